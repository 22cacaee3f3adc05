"""Long work on the event loop, in short parts between which other work runs.

For work in plain Python a thread is no better: it holds the interpreter lock just as long, and takes it from the event loop at
each system call. Short parts on the loop itself delay its other work by one part.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable, Iterator
from itertools import islice
from typing import TypeVar
from weakref import WeakKeyDictionary

from attend.model.errors import Overloaded

T = TypeVar("T")

GET_SECONDS = 0.005
"""Between two calls without a body: each takes up to a millisecond of the event loop."""
MAX_GETS = 128
"""Such calls that wait at a time, for two thirds of a second at most: each holds a place among the server's calls."""
LONG_BODIES = "long bodies"
"""Calls with these are one caller here."""


class _Rounds:
    """Who waits on one event loop. One continues in each round, of each caller in turn."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()
        self._goes_on = False

    async def wait(self, caller: Hashable) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        if not self._goes_on:
            self._goes_on = True
            loop.call_soon(self._next)
        await turn

    def _next(self) -> None:
        is_given = False
        while self._waiting and not is_given:
            caller, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[caller] = turns  # behind all others
            if not turn.done():
                turn.set_result(None)
                is_given = True
        self._goes_on = bool(self._waiting)
        if self._goes_on:
            asyncio.get_running_loop().call_soon(self._next)


_rounds: "WeakKeyDictionary[asyncio.AbstractEventLoop, _Rounds]" = WeakKeyDictionary()


async def yield_to_loop(caller: Hashable = None) -> None:
    """Let the rest of the event loop run. In each round one waiting call continues, so their parts do not add up; and one of
    each caller in turn, so that many calls of one delay only his own.
    """
    await _rounds.setdefault(asyncio.get_running_loop(), _Rounds()).wait(caller)


class _Gets:
    """Calls without a body, of one event loop."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.free_at = 0.0
        self.waiting = 0


_gets: WeakKeyDictionary[asyncio.AbstractEventLoop, _Gets] = WeakKeyDictionary()


async def get_turn() -> None:
    """Wait until a call without a body may go on: one at once, others in the order in which they came. Raises Overloaded where
    MAX_GETS wait.
    """
    loop = asyncio.get_running_loop()
    gets = _gets.setdefault(loop, _Gets())
    if gets.waiting >= MAX_GETS:
        raise Overloaded(f"{gets.waiting} calls without a body are waiting already")
    gets.waiting += 1
    try:
        async with gets.lock:
            await asyncio.sleep(gets.free_at - loop.time())
            gets.free_at = loop.time() + GET_SECONDS
    finally:
        gets.waiting -= 1


async def in_turns(parts: Iterator[T]) -> AsyncIterator[T]:
    """The items of `parts`, each made in a round of the loop of its own; the first two at once, since mostly there is one."""
    made = [*islice(parts, 2)]
    for part in made:
        yield part
    while len(made) == 2:
        await yield_to_loop()
        last = [*islice(parts, 1)]
        if not last:
            break
        yield last[0]
