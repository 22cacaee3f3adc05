"""What every method of gRPC does with a caller's message, and with an error."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

from google.protobuf.message import DecodeError, Message

from attend.model.errors import InvalidRequest
from attend.service.access.caller import NOBODY, Caller
from attend.service.errors import INTERNAL, advice, sentence, wire
from attend.service.generation.aside import alone

log = logging.getLogger("attend.grpc")

M = TypeVar("M", bound=Message)
T = TypeVar("T")
INLINE_BYTES = 16 << 10
"""Larger messages are read beside the event loop: reading these takes up to a millisecond."""
Incoming = bytes | Callable[[], Awaitable[bytes]]
"""A caller's message; where the server has not read it, what reads it, by the errors of `attend.service.errors`."""


class Context(Protocol):
    """The part of Serve's gRPC context that is used."""

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """What the caller sent beside the message."""
        ...

    def peer(self) -> str:
        """Who connected, such as `ipv4:10.0.0.1:50000`."""
        ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None:
        """What goes back beside the status."""
        ...

    def set_code(self, code: Any) -> None:
        """The status of the call."""
        ...

    def set_details(self, details: str) -> None:
        """The sentence beside it."""
        ...


async def received(message: Incoming) -> bytes:
    """The bytes of a message."""
    return message if isinstance(message, bytes) else await message()


async def made(message: bytes, make: Callable[[], T], caller: Caller) -> T:
    """What `make` makes of a message; of a large one beside the event loop."""
    return make() if len(message) <= INLINE_BYTES else await alone(make, caller.turn)


async def read(message: bytes, kind: type[M], caller: Caller = NOBODY) -> M:
    """The message in these bytes; a large one is read beside the event loop. Raises InvalidRequest."""
    try:
        return await made(message, partial(kind.FromString, message), caller)
    except DecodeError as error:
        raise InvalidRequest(f"the bytes sent are not a valid {kind.DESCRIPTOR.name}") from error


def address_of(peer: str) -> str:
    """The address in gRPC's name of a peer: 10.0.0.1 of `ipv4:10.0.0.1:50000`, ::1 of `ipv6:%5B::1%5D:50000`."""
    kind, _, place = unquote(peer).partition(":")
    return place.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer


def refuse(error: Exception, request_id: str, context: Context) -> None:
    """Set the status of a call that failed. Raising would lose the code in a stream, and show a Python exception."""
    row, beside = wire(error), advice(error)
    if row is INTERNAL:
        log.error("request %s failed", request_id, exc_info=error)
    if beside:
        own = [("x-request-id", request_id)] if request_id else []
        context.set_trailing_metadata([*own, *beside.items()])
    context.set_code(row.grpc)
    context.set_details(sentence(error, request_id))
