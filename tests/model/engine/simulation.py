"""A seeded simulation of the scheduler under a fake model: tiny pools, aborts and faults; every law after every step."""

import random
from dataclasses import replace

from model.config import EngineConfig
from model.engine.request import FinishReason, Output, Request
from model.engine.scheduler import Plan, Scheduler, StepResult
from tests.model.engine.machines import FAKE_VOCAB, Clock, FakeRunner, ask, fake_answer

STEPS = 200


class Simulation:
    """One engine's life under one seed. `trace` is what its callers saw, in order."""

    def __init__(self, seed: int, scheduler: type[Scheduler] = Scheduler) -> None:
        self.dice = random.Random(seed)
        block_size, num_blocks = self.dice.randint(1, 4), self.dice.randint(3, 10)
        self.config = EngineConfig(
            max_model_len=self.dice.randint(max(3, block_size * num_blocks // 2), block_size * num_blocks),
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_requests=self.dice.randint(1, 8),
            max_batch_tokens=self.dice.choice([1, 3, 8, 20]),
            prefix_caching=self.dice.random() < 0.7,
        )
        self.stems = [self.dice.choices(range(FAKE_VOCAB), k=self.config.max_model_len) for _ in range(2)]
        self.clock = Clock()
        self.scheduler = scheduler(self.config, self.clock)
        self.runner = FakeRunner(block_size)
        self.live: dict[str, Request] = {}  # in order of arrival
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.due: set[str] = set()
        """Requests that may end with an error."""
        self.trace: list[Output] = []

    def run(self, steps: int = STEPS) -> "Simulation":
        """Submit, abort and step at random, then let everything end."""
        for _ in range(steps):
            self.clock.now += self.dice.random()
            if self.dice.random() < 0.3:
                self.submit()
            if self.dice.random() < 0.04:
                self.abort()
            self.step(faults=True)
        bound = sum(request.max_total_tokens for request in self.live.values())  # the oldest advances in every step
        while self.live:
            assert bound > 0, f"{list(self.live)} starve"
            bound -= 1
            self.step(faults=False)
        assert self.scheduler.pool.num_free == self.config.num_blocks, "blocks are lost"
        assert not self.scheduler.schedule().scheduled, "work without requests"
        return self

    def submit(self) -> None:
        room = self.dice.randint(self.config.max_model_len // 2 + 1, self.config.max_model_len)
        length = self.dice.randint(1, self.dice.choice([1, 1, room - 1]))
        stops = frozenset(self.dice.sample(range(FAKE_VOCAB), self.dice.choice([0, 0, 1, 4])))
        fewest = self.dice.randint(0, room - length) if self.dice.random() < 0.3 else 0
        shared = self.dice.choice([0, length, self.dice.randint(0, length)])
        request = ask(
            f"r{len(self.tokens)}",
            self.dice.choice(self.stems)[:shared] + self.dice.choices(range(FAKE_VOCAB), k=length - shared),
            room - length,
            seed=self.dice.randint(-9, 9),
            choice=self.dice.randint(0, 2),
            stop_token_ids=stops,
            min_tokens=fewest,
            cache_salt=self.dice.choice(["", "", "salt"]),
        )
        if self.dice.random() < 0.04:
            self.runner.broken.add(request.request_id)
        self.live[request.request_id], self.tokens[request.request_id] = request, []
        self.scheduler.add(request)

    def abort(self) -> None:
        """End one at random: waiting, running, preempted or in the middle of its prompt."""
        if not self.live:
            assert self.scheduler.abort("r0") is None, "an unknown request was aborted"
            return
        name, reason = self.dice.choice(list(self.live)), self.dice.choice([FinishReason.ABORT, FinishReason.DEADLINE])
        request = self.live[name]
        output = self.scheduler.abort(name, reason)
        assert output is not None and output.finish_reason is reason and not output.token_ids, f"{name} was not aborted"
        assert not request.blocks, f"{name} keeps its blocks"
        self.take(output)

    def step(self, faults: bool) -> None:
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        if faults and self.dice.random() < 0.01:
            self.due |= {item.request.request_id for item in plan.scheduled}
            result = StepResult(errors={item.request.request_id: "the step failed" for item in plan.scheduled})
        else:
            result = self.runner.submit(plan).result()
        if faults and self.dice.random() < 0.04:
            self.abort()  # between schedule and commit
        for output in self.scheduler.commit(plan, result):
            self.take(output)
        self.check_state()

    def take(self, output: Output) -> None:
        """An output reached its caller: one of a live request, and the tokens that the request alone would get."""
        name = output.request_id
        self.trace.append(output)
        assert name in self.live, f"an output of {name} after its end"
        request = self.live[name]
        self.tokens[name] += output.token_ids
        tokens, reason = fake_answer(replace(request, output=[]))
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
            assert name in self.due | self.runner.broken, f"{name} failed without a fault"

    def check_plan(self, plan: Plan) -> None:
        """S3 and S4: within the limits, with blocks for all, and the oldest in front."""
        requests = [item.request for item in plan.scheduled]
        assert sum(item.count for item in plan.scheduled) <= self.config.max_batch_tokens, "more tokens than the budget"
        assert self.scheduler.num_running <= self.config.max_batch_requests, "more requests than a batch holds"
        assert len(requests) == len(set(requests)), "a request twice in one step"
        assert requests[:1] == list(self.live.values())[:1], "the oldest request does not advance"
        assert requests == [request for request in self.live.values() if request in requests], "not by age"
        for item in plan.scheduled:
            end = item.start + item.count
            assert item.count >= 1 and item.start == item.request.num_computed and end <= item.request.num_tokens
            assert len(item.request.blocks) * self.config.block_size >= end, f"{item.request.request_id} lacks blocks"

    def check_state(self) -> None:
        """S1, S2 and A1: each live request in one place, the older ones running, and every block accounted for.

        Whether a block that two requests hold is right for both shows in their tokens: the runner reads them back.
        """
        running, waiting = list(self.scheduler._running), list(self.scheduler._waiting)
        assert running + waiting == list(self.live.values()), "requests are lost, doubled, or out of order"
        held = {block for request in running for block in request.blocks}
        assert 0 not in held, "the reserved block was given out"
        assert sum(len(request.blocks) for request in running) == len(held) or self.config.prefix_caching, "shared blocks"
        assert len(held) + self.scheduler.pool.num_free == self.config.num_blocks, "blocks are lost"
        for name, request in self.live.items():
            assert self.tokens[name] == request.output, f"the outputs of {name} have gaps"
        self.scheduler.check_integrity()
