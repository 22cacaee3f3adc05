"""What callers may ask and what they are answered, once for both transports: each field of each call, each answer, each route.

HTTP parses JSON into these bodies, gRPC turns messages into the same ones, and both make one Command of them.
"""
