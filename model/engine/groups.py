"""The blocks of one KV cache group, layers that keep the same kind of memory, and how many each request may hold.

- Full attention: a request holds blocks for all of its tokens.
- A window of W tokens: it holds the blocks that a later query may see. A block that no later query sees is evicted, and its
  entry in the request's table becomes the reserved block 0, so token p is still at p // block_size. Blocks are taken part by
  part, as tokens are computed, out of the request's claim: blocks for its tokens, at most those that a window spans. The
  claims together are never more than the blocks, so a part of a prompt always finds one, also where blocks are shared.
- A recurrent state: one block from the admission to the end, which is never shared.
"""

from array import array
from collections.abc import Sequence
from typing import Protocol

from attend.model.engine.blocks import BlockPool
from attend.model.engine.config import EngineConfig, GroupSize
from attend.model.engine.request import Request


class KVCacheGroup(Protocol):
    """The blocks of one group, and what each request may take of them. `at` is the place of its tables."""

    pool: BlockPool
    span: int
    """Blocks before a token that it needs at most."""

    @property
    def free_share(self) -> float:
        """From 1, all is free, to 0."""
        ...

    def fits(self, request: Request, num_tokens: int) -> bool:
        """Whether there is room for a request to grow to so many tokens."""
        ...

    def grow(self, request: Request, num_tokens: int) -> None:
        """Claim that room for the request."""
        ...

    def reach(self, request: Request, num_tokens: int) -> None:
        """Take a block for each of so many tokens that their queries can see; the request has the room."""
        ...

    def let_go(self, request: Request) -> None:
        """Evict the blocks that no later query sees."""
        ...

    def share(self, request: Request, start: int, blocks: Sequence[int]) -> None:
        """Hold the known `blocks` as its blocks `start`, `start + 1`, .., those that later queries see."""
        ...

    def give_back(self, request: Request) -> None:
        """Free all that it holds, and its room."""
        ...

    def restart(self, request: Request) -> None:
        """Have the request compute all of its tokens again, with the same room."""
        ...

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Assert that every block is free or held by these requests, and that no request holds more than it may."""
        ...


class FullGroup:
    """Blocks for all tokens, taken when a request grows."""

    span = 1 << 62

    def __init__(self, at: int, size: GroupSize, config: EngineConfig) -> None:
        self.pool = BlockPool(size.num_blocks)
        self._at, self._block_size = at, config.block_size

    @property
    def free_share(self) -> float:
        return self.pool.num_free / self.pool.num_blocks

    def missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that it lacks to hold so many tokens."""
        return max(0, -(-num_tokens // self._block_size) - len(request.tables[self._at]))

    def fits(self, request: Request, num_tokens: int) -> bool:
        return self.missing(request, num_tokens) <= self.pool.num_free

    def grow(self, request: Request, num_tokens: int) -> None:
        request.tables[self._at].extend(_taken(self.pool, self.missing(request, num_tokens)))

    def reach(self, request: Request, num_tokens: int) -> None:
        pass

    def let_go(self, request: Request) -> None:
        pass

    def share(self, request: Request, start: int, blocks: Sequence[int]) -> None:
        table, some = request.tables[self._at], slice(start, start + len(blocks))
        self.pool.share(blocks)
        self.pool.free(table[some])
        table[some] = array("q", blocks)

    def give_back(self, request: Request) -> None:
        self.pool.free(request.tables[self._at])
        del request.tables[self._at][:]

    def restart(self, request: Request) -> None:
        pass

    def check_integrity(self, requests: Sequence[Request]) -> None:
        for request in requests:
            held = len(request.tables[self._at])
            assert held * self._block_size >= request.room, f"{request.request_id} lacks blocks"
        self.pool.check_integrity(block for request in requests for block in request.tables[self._at])


class StateGroup(FullGroup):
    """One block for each request."""

    span = 0

    @property
    def free_share(self) -> float:
        return 1.0  # there is one for each request of a batch

    def missing(self, request: Request, num_tokens: int) -> int:
        return 1 - len(request.tables[self._at])

    def check_integrity(self, requests: Sequence[Request]) -> None:
        assert all(len(request.tables[self._at]) == 1 for request in requests), "a request without a state, or with two"
        self.pool.check_integrity(block for request in requests for block in request.tables[self._at])


class WindowGroup:
    """Blocks that later queries may see, taken as tokens are computed, out of a claim made before."""

    def __init__(self, at: int, size: GroupSize, config: EngineConfig) -> None:
        assert size.window is not None
        self.pool = BlockPool(size.num_blocks)
        self.span = -(-(size.window - 1) // config.block_size)
        self._at, self._window, self._block_size = at, size.window, config.block_size
        self._most = config.window_blocks(size.window)
        self._claimable = size.num_blocks - config.step_blocks
        self._claimed = 0

    @property
    def free_share(self) -> float:
        return 1 - self._claimed / self._claimable

    def _claim(self, num_tokens: int) -> int:
        return min(-(-num_tokens // self._block_size), self._most)

    def fits(self, request: Request, num_tokens: int) -> bool:
        return self._claimed + self._claim(num_tokens) - self._claim(request.room) <= self._claimable

    def grow(self, request: Request, num_tokens: int) -> None:
        self._claimed += max(0, self._claim(num_tokens) - self._claim(request.room))

    def reach(self, request: Request, num_tokens: int) -> None:
        table = request.tables[self._at]
        missing = -(-num_tokens // self._block_size) - len(table)
        if missing > 0:
            table.extend(_taken(self.pool, missing))

    def let_go(self, request: Request) -> None:
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

    def give_back(self, request: Request) -> None:
        self._claimed -= self._claim(request.room)
        self.restart(request)

    def restart(self, request: Request) -> None:
        """Free its blocks; the room stays its own."""
        table = request.tables[self._at]
        self._free(table, len(table))
        del table[:]

    def check_integrity(self, requests: Sequence[Request]) -> None:
        assert self._claimed == sum(self._claim(request.room) for request in requests) <= self._claimable, "lost claims"
        for request in requests:
            held = sum(map(bool, request.tables[self._at]))
            assert held <= self._claim(request.room), f"{request.request_id} holds {held} blocks"
        self.pool.check_integrity(block for request in requests for block in request.tables[self._at] if block)


def _taken(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None, "a request takes blocks that it has no room for"
    return blocks


def group_of(at: int, size: GroupSize, config: EngineConfig) -> KVCacheGroup:
    """The group at a place of `config.groups`."""
    kind = StateGroup if size.has_state else FullGroup if size.window is None else WindowGroup
    return kind(at, size, config)
