"""HTTP: OpenAI's routes, the routes that only Attend has, the page, and the OpenAPI document of them all.

A body is read (`body`, `schemas`), becomes a command (`openai`, `chat`, `embeddings`, `attention`), and its chunks become an
answer (`responses`, `chat_responses`) or events (`sse`). `routes` binds these to paths, `problems` writes errors.
"""
