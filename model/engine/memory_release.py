"""Frees memory of an idle engine: pages of KV cache blocks that nobody has used for a while, and what malloc keeps.

On a CPU the cache is a range of addresses whose pages are taken as steps write to them (`mapped_memory.py`). Once no request
is in flight, and the step thread has nothing else to do,
- blocks that were free for a while and have no known text are given back;
- known blocks, the prefix cache, stay longer: those that nobody has used for `seconds` are evicted, then given back.
A page is given back whole, in parts of PART bytes, as large pages are: what is left of a large page that is given back in
pieces would stay in memory. Blocks that lie in one part go together, once each of them is spare. Block 0, which nobody reads,
is spare. A page that was given back reads as zeros, and is taken anew where a step writes to it. So that this takes few pages,
spare blocks are given out in the order in which they lie, after those whose memory is there.

The work goes on for SLICE_SECONDS each time that the idle step thread beats, so that a request never waits longer for it. A
request ends a pass; the next one begins anew.

On a GPU nothing of this is done: there the cache takes its memory at the start, for good. Nor is it with tensor parallelism,
where rank 0 alone knows which blocks are used.

A few words: a *layer* here is a tensor that holds blocks one after the other, a *part* PART bytes whose address is a multiple
of it, a *run* blocks, or parts, one after the other.
"""

import ctypes
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attend.model.engine.blocks import BlockPool
from attend.model.engine.options import EngineOptions
from attend.model.engine.runner import ModelRunner
from attend.model.engine.scheduler import Scheduler
from attend.model.net.kv_cache import KVCache
from attend.model.net.mapped_memory import bytes_in_memory, clear

PART = 1 << 21
"""Bytes of a large page (transhuge.rst of the kernel): x86-64, and aarch64 with pages of 4 KiB."""
FREE_SECONDS = 30.0
"""For how long a block without a known text is free before its memory is given back: the next request would take it anew."""
SLICE_SECONDS = 0.003
"""Seconds that the step thread spends on it at a time. The longest single piece of work takes about as long again."""
PARTS_AT_ONCE = 8
"""Parts of one call of the system: 2 ms, if they lie in small pages."""
BLOCKS_AT_ONCE = 2048
"""Blocks that are looked at at a time."""

Runs = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Begin and end of each run; the end is the first number beyond it."""


class Layer(NamedTuple):
    """A tensor that holds the blocks of a group, one after the other, from block 0 on."""

    address: int
    block_bytes: int
    num_blocks: int
    """Blocks of the layer, block 0 among them."""
    group: int

    @property
    def end(self) -> int:
        """The first address beyond it."""
        return self.address + self.num_blocks * self.block_bytes


def layers_of(cache: KVCache) -> list[list[Layer]]:
    """The layers of a cache, in the order of their addresses: those that lie in one piece of memory together."""
    together, alone, seen = list[Layer](), list[list[Layer]](), set[int]()
    for number, halves in enumerate(zip(cache.keys, cache.values, strict=True)):
        group = cache.group_of_layer[number] if cache.group_of_layer else 0
        alone += [[_layer(part, 1, group)] for part in cache.states.get(number, ())]
        for held in halves:
            if held.nbytes and held.data_ptr() not in seen:  # layers may share theirs, and values be the keys
                seen.add(held.data_ptr())
                together.append(_layer(held, cache.block_size, group))
    return [sorted(together), *alone] if together else alone


def _layer(held: Tensor, block_size: int, group: int) -> Layer:
    num_blocks = len(held) // block_size
    return Layer(held.data_ptr(), held.nbytes // num_blocks, num_blocks, group)


def resident_bytes(cache: KVCache, ranks: int = 1) -> int:
    """Bytes of a cache that are in memory, of all ranks, which have as much each. For any thread."""
    if cache.keys[0].is_cuda:
        return cache.nbytes * ranks
    return ranks * sum(bytes_in_memory(layers[0].address, layers[-1].end - layers[0].address) for layers in layers_of(cache))


def runs_of(marks: NDArray[np.bool_]) -> Runs:
    """Where the runs of true marks begin and end."""
    edges = np.flatnonzero(np.diff(marks, prepend=False, append=False))
    return edges[::2], edges[1::2]


class PartsOf:
    """The whole parts in a piece of memory, and which of them blocks lie in."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.first, self.end = -(-layers[0].address // PART), layers[-1].end // PART
        """Addresses in parts of PART bytes: the first whole part, and the one after the last."""
        self._size = max(0, self.end - self.first) + 3  # one before the first, one beyond the end, where the marks end
        self._busy, self._old = np.zeros(self._size, np.int64), np.zeros(self._size, np.int64)

    def add(self, layer: Layer, busy: Runs, old: Runs) -> None:
        """Mark the parts in which a layer's busy blocks lie, and those of its old ones, as far as they may be given back."""
        for marks, (begins, ends) in ((self._busy, busy), (self._old, old)):
            first = (layer.address + begins * layer.block_bytes) // PART
            last = (layer.address + ends * layer.block_bytes - 1) // PART
            marks += np.bincount(self._place(first), minlength=self._size)
            marks -= np.bincount(self._place(last) + 1, minlength=self._size)

    def _place(self, parts: NDArray[np.int64]) -> NDArray[np.int64]:
        return (parts - self.first + 1).clip(0, self._size - 2)

    def spare(self) -> list[tuple[int, int]]:
        """Address and bytes of what may be given back: parts with old blocks and no busy one, as runs of PARTS_AT_ONCE."""
        is_spare = (self._busy.cumsum() == 0) & (self._old.cumsum() > 0)
        begins, ends = runs_of(is_spare[1:-2])
        return [
            ((self.first + part) * PART, min(PARTS_AT_ONCE, end - part) * PART)
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
            for part in range(begin, end, PARTS_AT_ONCE)
        ]


