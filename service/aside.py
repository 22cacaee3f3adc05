"""Work beside the event loop. What takes long stands back behind the engine's steps.

A thread of the event loop's own pool runs at once, beside the engine's threads: right for a prompt of some thousand characters.
A text of a MiB, or a large schema, would take a core from every stream for a second: it runs on one thread that the
operating system lets run when nothing else wants to (SCHED_IDLE).
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import TypeVar

from model.errors import Overloaded

T = TypeVar("T")

LARGE = 64 << 10
"""Characters, tokens or bytes; about 20 ms of one core."""
MOST_LARGE = 64
"""Large texts at a time; they wait for each other."""


def _stand_back() -> None:
    with contextlib.suppress(AttributeError, OSError):  # another system, or a sandbox that forbids it
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


_patient = ThreadPoolExecutor(1, "attend-aside", _stand_back)
_large = BoundedSemaphore(MOST_LARGE)


async def aside(work: Callable[[], T], size: int, pool: Executor | None = None) -> T:
    """The result of `work`, whose input has `size` characters, tokens or bytes; in `pool` unless that is large.

    Raises Overloaded where MOST_LARGE large ones are waiting.
    """
    loop = asyncio.get_running_loop()
    if size <= LARGE:
        return await loop.run_in_executor(pool, work)
    if not _large.acquire(blocking=False):
        raise Overloaded(f"{MOST_LARGE} long texts are waiting already")
    try:
        return await loop.run_in_executor(_patient, work)
    finally:
        _large.release()
