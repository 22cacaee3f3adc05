"""gRPC: the methods of `protos/attend/v1/generation.proto`, with the same meaning as HTTP by the same code below.

What a message asks for is in `service/contract`. `convert` counts what is long and turns results into messages. `servicer` has
the methods; `register` gives them to Ray Serve, and `server` to the server of one process.
"""
