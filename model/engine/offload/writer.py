"""The thread that writes blocks to disk: those of a text whose request has ended, which are not there yet.

It copies while steps compute. A block may be evicted meanwhile, and filled with another text: then its number in the pool has
changed afterwards, and the copy is dropped.
"""

import logging
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from attend.model.engine.offload.layout import BlockLayout
from attend.model.engine.offload.reader import unwritten, walk
from attend.model.engine.offload.store import BlockStore
from attend.model.engine.request import Request
from attend.model.engine.tables import BlockTables

log = logging.getLogger("attend.offload")

PIECE_BYTES = 4 << 20
"""Bytes that are copied, and then written, at a time."""
MAX_QUEUED_TOKENS = 1 << 22
"""Tokens of texts that may wait to be written. Texts beyond that are not written."""
REFRESH_SECONDS = 5.0
"""How often other processes' files are looked for."""
STEP_SECONDS = 0.2
"""How long the step in which a request ended may take to end: until then its last block counts as one that is not filled."""
PAUSE_SECONDS = 30.0
"""Nothing is written for so long after an error of the disk."""


@dataclass(frozen=True, slots=True)
class Text:
    """The tokens of a request that has ended."""

    root: str
    tokens: "array[int]"
    num_blocks: int
    known_before: list[int]
    """`BlockTables.known_before` of the step in which the request ended."""
    is_bad: bool = False
    """True if what is on disk of it is to be removed."""


class BlockWriter:
    """Writes texts, at most so many bytes a second over time."""

    def __init__(
        self, tables: BlockTables, store: BlockStore, layout: BlockLayout, bytes_per_second: float, clock: Callable[[], float]
    ) -> None:
        self._tables, self._store, self._layout, self._clock = tables, store, layout, clock
        self._bytes_per_second = bytes_per_second
        self._jobs: SimpleQueue[Text | threading.Event] = SimpleQueue()
        self._queued_tokens = 0
        self._hurry, self._closed = threading.Event(), threading.Event()
        self._paused_until = self._refreshed = 0.0
        self.num_bytes = 0
        """Bytes that were written since the start."""
        self.num_dropped = 0
        """Texts of which nothing, or not all, was written."""
        self._thread = threading.Thread(target=self._run, name="attend-kv-write", daemon=True)
        self._thread.start()

    def offer(self, request: Request, *, is_bad: bool) -> None:
        """Write the blocks of an ended request, or with `is_bad` remove them. Returns at once."""
        count = request.num_known * self._tables.config.block_size
        if self._queued_tokens + count > MAX_QUEUED_TOKENS:
            self.num_dropped += 1
            return
        self._queued_tokens += count
        tokens, known_before = array("I", request.tokens(0, count)), self._tables.known_before
        self._jobs.put(Text(request.root, tokens, request.num_known, known_before, is_bad))

    def flush(self, event: threading.Event) -> None:
        """Write what waits, without the bound on bytes a second; the event is set once that is done."""
        self._hurry.set()
        self._jobs.put(event)

    def close(self, seconds: float) -> None:
        """End the thread; what waits is not written."""
        self._closed.set()
        self._hurry.set()
        self._jobs.put(threading.Event())
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                job = self._jobs.get(timeout=REFRESH_SECONDS)
            except Empty:
                job = None
            try:
                if self._clock() - self._refreshed >= REFRESH_SECONDS:
                    self._refreshed = self._clock()
                    self._store.refresh()
                if isinstance(job, threading.Event):
                    job.set()
                elif job is not None:
                    self._queued_tokens -= len(job.tokens)
                    self._do(job)
            except Exception:
                log.exception("writing the KV blocks of a request to disk failed")

    def _do(self, text: Text) -> None:
        if text.is_bad:
            steps = walk(self._tables, text.root, text.tokens, text.num_blocks)
            self._store.remove([(digest, at) for _, digest, _ in steps for at in range(len(self._tables.groups))])
            return
        if self._clock() < self._paused_until:
            self.num_dropped += 1
            return
        try:
            self._write(text)
        except OSError as error:
            self._paused_until = self._clock() + PAUSE_SECONDS
            self.num_dropped += 1
            log.warning("no KV blocks are written to disk for %g s: %s", PAUSE_SECONDS, error)

    def _write(self, text: Text) -> None:
        """Write the blocks of a text that are in memory, and not on disk. Raises OSError."""
        dropped, deadline = False, time.monotonic() + STEP_SECONDS
        while self._tables.known_before is text.known_before and time.monotonic() < deadline:
            time.sleep(0.001)
        for group, some in enumerate(unwritten(self._tables, self._store, text)):
            pool, count = self._tables.groups[group].pool, max(1, PIECE_BYTES // self._layout.sizes[group])
            for start in range(0, len(some), count):
                began, size, part = self._clock(), 0, some[start : start + count]
                copies = self._layout.read(group, [block for block, _, _ in part])
                for (block, number, key), copy in zip(part, copies, strict=True):
                    if self._closed.is_set() or not pool.holds(block, number):  # evicted, perhaps before it was copied
                        dropped = True
                    else:
                        size += self._store.write(key, copy)
                self.num_bytes += size
                self._hurry.wait(max(0.0, size / self._bytes_per_second - (self._clock() - began)))
        self.num_dropped += dropped
