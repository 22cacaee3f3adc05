"""Streams stay flat while prompts arrive, and nobody starves: bounds in steps and seconds, on a machine whose cost is known."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import count

import pytest

from attend.model.engine.budget import (
    LEAST_SECONDS,
    LONGEST_FACTOR,
    MAX_SECONDS,
)
from attend.model.engine.config import EngineConfig, GroupSize
from attend.model.engine.engine import Engine
from attend.model.engine.fair_share import WHOLE_EVERY
from attend.model.engine.plan import StepInput
from attend.model.engine.scheduler import Scheduler
from tests.model.engine.machines import FAKE_VOCAB, Clock, Done, FakeRunner, ask, fake_answer, fake_engine, run, sizes, told

CHUNK = 8
ROOMY = {
    "num_blocks": 4096,
    "block_size": 8,
    "max_model_len": 4096,
    "max_batch_tokens": 64,
    "chunk_size": CHUNK,
    "step_goal": 0.0,
}


class Machine(FakeRunner):
    """Steps cost time: 4 ms, 1 ms a stream and 1 ms a token of a prompt; `hiccups` are factors of the steps to come."""

    def __init__(self, clock: Clock, block_size: int) -> None:
        super().__init__(block_size)
        self.clock, self.hiccups, self.seconds = clock, [], []
        self.seconds_of = lambda step: 0.004 + 0.001 * step.num_tokens

    def submit(self, step: StepInput) -> Done:
        factor = self.hiccups.pop(0) if self.hiccups else 1
        self.seconds.append(factor * self.seconds_of(step))
        self.clock.now += self.seconds[-1]
        return super().submit(step)


def machine(**changes) -> Engine:
    config, clock = sizes(**(ROOMY | changes)), Clock()
    return Engine(Scheduler(config, clock), Machine(clock, config.block_size), clock)


def with_streams(number: int, **changes) -> Engine:
    """An engine whose streams have run long enough to know what a step costs."""
    engine = machine(**changes)
    for at in range(number):
        engine.add(ask(f"stream{at}", [at], 2000))
    engine.add(ask("lesson", range(100), 1))
    for _ in range(60):
        engine.step()
    return engine


def steps_until_first(engine: Engine, name: str, before_each=lambda: None, most: int = 3000) -> int:
    """Steps until a token of `name` comes."""
    for step in range(1, most):
        before_each()
        if any(output.request_id == name for output in engine.step()):
            return step
    raise AssertionError(f"{name} starves")


# Long prompts.


class Attending(FakeRunner):
    """Steps cost time as those of a model of 0.6B on two cores do: the longer the past of a token, the more."""

    def __init__(self, clock: Clock, config: EngineConfig, slowness: float = 1) -> None:
        super().__init__(config.block_size)
        self.clock, self.slowness = clock, slowness
        self.steps: list[tuple[int, int, float]] = []
        """Start and tokens of the longest part of each, and its seconds."""

    def submit(self, step: StepInput) -> Done:
        pairs = sum(count * (start + count / 2) for start, count in zip(step.starts, step.counts, strict=True))
        seconds = self.slowness * (0.025 + 0.006 * step.num_tokens + 2.3e-6 * pairs)
        self.clock.now += seconds
        count, start = max(zip(step.counts, step.starts, strict=True))
        self.steps.append((start, count, seconds))
        return super().submit(step)


LENGTH = 30_000
"""Tokens of a long prompt: at its end one costs twelve times what the first did."""


def long_prompt(slowness: float = 1, **changes) -> Engine:
    """An engine that is warm, and has a long prompt to compute."""
    roomy = {"num_blocks": 4096, "block_size": 32, "max_model_len": 1 << 15, "max_batch_tokens": 1024, "chunk_size": 32}
    config, clock = sizes(**(roomy | changes)), Clock()
    engine = Engine(Scheduler(config, clock), Attending(clock, config, slowness), clock)
    run(engine, [ask("warm-up", range(8), 2)])
    engine.runner.steps.clear()
    engine.add(ask("long", [at % FAKE_VOCAB for at in range(LENGTH)], 1))
    return engine


@pytest.mark.parametrize("slowness", [1, 5])
def test_a_step_without_streams_takes_some_seconds_however_long_the_past_is(slowness):
    """And a chunk. Not before the machine is known: the first two may be larger."""
    engine = long_prompt(slowness)
    while engine.has_work:
        engine.step()
    steps = engine.runner.steps[2:-1]
    chunk = [slowness * 32 * (0.006 + 2.3e-6 * start) for start, _, _ in steps]
    assert all(
        count == 32 or seconds < 1.1 * MAX_SECONDS + more for (_, count, seconds), more in zip(steps, chunk, strict=True)
    )
    assert all(seconds > 0.8 * MAX_SECONDS for *_, seconds in steps), "smaller ones would read the weights more often"


def test_beside_a_stream_late_parts_take_no_longer_than_early_ones():
    """On a machine that is fast enough for more than the least part."""
    engine = long_prompt(0.002)
    engine.add(ask("stream", [1], 4000))
    while engine.has_work:
        engine.step()
    steps = [each for each in engine.runner.steps if each[1] > 32]
    early = [seconds for start, _, seconds in steps if 4000 < start < 8000]
    late = [seconds for start, _, seconds in steps if start > 20_000]
    assert early and late and max(late) < 1.3 * max(early)


def test_a_short_prompt_beside_a_long_one_waits_for_no_long_part_of_it():
    """Also where no stream runs: then a step of the long one alone takes seconds."""
    engine = long_prompt()
    for _ in range(6):
        engine.step()
    waits = []
    for at in range(10):
        engine.add(ask(f"chat{at}", range(40), 1))
        arrived = engine._clock()
        steps_until_first(engine, f"chat{at}")
        waits.append(engine._clock() - arrived)
    assert max(waits) < 0.025 + 0.006 * 60 + 2 * LEAST_SECONDS
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("streams", [1, 4])
def test_beside_a_stream_a_step_on_a_slow_machine_takes_little_longer_than_a_tenth_of_a_second_more(streams):
    """However long the past of the prompt is: a chunk of it takes 2.4 seconds at its end. And it advances."""
    engine = long_prompt()
    for at in range(streams):
        engine.add(ask(f"stream{at}", [at], 2000))
    for _ in range(1200):
        engine.step()
    steps = [(start, count, seconds) for start, count, seconds in engine.runner.steps[200:] if start > 32]
    alone = 0.025 + 0.006 * streams
    assert max(seconds for *_, seconds in steps) < LONGEST_FACTOR * alone + LEAST_SECONDS
    assert min(count for _, count, _ in steps) >= 1 and max(count for _, count, _ in steps) > 1
    assert steps[-1][0] > 5000


def test_a_window_bounds_what_a_token_costs():
    window = GroupSize(4096, window=512)
    config = sizes(num_blocks=4096, block_size=32, max_model_len=1 << 15, max_batch_tokens=64, groups=(window,))
    for groups, reach in (((window,), 512), ((GroupSize(4096), window), math.inf)):
        cost = Scheduler(replace(config, groups=groups), Clock()).cost
        cost.learn(0, 10, 0, 1.0)
        assert reach == cost.reach
        weights = [cost.weight(start) for start in (0, 100, 512, 20_000)]
        assert weights[0] == 1 < weights[1] < weights[2]
        assert (weights[3] == weights[2]) == (reach == 512)
        assert cost.pairs(20_000, 8) == 8 * min(20_004, reach)


# Parts of prompts.


def test_a_prompt_that_another_computes_meanwhile_is_not_computed_again():
    """Both were admitted before anything of it was known, and take turns with a third."""
    engine = machine(prefix_caching=True)
    engine.add(ask("stream", [1], 500))
    engine.step()
    twins = [ask(name, range(200), 2, seed=at) for at, name in enumerate("ab")]
    for request in [*twins, ask("other", range(500, 650), 2)]:
        engine.add(request)
    for _ in range(400):
        engine.step()
    computed = sum(number for plan in engine.runner.plans for name, _, number in plan if name in "ab")
    assert computed <= 200 + 8 + 2
    assert (0, 192) == (min(r.num_cached for r in twins), max(r.num_cached for r in twins))
    assert (1 + 200 + 200 + 150, 192) == (engine.stats().num_prefix_queries, engine.stats().num_prefix_hits)


# Fair.


def chunks(length: int) -> int:
    return -(-length // CHUNK)


def test_a_long_prompt_ends_in_bounded_time_under_an_endless_stream_of_short_ones():
    engine, numbers = with_streams(3), count()
    engine.add(ask("long", range(600), 1))

    def short() -> None:
        while engine.scheduler.num_running + engine.scheduler.num_waiting < 14:
            engine.add(ask(f"short{next(numbers)}", range(9), 2))

    assert steps_until_first(engine, "long", short) <= 2 * chunks(600)
    assert next(numbers) > 40


def test_a_short_prompt_is_answered_in_bounded_time_under_an_endless_stream_of_long_ones():
    engine, numbers = with_streams(3), count()

    def long() -> None:
        while engine.scheduler.num_running + engine.scheduler.num_waiting < 12:
            engine.add(ask(f"long{next(numbers)}", range(500), 2))

    for _ in range(50):
        long()
        engine.step()
    for at in range(5):
        engine.add(ask(f"short{at}", range(20), 1))
        assert steps_until_first(engine, f"short{at}", long) <= 2 * chunks(20) + 1


@pytest.mark.parametrize("seed", range(8))
def test_whoever_comes_later_cannot_delay_a_prompt_beyond_its_bound(seed):
    """Two steps for each chunk of its own and of the prompts that were there before it."""
    engine, dice, due, lengths = with_streams(2, max_batch_requests=64), random.Random(seed), {}, {}
    for step in range(600):
        if dice.random() < 0.3 and engine.scheduler.num_running < 60:
            name, length = f"p{step}", dice.choice([3, 10, 40, 200])
            engine.add(ask(name, range(length), dice.randint(1, 4), seed=seed))
            lengths[name] = length
            due[name] = step + 2 * sum(chunks(each) for each in lengths.values())
        for output in engine.step():
            if output.request_id in due:
                assert step <= due.pop(output.request_id), f"{output.request_id} comes late"
                del lengths[output.request_id]
        assert all(step <= moment for moment in due.values()), "somebody starves"


def order_of(engine: Engine) -> list[str]:
    """The names of requests in the order in which they end."""
    ended = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if output.finish_reason is not None]
    return ended


def test_a_level_of_priority_is_worth_ten_seconds_of_waiting():
    engine = machine(max_batch_requests=1)
    engine.add(ask("low", priority=5))
    engine.scheduler._clock.now += 9.9
    engine.add(ask("soon", priority=6))
    engine.scheduler._clock.now += 0.2
    engine.add(ask("late", priority=6))
    assert order_of(engine) == ["soon", "low", "late"]


def test_whoever_runs_is_not_stopped_for_a_higher_priority():
    engine = machine(max_batch_requests=1)
    engine.add(ask("first", max_tokens=20, priority=0))
    engine.step()
    engine.add(ask("urgent", priority=9))
    assert order_of(engine) == ["first", "urgent"]


def test_no_priority_starves_under_a_flood_of_the_highest():
    """Calls of priority 9 arrive faster than they can be served; one of priority 0 waits for those of 90 seconds."""
    engine, names = machine(max_batch_requests=1), count()
    clock = engine.scheduler._clock
    engine.add(ask("patient", priority=0))
    arrived, outputs = clock.now, []
    while not any(output.request_id == "patient" for output in outputs):
        if clock.now < arrived + 200:
            engine.add(ask(f"urgent{next(names)}", max_tokens=1, priority=9))
            clock.now += 1.0
        outputs = engine.step()
        assert engine.scheduler.num_waiting < 400
    assert 90 <= clock.now - arrived <= 92


def test_under_a_lack_of_blocks_the_lowest_priority_gives_way():
    """Though it came first. It ends after the other, with the same tokens as alone."""
    engine = fake_engine(num_blocks=6, block_size=2, max_model_len=12)
    low, high = ask("low", [1, 2], 9, priority=4), ask("high", [3, 4], 9, priority=6)
    found = run(engine, [low, high])
    assert list(found) == ["high", "low"]
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)
    assert {name: told(outputs) for name, outputs in found.items()} == {
        each.request_id: fake_answer(each) for each in (low, high)
    }


# Owners.


@pytest.mark.parametrize(("victims", "weight"), [(8, 1.0), (1, 1.0), (8, 3.0)])
def test_an_owner_with_many_streams_slows_those_of_others_by_half_of_what_is_fair_at_most(victims, weight):
    """And his own advance in turns: none stands still."""
    engine = machine(max_batch_requests=64)
    for at in range(victims):
        engine.add(ask(f"victim{at}", [at], 2000, owner="victim"))
    for at in range(64 - victims):
        engine.add(ask(f"many{at}", [at], 2000, owner="many", weight=weight))
    for _ in range(150):
        engine.step()
    before, counts = len(engine.runner.plans), Counter()
    for _ in range(60):
        engine.step()
    for plan in engine.runner.plans[before:]:
        names = [name for name, _, _ in plan]
        counts.update(names)
        assert sum(name.startswith("victim") for name in names) == victims, "they advance in every step"
    fair = 0.004 + 0.001 * victims * (1 + min(weight, 63 / victims))
    longest = sorted(engine.runner.seconds[before:])[50]  # one in eight has all
    assert longest <= 1.6 * fair + 0.0015, "costs are estimates"
    assert longest > 1.2 * fair, "as much as is fair is computed"
    own = [counts[f"many{at}"] for at in range(64 - victims)]
    assert max(own) - min(own) <= 2


def test_where_many_streams_take_the_time_of_few_hardly_any_is_left_out():
    """Once that is learned, from the steps that have all."""
    engine = machine(max_batch_requests=64)
    engine.runner.seconds_of = lambda step: 0.01 + 2e-4 * step.num_tokens
    for at in range(64):
        engine.add(ask(f"{at}", [at], 3000, owner="a" if at > 7 else "b"))
    for _ in range(800):
        engine.step()
    assert sum(map(len, engine.runner.plans[-80:])) > 0.6 * 80 * 64


def test_on_a_gpu_none_is_left_out():
    engine = machine(max_batch_requests=64, stream_turns=False)
    for at in range(64):
        engine.add(ask(f"{at}", [at], 2000, owner="a" if at else "b"))
    for _ in range(100):
        engine.step()
    assert len(engine.runner.plans[-1]) == 64


# In the background.


def test_beside_others_background_requests_advance_in_one_of_eight_steps():
    """Streams and prompts. Where they are alone they have every step."""
    engine = machine(max_batch_requests=64)
    for at in range(16):
        engine.add(ask(f"line{at}", [at] * 40, 2000, owner="lines", weight=0.01, is_background=True))
    for _ in range(60):
        engine.step()
    assert len(engine.runner.plans[-1]) == 16
    engine.add(ask("caller", [7], 2000, owner="caller"))
    for _ in range(WHOLE_EVERY):
        engine.step()
    before = len(engine.runner.plans)
    for _ in range(10 * WHOLE_EVERY):
        engine.step()
    names = [[name for name, _, _ in plan] for plan in engine.runner.plans[before:]]
    assert all("caller" in each for each in names)
    assert sum(len(each) > 1 for each in names) == 10
    assert sum(engine.runner.seconds[before:]) <= 1.4 * len(names) * 0.005, "a quarter of its time, as far as costs are known"
    counts = Counter(name for each in names for name in each)
    assert min(counts[f"line{at}"] for at in range(16)) >= 3, "and none stands still"


def test_a_caller_never_waits_for_a_long_step_of_prompts_in_the_background():
    """Prompts alone may take two seconds of a step; those that nobody waits for, a tenth of one, as far as costs are known."""
    engine = machine(max_batch_requests=8, max_batch_tokens=1 << 14, max_model_len=1 << 14, num_blocks=1 << 14)
    run(engine, [ask(f"lesson{at}", [at] * 100, 1) for at in range(8)])
    longest = {}
    for background in (False, True):
        before = len(engine.runner.seconds)
        prompt = [at % (7 + background) for at in range(8000)]
        engine.add(ask("long", prompt, 1, owner="lines", is_background=background))
        steps_until_first(engine, "long")
        longest[background] = max(engine.runner.seconds[before:])
    assert longest[False] > 1.0
    assert longest[True] < 0.35, "costs are estimates"
