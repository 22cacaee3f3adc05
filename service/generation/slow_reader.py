"""Slow readers: ends a call whose caller stops reading, which would hold memory and places."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

STALL_SECONDS = 60.0
"""How long one write may wait for the caller. The kernel asks for more once a third of what it holds has been taken.

So a caller may read an answer of many MB as slowly as some 20 KB a second."""
HOLD_UP_SECONDS, LOOK_SECONDS = 20.0, 1.0
"""How long all writes of a call may wait together while it holds up others, and how often it is looked."""


class SlowReaderGuard:
    """Cancels the task that enters it once one write has waited for STALL_SECONDS. Bytes that the kernel, or HAProxy, holds for
    the caller count as taken.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._writers = 0
        self._holds_up: Callable[[], bool] | None = None
        self._held_up = 0.0
        self._since = 0.0
        """When a write began or ended last, while any waits."""
        self.over = False
        """True if it has cancelled the task."""

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(STALL_SECONDS / 4, self._check)
        return self

    def end_where(self, holds_up: Callable[[], bool]) -> None:
        """Cancel the task too once its writes have waited for HOLD_UP_SECONDS in all while the call held up others."""
        self._holds_up = holds_up
        self._timer.cancel()
        self._timer = self._loop.call_later(LOOK_SECONDS, self._check)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()

    def writing(self) -> None:
        """A write begins. There may be several at a time: the answer's, and that which keeps an idle stream alive."""
        if not self._writers:
            self._since = self._loop.time()
        self._writers += 1

    def write_ended(self) -> None:
        """A write of the answer has ended."""
        self._writers -= 1
        self._since = self._loop.time()

    def _check(self) -> None:
        if self._writers and self._holds_up is not None and self._holds_up():
            self._held_up += LOOK_SECONDS
        stalls = self._writers and self._loop.time() - self._since >= STALL_SECONDS
        if stalls or self._held_up >= HOLD_UP_SECONDS:
            self.over = True
            if self._task is not None:
                self._task.cancel()
        else:
            seconds = STALL_SECONDS / 4 if self._holds_up is None else LOOK_SECONDS
            self._timer = self._loop.call_later(seconds, self._check)
