"""Long work on the event loop, in short parts between which other work runs.

For work in plain Python a thread is no better: it holds the interpreter lock just as long, and takes it from the event loop at
each system call. Short parts on the loop itself delay its other work by one part.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

GET_SECONDS = 0.005
"""Between two calls without a body: they are not charged to a key, and each takes up to a millisecond of the event loop."""

_Line = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]
_calls: _Line = WeakKeyDictionary()
_bodies: _Line = WeakKeyDictionary()


async def yield_to_loop(*, long: bool = False) -> None:
    """Let the rest of the event loop run. In each round one waiting call continues, so their parts do not add up; those with
    long bodies wait in a line of their own.
    """
    line = _bodies if long else _calls
    async with line.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        await asyncio.sleep(0)


class _Gets:
    """Calls without a body, of one event loop."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.free_at = 0.0


_gets: WeakKeyDictionary[asyncio.AbstractEventLoop, _Gets] = WeakKeyDictionary()


async def get_turn() -> None:
    """Wait until a call without a body may go on: one at once, and any number of them in the order in which they came."""
    loop = asyncio.get_running_loop()
    gets = _gets.setdefault(loop, _Gets())
    async with gets.lock:
        await asyncio.sleep(gets.free_at - loop.time())
        gets.free_at = loop.time() + GET_SECONDS


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