class IdleMemory:
    """Gives memory back while the engine is idle: to be called in place of a step, on the step thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: Sequence[Sequence[Layer]],
        seconds: float,
        clock: Callable[[], float],
        clear: Callable[[int, int], None] = clear,
    ) -> None:
        """`memory`: see `layers_of`. `seconds`: for how long known blocks stay though nobody uses them; 0: they always stay.
        `clear` gives back memory, by address and bytes.
        """
        self._scheduler, self._memory, self._clock, self._clear = scheduler, memory, clock, clear
        self._known_seconds = seconds or math.inf
        self._free_seconds = min(FREE_SECONDS, self._known_seconds)
        self._pools = [group.pool for group in scheduler.tables.groups]
        for pool in self._pools:
            pool.clock = clock
        self._due = clock() + self._free_seconds
        """When a block can be given back next."""
        self._seen = scheduler.num_ended
        self._pass: Iterator[None] | None = None

    def __call__(self) -> None:
        """Work at it for a moment, if there is something to do."""
        scheduler, now = self._scheduler, self._clock()
        if scheduler.num_running or scheduler.num_waiting:
            return
        if scheduler.num_ended != self._seen:  # blocks have changed hands
            self._seen, self._pass = scheduler.num_ended, None
            self._due = min(self._due, now + self._free_seconds)
        if self._pass is None and now >= self._due:
            self._pass = self._give_back(now)
        while self._pass is not None and self._clock() <= now + SLICE_SECONDS:
            if next(self._pass, self) is self:
                self._pass = None

    def _give_back(self, now: float) -> Iterator[None]:
        """One pass over all KV blocks, which gives the memory of free ones back to the system; it yields between slices."""
        due, busy, old = math.inf, list[Runs](), list[Runs]()
        order: list[tuple[BlockPool, list[int], list[int]]] = []
        """For each pool: blocks whose memory can go now, and other blocks without a known text."""
        for pool in self._pools:
            is_old, is_spare = np.zeros((2, pool.num_blocks + 1), np.bool_)
            is_spare[0] = True
            others = list[int]()
            for count, (block, since, known) in enumerate(pool.iter_free_blocks()):
                ends = -math.inf if since is None else since + (self._known_seconds if known else self._free_seconds)
                if ends <= now:
                    is_spare[block], is_old[block] = True, since is not None
                else:
                    due = min(due, ends)
                    others += () if known else (block,)
                if not count % BLOCKS_AT_ONCE:
                    yield
            for block in np.flatnonzero(is_old).tolist():
                pool.forget((block,))
                yield
            busy.append(runs_of(~is_spare))
            old.append(runs_of(is_old))
            order.append((pool, np.flatnonzero(is_spare)[:0:-1].tolist(), others[::-1]))
        gives = any(len(begins) for begins, _ in old)
        for layers in self._memory if gives else ():
            parts = PartsOf(layers)
            for layer in layers:
                parts.add(layer, busy[layer.group], old[layer.group])
                yield
            for address, size in parts.spare():
                self._clear(address, size)
                yield
        for pool, spare, others in order if gives else ():
            for first in range(0, len(spare), BLOCKS_AT_ONCE):
                pool.note_given_back(spare[first : first + BLOCKS_AT_ONCE])
                pool.give_next(spare[first : first + BLOCKS_AT_ONCE])
                yield
            pool.give_next(others)
        self._due = due
        if gives:
            threading.Thread(target=trim_heap, name="attend-trim", daemon=True).start()


def idle_memory(scheduler: Scheduler, runner: ModelRunner, options: EngineOptions) -> Callable[[], None]:
    """What the engine calls while it is idle: nothing on a GPU."""
    if runner.device != "cpu":
        return lambda: None
    return IdleMemory(scheduler, layers_of(runner.cache), options.kv_idle_seconds, time.monotonic)


def trim_heap() -> None:
    """Have malloc give back what it keeps of freed memory, where it is glibc's: malloc_trim(3)."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
