"""The scheduler's laws one by one: budget, age, chunks, preemption, refusal, abort, and exactly one end."""

import subprocess
import sys

import pytest

from attend.model.engine.plan import Plan
from attend.model.engine.request import FinishReason, Output, check_fits
from attend.model.engine.scheduler import Scheduler
from attend.model.errors import ContextTooLong, InvalidRequest
from tests.model.engine.machines import Clock, FakeRunner, answers, ask, fake_engine, given, sizes


def machine(**changes) -> tuple[Scheduler, FakeRunner]:
    config = sizes(**changes)
    return Scheduler(config, Clock()), FakeRunner(config.block_size)


def shown(plan: Plan) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.count) for item in plan.scheduled_tokens]


def step(scheduler: Scheduler, runner: FakeRunner) -> tuple[list[tuple[str, int, int]], list[Output]]:
    plan = scheduler.schedule()
    return shown(plan), scheduler.commit(plan, runner.submit(given(plan)).result())


@pytest.mark.parametrize("name", ["request", "blocks", "scheduler"])
def test_the_scheduler_is_plain_python(name):
    """Imported into a fresh interpreter, it brings no tensor and no network library with it."""
    heavy = ("torch", "ray", "grpc", "fastapi", "numpy")
    code = f"import sys, attend.model.engine.{name}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]\n" == found.stdout


def test_nobody_is_admitted_in_a_step_that_preempted():
    """The blocks just taken away must not be given back to the one they were taken from."""
    scheduler, runner = machine(num_blocks=5, block_size=1)
    scheduler.add(ask("a", [1, 2], max_tokens=3))
    scheduler.add(ask("b", [1, 2, 3], max_tokens=2))
    assert [("a", 0, 2), ("b", 0, 3)] == step(scheduler, runner)[0]
    assert [("a", 2, 1)] == step(scheduler, runner)[0]
    assert 1 == scheduler.num_waiting


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"), [(8, 1, "prompt"), (9, 1, "prompt"), (7, 2, "max_tokens"), (1, 8, "max_tokens")]
)
def test_what_can_never_fit_is_refused_by_name(prompt, max_tokens, field):
    with pytest.raises(ContextTooLong, match=f"^{field}: .*maximum context length is 8 tokens") as caught:
        check_fits(ask("a", range(prompt), max_tokens), 8)
    assert field == caught.value.field


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequest, match=r"^prompt must hold at least one token") as caught:
        check_fits(ask("a", []), 8)
    assert "prompt" == caught.value.field


@pytest.mark.parametrize(("prompt", "max_tokens"), [(0, 4), (8, 1), (1, 8)])
def test_the_scheduler_is_given_only_what_has_passed_that_check(prompt, max_tokens):
    """It runs once, where a call comes in: on the step thread an error would end everybody's answers."""
    scheduler, _ = machine(max_model_len=8)
    with pytest.raises(AssertionError, match="can never run"):
        scheduler.add(ask("a", range(prompt), max_tokens))
    assert (0, 0) == (scheduler.num_running, scheduler.num_waiting)


def test_an_id_in_flight_cannot_be_added_again_but_an_ended_one_can():
    scheduler, runner = machine()
    scheduler.add(ask("a", max_tokens=1))
    with pytest.raises(AssertionError, match="in flight already"):
        scheduler.add(ask("a"))
    step(scheduler, runner)
    scheduler.add(ask("a", max_tokens=1))
    assert [("a", 0, 3)] == step(scheduler, runner)[0]


def test_times_are_measured_on_the_injected_clock():
    clock = Clock(100.0)
    engine = fake_engine(clock)
    engine.add(ask("a", max_tokens=2))
    clock.now = 103.0
    engine.step()
    clock.now = 110.0
    [last] = engine.step()
    assert (3.0, 0.0, 7.0) == (last.times.queue, last.times.prefill, last.times.decode)


def test_a_request_that_never_ran_spent_all_its_time_in_the_queue():
    clock = Clock(5.0)
    engine = fake_engine(clock)
    engine.add(ask("a"))
    clock.now = 9.0
    times = engine.abort("a", FinishReason.DEADLINE).times
    assert (4.0, 0.0, 0.0) == (times.queue, times.prefill, times.decode)


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    scheduler, runner = machine(max_batch_tokens=4)
    scheduler.add(ask("a", range(10), max_tokens=2))
    steps = [step(scheduler, runner) for _ in range(4)]
    assert [[("a", 0, 4)], [("a", 4, 4)], [("a", 8, 2)], [("a", 10, 1)]] == [plan for plan, _ in steps]
    assert [0, 0, 1, 1] == [len(outputs) for _, outputs in steps]


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_is_exact(max_tokens):
    request = ask("a", max_tokens=max_tokens)
    tokens, reason = answers(fake_engine(), [request])["a"]
    assert (max_tokens, FinishReason.LENGTH) == (len(tokens), reason)
