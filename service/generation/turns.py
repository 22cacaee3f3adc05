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
