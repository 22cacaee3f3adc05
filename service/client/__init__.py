"""A client of a running server, over HTTP and over gRPC, sync and async. A stream that breaks goes on by itself.

It imports nothing of the server. `http` and `grpc` are the two transports, `retry` has the rules for both, and `errors` what a
caller may have to handle.
"""
