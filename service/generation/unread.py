"""Calls whose body has not come yet. They hold no place among the calls that run, so they are bounded here: by their bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from attend.model.errors import Overloaded
from attend.service.errors import SlowBody

CALL_BYTES = 64 << 10
"""What a call counts for beside its body: a connection or a stream, and a task."""
LEAST_BYTES = 1024 * CALL_BYTES
BODIES = 16
"""Of the longest bodies, so many may be on their way, where those are longer."""


class Unread:
    """The calls that wait for their bodies, for one event loop.

    Where they hold too many bytes together, the address that holds most of them loses its oldest call. So a caller whose body
    comes at once is served beside any number of others whose bodies never come.
    """

    def __init__(self, most_body: int) -> None:
        """`most_body` is the longest body in bytes."""
        self._most = max(LEAST_BYTES, BODIES * most_body)
        self._calls: dict[str, dict[Coming, None]] = {}
        self._bytes: dict[str, int] = {}
        """By address, as the calls are; only of those who wait."""
        self._total = 0

    def call(self, address: str) -> "Coming":
        """A call from there that begins to wait with the block that it opens."""
        return Coming(self, address)

    def enter(self, call: "Coming") -> None:
        """Count a call."""
        self._calls.setdefault(call.address, {})[call] = None
        self.add(call.address, CALL_BYTES)

    def add(self, address: str, size: int) -> None:
        """Count bytes of a call, and end others where there are too many."""
        self._bytes[address] = self._bytes.get(address, 0) + size
        self._total += size
        while self._total > self._most:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            next(iter(self._calls[largest])).end()

    def leave(self, call: "Coming") -> None:
        """Forget a call. It may have left already."""
        calls = self._calls.get(call.address, {})
        if call not in calls:
            return
        del calls[call]
        self._bytes[call.address] -= call.size
        self._total -= call.size
        if not calls:
            del self._calls[call.address], self._bytes[call.address]


class Coming:
    """One call that waits for its body."""

    def __init__(self, unread: Unread, address: str) -> None:
        self.address = address
        self.size = CALL_BYTES
        """Bytes that it counts for."""
        self._unread = unread
        self._limit: asyncio.Timeout | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        self._unread.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave()

    def leave(self) -> None:
        """Its body has come, or nobody wants it."""
        self._unread.leave(self)

    def came(self, size: int) -> None:
        """So many bytes of its body have come, and are held."""
        if not self._is_over:
            self.size += size
            self._unread.add(self.address, size)

    def end(self) -> None:
        """Wait no longer."""
        self.leave()
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
            raise SlowBody(f"the message must arrive within {seconds:g} seconds") from error
        finally:
            self._limit = None
