"""gRPC of several models: forwards each call to the process of its model."""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from attend.model.errors import AttendError
from attend.service.access.caller import FORWARDED
from attend.service.errors import ModelUnavailable
from attend.service.generation.slow_reader import SlowReaderGuard
from attend.service.generation.thread_pools import FairSemaphore
from attend.service.grpc_api.reading import AioContext, address_of, parse_message, receive_message, set_error_status
from attend.service.grpc_api.register import SERVICE
from attend.service.grpc_api.server import HEALTH, Calls, server_of
from attend.service.records import REQUEST_ID
from attend.service.runtime.models.admission import Admission

MAX_MESSAGE = 64 << 20
"""Bytes of a caller's message. Its model's own limit, which is lower, is known once it is loaded."""
OWN = {"user-agent", "te", "content-type", "x-request-id"}
"""Metadata that each connection has of its own."""


class GrpcForwarder:
    """Forwards calls as streams of bytes: a whole answer is a stream of one message."""

    def __init__(self, admission: Admission, most_calls: int) -> None:
        self._admission = admission
        self._places = FairSemaphore(most_calls, "calls are running")

    def handlers(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The handlers of our service."""
        handlers = {method.name: self._handler(method) for method in SERVICE.methods}
        return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)

    def _handler(self, method: MethodDescriptor) -> "grpc.RpcMethodHandler[Any, Any]":
        async def forward(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            given = (value for name, value in context.invocation_metadata() if name == "x-request-id")
            request_id = next((value for value in given if REQUEST_ID.fullmatch(value)), None) or secrets.token_hex(16)
            guard = SlowReaderGuard()
            try:
                with guard:
                    async with aclosing(self._call(method, messages, context, request_id, guard)) as responses:
                        async for response in responses:
                            guard.writing()
                            yield response
                            guard.write_ended()
            except AttendError as error:
                context.set_trailing_metadata((("x-request-id", request_id),))
                self._admission.log_refusal(error, "grpc", method.name, request_id, address_of(context.peer()))
                set_error_status(error, request_id, AioContext(context))

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _call(
        self, method: MethodDescriptor, messages: AsyncIterator[bytes], context: Any, request_id: str, guard: SlowReaderGuard
    ) -> AsyncGenerator[bytes]:
        sent, peer = context.invocation_metadata(), address_of(context.peer())
        arrival = self._admission.enter(sent, peer, answers=int(method.name != "GetServerInfo"), transport="grpc")
        data = await receive_message(messages, self._admission.unread_bodies, arrival.turn, MAX_MESSAGE)
        with self._places.hold(None):
            message: Any = await parse_message(data, GetMessageClass(method.input_type), arrival)
            slot = self._admission.find_model(getattr(message, "model", "") or getattr(message, "adapter", ""))
            deadline = getattr(message, "deadline_ms", 0)
            about = f"grpc {method.name} {request_id}"
            limits = max(deadline, 0) or None, guard, about, context.time_remaining()
            async with self._admission.use(slot, arrival.turn, len(data), *limits) as (process, left):
                if left is not None:
                    message.deadline_ms = left
                    data = message.SerializeToString()
                del message
                own = [(name, value) for name, value in sent if not name.startswith((":", "grpc-")) and name not in OWN]
                metadata = (*own, (FORWARDED, peer), ("x-request-id", request_id))  # the address, as HAProxy would add it
                begin = process.grpc.unary_stream(f"/{SERVICE.full_name}/{method.name}", bytes, bytes)
                call = begin(data, metadata=metadata, timeout=context.time_remaining())
                del data  # it is not held while the answer is made
                try:
                    with suppress(grpc.aio.AioRpcError):  # `_end` tells of it
                        async for response in call:
                            yield response
                    await _end(call, context, process.name)
                finally:
                    call.cancel()


async def _end(call: Any, context: Any, model: str) -> None:
    """Pass on how a call ended. Raises ModelUnavailable where its process did."""
    code, trailing = await call.code(), tuple(await call.trailing_metadata() or ())
    if code is grpc.StatusCode.UNAVAILABLE and not any(name == "x-request-id" for name, _ in trailing):
        raise ModelUnavailable(f"the process of the model {model!r} ended during the call", 1)
    context.set_trailing_metadata(trailing)
    context.set_code(code)
    context.set_details(await call.details())


def models_grpc_server(
    admission: Admission,
    host: str,
    port: int,
    tls: grpc.ServerCredentials | None,
    *,
    most_calls: int,
    most_connections: int,
    linger_seconds: float,
) -> grpc.aio.Server:
    """A server that listens once it is started."""
    handlers = (
        GrpcForwarder(admission, most_calls).handlers(),
        Calls(admission, most_calls, MAX_MESSAGE).handlers(HEALTH),
    )
    limits: dict[str, Any] = {"most_message": MAX_MESSAGE, "most_connections": most_connections}
    return server_of(handlers, host, port, tls, **limits, linger_seconds=linger_seconds)
