"""How much room there is, and how long a call would wait: what the estimate says is what then happens."""

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attend.model.engine.config import EngineConfig
from attend.model.engine.engine import Engine
from attend.model.engine.plan import StepInput, StepResult
from attend.model.engine.request import EngineStats, Request, StepReport
from attend.model.engine.scheduler import Scheduler
from attend.model.params import SamplingParams
from attend.service.observe.capacity import CompletionRate, Load, LoadMeter, estimate, retry_seconds, wait_seconds
from tests.conftest import examples
from tests.fakes import info
from tests.model.engine.machines import Clock, Done

INFO = info(max_batch_requests=8, num_blocks=64, block_size=16, max_model_len=512)
BUSY = CompletionRate(200, step_seconds=0.01, steps_per_request=40)
"""A request takes 0.4 s; eight at once end every 0.05 s."""


def load(running=0, waiting=0, free=64, pace=BUSY, **changes) -> Load:
    return Load(replace(INFO, **changes), EngineStats(running, waiting, free), pace)


class TimedRunner:
    """A machine of known speed: each step and each of its tokens takes so long on the clock."""

    STEP, TOKEN = 0.010, 0.0001

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def submit(self, step: StepInput) -> Done:
        self.clock.now += self.STEP + self.TOKEN * step.num_tokens
        return Done(StepResult(dict.fromkeys(step.draw_ids, 1)))


class Queue:
    """The real scheduler on that machine, with `depth` requests waiting at any time, and a meter beside it."""

    def __init__(self, depth: int, lengths: tuple[int, int], seed: int = 0, **sizes: int) -> None:
        self.clock, self.random = Clock(), random.Random(seed)
        self.config = EngineConfig(max_model_len=512, **({"num_blocks": 1024, "max_batch_requests": 8} | sizes))
        self.engine = Engine(Scheduler(self.config, self.clock), TimedRunner(self.clock), self.clock)
        self.meter = LoadMeter(self.clock)
        self.engine.observer = self.meter.observe_step
        self.depth, self.lengths, self.ended_at, self.num = depth, lengths, {}, 0

    def request(self, prompt: int, answer: int) -> Request:
        self.num += 1
        return Request(str(self.num), [1] * prompt, answer, SamplingParams())

    def step(self) -> None:
        while self.engine.scheduler.num_waiting < self.depth:
            self.engine.add(self.request(self.random.randint(1, 100), self.random.randint(*self.lengths)))
        for output in self.engine.step():
            if output.finish_reason is not None:
                self.ended_at[output.request_id] = self.clock.now

    def load(self) -> Load:
        sizes = {name: getattr(self.config, name) for name in ("max_model_len", "num_blocks", "max_batch_requests")}
        return Load(info(block_size=self.config.block_size, **sizes), self.engine.stats(), self.meter.pace())

    def probe(self) -> tuple[float, float]:
        """Estimated and real wait."""
        now, told = self.clock.now, self.load()
        request = self.request(1, 60)
        self.engine.add(request)
        while request.request_id not in self.ended_at:
            self.step()
        return wait_seconds(told), request.scheduled_at - now


SHAPES = {
    "all alike": {"depth": 20, "lengths": (50, 50)},
    "all sorts": {"depth": 20, "lengths": (1, 200)},
    "a long queue": {"depth": 120, "lengths": (10, 60)},
    "a short queue": {"depth": 8, "lengths": (10, 100)},
    "one at a time": {"depth": 10, "lengths": (10, 60), "max_batch_requests": 1},
}


def probed(shape) -> list[tuple[float, float]]:
    """Probes of a queue that has been steady for long."""
    queue = Queue(**shape)
    for _ in range(2000):
        queue.step()
    probes = []
    for _ in range(12):
        probes.append(queue.probe())
        for _ in range(queue.random.randint(1, 100)):
            queue.step()
    return probes


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_in_a_steady_queue_each_estimate_is_within_a_factor_of_two_of_what_happens(shape):
    for wait, real_wait in probed(shape):
        assert 0.5 < wait / real_wait < 2


