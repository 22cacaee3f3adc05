"""gRPC: the methods of `protos/attend/v1/generation.proto`, with the same meaning as HTTP by the same code below.

`convert` turns messages into commands and chunks into messages; `chat`, `embed` and `explain` do so for their methods.
`servicer` has the methods; `register` gives them to Ray Serve, and `server` to the server of one process.
"""
