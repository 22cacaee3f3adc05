"""A gRPC client of a running server, sync and async. A stream that breaks is resumed.

It imports nothing of the server. `grpc` has the clients, `retry` the rules, and `errors` what a caller may have to handle.
"""
