"""The block tables of all requests, one for each group of layers, and the prefix cache over them.

A full block is found again by its text. One group tells texts apart and numbers them: that of full attention, or `Texts` where
all layers have windows. The others know a block by the number of its text. A prefix is found as far as each group has the
blocks that the next token sees: full attention all of them, a window the last ones, and a recurrent state the snapshot at
its end.
"""

from array import array
from collections.abc import Sequence
from itertools import count

from attend.model.engine.blocks import BlockPool, Parent, Texts
from attend.model.engine.config import LONGEST_DRAFT, EngineConfig
from attend.model.engine.groups import FullGroup, KVCacheGroup, StateGroup, group_of
from attend.model.engine.plan import ScheduledTokens, StepResult
from attend.model.engine.request import AdmissionShortfall, Request
from attend.model.engine.snapshots import SPACING, Snapshots
from attend.model.pooling import Pooling

TEXTS_OF_BLOCK = 4
"""Texts that are known for each block, where all layers have windows."""


class BlockTables:
    """Owns the blocks of every group."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.groups: list[KVCacheGroup] = [group_of(at, size, config) for at, size in enumerate(config.groups)]
        self.has_windows = any(size.window is not None for size in config.groups)
        self.has_states = any(size.has_state for size in config.groups)
        full = [group for group in self.groups if type(group) is FullGroup]
        self.full = full[0] if full else None
        self.texts: BlockPool | Texts = full[0].pool if full else Texts(TEXTS_OF_BLOCK * config.num_blocks)
        self.others = [(at, group) for at, group in enumerate(self.groups) if group is not self.full]
        self._windows = [(at, group) for at, group in self.others if not isinstance(group, StateGroup)]
        self._states = next((group for group in self.groups if isinstance(group, StateGroup)), None)
        self.snapshots: Snapshots | None = None
        if self._states is not None and self.full is not None and config.prefix_caching:
            self.snapshots = Snapshots(self._states, self.full.pool, config)
        self._gap = SPACING if self.has_states else 0
        self.known_before: list[int] = []
        """For each group's pool: blocks with lower numbers were filled before the step under way."""
        self.known_next: tuple[list[int], list[int]] | None = None
        """`known_before` for the step after it, before and after its planning; only if that was early and made blocks known."""
        self._filled: list[range] = []
        """Numbers behind `known_before` that are of the step before the one under way: it ended after that was planned."""
        self._versions = count(1)
        self.begin_step()

    def new(self) -> list["array[int]"]:
        """Empty tables, one of each group, for a request before its admission."""
        return [array("q") for _ in self.groups]

    @property
    def num_free(self) -> int:
        """Free blocks in the group that has the smallest share of them, counted in blocks of the first group."""
        return int(self.config.num_blocks * min(group.free_share for group in self.groups) + 1e-6)  # a share is rounded

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for so many tokens in every group, or in none."""
        if num_tokens <= request.reserved_tokens:
            return True
        if not all(group.fits(request, num_tokens) for group in self.groups):
            return False
        for group in self.groups:
            group.grow(request, num_tokens)
        size = self.config.block_size
        request.reserved_tokens = -(-num_tokens // size) * size
        return True

    def allocate(self, request: Request, num_tokens: int) -> None:
        """Take the blocks that a step writes to, for so many tokens; the request has the room."""
        for group in self.groups:
            group.allocate(request, num_tokens)

    def part_end(self, request: Request) -> int:
        """How many tokens are computed at most once the next part of its prompt is: a snapshot is kept of the state then."""
        return request.num_tokens if self.snapshots is None else self.snapshots.border(request)

    def advance(self, request: Request, end: int, *, pending: bool = False) -> int:
        """Plan where a step that computes the tokens before `end` writes its state: the slot if it becomes a snapshot, else 0.
        `pending`: its one token is drawn by the step before.
        """
        if self._states is None:
            return 0
        snapshots = self.snapshots
        if snapshots is None or not snapshots.should_keep(request, end, pending=pending):
            return self._states.advance(request, keep=False)
        slot = self._states.advance(request, keep=True)
        if slot:
            snapshots.plan(request, end)
        return slot

    def draft_room(self, request: Request) -> int:
        """Draft tokens that may follow a request's next token: none past a block's end where a step must end for a snapshot."""
        most, size = LONGEST_DRAFT - request.num_replayed, self.config.block_size
        return most if self.snapshots is None else min(most, size - 1 - request.num_tokens % size)

    def keep(self, request: Request, slot: int) -> None:
        """A step has written its state to the slot that `advance` returned."""
        if self.snapshots is not None:
            self.snapshots.keep(request, slot)

    def evict_out_of_window(self, request: Request) -> None:
        """Free the blocks that no query of a token that is not computed yet sees."""
        for group in self.groups:
            group.evict_out_of_window(request)

    def free(self, request: Request) -> None:
        """Free a request's blocks; it has computed nothing then."""
        for group in self.groups:
            group.free(request)
        request.reserved_tokens = 0
        self._begin_again(request)

    def admit(self, request: Request) -> bool:
        """Make room for all tokens of a waiting request, in known blocks where possible; or none, and note what it lacks."""
        if self._lacks_blocks(request):
            return False
        before = 0 if self.full is None else self.full.pool.num_free
        self.skip_known(request)
        if self.grow(request, request.num_tokens):
            request.lack, request.version = None, next(self._versions)
            return True
        if self.full is not None:
            needed = self.full.missing(request, request.num_tokens) + before - self.full.pool.num_free
            request.lack = AdmissionShortfall(needed, request.num_known, self.parent(request))
        self.free(request)
        return False

    def _lacks_blocks(self, request: Request) -> bool:
        """True if admission would fail again. An estimate: a wrong no costs a failed try, a wrong yes a longer wait."""
        if not all(group.fits(request, request.num_tokens) for _, group in self.others):
            return True
        lack = request.lack
        while lack is not None and (found := self._find(request, lack.num_known, lack.parent)) is not None:
            lack.num_free, lack.num_known, lack.parent = lack.num_free - 1, lack.num_known + 1, found[1]
        return lack is not None and self.full is not None and self.full.pool.num_free < lack.num_free

    # The prefix cache.

    def begin_step(self) -> None:
        """Blocks that become known from here on are filled by the step under way."""
        self.known_before, self.known_next, self._filled = self.next_numbers(), None, []
        if self.snapshots is not None:
            self.snapshots.begin_step()

    def end_step(self) -> None:
        """The step under way has ended: the next one may be under way already."""
        known = self.known_next
        self.begin_step()
        if known is not None:
            begun, ended = known
            self._filled = [range(end, now) for end, now in zip(ended, self.known_before, strict=True)]
            self.known_before = begun

    def next_numbers(self) -> list[int]:
        """For each group's pool the number of the next block that becomes known."""
        return [group.pool.next_number for group in self.groups]

    def forget_step(self) -> list[set[int]]:
        """Make all blocks that became known since `begin_step` unfindable; returns them by group."""
        if not self._filled:
            return [group.pool.forget_since(number) for group, number in zip(self.groups, self.known_before, strict=True)]
        since = zip(self.groups, self.known_before, self._filled, strict=True)
        return [group.pool.forget_since(number, filled) for group, number, filled in since]

    def begun_after(self, blocks: Sequence[set[int]], items: Sequence[ScheduledTokens], result: StepResult) -> set[str]:
        """The requests of a step that were put off, and those that begin after one of `blocks` which no other has filled."""
        found: set[str] = set()
        unfilled = [set(some) for some in blocks]
        for item in items:
            name, first = item.request.request_id, item.start // self.config.block_size
            tables = list(zip(unfilled, item.request.tables, strict=True))
            if name in result.put_off or not all(some.isdisjoint(table[:first]) for some, table in tables):
                found.add(name)
            elif name not in result.errors:
                for some, table in tables:
                    some.difference_update(table[first:])
        return found

    def forget(self, request: Request) -> None:
        """Make the blocks of a request unfindable."""
        for group, table in zip(self.groups, request.tables, strict=True):
            group.pool.forget(table)

    def restart(self, request: Request) -> None:
        """Have the request compute all of its tokens again, with the same room."""
        for group in self.groups:
            group.restart(request)
        request.version = next(self._versions)
        self._begin_again(request)

    def _begin_again(self, request: Request) -> None:
        request.num_computed, request.num_known, request.parent = 0, 0, None
        request.snapshot_at, request.known_until, request.num_replayed = 0, 0, 0

    def looks_up(self, request: Request) -> bool:
        """True if its prefix may come from the cache: a prompt's scores, and a first or mean hidden state, need it computed."""
        scored = request.prompt_logprobs is None or len(request.prompt_scores) == len(request.prompt) - 1
        return self.config.prefix_caching and scored and request.pooling in (None, Pooling.LAST)

    def parent(self, request: Request) -> Parent:
        """The predecessor of its next block that is not known."""
        return request.root if request.parent is None else request.parent

    def remember(self, request: Request, end: int) -> None:
        """Make the blocks that the tokens before `end` fill known."""
        size = self.config.block_size
        for at in range(request.num_known, end // size) if self.config.prefix_caching else ():
            block = 0 if self.full is None else request.tables[0][at]
            number = self.texts.remember(self.parent(request), request.tokens(at * size, size), block)
            for place, group in self._windows:
                if request.tables[place][at]:
                    group.pool.remember(number, (), request.tables[place][at])
            request.parent, request.num_known = number, at + 1

    def skip_known(self, request: Request) -> None:
        """Share the known blocks that follow its computed tokens."""
        start, inside = divmod(request.num_computed, self.config.block_size)
        request.awaits = False
        if inside or not self.looks_up(request):
            return
        known, usable = self.known_after(request, start)
        if self.snapshots is not None:
            self.snapshots.note(request, start, known, usable)
        if not usable:
            return
        found = known[:usable]
        if self.full is not None:
            self.full.share(request, start, [block for block, _ in found])
        for _, group in self.others:
            group.share(request, start, [_block_of(group, number) for _, number in found])
        request.version = next(self._versions)
        request.num_known, request.parent = start + len(found), found[-1][1]
        request.num_computed = request.snapshot_at = request.num_known * self.config.block_size

    def known_after(self, request: Request, start: int) -> tuple[list[tuple[int, int]], int]:
        """Block and number of the known texts from block `start` on, and how many of them can be used: as far as every group
        has the blocks that the next token sees. Lookups after the first stop at a gap, to cost little more than they find.
        """
        found: list[tuple[int, int]] = []
        usable, parent = 0, self.parent(request)
        in_row = [min(start, group.span) for _, group in self.others]
        while (known := self._text(request, start + len(found), parent)) is not None:
            found.append(known)
            parent, end = known[1], start + len(found)
            for at, (_, group) in enumerate(self.others):
                in_row[at] = in_row[at] + 1 if _block_of(group, known[1]) else 0
            if all(row >= min(end, group.span) for row, (_, group) in zip(in_row, self.others, strict=True)):
                usable = len(found)
            elif start and len(found) - usable > self._gap:
                break
        return found, usable

    def _text(self, request: Request, at: int, parent: Parent) -> tuple[int, int] | None:
        """The known text of block `at`: its block under full attention, and its number. None for the last token, which must
        be computed.
        """
        size = self.config.block_size
        if at >= (request.num_tokens - 1) // size:
            return None
        return self.texts.find(parent, request.tokens(at * size, size))

    def _find(self, request: Request, at: int, parent: Parent) -> tuple[int, int] | None:
        """See `_text`. None too where another group lacks the block."""
        known = self._text(request, at, parent) if self.looks_up(request) else None
        return known if known is not None and all(_block_of(group, known[1]) for _, group in self.others) else None

    # Checks.

    def check_all_free(self) -> None:
        """Assert that no block is held and none is lost. It only counts, since an engine that goes idle checks it each time."""
        for group in self.groups:
            group.pool.check_all_free()


def _block_of(group: KVCacheGroup, number: int) -> int:
    """The block that holds a text in a group that knows texts by their numbers; 0 where there is none."""
    known = group.pool.find(number, ())
    return 0 if known is None else known[0]
