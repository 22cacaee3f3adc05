"""KV offloading to disk: what the KV cache forgets, and what a process leaves behind, is read back where that is faster.

Blocks are written when a request ends (`writer.py`), so that eviction finds most of them written. A request whose text is on
disk further than in memory waits, without a block, while it is read (`reader.py`): it is admitted then, and finds the blocks as
any known prefix. Where something is amiss (a bad record, no free block, a disk that takes too long) it is admitted as it is,
and computes.

A block is named by the digest of its text from the beginning, of the model with all that its bits depend on, and of the
request's adapter and salt: see `Request.root`.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from attend.model.engine.offload.layout import BlockLayout
from attend.model.engine.offload.reader import LEAST_TOKENS, BlockReader
from attend.model.engine.offload.store import BlockStore
from attend.model.engine.offload.writer import BlockWriter
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import FinishReason, OffloadStats, Request
from attend.model.engine.scheduler import Scheduler
from attend.model.errors import SettingError
from attend.model.net.kv_cache import KVCache

log = logging.getLogger("attend.offload")

SUBFOLDER = "attend-kv"
"""Subfolder of `kv_disk_folder`, which a cluster may create with any owner and mode: this one is the user's alone."""
BYTES_PER_SECOND = 200e6
"""Written over time: reads, and other processes, need the disk too."""
CODE = Path(__file__).parents[2] / "net"
"""The code that the bits of keys and values depend on."""


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
        self._scheduler = scheduler
        self._results: deque[Callable[[], None]] = deque()
        self.writer = BlockWriter(scheduler.tables, store, layout, bytes_per_second, clock)
        self.reader = BlockReader(scheduler, store, layout, self._post, clock)
        scheduler.on_finish = self._request_finished

    def _post(self, result: Callable[[], None]) -> None:
        self._results.append(result)
        self.wake()

    # The step thread.

    @property
    def has_results(self) -> bool:
        """True if `take_results` has something to do."""
        return bool(self._results)

    def take_results(self) -> None:
        """Do what the threads ask for, and let go on who has waited too long."""
        while self._results:
            self._results.popleft()()
        self.reader.recompute_overdue()

    def _request_finished(self, request: Request) -> None:
        """A text is written once its logits were seen to be finite, and removed where they are not: it may be at fault."""
        self._scheduler.awaiting_kv.pop(request.request_id, None)
        config, reason = self._scheduler.config, request.finish_reason
        if not config.prefix_caching or request.num_known * config.block_size < LEAST_TOKENS:
            return
        is_bad = reason is FinishReason.ERROR
        if is_bad or request.first_token_at is not None or reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.writer.offer(request, is_bad=is_bad)

    def stats(self) -> OffloadStats:
        """Counts since the start, and what is there."""
        return OffloadStats(
            num_bytes=self.store.num_bytes,
            read_tokens=self.reader.num_tokens,
            read_bytes=self.reader.num_bytes,
            written_bytes=self.writer.num_bytes,
            dropped_texts=self.writer.num_dropped,
            num_slower=self.reader.num_slower,
            num_errors=self.store.num_errors,
        )

    def close(self, seconds: float = 1.0) -> None:
        """End the threads; what waits is not written."""
        self.writer.close(seconds)
        self.reader.close(seconds)


def code_digest() -> bytes:
    """Digest of the source code that computes keys and values, 16 bytes."""
    digest = blake2b(digest_size=16)
    for path in sorted(CODE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


def open_offload(options: EngineOptions, cache: KVCache, scheduler: Scheduler, fingerprint: str) -> KVOffload | None:
    """What the options ask for. `fingerprint` changes whenever the bits of a block may. Raises SettingError."""
    if not options.kv_disk_folder:
        return None
    if not scheduler.config.prefix_caching:
        raise SettingError("kv_disk_folder is set, but prefix caching is off: turn it on, or leave the folder out")
    if cache.keys[0].is_cuda:
        raise SettingError("kv_disk_folder is set, but KV offloading from a GPU is not built yet: it needs device = cpu")
    layout = BlockLayout(cache, scheduler.config)
    named = f"{fingerprint} {scheduler.config.block_size} {layout.sizes}".encode() + code_digest()
    folder, name = Path(options.kv_disk_folder) / SUBFOLDER, blake2b(named, digest_size=8).hexdigest()
    store = BlockStore(folder, name, layout.sizes, options.kv_disk_bytes)
    log.info("KV offloading to %s: %.1f MiB there, %d blocks of this model", folder, store.num_bytes / (1 << 20), len(store))
    return KVOffload(scheduler, store, layout, bytes_per_second=BYTES_PER_SECOND)
