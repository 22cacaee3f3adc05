"""A seeded simulation of the scheduler under a fake model: tiny pools, aborts and faults; every law after every step."""

import random
from collections import Counter
from dataclasses import replace
from itertools import chain

from attend.model.engine.budget import LASTING_FACTOR, LONGEST_FACTOR, SHORT_FACTOR, SHORT_SECONDS
from attend.model.engine.config import EngineConfig
from attend.model.engine.failed_steps import bisect_step, failed_step
from attend.model.engine.plan import Plan, ScheduledTokens, StepResult
from attend.model.engine.request import FinishReason, Output, Request
from attend.model.engine.scheduler import Scheduler
from attend.model.errors import OutOfMemory
from tests.model.engine.machines import FAKE_VOCAB, Clock, FakeRunner, ask, fake_answer, given
from tests.model.engine.windows import GroupsRunner, with_groups

STEPS = 200
SLACK = 2.5
"""By which factor a step may be longer or shorter than the true cost allows: it is learned from a few noisy steps."""


class Machine:
    """What a step costs in truth: a cost for itself, for a stream and for a token of a prompt; and some steps are very slow."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = random.Random(dice.random())
        self.per_token = 0.001
        self.per_stream = self.per_token * self.dice.choice([0.5, 1, 4])
        self.fixed = self.per_token * self.dice.choice([0.5, 2, 6])
        self.since = 0
        """Steps since a slow one."""

    def alone(self, streams: int) -> float:
        """Seconds of a step without prompts."""
        return self.fixed + self.per_stream * streams

    def seconds(self, plan: Plan) -> float:
        """What a step takes: about what it costs, or 50 times that. Slow steps are accidents: never two of five."""
        if not plan.scheduled_tokens:
            return 0.0
        clean = self.alone(plan.num_streams) + self.per_token * (plan.num_prompt_tokens + plan.num_drafted)
        self.since = 0 if self.since > 3 and self.dice.random() < 0.15 else self.since + 1
        return clean * self.dice.uniform(0.95, 1.1) * (1 if self.since else 50)


class Simulation:
    """One engine's life under one seed. `trace` is what its callers saw, in order."""

    def __init__(
        self, seed: int, scheduler: type[Scheduler] = Scheduler, groups: str = "full", shaky: float = 0.02, owners: int = 1
    ) -> None:
        """`groups` of layers: "full" attention alone, "windows" too, or also "states". Of the steps `shaky` raise."""
        self.shaky = shaky
        self.is_shared = owners > 1
        self.left_out: list[Request] = []
        self.weights = {f"owner{at}" if self.is_shared else None: (1.0, 1.0, 3.0)[at % 3] for at in range(owners)}
        self.dice = random.Random(seed)
        block_size, num_blocks = self.dice.randint(1, 4), self.dice.randint(3, 10)
        self.config = EngineConfig(
            max_model_len=self.dice.randint(max(3, block_size * num_blocks // 2), block_size * num_blocks),
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_requests=self.dice.randint(1, 8),
            max_batch_tokens=self.dice.choice([1, 3, 8, 40, 40]),
            chunk_size=self.dice.choice([1, 2, 3, 4]),
            step_goal=self.dice.choice([0.0, 0.0, 0.01]),
            prefix_caching=self.dice.random() < 0.7,
            draft_tokens=self.dice.choice([0, 3, 15]),
            stream_turns=not self.is_shared or seed % 2 == 0,
        )
        if groups != "full":
            self.config = with_groups(self.config, random.Random(seed), states=groups == "states")
        self.stems = [self.dice.choices(range(FAKE_VOCAB), k=self.config.max_model_len) for _ in range(2)]
        self.clock = Clock()
        self.scheduler = scheduler(self.config, self.clock)
        if (snapshots := self.scheduler.tables.snapshots) is not None:
            snapshots.least, snapshots.spacing = block_size * (1 + seed % 3), block_size * (1 + seed % 4)
        self.runner = FakeRunner(block_size) if groups == "full" else GroupsRunner(self.config)
        self.async_scheduling = self.dice.random() < 0.5
        self.next: tuple[Plan, StepResult | Exception] | None = None
        """The step that was begun early."""
        self.poison: set[str] = set()
        """Requests with which every step raises."""
        self.most_tokens = self.dice.choice([1000, 1000, 6])
        """Tokens of a step for which the memory suffices."""
        self.budget = self.config.max_batch_tokens
        self.least = min(self.budget, max(self.config.chunk_size, self.config.max_batch_requests))
        """Tokens that a step may have, and those that it may have whatever the memory."""
        self.num_early = self.num_early_parts = 0
        self.machine = Machine(self.dice)
        self.live: dict[str, Request] = {}  # in order of arrival
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.due: set[str] = set()
        """Requests that may end with an error."""
        self.trace: list[Output] = []
        self.asked: list[Request] = []
        self.ranks: dict[Request, float] = {}
        """Seconds of arrival; a level of priority is worth ten."""
        self.alone: dict[str, tuple[list[int], FinishReason]] = {}
        """What each request must come to."""
        self.found: dict[str, int] = {}
        """Tokens that a request had found in the prefix cache before it was first preempted."""
        self.turns: list[tuple[bool, bool]] = []
        """Of each step with parts of prompts: whether the oldest prompt went first, and whether the shortest did."""

    def run(self, steps: int = STEPS) -> "Simulation":
        """Submit, abort and step at random, then let everything end."""
        for _ in range(steps):
            self.clock.now += self.dice.random() if self.next is None else 0.0
            if self.dice.random() < 0.3:
                self.submit()
            if self.dice.random() < 0.04:
                self.abort()
            self.step(faults=True)
        # A step draws a token, or the oldest request is a prompt and advances in this step or the next.
        # Of more than one owner it advances when it is this owner's turn.
        bound = sum(2 * len(request.prompt) + 3 * request.max_tokens for request in self.live.values()) * len(self.weights)
        while self.live:
            assert bound > 0, f"{list(self.live)} starve"
            bound -= 1
            self.step(faults=False)
        assert self.scheduler.tables.num_free == self.config.num_blocks, "blocks are lost"
        assert not self.scheduler.schedule().scheduled_tokens, "work without requests"
        return self

    def submit(self) -> None:
        room = self.dice.randint(self.config.max_model_len // 2 + 1, self.config.max_model_len)
        length = self.dice.randint(1, self.dice.choice([1, 1, room - 1]))
        stops = frozenset(self.dice.sample(range(FAKE_VOCAB), self.dice.choice([0, 0, 1, 4])))
        fewest = self.dice.randint(0, room - length) if self.dice.random() < 0.3 else 0
        shared = self.dice.choice([0, length, self.dice.randint(0, length)])
        owner = self.dice.choice(list(self.weights)) if self.is_shared else None
        request = ask(
            f"r{len(self.tokens)}",
            self.dice.choice(self.stems)[:shared] + self.dice.choices(range(FAKE_VOCAB), k=length - shared),
            room - length,
            seed=self.dice.randint(-9, 9),
            answer_index=self.dice.randint(0, 2),
            stop_token_ids=stops,
            min_tokens=fewest,
            cache_salt=self.dice.choice(["", "", "salt"]),
            priority=self.dice.choice([5, 5, 5, self.dice.randint(0, 9)]),
            owner=owner,
            weight=self.weights[owner],
        )
        if self.scheduler.tables.snapshots is not None and self.asked and self.dice.random() < 0.6:
            self.go_on(request, self.dice.choice(self.asked))
        elif request.seed % 3 == 2:  # a prompt in the answer's own words, stop tokens among them
            own = replace(request, prompt=request.prompt[:1], max_tokens=length - 1, stop_token_ids=frozenset(), min_tokens=0)
            request.prompt = [*own.prompt, *fake_answer(own)[0]]
        if self.dice.random() < 0.04:
            self.runner.broken.add(request.request_id)
        if self.dice.random() < 0.04:
            self.poison.add(request.request_id)
        self.live[request.request_id], self.tokens[request.request_id] = request, []
        self.asked.append(request)
        self.alone[request.request_id] = fake_answer(request)
        self.ranks[request] = self.clock.now - 10 * request.priority
        self.scheduler.add(request)

    def go_on(self, request: Request, earlier: Request) -> None:
        """Make it the next turn of a chat, as far as there is room."""
        text = [*earlier.prompt, *earlier.output, *self.dice.choices(range(FAKE_VOCAB), k=2)]
        room = request.max_total_tokens
        request.prompt = text[: room - 1]
        request.max_tokens = room - len(request.prompt)
        request.min_tokens = min(request.min_tokens, request.max_tokens)
        request.cache_salt = earlier.cache_salt

    def ranked(self, *, running: bool) -> list[Request]:
        """The live requests that hold room, or those that wait: better ranks first, of equal ones the older."""
        return sorted((r for r in self.live.values() if bool(r.room) == running), key=self.ranks.__getitem__)

    def older(self, one: Request, other: Request) -> bool:
        """True if it goes before the other, of the same owner."""
        return one.owner == other.owner and self.ranks[one] < self.ranks[other]

    def abort(self) -> None:
        """End one at random: waiting, running, preempted or in the middle of its prompt."""
        if not self.live:
            assert self.scheduler.abort("r0") is None, "an unknown request was aborted"
            return
        name, reason = self.dice.choice(list(self.live)), self.dice.choice([FinishReason.ABORT, FinishReason.DEADLINE])
        request = self.live[name]
        output = self.scheduler.abort(name, reason)
        assert output is not None and output.finish_reason is reason and not output.token_ids, f"{name} was not aborted"
        assert not request.room and not any(request.tables), f"{name} keeps its blocks"
        self.take(output)

    def step(self, faults: bool) -> None:
        plan, result = self.next or self.computed(self.planned(), faults)
        self.next = None
        self.clock.now += self.machine.seconds(plan)
        if faults and self.dice.random() < 0.04:
            self.abort()  # between schedule and commit
        following = self.followed(plan) if self.async_scheduling and plan.scheduled_tokens else None
        if isinstance(result, Exception):
            result = self.repeated(plan, result)
        elif following is not None and (not result.errors or self.scheduler.tables.has_states):
            self.next = self.computed(following, faults)
        dropped = following if self.next is None else None  # something of the step before it failed
        for output in self.scheduler.commit(plan, result, dropped):
            self.take(output)
        self.check_state()

    def followed(self, plan: Plan) -> Plan | None:
        """The step after one that has not ended, looked at."""
        drawing = {item.request for item in plan.scheduled_tokens if item.draws}
        ends = {item.request: item.start + item.count for item in plan.scheduled_tokens}
        lacked = {r.request_id: r.num_tokens + (r in drawing) - ends.get(r, r.num_computed) for r in self.live.values()}
        begun = {name for name, request in self.live.items() if request.scheduled_at is not None}
        waited, preempted = set(self.scheduler._waiting), self.scheduler.num_preemptions
        following = self.scheduler.schedule_async(plan)
        assert self.scheduler.num_preemptions == preempted, "somebody gives way for a step that is begun early"
        left = waited.intersection(self.scheduler._waiting)
        assert not [r for r in waited - left for other in left if self.older(other, r)], "somebody is passed over in the queue"
        if following is not None:
            self.check_early(
                following, drawing, left, {name: lacked[name] for name, r in self.live.items() if name in lacked}, begun
            )
            self.num_early += 1
            self.num_early_parts += following.has_parts
        return following

    def planned(self) -> Plan:
        """The next step's work, looked at."""
        before = {
            name: (r.num_tokens - r.num_computed - r.num_replayed, r.num_preemptions) for name, r in self.live.items() if r.room
        }
        begun = {name for name, request in self.live.items() if request.scheduled_at is not None}
        waited, ran = set(self.scheduler._waiting), self.ranked(running=True)
        left_out = {name: request.num_left_out for name, request in self.live.items()}
        plan = self.scheduler.schedule()
        self.left_out = [each for each in self.live.values() if each.num_left_out > left_out[each.request_id]]
        left = waited.intersection(self.scheduler._waiting)
        passed = [(r, other) for r in waited - left for other in left if self.older(other, r)]
        assert not passed, "somebody is passed over in the queue"
        gave = [request.num_preemptions > before[request.request_id][1] for request in ran]
        for owner in {request.owner for request in ran}:
            own = [each for each, request in zip(gave, ran, strict=True) if request.owner == owner]
            assert own == sorted(own), "an older request gives its room"
        self.check_plan(plan)
        undisturbed = {name: lacked for name, (lacked, count) in before.items() if self.live[name].num_preemptions == count}
        self.check_shares(plan, undisturbed, begun)
        return plan

    def computed(self, plan: Plan, faults: bool) -> tuple[Plan, StepResult | Exception]:
        """The plan and what came of it. Sometimes all of the step fails, or it raises."""
        if faults and self.dice.random() < 0.01:
            return plan, self.failed(plan, RuntimeError())
        try:
            if faults and self.dice.random() < self.shaky:
                raise RuntimeError
            return plan, self.submitted(plan)
        except (RuntimeError, OutOfMemory) as error:
            return plan, error

    def submitted(self, plan: Plan) -> StepResult:
        """What comes of a step; raises where it has too many tokens, or a request that is poison."""
        if sum(item.count for item in plan.scheduled_tokens) > max(self.most_tokens, self.least):
            raise OutOfMemory
        if any(item.request.request_id in self.poison for item in plan.scheduled_tokens):
            raise RuntimeError
        return self.runner.submit(given(plan)).result()

    def repeated(self, plan: Plan, error: Exception) -> StepResult:
        """What the engine makes of a step that raised."""
        if isinstance(error, OutOfMemory):
            self.budget = max(self.least, self.budget // 2)
            self.scheduler.shrink()
        if len(plan.scheduled_tokens) == 1 and not isinstance(error, OutOfMemory):
            self.due.add(plan.scheduled_tokens[0].request.request_id)  # the step of one request is not repeated
        if self.scheduler.tables.has_states:
            return self.failed(plan, error)
        return bisect_step(plan, error, self.submitted, self.least)

    def failed(self, plan: Plan, error: Exception) -> StepResult:
        """All of the step fails."""
        self.due |= {item.request.request_id for item in plan.scheduled_tokens}
        return failed_step(plan.scheduled_tokens, error)

    def take(self, output: Output) -> None:
        """An output reached its caller: one of a live request, and the tokens that the request alone would get."""
        name = output.request_id
        self.trace.append(output)
        assert name in self.live, f"an output of {name} after its end"
        self.tokens[name] += output.token_ids
        tokens, reason = self.alone[name]
        assert self.tokens[name] == tokens[: len(self.tokens[name])], f"{name} got {self.tokens[name]}, alone {tokens}"
        if output.finish_reason is None:
            assert len(self.tokens[name]) < len(tokens), f"{name} does not end where it must"
            return
        self.ended[name] = output.finish_reason
        del self.live[name]
        assert output.times is not None and min(output.times.queue, output.times.prefill, output.times.decode) >= 0
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (tokens, reason) == (self.tokens[name], output.finish_reason), f"{name} ended wrongly"
        elif output.finish_reason is FinishReason.ERROR:
            assert name in self.due | self.runner.broken | self.poison, f"{name} failed without a fault"

    def check_plan(self, plan: Plan) -> None:
        """S3 and S5: within the limits, with blocks for all, and somebody moves."""
        requests = [item.request for item in plan.scheduled_tokens]
        assert sum(item.num_rows for item in plan.scheduled_tokens) == plan.num_tokens <= self.budget, "over budget"
        assert self.scheduler.num_running <= self.config.max_batch_requests, "more requests than a batch holds"
        assert len(requests) == len(set(requests)), "a request twice in one step"
        assert requests or not self.live, "nobody moves"
        for item in plan.scheduled_tokens:
            end = item.start + item.count
            assert item.count >= 1 and item.start == item.request.num_computed and end <= item.request.num_tokens
            end += len(item.draft)
            self.check_reach(item.request, item.start, end)
            assert end < item.request.max_total_tokens or not item.draft, "a guess at a token that is never drawn"
            assert not item.draft or (item.completes and plan.num_streams == len(requests)), "a guess beside a prompt"
        assert plan.num_drafted <= self.config.draft_tokens, "more guesses than a step may have"

    def check_early(
        self, following: Plan, drawing: set[Request], left: set[Request], lacked: dict[str, int], begun: set[str]
    ) -> None:
        """S3 and S4 for a step that is begun early: nobody is passed over, and nobody gives way."""
        requests = [item.request for item in following.scheduled_tokens]
        running = [r for r in self.ranked(running=True) if lacked[r.request_id]]  # the others draw none after this step
        running = [r for r in running if r not in drawing or len(r.output) + 1 < r.max_tokens]
        pending = [item.request for item in following.scheduled_tokens if item.input_pending]
        assert pending == [r for r in running if r in drawing], "a stream waits, ends late, or not by age"
        assert 0 < following.num_tokens <= self.budget, "over budget, or for nothing"
        assert len(requests) == len(set(requests)), "a request twice in one step"
        for item in following.scheduled_tokens:
            end = item.start + item.count
            if item.input_pending:
                assert item.start == item.request.num_tokens and item.count == 1
            else:
                assert item.count >= 1 and item.start == item.request.num_computed and end <= item.request.num_tokens
            assert not item.draft, "a guess beside a token that is not known"
            self.check_reach(item.request, item.start, end)
        if self.scheduler._foresees_prompts:
            self.check_shares(following, lacked, begun, running)
        else:
            assert requests == pending == running, "a token that is not under way"
        is_full = self.scheduler.num_running >= self.config.max_batch_requests
        free, size = self.scheduler.tables.num_free, self.config.block_size
        fits = [r for r in sorted(left, key=self.ranks.__getitem__)[:1] if r.lack is None and -(-r.num_tokens // size) <= free]
        full = is_full or sum(item.count for item in following.scheduled_tokens[: following.num_streams]) == self.budget
        assert full or not fits or self.is_shared, "somebody waits who could run"

    def check_reach(self, request: Request, start: int, end: int) -> None:
        """In each group it has room for all tokens before `end`, and blocks for those that a query from `start` on sees."""
        size = self.config.block_size
        assert request.room >= end, f"{request.request_id} lacks room"
        for group, table in zip(self.config.groups, request.tables, strict=True):
            first = 0 if group.window is None else max(0, start + 1 - group.window)
            assert group.has_state or all(table[first // size : -(-end // size)]), f"{request.request_id} lacks blocks"
            assert group.has_state or len(table) * size >= end, f"{request.request_id} lacks blocks"

    def without_left_out(self, streams: list[Request], ran: list[Request]) -> list[Request]:
        """S7: those left out are of the owner with most streams, who keeps as many as the one after him, and no weight less."""
        counts = Counter(request.owner for request in streams if request not in self.left_out)
        for request in self.left_out:
            assert request not in ran, "it is left out and computed"
            own = counts[request.owner] / request.weight
            assert len(counts) > 1, "nobody else has streams"
            assert all(own >= count / self.weights[owner] for owner, count in counts.items()), "he has no more than others"
        assert len({request.owner for request in self.left_out}) <= 1, "two owners give way"
        return [request for request in streams if request not in self.left_out]

    def check_shares(self, plan: Plan, before: dict[str, int], begun: set[str], running: list[Request] | None = None) -> None:
        """S4: streams before prompts, which take turns, in parts that end where they may, in no more time than they may.

        `before` has what the requests that go on running lacked before the step, `begun` who was ever scheduled before.
        """
        planned = [item.request for item in plan.scheduled_tokens]
        running = self.ranked(running=True) if running is None else running
        streams = [r for r in running if before.get(r.request_id) == 1 and r.request_id in begun]
        spent = sum(item.count for item in plan.scheduled_tokens[: plan.num_streams])
        ran = [r for r in planned[: plan.num_streams] if not self.is_shared or r.request_id in before]  # others were let in
        streams = self.without_left_out(streams, ran)
        assert ran == streams[: len(ran)], "a stream waits, or not by age"
        if len(ran) < len(streams):
            assert spent + 1 + streams[len(ran)].num_replayed > self.budget, "a stream waits"
        prompts = [r for r in running if r not in streams and r not in self.left_out]
        parts = plan.scheduled_tokens[plan.num_streams :]
        prompts = [r for r in prompts if r in planned or not self.awaits(r, plan)]
        if not parts:
            wait = [r for r in prompts if r not in planned]
            assert not wait or spent == self.budget or len(ran) < len(streams), "prompts wait for nothing"
            return
        first, size = parts[0], self.config.chunk_size
        others = [before.get(r.request_id, r.num_tokens) for r in prompts if r not in planned]
        shortest = all(first.request.num_tokens - first.start <= lacking for lacking in others)
        if self.is_shared:
            return
        self.turns.append((first.request is prompts[0], shortest))
        assert all(map(any, zip(*self.turns[-2:], strict=True))) or len(self.turns) < 2, "a prompt is passed over twice"
        whole = [item.completes or (item.start + item.count) % size == 0 or self.keeps_state(item) for item in parts]
        assert all(whole[1:]) and (whole[0] or (len(parts) == 1 and first.count < size)), "a part ends within a chunk"
        left = self.budget
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
        states = self.scheduler.tables.has_states and self.config.prefix_caching
        return states and (item.start + item.count) % self.config.block_size == 0

    def check_time(self, plan: Plan, prompts: int, served: bool) -> None:
        """Beside streams a step takes what it may by the machine's true cost, which the scheduler has to learn; without
        streams nothing of the budget is left. `served`: each prompt has a part in the step.
        """
        tokens, size = plan.num_prompt_tokens, self.config.chunk_size
        left = self.budget - sum(item.count for item in plan.scheduled_tokens[: plan.num_streams])
        served = served and all(item.completes or self.keeps_state(item) for item in plan.scheduled_tokens)
        if not plan.num_streams:
            assert left - tokens < size or served, "a budget that nobody else needs is not spent"
        elif len(self.turns) > 16:
            least = max(size, self.config.block_size, self.config.max_batch_tokens // 32)
            alone = self.machine.alone(plan.num_streams) / self.machine.per_token  # in tokens of a prompt
            later, empty = (self.machine.alone(n) / self.machine.per_token for n in (plan.num_streams + prompts, 0))
            goal = self.config.step_goal / self.machine.per_token
            smooth = SHORT_SECONDS / self.machine.per_token
            short = max(goal, min(SHORT_FACTOR * alone, smooth))
            longest = max(short, LONGEST_FACTOR * empty, min(LONGEST_FACTOR * alone, LASTING_FACTOR * later))
            room = short - alone  # more needs to tell an empty step from its streams, which steps of many shapes teach
            assert tokens <= max(least, SLACK * longest - alone + size), "streams wait too long for a step"
            assert tokens > min(left, max(least, room / SLACK - size)) - size or served, "prompts get less than their share"

    def check_state(self) -> None:
        """S1, S2 and A1: each live request in one place, the older ones running, and every block accounted for.

        Whether a block that two requests hold is right for both shows in their tokens: the runner reads them back.
        """
        running, waiting = list(self.scheduler._running), list(self.scheduler._waiting)
        assert running == self.ranked(running=True), "running requests are lost, doubled, or out of order"
        assert waiting == self.ranked(running=False), "waiting requests are lost, doubled, or out of order"
        for at, group in enumerate(self.config.groups):
            own = [[request.slot] if group.has_state else [] for request in running]
            tables = [[block for block in request.tables[at] if block] for request in running]
            held = {block for table in (*tables, *own) for block in table}
            assert sum(map(len, tables)) == len({*chain(*tables)}) or self.config.prefix_caching, "shared blocks"
            assert len(held) + self.scheduler.tables.groups[at].pool.num_free == group.num_blocks, "blocks are lost"
            if group.window is not None:
                most = self.config.window_blocks(group.window)
                assert all(len(table) <= most for table in tables), "blocks out of sight are kept"
            if group.has_state:
                slots = {request.slot for request in running}
                assert len(slots) == len(running) and 0 not in slots, "a request without a state of its own"
        for name, request in self.live.items():
            assert self.tokens[name] == request.output, f"the outputs of {name} have gaps"
        self.scheduler.check_integrity()
        self.check_hits()

    def check_hits(self) -> None:
        """No token is found in the prefix cache that was not looked up, and what a preempted request finds again is no news."""
        hits = self.scheduler.num_prefix_hits
        assert hits == sum(request.num_cached for request in self.asked), "the hits are not those of the requests"
        assert hits <= self.scheduler.num_prefix_queries, "more is found than was looked up"
        for name, request in self.live.items():
            assert request.num_cached < request.num_tokens, f"{name} found all of itself"
            if request.num_preemptions and request.scheduled_at is not None:
                assert request.num_cached == self.found.setdefault(name, request.num_cached), f"{name} counts a hit twice"
