"""Admission of request bodies that are not parsed yet, bounded by bytes over all callers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from attend.model.errors import Overloaded
from attend.service.errors import SlowBody

MAX_BYTES = 256 << 20
"""Of all bodies together, over HTTP and gRPC."""
CALL_BYTES = 64 << 10
"""What a call counts for beside its body: a connection or a stream, and a task."""
MESSAGE_SECONDS = 30.0
"""Seconds in which a caller must send all of a body, or of a message of gRPC."""


class UnreadBodies:
    """The calls whose bodies are not read yet, for one event loop.

    Where they hold too many bytes together, the caller who holds most of them loses its oldest call: an API key, or an address.
    So a caller whose body comes at once is served beside any number of others whose bodies never come.
    """

    def __init__(self, most: int = MAX_BYTES, most_calls: int = MAX_BYTES // CALL_BYTES) -> None:
        """`most` is in bytes; `most_calls` may wait of whose bodies nothing has come."""
        self._most = most
        self._call_bytes = max(CALL_BYTES, most // most_calls)
        self._calls: dict[str | None, dict[IncomingBody, None]] = {}
        self._bytes: dict[str | None, int] = {}
        """By caller, as the calls are; only of those who wait."""
        self._total = 0

    def call(self, turn: str | None) -> "IncomingBody":
        """A call of this caller (`Caller.turn`), which begins to wait with the block that it opens."""
        return IncomingBody(self, turn, self._call_bytes)

    def enter(self, call: "IncomingBody") -> None:
        """Count the bytes of a call whose body begins to come."""
        self._calls.setdefault(call.turn, {})[call] = None
        self.add(call.turn, call.size)

    def add(self, turn: str | None, size: int) -> None:
        """Count bytes of a call, and end others where there are too many."""
        self._bytes[turn] = self._bytes.get(turn, 0) + size
        self._total += size
        while self._total > self._most:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            next(iter(self._calls[largest])).end()

    def leave(self, call: "IncomingBody") -> None:
        """Forget a call. It may have left already."""
        calls = self._calls.get(call.turn, {})
        if call not in calls:
            return
        del calls[call]
        self._bytes[call.turn] -= call.size
        self._total -= call.size
        if not calls:
            del self._calls[call.turn], self._bytes[call.turn]


class IncomingBody:
    """One call whose body is not read yet."""

    def __init__(self, unread_bodies: UnreadBodies, turn: str | None, size: int) -> None:
        self.turn = turn
        self.size = size
        """Bytes that the call counts for."""
        self._unread = unread_bodies
        self._limit: asyncio.Timeout | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        self._unread.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._unread.leave(self)

    def came(self, size: int) -> None:
        """So many bytes of its body have come, or may have, and are held."""
        if not self._is_over:
            self.size += size
            self._unread.add(self.turn, size)

    def end(self) -> None:
        """Count this call's bytes no longer; a wait for its body fails then."""
        self._unread.leave(self)
        self._is_over = True
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def waiting(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Wait in this block, at most so long. Raises SlowBody, or Overloaded where `end` was called."""
        try:
            async with asyncio.timeout(0 if self._is_over else seconds) as self._limit:
                yield
        except TimeoutError as error:
            if self._is_over:
                raise Overloaded("too many request bodies are still being received") from error
            if seconds is None:
                raise
            raise SlowBody(f"the message must arrive within {seconds:g} seconds") from error
        finally:
            self._limit = None
