"""Reads the blocks of waiting requests from disk: one thread finds out what is there, another reads it. Between two steps the
step thread copies them into the KV cache and makes them known: a disk that hangs holds no block.

Owners take turns, and a request waits MAX_WAIT_SECONDS at most: then it is computed.
"""

import logging
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from attend.model.engine.blocks import Parent
from attend.model.engine.offload.layout import BlockLayout
from attend.model.engine.offload.store import BlockStore, Bytes, Key
from attend.model.engine.request import Request
from attend.model.engine.scheduler import Scheduler
from attend.model.engine.tables import BlockTables

if TYPE_CHECKING:
    from attend.model.engine.offload.writer import Text

log = logging.getLogger("attend.offload")

LEAST_TOKENS = 128
"""A prefix is not worth a wait below so many."""
PIECE_BYTES = 4 << 20
"""Read, and then copied, at a time: the copy takes two or three milliseconds of the step thread."""
MAX_WAIT_SECONDS = 10.0
LEARNS = 1.25
"""A read that was not worth it makes the next one look so much faster: one slow read must not end all of them."""


class WantedBlocks(NamedTuple):
    """A KV block that is to be read from disk."""

    place: int
    """Number of the block in its text, from 0."""
    group: int
    key: Key
    num_bytes: int
    is_full: bool
    """True if the text cannot go on without it: it is of full attention."""


@dataclass(slots=True, eq=False)
class Load:
    """Blocks of a waiting request that are read from disk."""

    request: Request
    num_computed_blocks: int
    """Blocks of the prefix that can be used without reading."""
    num_blocks: int
    """Blocks of the prefix that can be used once all is read."""
    wanted_blocks: list[WantedBlocks]
    """Blocks to read, in the order of their places in the text."""
    text_blocks: list[tuple[int, int]] = field(default_factory=list)
    """Block and number of what full attention had of its text at the last copy, from the first place on."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the records that are still to be read."""
        return sum(wanted.num_bytes for wanted in self.wanted_blocks)

    def in_pieces(self, num_bytes: int) -> Iterator[list[WantedBlocks]]:
        """The blocks to read, in pieces of about so many bytes."""
        piece, size = list[WantedBlocks](), 0
        for wanted in self.wanted_blocks:
            if piece and size + wanted.num_bytes > num_bytes:
                yield piece
                piece, size = [], 0
            piece.append(wanted)
            size += wanted.num_bytes
        if piece:
            yield piece


def root_digest(root: str) -> bytes:
    """The digest that a request's texts begin with, see `Request.root`."""
    return blake2b(root.encode(), digest_size=16).digest()


