"""gRPC of a replica without Ray: a grpc.aio server around the methods that Ray Serve would call."""

import inspect
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from service.grpc_api.reflection import add_reflection
from service.grpc_api.register import add_generation_service
from service.grpc_api.servicer import GrpcMethods

MAX_MESSAGE = 4 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_concurrent_streams", 100),
    ("grpc.max_allowed_incoming_connections", 1920),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    # A ping every 10 s keeps a silent call, or a connection without one, open through NAT; the third that comes sooner ends it.
    ("grpc.http2.min_ping_interval_without_data_ms", 8_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.so_reuseport", 0),  # two servers on a port would answer each other's calls
)


class _Context:
    """What the methods use of a context, on that of grpc.aio."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.invocation_metadata, self.peer = context.invocation_metadata, context.peer
        self.set_code, self.set_details = context.set_code, context.set_details

    def set_trailing_metadata(self, trailing_metadata: Sequence[tuple[str, str]]) -> None:
        """grpc.aio takes nothing but a tuple."""
        self._context.set_trailing_metadata(tuple(trailing_metadata))


class Servicer:
    """Calls the methods by Ray Serve's rules: `grpc_context` only where a method takes it."""

    def __init__(self, methods: GrpcMethods) -> None:
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._methods, name)
        wants_context = "grpc_context" in inspect.signature(method).parameters

        def begin(request: Any, context: Any) -> Any:
            return method(request, **({"grpc_context": _Context(context)} if wants_context else {}))

        async def unary(request: Any, context: Any) -> Any:
            return await begin(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async with aclosing(begin(request, context)) as answers:
                async for answer in answers:
                    yield answer

        return stream if inspect.isasyncgenfunction(method) else unary


def grpc_server(
    methods: GrpcMethods, host: str, port: int, most_calls: int, tls: grpc.ServerCredentials | None = None
) -> grpc.aio.Server:
    """A server that listens once it is started; with `tls` for TLS alone. Raises RuntimeError where the port is taken."""
    server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=most_calls)
    servicer = Servicer(methods)
    add_generation_service(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    add_reflection(server)
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if tls is None:
        server.add_insecure_port(place)
    else:
        server.add_secure_port(place, tls)
    return server
