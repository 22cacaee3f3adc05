"""Chunked prefill: which parts of which prompts a step computes, beside its streams or without any. Plain Python."""

from collections.abc import Callable

from attend.model.engine.budget import StepCost
from attend.model.engine.config import EngineConfig
from attend.model.engine.fair_share import FairShare
from attend.model.engine.plan import ScheduledTokens
from attend.model.engine.request import Request
from attend.model.engine.tables import BlockTables


class PromptChunks:
    """What a scheduler needs to share a step among prompts."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.tables = BlockTables(config)
        self.cost = StepCost(max(config.chunk_size, config.block_size), config.reach)
        self.budget = config.max_batch_tokens
        """Tokens that a step computes at most: fewer than was set after a step for which the memory did not suffice."""
        self.num_prefix_queries = 0
        """Tokens of admitted requests that were looked up in the prefix cache."""
        self.num_prefix_hits = 0
        """Tokens of `num_prefix_queries` that were found."""
        self._clock = clock
        self._shares = FairShare()
        self._running: list[Request] = []
        """Running requests in the order of their virtual arrivals; of two with the same the older is first."""

    def _share_out(self, prompts: list[Request], room: float, left: int) -> list[ScheduledTokens]:
        """The step's parts of prompts, which come with the oldest first; in the next step those that lack least go first."""
        prompts, alone = self._shares.in_turns(prompts, self._running), left == self.budget
        plan, least = (
            list[ScheduledTokens](),
            max(self.config.chunk_size, self.config.block_size, self.config.max_batch_tokens // 32),
        )
        ends = {each for each in prompts if alone and self.cost.worth(each.num_computed, each.num_tokens) <= min(room, left)}
        for request in prompts:
            delays = not alone or request.is_background or (ends and request not in ends)  # others' tokens, if its part is long
            some = min(room, self.cost.brief) if alone and delays else room
            if not (share := self._share(request, some, least, left, delays)):
                break
            if self._part(request, share, not plan):
                self._begin(request)
                share = self._share(request, some, least, left, delays)
            count = self._part(request, share, not plan)  # again: it may lack fewer tokens now, and each may cost more
            if count and not request.awaits:
                plan.append(self._plan_chunk(request, count))
                room -= count * self.cost.weight(request.num_computed)
                least, left = max(0, least - count), left - count
        self._shares.turn(prompts[0], plan)
        return plan

    def _share(self, request: Request, room: float, least: int, left: int, delays: object) -> int:
        """Tokens of a prompt's next part: at most `left`, and as `StepCost.share` says."""
        share = self.cost.share(request.num_computed, room, least, self.config.chunk_size, brief=bool(delays))
        return int(min(left, share))

    def _part(self, request: Request, share: int, first: bool) -> int:
        """The rest of a prompt, or what ends at a multiple of the chunk size; only the first of a step may end elsewhere."""
        missing = self.tables.part_end(request) - request.num_computed
        if missing <= share:
            return missing
        size = self.config.chunk_size
        whole = (request.num_computed + share) // size * size - request.num_computed
        if whole > 0:
            return whole
        return share if first else 0

    def _begin(self, request: Request) -> None:
        """Before a part of a prompt: skip the blocks that became known since its admission, or since its last part."""
        before, counts, first = request.num_computed, request.num_preemptions == 0, request.scheduled_at is None
        if first:
            request.scheduled_at = self._clock()
            before, counts = 0, True
            self.num_prefix_queries += request.num_tokens if self.tables.looks_up(request) else 0
        self.tables.skip_known(request)
        if counts:
            request.num_cached += request.num_computed - before
            self.num_prefix_hits += request.num_computed - before

    def _plan_chunk(self, request: Request, count: int) -> ScheduledTokens:
        """The next `count` tokens. The blocks that they fill are known from now on: a step writes before it reads, so
        even a request of the same step may share them.
        """
        start = request.num_computed
        if self.tables.has_windows:
            self.tables.allocate(request, start + count)
        self.tables.remember(request, start + count)
        return ScheduledTokens(request, start, count, snapshot=self.tables.advance(request, start + count))