def next_digest(digest: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a text and the block of tokens after it."""
    return blake2b(digest + array("I", tokens).tobytes(), digest_size=16).digest()


def is_on_disk(tables: BlockTables, store: BlockStore, request: Request) -> bool:
    """True if anything may be on disk of a request's text: its first block, where there is full attention."""
    if tables.full is None:
        return len(store) > 0
    return store.has((next_digest(root_digest(request.root), request.tokens(0, tables.config.block_size)), 0))


def walk(
    tables: BlockTables, root: str, tokens: Sequence[int], num_blocks: int
) -> Iterator[tuple[int, bytes, tuple[int, int] | None]]:
    """Of each block of a text: its place, its digest, and its block and number in memory, None where they are not known."""
    size, digest = tables.config.block_size, root_digest(root)
    parent: Parent | None = root
    for place in range(num_blocks):
        some = tokens[place * size : place * size + size]
        digest = next_digest(digest, some)
        known = None if parent is None else tables.texts.find(parent, some)
        parent = None if known is None else known[1]
        yield place, digest, known


def in_memory(tables: BlockTables, last_block: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Group, block and number there of what is in memory at the end of a known text, which has its last block and number in the
    first group."""
    if tables.full is not None:
        yield 0, *last_block
    for at, group in tables.others:
        if (found := group.pool.find(last_block[1], ())) is not None:
            yield at, *found


def unwritten(tables: BlockTables, store: BlockStore, text: "Text") -> list[list[tuple[int, int, Key]]]:
    """For each group: block, number and key of a text's blocks that are in memory, and not on disk. Blocks that the step under
    way fills are known already; whoever has it fill them brings them here. What is on disk counts as used.
    """
    found: list[list[tuple[int, int, Key]]] = [[] for _ in tables.groups]
    filled = tables.known_before
    for _, digest, known in walk(tables, text.root, text.tokens, text.num_blocks):
        if known is None:
            break
        for at, block, number in in_memory(tables, known):
            if store.has((digest, at)):
                store.note_use((digest, at))
            elif number < filled[at]:
                found[at].append((block, number, (digest, at)))
    return found


def plan(tables: BlockTables, store: BlockStore, sizes: Sequence[int], request: Request, least_tokens: int) -> Load | None:
    """What is to be read for a request, so that `least_tokens` more of its text are known; None where there are not so many.
    `sizes`: bytes of a block of each group.
    """
    size, others = tables.config.block_size, tables.others
    keys: list[tuple[bytes, set[int]]] = []  # by place: its digest, and the groups that have it in memory
    usable = computed = 0
    either, memory = [0] * len(others), [0] * len(others)  # for how many blocks in a row each group has it
    tokens = request.tokens(0, request.num_tokens)
    for place, digest, known in walk(tables, request.root, tokens, (len(tokens) - 1) // size):
        have = set() if known is None else {at for at, _, _ in in_memory(tables, known)}
        if tables.full is not None and known is None and not store.has((digest, 0)):
            break
        keys.append((digest, have))
        for row, (at, _) in enumerate(others):
            memory[row] = memory[row] + 1 if at in have else 0
            either[row] = either[row] + 1 if at in have or store.has((digest, at)) else 0
        least = [min(place + 1, group.span) for _, group in others]
        if all(map(int.__ge__, either, least)):
            usable = place + 1
        if known is not None and all(map(int.__ge__, memory, least)):
            computed = place + 1
    if (usable - computed) * size < least_tokens:
        return None
    wanted = [
        WantedBlocks(place, at, (digest, at), sizes[at], at == 0 and tables.full is not None)
        for place, (digest, have) in enumerate(keys[:usable])
        for at, group in enumerate(tables.groups)
        if at not in have and place >= usable - group.span
    ]
    return Load(request, computed, usable, wanted)


class BlockReader:
    """Reads for the requests of a scheduler. `post` has the step thread do something."""

    def __init__(
        self,
        scheduler: Scheduler,
        store: BlockStore,
        layout: BlockLayout,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._tables, self._store, self._layout = scheduler, scheduler.tables, store, layout
        self._post, self._clock = post, clock
        self._asked: SimpleQueue[Request | None] = SimpleQueue()
        self._loads: OrderedDict[str | None, deque[Load]] = OrderedDict()
        """Loads that wait or are read, by owner: the first of each in turn."""
        self._changed = threading.Condition()
        self._uncopied = threading.Semaphore(2)
        """Pieces that may have been read and not copied."""
        self._queued_bytes = 0
        self._closed = False
        self._reading_since: float | None = None
        self._rate = 0.0  # bytes a second, 0 while it was not measured
        self.num_tokens = 0
        """Found in the prefix cache for what was read."""
        self.num_bytes = 0
        self.num_slower = 0
        """Prefixes that were there and were computed."""
        names = {"attend-kv-plan": self._plan_all, "attend-kv-read": self._read_all}
        self._threads = [threading.Thread(target=work, name=name, daemon=True) for name, work in names.items()]
        for thread in self._threads:
            thread.start()

    # The step thread.

    def begin(self, request: Request) -> None:
        """Have a new request wait while what is on disk of its text is read, if there may be something."""
        hangs = self._reading_since is not None and self._clock() - self._reading_since > MAX_WAIT_SECONDS
        if hangs or request.num_tokens <= LEAST_TOKENS or not self._tables.looks_up(request):
            return
        if is_on_disk(self._tables, self._store, request):
            self._scheduler.awaiting_kv[request.request_id] = self._clock()
            self._asked.put(request)

    def recompute_overdue(self) -> None:
        """Have who has waited too long be computed."""
        waiting = self._scheduler.awaiting_kv
        while waiting and self._clock() - next(iter(waiting.values())) > MAX_WAIT_SECONDS:
            late = next(iter(waiting))
            log.warning("request %s is recomputed: its KV blocks were not read from disk in %g s", late, MAX_WAIT_SECONDS)
            self.num_slower += 1
            del waiting[late]

    def _end(self, request: Request, load: Load | None) -> None:
        """Let a request be scheduled, whether its blocks were read or not."""
        if self._scheduler.awaiting_kv.pop(request.request_id, None) is not None and load is not None:
            gained = self._tables.known_after(request, 0)[1] - load.num_computed_blocks
            self.num_tokens += max(0, gained) * self._tables.config.block_size

    def _copy(self, load: Load, pairs: Sequence[tuple[WantedBlocks, Bytes]]) -> None:
        """Copy what was read into free blocks and make them known, as far as the text goes on without a gap."""
        self._uncopied.release()
        if load.request.request_id not in self._scheduler.awaiting_kv:
            return
        tables, filled = self._tables, dict[tuple[int, int], int]()
        known = self._blocks_of(load)
        if tables.full is not None:
            tables.full.pool.share(known)  # so that they do not give way
        try:
            for at, group in enumerate(tables.groups):
                some = [(wanted.place, data) for wanted, data in pairs if wanted.group == at]
                blocks = group.pool.allocate(len(some))
                if blocks is None:
                    return self._end(load.request, load)
                filled |= {(at, place): block for (place, _), block in zip(some, blocks, strict=True)}
                if blocks:
                    self._layout.write(at, blocks, [data for _, data in some])
            self._remember(load, filled)
        except Exception:
            log.exception("copying the KV blocks of request %s failed", load.request.request_id)
            self._end(load.request, load)
        finally:
            for at, group in enumerate(tables.groups):
                group.pool.free([block for (place, _), block in filled.items() if place == at])
            if tables.full is not None:
                tables.full.pool.free(known)

    def _blocks_of(self, load: Load) -> list[int]:
        """The blocks of full attention that are known of its text. Those of the last copy are not looked up again."""
        full, size, known = self._tables.full, self._tables.config.block_size, load.text_blocks
        if full is None:
            return []
        del known[next((at for at, (block, its) in enumerate(known) if not full.pool.holds(block, its)), len(known)) :]
        parent: Parent = known[-1][1] if known else load.request.root
        while len(known) < load.num_blocks:
            found = full.pool.find(parent, load.request.tokens(len(known) * size, size))
            if found is None:
                break
            known.append(found)
            parent = found[1]
        return [block for block, _ in known]

    def _remember(self, load: Load, filled: dict[tuple[int, int], int]) -> None:
        """Make blocks known, which have what these groups keep of these places of a request's text."""
        tables, size, known = self._tables, self._tables.config.block_size, load.text_blocks
        places = [place for _, place in filled] or [0]
        begin = min(len(known), *places)
        parent: Parent = known[begin - 1][1] if begin else load.request.root
        for place in range(begin, 1 + max(places)):
            tokens = load.request.tokens(place * size, size)
            found = tables.texts.find(parent, tokens)
            if found is not None:
                parent = found[1]
            elif tables.full is None or (0, place) in filled:
                parent = tables.texts.remember(parent, tokens, filled.get((0, place), 0))
            else:
                return
            for at, group in tables.others:
                if (at, place) in filled:
                    group.pool.remember(parent, (), filled[at, place])

    # The threads.

    def _plan_all(self) -> None:
        while (request := self._asked.get()) is not None:
            load = None
            try:
                load = plan(self._tables, self._store, self._layout.sizes, request, LEAST_TOKENS)
            except Exception:
                log.exception("looking up the KV blocks of request %s on disk failed", request.request_id)
            if load is None or not self._is_worth(load):
                self._post(partial(self._end, request, None))
                continue
            with self._changed:
                self._loads.setdefault(request.owner, deque()).append(load)
                self._queued_bytes += load.num_bytes
                self._changed.notify()

    def _is_worth(self, load: Load) -> bool:
        """True if reading, behind those that wait, is faster than computing, as far as both are known."""
        cost, size = self._scheduler.cost, self._tables.config.block_size
        seconds = cost.worth(load.num_computed_blocks * size, load.num_blocks * size) * cost.token_seconds
        slower = bool(self._rate and seconds) and (self._queued_bytes + load.num_bytes) / self._rate > seconds
        if slower:
            self.num_slower += 1
            self._rate *= LEARNS
        return not slower

    def _read_all(self) -> None:
        while (load := self._next()) is not None:
            try:
                self._read(load)
            except Exception:
                log.exception("reading the KV blocks of request %s from disk failed", load.request.request_id)
            with self._changed:
                loads = self._loads.pop(load.request.owner)
                loads.popleft()
                if loads:
                    self._loads[load.request.owner] = loads  # behind who came while it was read
            self._post(partial(self._end, load.request, load))

    def _next(self) -> Load | None:
        with self._changed:
            self._changed.wait_for(lambda: self._loads or self._closed)
            if self._closed:
                return None
            load = next(iter(self._loads.values()))[0]
            self._queued_bytes -= load.num_bytes
            return load

    def _read(self, load: Load) -> None:
        """Read, and hand over piece by piece; ends at the first record of full attention that is gone or no good."""
        for piece in load.in_pieces(PIECE_BYTES):
            self._uncopied.acquire()
            if self._closed or load.request.request_id not in self._scheduler.awaiting_kv:
                self._uncopied.release()
                return
            self._reading_since = began = self._clock()
            found = list(zip(piece, self._store.read([wanted.key for wanted in piece]), strict=True))
            seconds, self._reading_since = self._clock() - began, None
            gap = min((one.place for one, data in found if data is None and one.is_full), default=load.num_blocks)
            pairs = [(one, data) for one, data in found if data is not None and one.place < gap]
            count = sum(len(data) for _, data in pairs)
            self.num_bytes += count
            if seconds > 0:
                self._rate = (self._rate + count / seconds) / 2 if self._rate else count / seconds
            self._post(partial(self._copy, load, pairs))
            if gap < load.num_blocks:
                return

    def close(self, seconds: float) -> None:
        """End the threads; a read that hangs is not waited for longer than `seconds`."""
        self._asked.put(None)
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._uncopied.release()
        for thread in self._threads:
            thread.join(seconds)
