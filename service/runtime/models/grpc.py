"""gRPC of several models: forwards each call to the process of its model."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from attend.model.errors import AttendError, DeadlineExceeded
from attend.service.access.caller import FORWARDED
from attend.service.errors import ModelUnavailable
from attend.service.generation.slow_reader import SlowReaderGuard
from attend.service.generation.thread_pools import FairSemaphore
from attend.service.generation.unread_bodies import UnreadBodies
from attend.service.grpc_api.health import HealthMethods
from attend.service.grpc_api.reading import AioContext, address_of, parse_message, receive_message, set_error_status
from attend.service.grpc_api.register import SERVICE
from attend.service.grpc_api.server import HEALTH, Calls, server_of
from attend.service.records import REQUEST_ID
from attend.service.runtime.models.authentication import CallAuthenticator
from attend.service.runtime.models.http import find_model
from attend.service.runtime.models.pool import Pool, Slot
from attend.service.runtime.models.process import ModelProcess

MAX_MESSAGE = 64 << 20
"""Bytes of a caller's message. Its model's own limit, which is lower, is known once it is loaded."""
Metadata = tuple[tuple[str, Any], ...]


class Health(HealthMethods):
    """Health of the server: models that are not loaded are no fault of it."""

    def __init__(self, authenticator: CallAuthenticator) -> None:
        self.unread_bodies: UnreadBodies = authenticator.unread_bodies
        self._authenticator = authenticator

    def is_draining(self) -> bool:
        """True if new calls are refused."""
        return self._authenticator.is_draining()


class Passing:
    """Calls that are passed to the processes of models. `seconds`: how long one may wait for its model."""

    def __init__(self, authenticator: CallAuthenticator, pool: Pool[ModelProcess], seconds: float, most_calls: int) -> None:
        self._authenticator, self._pool, self._seconds = authenticator, pool, seconds
        self._places = FairSemaphore(most_calls, "calls are running")

    def handlers(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The handlers of our service."""
        handlers = {method.name: self._handler(method) for method in SERVICE.methods}
        return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)

    def _handler(self, method: MethodDescriptor) -> "grpc.RpcMethodHandler[Any, Any]":
        """One for each kind of methods: a whole answer is a stream of one message."""

        async def forward_messages(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            metadata, peer = context.invocation_metadata(), address_of(context.peer())
            given = (value for name, value in metadata if name == "x-request-id")
            request_id = next((value for value in given if REQUEST_ID.fullmatch(value)), None) or secrets.token_hex(16)
            was_begun = False
            try:
                with SlowReaderGuard() as reader_guard:
                    call = self._call(method, messages, context, request_id, reader_guard)
                    async with aclosing(call) as responses:
                        async for response in responses:
                            was_begun = True
                            reader_guard.writing()
                            yield response
                            reader_guard.write_ended()
            except AttendError as error:
                context.set_trailing_metadata((("x-request-id", request_id),))
                self._authenticator.count_refusal(error, "grpc", method.name, request_id, peer, was_begun=was_begun)
                set_error_status(error, request_id, AioContext(context))

        return grpc.stream_stream_rpc_method_handler(forward_messages)

    async def _call(
        self,
        method: MethodDescriptor,
        messages: AsyncIterator[bytes],
        context: Any,
        request_id: str,
        reader_guard: SlowReaderGuard,
    ) -> AsyncGenerator[bytes]:
        sent, peer = context.invocation_metadata(), address_of(context.peer())
        caller, arrival = self._authenticator.enter(sent, peer, answers=int(method.name != "GetServerInfo"), transport="grpc")
        data = await receive_message(messages, self._authenticator.unread_bodies, caller.turn, MAX_MESSAGE)
        async with AsyncExitStack() as held:
            held.enter_context(self._places.hold(None))
            message: Any = await parse_message(data, GetMessageClass(method.input_type), arrival)
            slot = find_model(self._pool, getattr(message, "model", "") or getattr(message, "adapter", ""))
            process, waited = await self._model(held, slot, message, context, caller.turn, len(data))
            reader_guard.end_where(lambda: slot.yields)
            if waited >= 0.001 and getattr(message, "deadline_ms", 0) > 0:
                message.deadline_ms = max(1, message.deadline_ms - round(1000 * waited))
                data = message.SerializeToString()
            del message
            process.check()
            call = process.grpc.unary_stream(f"/{SERVICE.full_name}/{method.name}", bytes, bytes)(
                data, metadata=_passed_on(sent, peer, request_id), timeout=context.time_remaining()
            )
            del data  # it is not held while the answer is made
            try:
                with suppress(grpc.aio.AioRpcError):  # `_end` tells of it
                    async for response in call:
                        yield response
                await _end(call, context, process.name)
            finally:
                call.cancel()
                if reader_guard.over:
                    self._authenticator.log_cut("grpc", method.name, request_id, slot.name)

    async def _model(
        self,
        resources: AsyncExitStack,
        slot: Slot[ModelProcess],
        message: Message,
        context: Any,
        turn: str | None,
        size: int,
    ) -> tuple[ModelProcess, float]:
        """The process of the model that a message names, and how long it took to have it."""
        asked = getattr(message, "deadline_ms", 0)
        limits = [self._seconds, context.time_remaining(), asked / 1000 if asked > 0 else None]
        began = asyncio.get_running_loop().time()
        with self._authenticator.unread_bodies.call(turn) as waits:
            waits.came(size)
            try:
                async with waits.waiting(), asyncio.timeout(min(limit for limit in limits if limit is not None)):
                    process = await resources.enter_async_context(self._pool.use(slot, turn))
            except TimeoutError as error:
                if asked > 0:
                    raise DeadlineExceeded("the deadline passed before the model was loaded") from error
                raise ModelUnavailable(f"the model {slot.name!r} is still loading") from error
        return process, asyncio.get_running_loop().time() - began


def _passed_on(sent: Metadata, peer: str, request_id: str) -> Metadata:
    """The metadata for the process of a model, with the address that connected to us as HAProxy would add it."""
    own = [(name, value) for name, value in sent if not name.startswith((":", "grpc-")) and name not in OWN]
    return (*own, (FORWARDED, peer), ("x-request-id", request_id))


OWN = {"user-agent", "te", "content-type", "x-request-id"}
"""Metadata that each connection has of its own."""


async def _end(call: Any, context: Any, model: str) -> None:
    """Pass on how a call ended. Raises ModelUnavailable where its process did."""
    code, trailing = await call.code(), tuple(await call.trailing_metadata() or ())
    if code is grpc.StatusCode.UNAVAILABLE and not any(name == "x-request-id" for name, _ in trailing):
        raise ModelUnavailable(f"the process of the model {model!r} ended during the call", 1)
    context.set_trailing_metadata(trailing)
    context.set_code(code)
    context.set_details(await call.details())


def models_grpc_server(
    authenticator: CallAuthenticator,
    pool: Pool[ModelProcess],
    host: str,
    port: int,
    tls: grpc.ServerCredentials | None,
    *,
    seconds: float,
    most_calls: int,
    most_connections: int,
) -> grpc.aio.Server:
    """A server that listens once it is started."""
    handlers = (
        Passing(authenticator, pool, seconds, most_calls).handlers(),
        Calls(Health(authenticator), most_calls, MAX_MESSAGE).handlers(HEALTH),
    )
    return server_of(handlers, host, port, tls, most_message=MAX_MESSAGE, most_connections=most_connections)
