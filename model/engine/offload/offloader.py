"""KV offloading to disk: what the KV cache forgets, and what a process leaves behind, is read back where that is faster.

Blocks are written when a request ends, by a thread of their own: all of its text that the prefix cache knows then, and that is
not on disk yet. So eviction finds them written, and the step thread copies nothing. A block may be evicted while it is copied:
then its number in the pool has changed afterwards, and the copy is dropped.

A request whose text is on disk further than in memory waits, without a block, while another thread reads. The step thread lends
that thread blocks, in which nobody looks, and makes them known once they are filled: the request is admitted then, and finds
them as any known prefix. Where something is amiss (a bad record, no free block, a disk that takes too long) it is admitted as
it is, and computes.

A block is named by the digest of its text from the beginning, of the model with all that its bits depend on, and of the
request's adapter and salt: see `Request.root`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from attend.model.engine.blocks import Parent
from attend.model.engine.offload.layout import BlockLayout
from attend.model.engine.offload.plan import Load, next_digest, plan, root_digest, unwritten
from attend.model.engine.offload.store import BlockStore, Key
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import OffloadStats, Request
from attend.model.engine.scheduler import Scheduler
from attend.model.errors import SettingError
from attend.model.net.kv_cache import KVCache

log = logging.getLogger("attend.offload")
T = TypeVar("T")

LEAST_TOKENS = 128
"""A prefix is not worth a file, or a wait, below so many."""
FILE_BYTES = 16 << 20
"""Records of a file, at most, unless one is larger."""
PIECE_BYTES = 4 << 20
"""Copied, or read, at a time."""
MOST_JOBS = 256
"""Ended requests that wait to be written. Beyond them the oldest is not written."""
MOST_WAIT_SECONDS = 10.0
"""A request waits so long for its blocks, and is computed then."""
REFRESH_SECONDS = 5.0
"""How often the thread that writes looks for other processes' files while it has nothing to do."""
PAUSE_SECONDS = 30.0
"""Nothing is written for so long after an error of the disk."""


@dataclass(frozen=True, slots=True)
class _Text:
    """The tokens of a request that has ended."""

    root: str
    tokens: Sequence[int]
    num_blocks: int


