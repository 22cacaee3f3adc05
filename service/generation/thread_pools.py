"""Thread pools for work that would block the event loop, fair among callers; long work runs on idle cores alone.

A prompt of some thousand characters is worked on at once, by a thread pool of its own. A text of a MiB, or a large schema,
would take a core from every stream for a second: it runs on one thread that the operating system lets run when nothing else
wants to (SCHED_IDLE).

An `owner` is whoever's turn it is: `Caller.turn`. Those without one (None) are one caller.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from attend.model.errors import EngineFailed, Overloaded, is_panic
from attend.service.access.caller import Address
from attend.service.records import Arrival

T = TypeVar("T")

LARGE = 64 << 10
"""Characters, tokens or bytes; about 20 ms of one core."""
MAX_LARGE = 64
"""Large texts, and large bodies, at a time; they wait for each other."""
SHORT = 16 << 10
"""Bytes of a call whose reading takes a few milliseconds. Such calls never wait for longer ones."""
THREADS = 4
"""For work that is not large and mostly runs without the interpreter lock, as the tokenizer does."""


class FairSemaphore:
    """Places that callers hold for a while, at most `most` at a time. For one event loop.

    An owner who holds some may take more as long as all of his are no more than a third of what is then left free: a quarter of
    all where he is alone, and less the more owners there are, so that a place is left for the next one (Choudhury and Hahne
    1998, dynamic thresholds). An address, behind which there may be many callers, may have three times what is left free.
    """

    def __init__(self, most: int, what: str) -> None:
        self.most = most
        self._what = what
        self._taken = 0
        self._held: dict[str | None, int] = {}
        """By owner; only of those who hold any."""

    @contextlib.contextmanager
    def hold(self, owner: str | None, amount: int = 1) -> Iterator[None]:
        """Hold `amount` places, 1 to `most`, in a block. Raises Overloaded where they are not free, or not for this owner."""
        self.check(owner, amount)
        self._change(owner, amount)
        try:
            yield
        finally:
            self._change(owner, -amount)

    def check(self, owner: str | None, amount: int = 1) -> None:
        """Raise Overloaded where `hold` would."""
        held, free = self._held.get(owner, 0), self.most - self._taken - amount
        if free < 0:
            raise Overloaded(f"{self._taken} {self._what} already")
        if isinstance(owner, Address):
            if held and held + amount > 3 * free:
                raise Overloaded(f"{held} {self._what} already for your address")
        elif owner is not None and held and 3 * (held + amount) > free:
            raise Overloaded(f"{held} {self._what} already for {owner!r}")

    @property
    def num_held(self) -> int:
        """How many places are taken now."""
        return self._taken

    def _change(self, owner: str | None, amount: int) -> None:
        self._taken += amount
        held = self._held.pop(owner, 0) + amount
        if held:
            self._held[owner] = held


class TurnPool:
    """Threads that take one piece of work of each owner in turn: an owner with many pieces delays only his own.

    With `rests` a thread rests after each piece for the time that it took of a CPU.
    """

    def __init__(self, threads: int, name: str, initializer: Callable[[], None] | None = None, *, rests: bool = False) -> None:
        self._rests = rests
        self._threads = ThreadPoolExecutor(threads, name, initializer)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str | None, dict[Future[Any], Callable[[], Any]]] = OrderedDict()

    def submit(self, owner: str | None, work: Callable[[], T]) -> Future[T]:
        """A future of the result of `work`. Work that is cancelled before its turn is never begun, and dropped at once."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(owner, {})[future] = work
        future.add_done_callback(partial(self._forget, owner))
        self._threads.submit(self._next)  # one for each piece of work, though not for this one
        return future

    def close(self) -> None:
        """Wait for the work that was given, and take no more."""
        self._threads.shutdown()

    def _forget(self, owner: str | None, future: Future[Any]) -> None:
        """Drop cancelled work: it may hold a long text, and its turn may be far away."""
        with self._lock:
            pieces = self._waiting.get(owner, {})
            if pieces.pop(future, None) is not None and not pieces:
                del self._waiting[owner]

    def _next(self) -> None:
        with self._lock:
            if not self._waiting:
                return  # cancelled
            owner, pieces = self._waiting.popitem(last=False)
            future = next(iter(pieces))
            work = pieces.pop(future)
            if pieces:
                self._waiting[owner] = pieces  # behind all others
        began = time.thread_time()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(EngineFailed(f"a library panicked: {error}") if is_panic(error) else error)
        del future, work, pieces  # the error's traceback holds this frame
        if self._rests:
            time.sleep(time.thread_time() - began)


def stand_back() -> None:
    """Let the calling thread run only when nothing else wants to, where the system allows it."""
    with contextlib.suppress(AttributeError, OSError):  # another system, or a sandbox that forbids it
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


_quick = TurnPool(THREADS, "attend-quick")
_alone = TurnPool(1, "attend-alone", rests=True)
"""For work that holds the interpreter."""
_short = TurnPool(1, "attend-short", rests=True)
"""For such work on short calls."""
_patient = TurnPool(1, "attend-aside", stand_back)
_large = FairSemaphore(MAX_LARGE, "long texts are waiting")
long_bodies = FairSemaphore(MAX_LARGE, "long request bodies are waiting")
"""Those of more than LARGE bytes that have come, and are read or wait for it."""


async def run_in_pool(work: Callable[[], T], size: int, pool: TurnPool | None = None, owner: str | None = None) -> T:
    """The result of `work`, whose input has `size` characters, tokens or bytes; in `pool` unless that is large.

    Raises Overloaded where too many large ones are waiting.
    """
    if size <= LARGE:
        return await asyncio.wrap_future((pool or _quick).submit(owner, work))
    with _large.hold(owner):
        return await asyncio.wrap_future(_patient.submit(owner, work))


async def run_exclusive(work: Callable[[], T], arrival: Arrival) -> T:
    """The result of work on a call that holds the interpreter lock. One piece at a time, with a rest after each as long as
    itself; short calls have a thread of their own. Raises Overloaded where too many large ones are waiting.

    Four threads would take the lock from the event loop and the engine one after the other. With them four bodies of 1 MiB at
    a time made a gap of 950 ms between a neighbour's messages; one after the other 346 ms, with rests between them 145 ms.
    """
    turn, size = arrival.turn, arrival.size
    with long_bodies.hold(turn) if size > LARGE else contextlib.nullcontext():
        return await asyncio.wrap_future((_short if size <= SHORT else _alone).submit(turn, work))
