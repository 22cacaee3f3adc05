"""From a command to its answers, the same for both transports.

`generation` admits a call, and streams its chunks; `prepare` makes engine requests of it; `answer` and `text` make text of
the engine's tokens. `embed`, `score` and `explain` are the other things that a model is asked for. Long work runs in
`thread_pools`, or in short parts on the event loop (`turns`). `adapters` keeps the LoRA adapters that callers can name.
"""
