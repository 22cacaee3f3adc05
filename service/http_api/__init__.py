"""HTTP: OpenAI's routes, the routes that only Attend has, the page, and the OpenAPI document of them all.

The bytes of a body are read (`body`); what they ask for is in `service/contract`. Chunks become an answer (`completion_writer`,
`chat_writer`, `embeddings`, `attention`) or events (`sse`). `routes` answers the contract's routes, `problems` writes errors.
"""