class KVOffload:
    """What a scheduler's requests find on disk, and leave there."""

    def __init__(
        self,
        scheduler: Scheduler,
        store: BlockStore,
        layout: BlockLayout,
        *,
        bytes_per_second: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bytes_per_second` bounds what is written, over time."""
        self.store = store
        self.wake: Callable[[], None] = lambda: None
        """Called from other threads when `take_results` has something to do."""
        self._scheduler, self._tables, self._layout, self._clock = scheduler, scheduler.tables, layout, clock
        self._bytes_per_second = bytes_per_second
        self._results: deque[Callable[[], None]] = deque()
        self._reads: SimpleQueue[Request | None] = SimpleQueue()
        self._writes: SimpleQueue[_Text | threading.Event | None] = SimpleQueue()
        self._ending = threading.Event()
        self._paused_until = 0.0
        self._read_rate = 0.0  # bytes a second, 0 while it was not measured
        self._read_tokens = self._read_bytes = self._written_bytes = self._dropped = self._slower = 0
        scheduler.on_finish = self._finished
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._reading, self._writing)]
        for name, thread in zip(("kv-read", "kv-write"), self._threads, strict=True):
            thread.name = f"attend-{name}"
            thread.start()

    # The step thread.

    @property
    def has_results(self) -> bool:
        """Whether `take_results` has something to do."""
        return bool(self._results)

    @property
    def is_lending(self) -> bool:
        """Whether blocks are held for no request."""
        return any(group.borrowed for group in self._tables.groups)

    def begin(self, request: Request) -> None:
        """Read what is on disk of a new request's text, before it is admitted."""
        tables, size = self._tables, self._tables.config.block_size
        if request.num_tokens <= LEAST_TOKENS or not tables.looks_up(request):
            return
        if tables.full is not None and not self.store.has((next_digest(root_digest(request.root), request.tokens(0, size)), 0)):
            return
        self._scheduler.awaiting_kv[request.request_id] = self._clock()
        self._reads.put(request)

    def take_results(self) -> None:
        """Do what the threads ask for, and let go on who has waited too long."""
        while self._results:
            self._results.popleft()()
        waiting = self._scheduler.awaiting_kv
        if waiting and self._clock() - next(iter(waiting.values())) > MOST_WAIT_SECONDS:
            late = next(iter(waiting))
            log.warning("request %s is computed: its blocks were not read from disk in %g s", late, MOST_WAIT_SECONDS)
            self._slower += 1
            del waiting[late]

    def _finished(self, request: Request) -> None:
        self._scheduler.awaiting_kv.pop(request.request_id, None)
        size = self._tables.config.block_size
        if not self._tables.config.prefix_caching or request.num_known * size < LEAST_TOKENS:
            return
        if self._writes.qsize() >= MOST_JOBS or self._clock() < self._paused_until:
            self._dropped += request.num_known
            return
        self._writes.put(_Text(request.root, request.tokens(0, request.num_known * size), request.num_known))

    def stats(self) -> OffloadStats:
        """Counts since the start, and what is there."""
        return OffloadStats(
            num_bytes=self.store.num_bytes,
            read_tokens=self._read_tokens,
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            dropped_blocks=self._dropped,
            num_slower=self._slower,
            num_errors=self.store.num_errors,
        )

    def flush(self, seconds: float) -> bool:
        """Write what waits, without the bound on bytes a second; whether that was done in time. From any thread."""
        done = threading.Event()
        self._ending.set()
        self._writes.put(done)
        return done.wait(seconds)

    def close(self) -> None:
        """End both threads; what waits is not written."""
        self._ending.set()
        self._reads.put(None)
        self._writes.put(None)

    # Writing.

    def _writing(self) -> None:
        while True:
            try:
                job = self._writes.get(timeout=REFRESH_SECONDS)
            except Empty:
                self.store.refresh()
                continue
            if job is None:
                return
            if isinstance(job, threading.Event):
                job.set()
                continue
            try:
                for records in self._files(job):
                    began = self._clock()
                    count = self.store.write(records)
                    self._written_bytes += count
                    self._ending.wait(max(0.0, count / self._bytes_per_second - (self._clock() - began)))
            except OSError as error:
                self._paused_until = self._clock() + PAUSE_SECONDS
                self._dropped += job.num_blocks
                log.warning("KV blocks are not written for %g s: %s", PAUSE_SECONDS, error)
            except Exception:
                log.exception("KV blocks of a request are not written")

    def _files(self, text: _Text) -> Iterator[list[tuple[Key, memoryview]]]:
        """The records of a text that are to be written, in files."""
        records: list[tuple[Key, memoryview]] = []
        size = 0
        for group, some in enumerate(unwritten(self._tables, self.store, text.root, text.tokens, text.num_blocks)):
            for part in self._pieces(group, some):
                copies = self._layout.read(group, [block for block, _, _ in part])
                pool = self._tables.groups[group].pool
                for (block, number, key), copy in zip(part, copies, strict=True):
                    if not pool.holds(block, number):  # evicted, perhaps before it was copied
                        self._dropped += 1
                        continue
                    if records and size + len(copy) > FILE_BYTES:
                        yield records
                        records, size = [], 0
                    records.append((key, copy))
                    size += len(copy)
        if records:
            yield records

    def _pieces(self, group: int, blocks: Sequence[T]) -> Iterator[Sequence[T]]:
        """Blocks of a group in parts of PIECE_BYTES."""
        count = max(1, PIECE_BYTES // self._layout.sizes[group])
        return (blocks[start : start + count] for start in range(0, len(blocks), count))

    # Reading.

    def _reading(self) -> None:
        while (request := self._reads.get()) is not None:
            load = None
            try:
                if request.request_id in self._scheduler.awaiting_kv:
                    load = plan(self._tables, self.store, request, LEAST_TOKENS)
                if load is not None and self._is_worth(load) and self._lend(load):
                    self._fill(load)
            except Exception:
                log.exception("KV blocks of request %s are not read", request.request_id)
            self._post(self._ender(request, load))

    def _is_worth(self, load: Load) -> bool:
        """Whether reading is faster than computing, as far as both are known."""
        cost, size = self._scheduler.cost, self._tables.config.block_size
        seconds = cost.worth(load.computed * size, load.num_blocks * size) * cost.token_seconds
        num_bytes = sum(self._layout.sizes[at] for at, _, _ in load.wanted)
        slower = bool(self._read_rate and seconds) and num_bytes / self._read_rate > seconds
        self._slower += slower
        return not slower

    def _lend(self, load: Load) -> bool:
        """Have the step thread lend blocks; whether it did."""
        reply: Future[bool] = Future()

        def answer() -> None:
            if reply.set_running_or_notify_cancel():
                reply.set_result(self._borrow(load))

        self._post(answer)
        try:
            return reply.result(MOST_WAIT_SECONDS)
        except TimeoutError:
            return not reply.cancel() and reply.result()

    def _borrow(self, load: Load) -> bool:
        """On the step thread: hold what is in memory of the prefix, and take blocks for the rest."""
        tables = self._tables
        if load.request.request_id not in self._scheduler.awaiting_kv:
            return False
        full = tables.full
        if full is not None:
            if not all(full.pool.holds(*known) for known in load.known):
                return False
            full.borrow_known([block for block, _ in load.known])
        for at, group in enumerate(tables.groups):
            places = [place for some, place, _ in load.wanted if some == at]
            blocks = group.borrow(len(places))
            if blocks is None:
                self._return(load)
                return False
            load.lent |= {(at, place): block for place, block in zip(places, blocks, strict=True)}
        load.is_held = True
        return True

    def _fill(self, load: Load) -> None:
        """Read the blocks into their places."""
        began, count = self._clock(), 0
        for at in range(len(self._tables.groups)):
            wanted = [(place, key) for some, place, key in load.wanted if some == at]
            for part in self._pieces(at, wanted):
                if load.request.request_id not in self._scheduler.awaiting_kv:
                    return
                data = self.store.read([key for _, key in part])
                good = [(place, some) for (place, _), some in zip(part, data, strict=True) if some is not None]
                if good:
                    blocks = [load.lent[at, place] for place, _ in good]
                    self._layout.write(at, blocks, [some for _, some in good])
                    load.filled.update((at, place) for place, _ in good)
                    count += sum(len(some) for _, some in good)
        seconds = self._clock() - began
        if count and seconds > 0:
            rate = count / seconds
            self._read_rate = rate if not self._read_rate else (self._read_rate + rate) / 2
        self._read_bytes += count

    def _ender(self, request: Request, load: Load | None) -> Callable[[], None]:
        def end() -> None:
            if load is not None and load.is_held:
                self._enter(load)
            self._scheduler.awaiting_kv.pop(request.request_id, None)

        return end

    def _enter(self, load: Load) -> None:
        """On the step thread: make the blocks that were filled known, as far as the text goes on without a gap."""
        tables, size, full = self._tables, self._tables.config.block_size, self._tables.full
        parent: Parent = load.request.root
        entered = 0
        for place in range(load.num_blocks):
            tokens = load.request.tokens(place * size, size)
            known = tables.texts.find(parent, tokens)
            if known is not None:
                number = known[1]
            elif full is None or (0, place) in load.filled:
                number = tables.texts.remember(parent, tokens, load.lent.get((0, place), 0) if full is not None else 0)
                entered += 1
            else:
                break
            for at, group in tables.others:
                if (at, place) in load.filled:
                    group.pool.remember(number, (), load.lent[at, place])
            parent = number
        self._read_tokens += entered * size
        self._return(load)

    def _return(self, load: Load) -> None:
        tables = self._tables
        if tables.full is not None:
            tables.full.return_borrowed([block for block, _ in load.known])
        for at, group in enumerate(tables.groups):
            group.return_borrowed([block for (some, _), block in load.lent.items() if some == at])

    def _post(self, result: Callable[[], None]) -> None:
        self._results.append(result)
        self.wake()


def open_offload(options: EngineOptions, cache: KVCache, scheduler: Scheduler, fingerprint: str) -> KVOffload | None:
    """What the options ask for. `fingerprint` changes whenever the bits of a block may. Raises SettingError."""
    if not options.kv_disk_folder:
        return None
    if not scheduler.config.prefix_caching:
        raise SettingError("kv_disk_folder is set, but prefix caching is off: turn it on, or leave the folder out")
    layout = BlockLayout(cache, scheduler.config)
    named = f"1 {fingerprint} {scheduler.config.block_size} {layout.sizes}"  # 1: of this format
    folder, name = Path(options.kv_disk_folder), blake2b(named.encode(), digest_size=8).hexdigest()
    store = BlockStore(folder, name, layout.sizes, options.kv_disk_bytes)
    log.info("KV offloading to %s: %.1f MiB there, %d blocks of this model", folder, store.num_bytes / (1 << 20), len(store))
    return KVOffload(scheduler, store, layout, bytes_per_second=options.kv_disk_bandwidth)
