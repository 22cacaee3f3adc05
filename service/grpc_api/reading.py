"""Reads the one message of an RPC: after authentication, with a time limit, within the bound of all bodies.

grpc.aio hands over whole messages alone. How much of one has come nobody knows: see GRACE_SECONDS.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

from google.protobuf.message import DecodeError, Message

from attend.model.errors import AttendError, DeadlineExceeded, InvalidRequest
from attend.service.errors import INTERNAL, advice, sentence, wire
from attend.service.generation.thread_pools import run_exclusive
from attend.service.generation.unread_bodies import MESSAGE_SECONDS, UnreadBodies
from attend.service.records import Arrival

log = logging.getLogger("attend.grpc")

M = TypeVar("M", bound=Message)
T = TypeVar("T")

INLINE_BYTES = 4 << 10
"""Larger messages are read in a thread pool: reading these takes up to a millisecond."""
GRACE_SECONDS = 1.0
"""A message that has not come by then counts as if all of the longest one were held for it."""

Incoming = bytes | Callable[[str | None], Awaitable[bytes]]
"""A caller's message; where the server has not read it, what reads it in the turn of its caller. Errors are an AttendError."""


Context = Any
"""Serve's gRPC context: of it `invocation_metadata`, `peer`, `set_trailing_metadata`, `set_code` and `set_details` are used."""


class AioContext:
    """What is used of a context, on that of grpc.aio."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.invocation_metadata, self.peer = context.invocation_metadata, context.peer
        self.set_code, self.set_details = context.set_code, context.set_details

    def set_trailing_metadata(self, trailing_metadata: Sequence[tuple[str, str]]) -> None:
        """grpc.aio takes nothing but a tuple."""
        self._context.set_trailing_metadata(tuple(trailing_metadata))


async def receive_message(messages: AsyncIterator[bytes], unread_bodies: UnreadBodies, turn: str | None, most: int) -> bytes:
    """The one message, of `most` bytes at most, of a call. Raises InvalidRequest, SlowBody or Overloaded."""
    with unread_bodies.call(turn) as call:
        late = asyncio.get_running_loop().call_later(GRACE_SECONDS, call.came, most)
        try:
            async with call.waiting(MESSAGE_SECONDS):
                data = await anext(messages, None)
                second = None if data is None else await anext(messages, None)
        finally:
            late.cancel()
    if data is None or second is not None:
        raise InvalidRequest(f"a call has one message; got {'none' if data is None else 'a second one'}")
    return data


def one_message_handler(begin: Callable[..., Awaitable[Any]], empty: Callable[[], Any], *, streams: bool) -> Callable[..., Any]:
    """The handler of a call that is a stream of messages to grpc.aio. `begin` gives what makes the answer, or an
    AttendError.
    """

    async def start(messages: AsyncIterator[bytes], context: Any, resources: ExitStack) -> Any:
        try:
            return await begin(messages, context, resources)
        except AttendError as error:
            set_error_status(error, "", AioContext(context))
            return None

    async def whole(messages: AsyncIterator[bytes], context: Any) -> Any:
        with ExitStack() as held:
            call = await start(messages, context, held)
            return empty() if call is None else await call

    async def stream(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        with ExitStack() as held:
            call = await start(messages, context, held)
            if call is not None:
                async with aclosing(call) as responses:
                    async for response in responses:
                        yield response

    return stream if streams else whole


@asynccontextmanager
async def count_bytes(message: Incoming, arrival: Arrival, unread_bodies: UnreadBodies) -> AsyncIterator[tuple[bytes, Arrival]]:
    """The bytes of a message, which count until the block ends, and its arrival with their number. Raises Overloaded."""
    data = message if isinstance(message, bytes) else await message(arrival.turn)
    with unread_bodies.call(arrival.turn) as call:
        call.came(len(data))
        async with call.waiting():
            yield data, replace(arrival, size=len(data))


async def convert_message(message: bytes, make: Callable[[], T], arrival: Arrival, deadline: float | None = None) -> T:
    """What `make` makes of a message; of a large one in a thread pool, and before `deadline`. Raises DeadlineExceeded."""
    if len(message) <= INLINE_BYTES:
        return make()
    try:
        async with asyncio.timeout_at(deadline):
            return await run_exclusive(make, arrival)
    except TimeoutError as error:
        raise DeadlineExceeded("the deadline passed before the message was read") from error


async def parse_message(message: bytes, kind: type[M], arrival: Arrival) -> M:
    """The message in these bytes; a large one is read in a thread pool. Raises InvalidRequest."""
    try:
        return await convert_message(message, partial(kind.FromString, message), arrival)
    except DecodeError as error:
        raise InvalidRequest(f"the bytes sent are not a valid {kind.DESCRIPTOR.name}") from error


def address_of(peer: str) -> str:
    """The address in gRPC's name of a peer: 10.0.0.1 of `ipv4:10.0.0.1:50000`, ::1 of `ipv6:%5B::1%5D:50000`."""
    kind, _, place = unquote(peer).partition(":")
    return place.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer


def set_error_status(error: Exception, request_id: str, context: Context) -> None:
    """Set the status of a call that failed. Raising would lose the code in a stream, and show a Python exception."""
    row, beside = wire(error), advice(error)
    if row is INTERNAL:
        log.error("request %s failed", request_id, exc_info=error)
    if beside:
        own = [("x-request-id", request_id)] if request_id else []
        context.set_trailing_metadata([*own, *beside.items()])
    context.set_code(row.grpc)
    context.set_details(sentence(error, request_id))
