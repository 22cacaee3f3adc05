"""The laws of the scheduler: a scheduler that checks its own plans, and what it holds after each step."""

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

from attend.model.engine.budget import LASTING_FACTOR, LONGEST_FACTOR, SHORT_FACTOR, SHORT_SECONDS
from attend.model.engine.config import EngineConfig
from attend.model.engine.plan import Plan, ScheduledTokens, StepResult
from attend.model.engine.request import Output, Request
from attend.model.engine.scheduler import Scheduler
from tests.model.engine.integrity import check_integrity
from tests.simulation.model import Machine

SLACK, STEPS = 4.0, 24
"""By which factor a predicted step may differ from the true one, after so many: the cost is learned from noisy steps."""


class LawfulScheduler(Scheduler):
    """Each method of the scheduler, with its laws. `lawful` calls a check, and notes where it fails."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float], machine: Machine, lawful: Callable[..., Any]) -> None:
        self.asked: list[Request] = []
        self.ranks: dict[Request, float] = {}
        """Seconds of arrival; a level of priority is worth ten."""
        self.found: dict[Request, int] = {}
        """Tokens that a request had found in the prefix cache before it was first preempted."""
        self.turns: list[tuple[bool, bool]] = []
        """Of each step with parts of prompts: whether the oldest prompt went first, and whether the shortest did."""
        self.left_out: list[Request] = []
        self.machine, self.lawful = machine, lawful
        self.num_early_parts = self.num_measured = 0
        super().__init__(config, clock)
        self.most = config.max_batch_tokens
        """Tokens that a step may have."""

    def add(self, request: Request) -> None:
        self.asked.append(request)
        self.ranks[request] = self._clock() - 10 * request.priority
        super().add(request)

    def shrink(self) -> None:
        self.most = max(self.least_budget, self.most // 2)
        super().shrink()

    def schedule(self) -> Plan:
        before = {
            r: (r.num_tokens - r.num_computed - r.num_replayed, r.num_preemptions) for r in self.live if r.reserved_tokens
        }
        begun, ran = self.begun(), self.ranked(running=True)
        waited, left_out = set(self._waiting), {request: request.num_left_out for request in self.live}
        plan = super().schedule()
        self.lawful(self.check_scheduled, plan, before, begun, ran, waited, left_out)
        return plan

    def schedule_async(self, plan: Plan) -> Plan | None:
        drawing = {item.request for item in plan.scheduled_tokens if item.draws}
        ends = {item.request: item.start + item.count for item in plan.scheduled_tokens}
        lacked = {r: r.num_tokens + (r in drawing) - ends.get(r, r.num_computed) for r in self.live}
        begun, waited, preempted = self.begun(), set(self._waiting), self.num_preemptions
        following = super().schedule_async(plan)
        self.lawful(self.check_followed, following, drawing, lacked, begun, waited, self.num_preemptions - preempted)
        return following

    def commit(self, plan: Plan, result: StepResult, dropped_plan: Plan | None = None) -> list[Output]:
        open_ids = set(self._by_id)
        outputs = super().commit(plan, result, dropped_plan)
        self.lawful(self.check_outputs, outputs, open_ids)
        if plan.scheduled_tokens and plan.is_plain and not (result.errors or result.put_off):
            self.num_measured += 1
            if self.num_measured > STEPS:
                self.lawful(self.check_cost, plan)
        return outputs

    @property
    def live(self) -> list[Request]:
        return list(self._by_id.values())

    def begun(self) -> set[Request]:
        return {request for request in self.live if request.scheduled_at is not None}

    def ranked(self, *, running: bool) -> list[Request]:
        """The requests that hold room, or those that wait: better ranks first."""
        return sorted(self._running if running else self._waiting, key=self.ranks.__getitem__)

    @property
    def is_shared(self) -> bool:
        return any(request.owner is not None for request in self.asked)

    def check_outputs(self, outputs: list[Output], open_ids: set[str]) -> None:
        """An output is one of a request in flight, and nothing follows the last."""
        for output in outputs:
            assert output.request_id in open_ids, f"an output of {output.request_id} after its end"
            if output.finish_reason is not None:
                open_ids.remove(output.request_id)

    def check_queue(self, waited: set[Request]) -> None:
        left = waited.intersection(self._waiting)
        passed = [r for r in waited - left for other in left if r.owner == other.owner and self.ranks[other] < self.ranks[r]]
        assert not passed, "somebody is passed over in the queue"

    def check_scheduled(
        self,
        plan: Plan,
        before: dict[Request, tuple[int, int]],
        begun: set[Request],
        ran: list[Request],
        waited: set[Request],
        left_out: dict[Request, int],
    ) -> None:
        """Within the limits, with blocks for all; the youngest gives way, and somebody moves."""
        self.left_out = [each for each in self.live if each.num_left_out > left_out[each]]
        self.check_queue(waited)
        gave = [request.num_preemptions > before[request][1] for request in ran]
        for owner in {request.owner for request in ran}:
            own = [each for each, request in zip(gave, ran, strict=True) if request.owner == owner]
            assert own == sorted(own), "an older request gives its room"
        requests = self.check_items(plan)
        assert requests or not self.live, "nobody moves"
        for item in plan.scheduled_tokens:
            assert item.count >= 1 and item.start == item.request.num_computed, "tokens are skipped"
            assert item.start + item.count <= item.request.num_tokens, "tokens that are not there"
            end = item.start + item.num_rows
            assert end < item.request.max_total_tokens or not item.draft, "a guess at a token that is never drawn"
            assert not item.draft or (item.completes and plan.num_streams == len(requests)), "a guess beside a prompt"
        assert plan.num_drafted <= self.config.draft_tokens, "more guesses than a step may have"
        undisturbed = {r: lacked for r, (lacked, count) in before.items() if r.num_preemptions == count}
        self.check_shares(plan, undisturbed, begun)

    def check_items(self, plan: Plan) -> list[Request]:
        """A step within its budget, and each of its requests once, with room for all its tokens."""
        requests = [item.request for item in plan.scheduled_tokens]
        assert sum(item.num_rows for item in plan.scheduled_tokens) == plan.num_tokens <= self.most, "over budget"
        assert self.num_running <= self.config.max_batch_requests, "more requests than a batch holds"
        assert len(requests) == len(set(requests)), "a request twice in one step"
        for item in plan.scheduled_tokens:
            request, end, size = item.request, item.start + item.num_rows, self.config.block_size
            assert request.reserved_tokens >= end, f"{request.request_id} lacks room"
            for group, table in zip(self.config.groups, request.tables, strict=True):
                first = 0 if group.window is None else max(0, item.start + 1 - group.window)
                held = group.has_state or (all(table[first // size : -(-end // size)]) and len(table) * size >= end)
                assert held, f"{request.request_id} lacks blocks"
        return requests

    def check_followed(
        self,
        following: Plan | None,
        drawing: set[Request],
        lacked: dict[Request, int],
        begun: set[Request],
        waited: set[Request],
        num_preempted: int,
    ) -> None:
        """A step that is begun early: nobody is passed over, and nobody gives way."""
        assert not num_preempted, "somebody gives way for a step that is begun early"
        self.check_queue(waited)
        if following is None:
            return
        self.num_early_parts += following.has_parts
        requests = self.check_items(following)
        running = [r for r in self.ranked(running=True) if lacked[r]]  # the others draw none after this step
        running = [r for r in running if r not in drawing or len(r.output) + 1 < r.max_tokens]
        pending = [item.request for item in following.scheduled_tokens if item.input_pending]
        assert pending == [r for r in running if r in drawing], "a stream waits, ends late, or not by age"
        assert requests, "a step for nothing"
        for item in following.scheduled_tokens:
            if item.input_pending:
                assert item.start == item.request.num_tokens and item.count == 1
            else:
                assert item.count >= 1 and item.start == item.request.num_computed, "tokens are skipped"
            assert not item.draft, "a guess beside a token that is not known"
        if self._foresees_prompts:
            self.check_shares(following, lacked, begun, running)
        else:
            assert requests == pending == running, "a token that is not under way"
        left, size = [r for r in self._waiting if r in waited], self.config.block_size
        fits = [r for r in left[:1] if r.lack is None]
        fits = [r for r in fits if -(-r.num_tokens // size) <= self.tables.num_free]
        spent = sum(item.count for item in following.scheduled_tokens[: following.num_streams])
        full = self.num_running >= self.config.max_batch_requests or spent == self.most
        assert full or not fits or self.is_shared, "somebody waits who could run"

    def without_left_out(self, streams: list[Request], ran: list[Request]) -> list[Request]:
        """Those left out are of the owner with most streams, who keeps as many as the one after him, and no weight less."""
        counts = Counter(request.owner for request in streams if request not in self.left_out)
        weights = {request.owner: request.weight for request in streams}
        for request in self.left_out:
            assert request not in ran, "it is left out and computed"
            own = counts[request.owner] / request.weight
            assert len(counts) > 1, "nobody else has streams"
            assert all(own >= count / weights[owner] for owner, count in counts.items()), "he has no more than others"
        assert len({request.owner for request in self.left_out}) <= 1, "two owners give way"
        return [request for request in streams if request not in self.left_out]

    def check_shares(
        self, plan: Plan, before: dict[Request, int], begun: set[Request], running: list[Request] | None = None
    ) -> None:
        """Streams before prompts, which take turns, in parts that end where they may, in no more time than they may.

        `before` has what the requests that go on running lacked before the step, `begun` who was ever scheduled before.
        """
        planned = [item.request for item in plan.scheduled_tokens]
        running = self.ranked(running=True) if running is None else running
        spent = sum(item.count for item in plan.scheduled_tokens[: plan.num_streams])
        ran = [r for r in planned[: plan.num_streams] if not self.is_shared or r in before]  # others were let in
        streams = self.without_left_out([r for r in running if before.get(r) == 1 and r in begun], ran)
        assert ran == streams[: len(ran)], "a stream waits, or not by age"
        if len(ran) < len(streams):
            assert spent + 1 + streams[len(ran)].num_replayed > self.most, "a stream waits"
        prompts = [r for r in running if r not in streams and r not in self.left_out]
        parts = plan.scheduled_tokens[plan.num_streams :]
        prompts = [r for r in prompts if r in planned or not self.awaits(r, plan)]
        if not parts:
            wait = [r for r in prompts if r not in planned]
            assert not wait or spent == self.most or len(ran) < len(streams), "prompts wait for nothing"
            return
        if self.is_shared:
            return
        first, size = parts[0], self.config.chunk_size
        others = [before.get(r, r.num_tokens) for r in prompts if r not in planned]
        shortest = all(first.request.num_tokens - first.start <= lacking for lacking in others)
        self.turns.append((first.request is prompts[0], shortest))
        assert all(map(any, zip(*self.turns[-2:], strict=True))) or len(self.turns) < 2, "a prompt is passed over twice"
        whole = [item.completes or (item.start + item.count) % size == 0 or self.keeps_state(item) for item in parts]
        assert all(whole[1:]) and (whole[0] or (len(parts) == 1 and first.count < size)), "a part ends within a chunk"
        left = self.most
        for item in () if plan.num_streams else parts:
            ends = item.completes or self.keeps_state(item)
            assert ends or item.request.num_tokens - item.start > left, "what fits is cut"
            left -= item.count
        self.check_time(plan, len(prompts), all(r in planned for r in prompts))

    def awaits(self, request: Request, plan: Plan) -> bool:
        """True if another request's part ends with a snapshot of its text."""
        kept = [item.request.tokens(0, item.start + item.count) for item in plan.scheduled_tokens if item.snapshot]
        return any(len(text) > request.num_computed and request.tokens(0, len(text)) == text for text in kept)

    def keeps_state(self, item: ScheduledTokens) -> bool:
        """True if a part of a prompt may end here, so that a snapshot is kept of its state."""
        states = self.tables.has_states and self.config.prefix_caching
        return states and (item.start + item.count) % self.config.block_size == 0

    def check_time(self, plan: Plan, prompts: int, served: bool) -> None:
        """Beside streams a step takes what it may, by the cost that was learned; without streams nothing of the budget is left.
        `served`: each prompt has a part in the step.
        """
        tokens, size, cost = plan.num_prompt_tokens, self.config.chunk_size, self.cost
        left = self.most - sum(item.count for item in plan.scheduled_tokens[: plan.num_streams])
        served = served and all(item.completes or self.keeps_state(item) for item in plan.scheduled_tokens)
        if not plan.num_streams:
            assert left - tokens < size or served, "a budget that nobody else needs is not spent"
        elif cost.token_seconds:
            least = max(size, self.config.block_size, self.config.max_batch_tokens // 32)
            alone, later = (
                cost.fixed_seconds + cost.stream_seconds * n for n in (plan.num_streams, plan.num_streams + prompts)
            )
            short = max(self.config.step_goal, min(SHORT_FACTOR * alone, SHORT_SECONDS))
            longest = max(short, LONGEST_FACTOR * cost.fixed_seconds, min(LONGEST_FACTOR * alone, LASTING_FACTOR * later))
            room, some = ((seconds - alone) / cost.token_seconds for seconds in (longest, short))
            assert tokens <= max(least, room) + size, "streams wait too long for a step"
            assert tokens > min(left, max(least, some / 2 - size)) - size or served, "prompts get less than their share"

    def check_cost(self, plan: Plan) -> None:
        """What a step costs is learned, and one slow step is not believed."""
        parts = plan.scheduled_tokens[plan.num_streams :]
        pairs = sum(self.cost.pairs(item.start, item.count) for item in parts)
        predicted = sum(self.cost._parts(plan.num_streams, plan.num_prompt_tokens, pairs))
        truth = self.machine.alone(plan.num_streams) + self.machine.per_token * plan.num_prompt_tokens
        assert truth / SLACK < predicted < SLACK * truth, f"a step of {truth} s is thought to take {predicted} s"

    def check_state(self) -> None:
        """Each live request in one place, the older ones running, and every block accounted for.

        Whether a block that two requests hold is right for both shows in their tokens: the runner reads them back.
        """
        running, waiting = list(self._running), list(self._waiting)
        assert running == self.ranked(running=True), "running requests are lost, doubled, or out of order"
        assert waiting == self.ranked(running=False), "waiting requests are lost, doubled, or out of order"
        assert {r for r in self.live if r.reserved_tokens} == {*running} and len(running) + len(waiting) == len(self.live)
        for at, group in enumerate(self.config.groups):
            own = [[request.slot] if group.has_state else [] for request in running]
            tables = [[block for block in request.tables[at] if block] for request in running]
            held = {block for table in (*tables, *own) for block in table}
            assert sum(map(len, tables)) == len({*chain(*tables)}) or self.config.prefix_caching, "shared blocks"
            assert len(held) + self.tables.groups[at].pool.num_free == group.num_blocks, "blocks are lost"
            if group.window is not None:
                most = self.config.window_blocks(group.window)
                assert all(len(table) <= most for table in tables), "blocks out of sight are kept"
        check_integrity(self)
        hits = sum(request.num_cached for request in self.asked)
        assert hits == self.num_prefix_hits <= self.num_prefix_queries, "the hits are not those of the requests"
        for request in self.live:
            assert request.num_cached < request.num_tokens, f"{request.request_id} found all of itself"
            if request.num_preemptions and request.scheduled_at is not None:
                known = self.found.setdefault(request, request.num_cached)
                assert request.num_cached == known, f"{request.request_id} counts a hit twice"
