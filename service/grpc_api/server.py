"""The grpc.aio server of a replica without Ray.

grpc.aio would read a call's message before it asks a method, for as long as that takes, and its own limit counts such calls and
health checks too. So here every call is a stream of messages to grpc.aio, and a method reads its one message when it has judged
the caller's key.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from attend.model.errors import AttendError
from attend.service.access.caller import Address
from attend.service.generation.thread_pools import FairSemaphore
from attend.service.grpc_api.limits import most_bytes
from attend.service.grpc_api.reading import AioContext, address_of, parse_message, receive_message, set_error_status
from attend.service.grpc_api.reflection import add_reflection
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


class Calls:
    """Calls methods by Ray Serve's rules: `grpc_context` only where a method takes it.

    At most `most_calls` calls of our own service run at a time, and those whose message has not come are none of them.
    """

    def __init__(self, methods: "GrpcMethods | HealthMethods", most_calls: int, most_message: int) -> None:
        self._methods, self._most_message = methods, most_message
        self._places = FairSemaphore(most_calls, "calls are running")

    def handlers(self, service: ServiceDescriptor) -> "grpc.GenericRpcHandler[Any, Any]":
        """The handlers of a service, each of which calls the method of its name."""
        handlers = {method.name: self._handler(method) for method in service.methods}
        return grpc.method_handlers_generic_handler(service.full_name, handlers)

    def _handler(self, described: MethodDescriptor) -> "grpc.RpcMethodHandler[Any, Any]":
        method, answer = getattr(self._methods, described.name), GetMessageClass(described.output_type)
        give = self._reader if described.containing_service is SERVICE else self._parse_message
        wants_context = "grpc_context" in inspect.signature(method).parameters

        async def begin(messages: AsyncIterator[bytes], context: Any, resources: ExitStack) -> Any:
            given = await give(described, messages, context, resources)
            return method(given, **({"grpc_context": AioContext(context)} if wants_context else {}))

        async def unary(messages: AsyncIterator[bytes], context: Any) -> Any:
            with ExitStack() as held:
                try:
                    call = await begin(messages, context, held)
                except AttendError as error:
                    set_error_status(error, "", AioContext(context))
                    return answer()
                return await call

        async def stream(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
            with ExitStack() as held:
                try:
                    call = await begin(messages, context, held)
                except AttendError as error:
                    set_error_status(error, "", AioContext(context))
                    return
                async with aclosing(call) as answers:
                    async for response in answers:
                        yield response

        if described.server_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=answer.SerializeToString)
        return grpc.stream_unary_rpc_method_handler(unary, response_serializer=answer.SerializeToString)

    async def _reader(
        self, described: MethodDescriptor, messages: AsyncIterator[bytes], context: Any, resources: ExitStack
    ) -> Callable[[str | None], Awaitable[bytes]]:
        """What a method of ours reads its message by. A call has its place from then on."""

        async def message(turn: str | None) -> bytes:
            data = await receive_message(messages, self._methods.unread_bodies, turn, self._most_message)
            resources.enter_context(self._places.hold(None))
            return data

        return message

    async def _parse_message(
        self, described: MethodDescriptor, messages: AsyncIterator[bytes], context: Any, resources: ExitStack
    ) -> Message:
        """The message of a check of health, which takes no place. Raises InvalidRequest, SlowBody or Overloaded."""
        turn = Address(address_of(context.peer()))
        data = await receive_message(messages, self._methods.unread_bodies, turn, self._most_message)
        return await parse_message(data, GetMessageClass(described.input_type), Arrival(turn))


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
    """A server that listens once it is started; with `tls` for TLS alone. Raises RuntimeError where the port is taken.

    `host` may be unix:PATH, which has no port.
    """
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
    add_reflection(server)
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