def test_a_call_that_the_next_step_takes_up_waits_no_time_and_one_more_would():
    assert wait_seconds(load()) == 0
    assert wait_seconds(load(7, 0, 1)) == 0
    assert wait_seconds(load(8, 0, 1)) > 0  # no place
    assert wait_seconds(load(7, 0, 0)) > 0  # no block
    assert wait_seconds(load(7, 1, 1)) > 0  # somebody before it


def test_an_idle_queue_needs_no_measurement_to_know_that_there_is_no_wait():
    assert wait_seconds(load(pace=CompletionRate())) == 0
    assert wait_seconds(load(8, 5, 30, CompletionRate())) is None
    assert wait_seconds(load(8, 5, 30, replace(BUSY, steps_per_request=None))) is None


def test_the_wait_is_the_requests_that_must_end_over_how_fast_they_end():
    assert wait_seconds(load(8, 0, 30)) == pytest.approx(1 * 40 * 0.01 / 8)
    assert wait_seconds(load(8, 9, 60)) == pytest.approx(10 * 40 * 0.01 / 8)


counts = st.integers(0, 200)
some = st.one_of(st.none(), st.floats(1e-6, 1e6))
paces = st.builds(CompletionRate, st.just(0.0), some, some)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(st.integers(0, 8), counts, st.integers(0, 64), paces)
def test_an_estimate_is_never_negative_never_nan_and_never_shrinks_with_the_queue(running, waiting, free, pace):
    now, later = (wait_seconds(load(running, n, free, pace)) for n in (waiting, waiting + 1))
    for seconds in (now, later):
        assert seconds is None or (seconds >= 0 and math.isfinite(seconds))
    assert later is None or now <= later


def test_rates_are_those_of_the_last_ten_seconds():
    clock = Clock(1000.0)
    meter = LoadMeter(clock)
    assert meter.pace() == CompletionRate()
    for _ in range(400):  # twenty seconds of twenty steps each
        clock.now += 0.05
        meter.observe_step(StepReport(0.05, 4, 6, num_drawn=4))
    assert meter.pace().tokens_per_second == pytest.approx(80, rel=0.05)
    clock.now += 5
    assert meter.pace().tokens_per_second == pytest.approx(40, rel=0.1)
    clock.now += 6
    assert meter.pace().tokens_per_second == 0
    assert meter.pace().step_seconds == pytest.approx(0.05)  # of the last steps, however long ago


def test_the_document_sums_over_replicas_and_tells_the_times_of_the_least_wait():
    loads = [load(8, 9, 60), load(2, 0, 50), load(8, 3, 10)]
    told = estimate(loads, 4)
    json.dumps(told, allow_nan=False)
    assert told["replicas"] == {"expected": 4, "answered": 3}
    sums = ("free_blocks", "num_blocks", "running", "waiting", "max_batch_requests", "tokens_per_second")
    assert [told[name] for name in sums] == [120, 192, 18, 12, 24, 600]
    assert (told["block_size"], told["max_model_len"]) == (16, 512)
    assert told["estimated_wait_seconds"] == 0


def test_a_refused_call_is_told_to_come_back_when_the_queue_has_moved_on():
    """After as long as a call would wait now; 1 to 60 s, and 1 while nothing is known."""
    pace = CompletionRate(step_seconds=0.05, steps_per_request=40)
    assert retry_seconds(load(8, 8, 60, pace)) == math.ceil(9 * 40 * 0.05 / 8)
    assert retry_seconds(load(8, 0, 60, pace)) == 1
    assert retry_seconds(load(8, 8, 60, CompletionRate())) == 1
    assert retry_seconds(load(8, 8, 60, CompletionRate(step_seconds=9.0, steps_per_request=400))) == 60
