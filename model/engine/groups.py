"""The block manager of one KV cache group, layers that keep the same kind of memory, and how many each request may hold.

- Full attention: a request holds blocks for all of its tokens.
- A window: it holds the blocks that a later query may see. A block that none sees is evicted, and its entry in the request's
  table becomes the reserved block 0, so token p is still at p // block_size. Blocks are taken as tokens are computed, out of
  the request's claim. The claims together are never more than the blocks, so a part of a prompt always finds one.
- A recurrent state: one block of its own, a slot of states, from the admission to the end. A snapshot is a slot that a step
  has written at the end of a block of tokens. A step reads a state from one slot and writes it to the same or to another one,
  so a snapshot is made, and used, without a copy.
"""

from array import array
from collections.abc import Sequence

from attend.model.engine.blocks import BlockPool, Parent
from attend.model.engine.config import EngineConfig, GroupSize
from attend.model.engine.request import Request


class KVCacheGroup:
    """The blocks of one group, and what each request may take of them. `at` is the place of its tables."""

    span = 1
    """Blocks before a token that it needs at most."""

    def __init__(self, at: int, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self._at = at

    @property
    def free_share(self) -> float:
        """Share of the group's blocks that are free, 0 to 1."""
        return 1.0

    def fits(self, request: Request, num_tokens: int) -> bool:
        """True if there is room for a request to grow to so many tokens."""
        raise NotImplementedError

    def grow(self, request: Request, num_tokens: int) -> None:
        """Claim that room for the request."""
        raise NotImplementedError

    def allocate(self, request: Request, num_tokens: int) -> None:
        """Take a block for each of so many tokens that their queries can see; the request has the room."""

    def evict_out_of_window(self, request: Request) -> None:
        """Evict the blocks that no later query sees."""

    def share(self, request: Request, start: int, blocks: Sequence[int]) -> None:
        """Hold the known `blocks` as its blocks `start`, `start + 1`, .., those that later queries see."""
        raise NotImplementedError

    def free(self, request: Request) -> None:
        """Free all that it holds, and its room."""
        raise NotImplementedError

    def restart(self, request: Request) -> None:
        """Have the request compute all of its tokens again, with the same room."""

    def _take(self, count: int) -> list[int]:
        blocks = self.pool.allocate(count)
        assert blocks is not None, "a request takes blocks that it has no room for"
        return blocks


class FullGroup(KVCacheGroup):
    """Blocks for all tokens, taken when a request grows."""

    span = 1 << 62

    def __init__(self, at: int, size: GroupSize, config: EngineConfig) -> None:
        super().__init__(at, size.num_blocks)
        self._block_size = config.block_size

    @property
    def free_share(self) -> float:
        return self.pool.num_free / self.pool.num_blocks

    def missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that it lacks to hold so many tokens."""
        return max(0, -(-num_tokens // self._block_size) - len(request.tables[self._at]))

    def fits(self, request: Request, num_tokens: int) -> bool:
        return self.missing(request, num_tokens) <= self.pool.num_free

    def grow(self, request: Request, num_tokens: int) -> None:
        request.tables[self._at].extend(self._take(self.missing(request, num_tokens)))

    def share(self, request: Request, start: int, blocks: Sequence[int]) -> None:
        table, some = request.tables[self._at], slice(start, start + len(blocks))
        self.pool.share(blocks)
        self.pool.free(table[some])
        table[some] = array("q", blocks)

    def free(self, request: Request) -> None:
        self.pool.free(request.tables[self._at])
        del request.tables[self._at][:]


class StateGroup(KVCacheGroup):
    """A slot of states for each request, and snapshots. A request's table has the slot that its last planned step reads, and
    the one that it writes where that is another: its state lies in the last of them.
    """

    def fits(self, request: Request, num_tokens: int) -> bool:
        return bool(request.slot) or self.pool.num_free > 0

    def grow(self, request: Request, num_tokens: int) -> None:
        if not request.slot:
            [request.slot] = self._take(1)
            request.tables[self._at] = request.tables[self._at] or array("q", [request.slot])

    def share(self, request: Request, start: int, blocks: Sequence[int]) -> None:
        self.pool.share(blocks[-1:])
        self._leave(request, request.tables[self._at])
        request.tables[self._at] = array("q", blocks[-1:])

    def advance(self, request: Request, *, keep: bool) -> int:
        """Plan a step: it reads the state where it lies, and writes it to the request's own slot. With `keep` it writes to a
        new slot, which is returned: a snapshot, once it is remembered. 0 where there is none.
        """
        table = request.tables[self._at]
        if table[-1] == request.slot and len(table) == 1 and not keep:
            return 0
        lies, new = table[-1], self.pool.allocate(1) if keep else None
        writes = request.slot if new is None else new[0]
        self._leave(request, table[:-1])
        request.tables[self._at] = array("q", [lies] if lies == writes else [lies, writes])
        return 0 if new is None else writes

    def remember(self, request: Request, slot: int, number: int) -> bool:
        """Make a slot that a step has written known as the state after a text. Not if another is, or if the request lost it."""
        if slot not in request.tables[self._at] or self.has(number):
            return False
        self.pool.remember(number, (), slot)
        return True

    def has(self, number: int) -> bool:
        """True if there is a snapshot of a text."""
        return self.pool.find(number, ()) is not None

    def discard(self, number: Parent) -> None:
        """Evict the snapshot of a text."""
        known = self.pool.find(number, ())
        if known is not None:
            self.pool.share(known[:1])
            self.pool.forget(known[:1])
            self.pool.free(known[:1])

    def free(self, request: Request) -> None:
        self._leave(request, request.tables[self._at])
        if request.slot:
            self.pool.free([request.slot])
        request.tables[self._at], request.slot = array("q"), 0

    def restart(self, request: Request) -> None:
        self._leave(request, request.tables[self._at])
        request.tables[self._at] = array("q", [request.slot])

    def _leave(self, request: Request, slots: Sequence[int]) -> None:
        """Free slots that are not the request's own."""
        self.pool.free(slot for slot in slots if slot != request.slot)


class WindowGroup(KVCacheGroup):
    """Blocks that later queries may see, taken as tokens are computed, out of a claim made before."""

    def __init__(self, at: int, size: GroupSize, config: EngineConfig) -> None:
        assert size.window is not None
        super().__init__(at, size.num_blocks)
        self.span = -(-(size.window - 1) // config.block_size)
        self._window, self._block_size = size.window, config.block_size
        self._most = config.window_blocks(size.window)
        self._claimable = size.num_blocks - config.step_blocks
        self._claimed = 0

    @property
    def free_share(self) -> float:
        return 1 - self._claimed / self._claimable

    def _claim(self, num_tokens: int) -> int:
        return min(-(-num_tokens // self._block_size), self._most)

    def fits(self, request: Request, num_tokens: int) -> bool:
        return self._claimed + self._claim(num_tokens) - self._claim(request.reserved_tokens) <= self._claimable

    def grow(self, request: Request, num_tokens: int) -> None:
        self._claimed += max(0, self._claim(num_tokens) - self._claim(request.reserved_tokens))

    def allocate(self, request: Request, num_tokens: int) -> None:
        table = request.tables[self._at]
        missing = -(-num_tokens // self._block_size) - len(table)
        if missing > 0:
            table.extend(self._take(missing))

    def evict_out_of_window(self, request: Request) -> None:
        first_seen = (request.num_computed + 1 - self._window) // self._block_size
        if first_seen > 0:
            self._free(request.tables[self._at], first_seen)

    def _free(self, table: "array[int]", end: int) -> None:
        """Free the blocks before `end`, to be reused from the first on: a text that continues this one needs the last ones."""
        gone, at = [], end - 1
        while at >= 0 and table[at]:
            gone.append(table[at])
            table[at] = 0
            at -= 1
        self.pool.free(gone)

    def share(self, request: Request, start: int, blocks: Sequence[int]) -> None:
        table = request.tables[self._at]
        assert len(table) == start, "a part of a prompt ends within a block, or its blocks were taken too early"
        end = start + len(blocks)
        seen = min(end - start, self.span)
        self._free(table, max(0, min(start, end - self.span)))
        self.pool.share(blocks[len(blocks) - seen :])
        table.extend([0] * (len(blocks) - seen))
        table.extend(blocks[len(blocks) - seen :])

    def free(self, request: Request) -> None:
        self._claimed -= self._claim(request.reserved_tokens)
        self.restart(request)

    def restart(self, request: Request) -> None:
        """Free its blocks; the room stays its own."""
        table = request.tables[self._at]
        self._free(table, len(table))
        del table[:]


def group_of(at: int, size: GroupSize, config: EngineConfig) -> KVCacheGroup:
    """The group at a place of `config.groups`."""
    if size.has_state:
        return StateGroup(at, size.num_blocks)
    return FullGroup(at, size, config) if size.window is None else WindowGroup(at, size, config)
