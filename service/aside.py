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
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LARGE = 64 << 10
"""Characters, tokens or bytes; about 20 ms of one core."""


def _stand_back() -> None:
    with contextlib.suppress(AttributeError, OSError):  # another system, or a sandbox that forbids it
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


_patient = ThreadPoolExecutor(1, "attend-aside", _stand_back)


async def aside(work: Callable[[], T], size: int) -> T:
    """The result of `work`, whose input has `size` characters, tokens or bytes."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_patient if size > LARGE else None, work)
