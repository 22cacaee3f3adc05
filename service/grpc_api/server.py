"""The grpc.aio server of a replica without Ray. Every call is a stream of messages to it: see `register`."""

import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from attend.service.access.caller import Address
from attend.service.generation.thread_pools import FairSemaphore
from attend.service.grpc_api.limits import most_bytes
from attend.service.grpc_api.reading import AioContext, address_of, one_message_handler, parse_message, receive_message
from attend.service.grpc_api.register import SERVICE
from attend.service.records import Arrival

if TYPE_CHECKING:
    from attend.service.grpc_api.health import HealthMethods
    from attend.service.grpc_api.servicer import GrpcMethods

MAX_CONNECTIONS = 1920
MAX_AGE_MS = 300_000
OPTIONS = (
    ("grpc.max_send_message_length", -1),  # what a call may ask for bounds its answer, and all calls share that
    ("grpc.max_concurrent_streams", 100),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    # Behind an address of several servers callers meet new ones within minutes. Calls that run on a connection end there.
    ("grpc.max_connection_age_ms", MAX_AGE_MS),
    # A ping every 10 s keeps a silent call, or a connection without one, open through NAT; the third that comes sooner ends it.
    ("grpc.http2.min_ping_interval_without_data_ms", 8_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.so_reuseport", 0),  # two servers on a port would answer each other's calls
)
UNIX = "unix:"
MAX_STREAMS = 1 << 16
"""On one connection of a process of this machine that has bounded its callers."""
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]


MAX_REFLECTIONS, REFLECTION_SECONDS = 32, 10.0
"""Streams of reflection at a time, which need no key, and how long one may last."""


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc, name-defined]  # untyped
    """Tells of the services, a few callers at a time, each for so long."""

    def __init__(self) -> None:
        super().__init__((SERVICE.full_name, HEALTH.full_name, reflection.SERVICE_NAME))
        self._num_streams = 0

    async def ServerReflectionInfo(self, request_iterator: AsyncIterable[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answer the questions of one stream; RESOURCE_EXHAUSTED where too many are open."""
        if self._num_streams >= MAX_REFLECTIONS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_REFLECTIONS} reflection streams are open already")
        self._num_streams += 1
        try:
            async with asyncio.timeout(REFLECTION_SECONDS):
                async for answer in super().ServerReflectionInfo(request_iterator, context):
                    yield answer
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"reflection takes at most {REFLECTION_SECONDS:g} seconds")
        finally:
            self._num_streams -= 1


class Calls:
    """Calls methods by Ray Serve's rules, `most_calls` of our own service at a time once their message has come."""

    def __init__(self, methods: "GrpcMethods | HealthMethods", most_calls: int, most_message: int) -> None:
        self._methods, self._most_message = methods, most_message
        self._places = FairSemaphore(most_calls, "calls are running")

    def handlers(self, service: ServiceDescriptor) -> "grpc.GenericRpcHandler[Any, Any]":
        """The handlers of a service, each of which calls the method of its name."""
        handlers = {method.name: self._handler(method) for method in service.methods}
        return grpc.method_handlers_generic_handler(service.full_name, handlers)

    def _handler(self, described: MethodDescriptor) -> "grpc.RpcMethodHandler[Any, Any]":
        method, answer = getattr(self._methods, described.name), GetMessageClass(described.output_type)
        is_ours = described.containing_service is SERVICE
        wants_context = "grpc_context" in inspect.signature(method).parameters

        async def begin(messages: AsyncIterator[bytes], context: Any, resources: ExitStack) -> Any:
            async def message(turn: str | None) -> bytes:
                data = await receive_message(messages, self._methods.unread_bodies, turn, self._most_message)
                if is_ours:  # a call has its place from then on
                    resources.enter_context(self._places.hold(None))
                return data

            given: Any = message
            if not is_ours:
                turn = Address(address_of(context.peer()))
                given = await parse_message(await message(turn), GetMessageClass(described.input_type), Arrival(turn))
            return method(given, **({"grpc_context": AioContext(context)} if wants_context else {}))

        streams = described.server_streaming
        make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        return make(one_message_handler(begin, answer, streams=streams), response_serializer=answer.SerializeToString)


def grpc_server(
    methods: "GrpcMethods",
    host: str,
    port: int,
    most_calls: int,
    tls: grpc.ServerCredentials | None = None,
    *,
    max_model_len: int = 0,
    most_connections: int = MAX_CONNECTIONS,
    linger_seconds: float = 0.0,
) -> grpc.aio.Server:
    """A server that listens once it is started. Raises RuntimeError where the port is taken. `host` may be unix:PATH."""
    most_message = most_bytes(max_model_len)
    calls = Calls(methods, most_calls, most_message)
    handlers = (calls.handlers(SERVICE), calls.handlers(HEALTH))
    limits: dict[str, Any] = {"most_message": most_message, "most_connections": most_connections}
    return server_of(handlers, host, port, tls, **limits, linger_seconds=linger_seconds)


def server_of(
    handlers: "Iterable[grpc.GenericRpcHandler[Any, Any]]",
    host: str,
    port: int,
    tls: grpc.ServerCredentials | None = None,
    *,
    most_message: int,
    most_connections: int = MAX_CONNECTIONS,
    linger_seconds: float = 0.0,
) -> grpc.aio.Server:
    """The same of any handlers, with reflection. `most_message`: bytes of a caller's message.

    gRPC can be told to refuse new calls, or how old a connection may be, but not later on that all of them should go. So
    where a server lingers none gets older than half of that time: each is told to go meanwhile, and its calls are answered.
    """
    limits = {
        "grpc.max_receive_message_length": most_message,
        "grpc.max_allowed_incoming_connections": most_connections,
    }
    if linger_seconds:
        limits["grpc.max_connection_age_ms"] = min(MAX_AGE_MS, max(100, int(500 * linger_seconds)))
    if host.startswith(UNIX):
        limits["grpc.max_concurrent_streams"] = MAX_STREAMS
    server = grpc.aio.server(options=tuple((dict(OPTIONS) | limits).items()))
    server.add_generic_rpc_handlers(tuple(handlers))
    add_ServerReflectionServicer_to_server(Reflection(), server)
    if tls is None:
        server.add_insecure_port(listen_address(host, port))
    else:
        server.add_secure_port(listen_address(host, port), tls)
    return server


def listen_address(host: str, port: int) -> str:
    """A place to listen at, as gRPC writes it."""
    if host.startswith(UNIX):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
