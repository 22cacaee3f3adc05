"""Reads the blocks of waiting requests from disk: one thread finds out what is there, another reads it.

Records are read into memory of the process first. Only for the copy into the KV cache the step thread lends blocks, and makes
them known afterwards: a disk that hangs holds none. Owners take turns, and a request waits MAX_WAIT_SECONDS at most.
"""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from queue import SimpleQueue

from attend.model.engine.blocks import Parent
from attend.model.engine.offload.layout import BlockLayout
from attend.model.engine.offload.plan import Load, WantedBlocks, is_on_disk, plan
from attend.model.engine.offload.store import BlockStore, Bytes
from attend.model.engine.request import Request
from attend.model.engine.scheduler import Scheduler

log = logging.getLogger("attend.offload")

LEAST_TOKENS = 128
"""A prefix is not worth a wait below so many."""
PIECE_BYTES = 32 << 20
"""Read, and then copied, at a time."""
MAX_WAIT_SECONDS = 10.0
"""A request waits so long for its blocks, and is computed then."""
LEARNS = 1.25
"""A read that was not worth it makes the next one look so much faster: one slow read must not end all of them."""


class LoadQueue:
    """Loads that wait, by owner: the first of each in turn."""

    def __init__(self) -> None:
        self._loads: OrderedDict[str | None, deque[Load]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False
        self.num_bytes = 0

    def put(self, load: Load) -> None:
        """Queue a load for the reading thread."""
        with self._changed:
            self._loads.setdefault(load.request.owner, deque()).append(load)
            self.num_bytes += load.num_bytes
            self._changed.notify()

    def get(self) -> Load | None:
        """The next one, once there is one; None when it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._loads or self._closed)
            if self._closed:
                return None
            owner, loads = self._loads.popitem(last=False)
            load = loads.popleft()
            if loads:
                self._loads[owner] = loads  # behind the others
            self.num_bytes -= load.num_bytes
            return load

    def close(self) -> None:
        """Wake the readers, and let them end."""
        with self._changed:
            self._closed = True
            self._changed.notify()


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
        self._turns = LoadQueue()
        self._reading_since: float | None = None
        self._is_closed = False
        self._reply = Future[bool]()  # of the step thread, which lends blocks
        self._rate = 0.0  # bytes a second, 0 while it was not measured
        self.num_tokens = 0
        """Found in the prefix cache for what was read."""
        self.num_bytes = 0
        self.num_slower = 0
        """Prefixes that were there and were computed."""
        names = {"attend-kv-plan": self._planning, "attend-kv-read": self._reading}
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
            gained = self._tables.num_usable(request) - load.num_computed_blocks
            self.num_tokens += max(0, gained) * self._tables.config.block_size

    def _lend(self, load: Load, pieces: Sequence[WantedBlocks]) -> bool:
        """Take blocks for what was read, and hold what is known before it. Running requests keep one each, to grow."""
        tables, scheduler = self._tables, self._scheduler
        if not self._awaits(load.request):
            return False
        if tables.full is not None:
            known = [known[0] for known in self._known_blocks(load)]
            tables.full.borrow_known(known)
            load.held_blocks = {0: known}
        for at, group in enumerate(tables.groups):
            count = sum(wanted.group == at for wanted in pieces)
            has_room = group.pool.num_free >= count + scheduler.num_running
            blocks = group.borrow(count) if has_room else None
            if blocks is None:
                self._give_back(load)
                return False
            load.held_blocks.setdefault(at, []).extend(blocks)
            load.lent_blocks[at] = blocks
        return True

    def _known_blocks(self, load: Load) -> Iterator[tuple[int, int]]:
        """Block and number of the blocks of full attention that are known of its text."""
        parent: Parent = load.request.root
        size = self._tables.config.block_size
        for place in range(load.num_blocks):
            known = self._tables.texts.find(parent, load.request.tokens(place * size, size))
            if known is None:
                return
            yield known
            parent = known[1]

    def _enter(self, load: Load, pieces: Sequence[WantedBlocks]) -> None:
        """Make blocks that were filled known, as far as the text goes on without a gap."""
        tables, size = self._tables, self._tables.config.block_size
        blocks = {at: iter(some) for at, some in load.lent_blocks.items()}
        filled = {(wanted.group, wanted.place): next(blocks[wanted.group]) for wanted in pieces}
        parent: Parent = load.request.root
        for place in range(1 + max(wanted.place for wanted in pieces)):
            tokens = load.request.tokens(place * size, size)
            known = tables.texts.find(parent, tokens)
            if known is not None:
                number = known[1]
            elif tables.full is None or (0, place) in filled:
                number = tables.texts.remember(parent, tokens, filled.get((0, place), 0))
            else:
                break
            for at, group in tables.others:
                if (at, place) in filled:
                    group.pool.remember(number, (), filled[at, place])
            parent = number
        self._give_back(load)

    def _give_back(self, load: Load) -> None:
        for at, blocks in load.held_blocks.items():
            self._tables.groups[at].return_borrowed(blocks)
        load.held_blocks, load.lent_blocks = {}, {}

    # The threads.

    def _awaits(self, request: Request) -> bool:
        return request.request_id in self._scheduler.awaiting_kv

    def _planning(self) -> None:
        while (request := self._asked.get()) is not None:
            load = None
            try:
                load = plan(self._tables, self._store, self._layout.sizes, request, LEAST_TOKENS)
            except Exception:
                log.exception("looking up the KV blocks of request %s on disk failed", request.request_id)
            if load is not None and self._is_worth(load):
                self._turns.put(load)
            else:
                self._post(partial(self._end, request, None))

    def _is_worth(self, load: Load) -> bool:
        """True if reading, behind those that wait, is faster than computing, as far as both are known."""
        cost, size = self._scheduler.cost, self._tables.config.block_size
        seconds = cost.worth(load.num_computed_blocks * size, load.num_blocks * size) * cost.token_seconds
        slower = bool(self._rate and seconds) and (self._turns.num_bytes + load.num_bytes) / self._rate > seconds
        if slower:
            self.num_slower += 1
            self._rate *= LEARNS
        return not slower

    def _reading(self) -> None:
        while (load := self._turns.get()) is not None:
            try:
                self._read(load)
            except Exception:
                log.exception("reading the KV blocks of request %s from disk failed", load.request.request_id)
            self._post(partial(self._end, load.request, load))

    def _read(self, load: Load) -> None:
        """Read, and hand over piece by piece; ends at the first record of full attention that is gone or no good."""
        for pieces in load.in_pieces(PIECE_BYTES):
            if not self._awaits(load.request):
                return
            self._reading_since = began = self._clock()
            data = self._store.read([wanted.key for wanted in pieces])
            seconds, self._reading_since = self._clock() - began, None
            gap = min((one.place for one, some in zip(pieces, data, strict=True) if some is None and one.is_full), default=None)
            pairs = [
                (one, some)
                for one, some in zip(pieces, data, strict=True)
                if some is not None and (gap is None or one.place < gap)
            ]
            count = sum(len(some) for _, some in pairs)
            self.num_bytes += count
            if seconds > 0:
                self._rate = (self._rate + count / seconds) / 2 if self._rate else count / seconds
            if not pairs or not self._hand_over(load, pairs) or gap is not None:
                return

    def _hand_over(self, load: Load, pairs: Sequence[tuple[WantedBlocks, Bytes]]) -> bool:
        """Copy records into blocks that the step thread lends, and have it make them known. False where it lends none."""
        reply, pieces = Future[bool](), [wanted for wanted, _ in pairs]

        def answer() -> None:
            if reply.set_running_or_notify_cancel():
                reply.set_result(self._lend(load, pieces))

        self._reply = reply
        if self._is_closed:  # `close` cancels what it finds
            return False
        self._post(answer)
        try:
            lent = reply.result(MAX_WAIT_SECONDS)
        except TimeoutError:
            lent = not reply.cancel() and reply.result()
        except CancelledError:  # the engine is closed
            lent = False
        if not lent:
            return False
        try:
            for at, blocks in load.lent_blocks.items():
                if blocks:
                    self._layout.write(at, blocks, [some for wanted, some in pairs if wanted.group == at])
        except Exception:
            self._post(partial(self._give_back, load))
            raise
        self._post(partial(self._enter, load, pieces))
        return True

    def close(self, seconds: float) -> None:
        """End both threads; a read that hangs is not waited for longer than `seconds`."""
        self._is_closed = True
        self._asked.put(None)
        self._turns.close()
        self._reply.cancel()
        for thread in self._threads:
            thread.join(seconds)
