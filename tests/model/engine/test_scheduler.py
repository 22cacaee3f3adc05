"""The scheduler's laws one by one: budget, age, chunks, preemption, refusal, abort, and exactly one end."""

import subprocess
import sys

import pytest

from attend.model.engine.plan import Plan, StepResult
from attend.model.engine.request import FinishReason, Output, check_fits
from attend.model.engine.scheduler import Scheduler
from attend.model.errors import ContextTooLong, InvalidRequest
from tests.model.engine.machines import Clock, FakeRunner, answers, ask, fake_answer, fake_engine, given, sizes, told


def machine(**changes) -> tuple[Scheduler, FakeRunner]:
    config = sizes(**changes)
    return Scheduler(config, Clock()), FakeRunner(config.block_size)


def shown(plan: Plan) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.count) for item in plan.scheduled_tokens]


def step(scheduler: Scheduler, runner: FakeRunner) -> tuple[list[tuple[str, int, int]], list[Output]]:
    plan = scheduler.schedule()
    return shown(plan), scheduler.commit(plan, runner.submit(given(plan)).result())


def plans(scheduler: Scheduler, runner: FakeRunner, count: int) -> list[list[tuple[str, int, int]]]:
    return [step(scheduler, runner)[0] for _ in range(count)]


def free(scheduler: Scheduler) -> bool:
    scheduler.check_integrity()
    return scheduler.tables.num_free == scheduler.config.num_blocks


def test_a_requests_blocks_are_one_piece_of_memory_that_a_step_copies_at_once():
    scheduler, runner = machine(num_blocks=9, block_size=1, max_model_len=9, prefix_caching=True)
    requests = [ask("old", [1, 2], 7), ask("young", [1, 2, 3], 6)]
    for request in requests:
        scheduler.add(request)
    while scheduler.num_running + scheduler.num_waiting:
        step(scheduler, runner)
        assert all("q" == memoryview(table).format for request in requests for table in request.tables)
    assert requests[1].num_preemptions


@pytest.mark.parametrize("name", ["request", "blocks", "scheduler"])
def test_the_scheduler_is_plain_python(name):
    """Imported into a fresh interpreter, it brings no tensor and no network library with it."""
    heavy = ("torch", "ray", "grpc", "fastapi", "numpy")
    code = f"import sys, attend.model.engine.{name}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]\n" == found.stdout


def test_without_requests_the_plan_is_empty():
    scheduler, _ = machine()
    assert Plan(()) == scheduler.schedule()
    assert [] == scheduler.commit(Plan(()), StepResult())


def test_a_request_computes_its_prompt_at_once_and_then_token_by_token():
    scheduler, runner = machine()
    scheduler.add(ask("a", [5, 6, 7], max_tokens=3))
    assert [[("a", 0, 3)], [("a", 3, 1)], [("a", 4, 1)], []] == [*plans(scheduler, runner, 3), shown(scheduler.schedule())]
    assert free(scheduler)


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    scheduler, runner = machine(max_batch_tokens=4)
    scheduler.add(ask("a", range(10), max_tokens=2))
    steps = [step(scheduler, runner) for _ in range(4)]
    assert [[("a", 0, 4)], [("a", 4, 4)], [("a", 8, 2)], [("a", 10, 1)]] == [plan for plan, _ in steps]
    assert [0, 0, 1, 1] == [len(outputs) for _, outputs in steps]


def test_running_requests_decode_before_newcomers_prefill():
    scheduler, runner = machine(max_batch_tokens=5)
    scheduler.add(ask("a", [1, 2], max_tokens=9))
    step(scheduler, runner)
    scheduler.add(ask("b", range(8), max_tokens=9))
    assert [[("a", 2, 1), ("b", 0, 4)], [("a", 3, 1), ("b", 4, 4)], [("a", 4, 1), ("b", 8, 1)]] == plans(scheduler, runner, 3)


def test_older_requests_come_first_and_the_budget_is_never_exceeded():
    scheduler, _ = machine(max_batch_tokens=7)
    for name in "abcd":
        scheduler.add(ask(name, [1, 2, 3]))
    plan = scheduler.schedule()
    assert [("a", 0, 3), ("b", 0, 3), ("c", 0, 1)] == shown(plan)
    assert 7 == plan.num_tokens


def test_no_more_requests_run_than_a_batch_may_hold():
    scheduler, runner = machine(max_batch_requests=2)
    for name in "abc":
        scheduler.add(ask(name, max_tokens=2))
    assert [("a", 0, 3), ("b", 0, 3)] == step(scheduler, runner)[0]
    assert (2, 1) == (scheduler.num_running, scheduler.num_waiting)
    assert [[("a", 3, 1), ("b", 3, 1)], [("c", 0, 3)]] == plans(scheduler, runner, 2)


def test_a_large_request_at_the_head_of_the_queue_is_not_overtaken():
    """Overtaking would let a stream of small requests starve it."""
    scheduler, runner = machine(num_blocks=4, block_size=1)
    scheduler.add(ask("a", [1, 2], max_tokens=1))
    scheduler.schedule()
    scheduler.add(ask("large", [1, 2, 3], max_tokens=1))
    scheduler.add(ask("small", [1], max_tokens=1))
    assert [("a", 0, 2)] == step(scheduler, runner)[0]
    assert [("large", 0, 3), ("small", 0, 1)] == step(scheduler, runner)[0]


def test_preemption_takes_the_youngest_and_puts_it_at_the_head_of_the_queue():
    scheduler, runner = machine(num_blocks=6, block_size=1)
    for name in "abc":
        scheduler.add(ask(name, [1], max_tokens=5))
    for _ in range(2):
        assert list("abc") == [name for name, _, _ in step(scheduler, runner)[0]]
    scheduler.add(ask("d", [1], max_tokens=5))
    assert [("a", 2, 1), ("b", 2, 1)] == step(scheduler, runner)[0]  # c gave its two blocks
    assert (2, 2, 1) == (scheduler.num_running, scheduler.num_waiting, scheduler.num_preemptions)
    assert [("a", 3, 1)] == step(scheduler, runner)[0]  # and b its three
    assert [("a", 4, 1)] == step(scheduler, runner)[0]
    assert [("b", 0, 4)] == step(scheduler, runner)[0]  # all that b had goes at once, and b before c before d
    assert [[("b", 4, 1)], [("c", 0, 3), ("d", 0, 1)]] == plans(scheduler, runner, 2)


def test_a_preempted_request_resumes_with_the_same_tokens():
    requests = [ask(name, [at], max_tokens=7, seed=at) for at, name in enumerate("abcd")]
    engine = fake_engine(num_blocks=8, block_size=1)
    assert {request.request_id: fake_answer(request) for request in requests} == answers(engine, requests)
    assert engine.scheduler.num_preemptions >= 3
    assert [0] == [request.num_preemptions for request in requests[:1]]


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


def test_the_largest_request_that_fits_runs_to_its_end_in_a_pool_of_its_size():
    request = ask("a", range(5), max_tokens=7)
    engine = fake_engine(num_blocks=6, block_size=2, max_batch_tokens=1)
    assert {"a": fake_answer(request)} == answers(engine, [request])


def test_an_id_in_flight_cannot_be_added_again_but_an_ended_one_can():
    scheduler, runner = machine()
    scheduler.add(ask("a", max_tokens=1))
    with pytest.raises(AssertionError, match="in flight already"):
        scheduler.add(ask("a"))
    step(scheduler, runner)
    scheduler.add(ask("a", max_tokens=1))
    assert [("a", 0, 3)] == step(scheduler, runner)[0]


def check_abort(scheduler: Scheduler, reason: FinishReason = FinishReason.ABORT) -> None:
    """One terminal output, without tokens; then nobody knows the request, and its blocks are free."""
    output = scheduler.abort("a", reason)
    assert ("a", (), reason, None) == (output.request_id, output.token_ids, output.finish_reason, output.error)
    assert None is scheduler.abort("a", reason)
    assert free(scheduler)
    assert [] == shown(scheduler.schedule())


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.STOP])
def test_an_abort_ends_a_waiting_request(reason):
    scheduler, _ = machine()
    scheduler.add(ask("a"))
    check_abort(scheduler, reason)


def test_an_abort_ends_a_running_request():
    scheduler, runner = machine()
    scheduler.add(ask("a"))
    step(scheduler, runner)
    check_abort(scheduler)


def test_an_abort_ends_a_request_in_the_middle_of_its_prompt():
    scheduler, runner = machine(max_batch_tokens=2)
    scheduler.add(ask("a", range(7)))
    step(scheduler, runner)
    check_abort(scheduler)


def test_an_abort_ends_a_preempted_request():
    scheduler, runner = machine(num_blocks=4, block_size=1)
    scheduler.add(ask("old", [1], max_tokens=3))
    scheduler.add(ask("a", [1], max_tokens=3))
    plans(scheduler, runner, 3)
    assert 1 == scheduler.num_preemptions
    assert FinishReason.ABORT is scheduler.abort("a").finish_reason
    assert free(scheduler)


@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_between_schedule_and_commit_lets_no_token_and_no_error_follow(fails):
    scheduler, runner = machine()
    for name in "ab":
        scheduler.add(ask(name))
    plan = scheduler.schedule()
    pending = runner.submit(given(plan))
    assert FinishReason.ABORT is scheduler.abort("a").finish_reason
    result = StepResult(errors={"a": "late", "b": "late"}) if fails else pending.result()
    assert ["b"] == [output.request_id for output in scheduler.commit(plan, result)]


def test_an_unknown_id_is_ignored():
    scheduler, _ = machine()
    assert None is scheduler.abort("nobody")


def test_an_error_ends_its_request_alone_and_carries_its_reason():
    scheduler, runner = machine()
    runner.broken.add("a")
    for name in "ab":
        scheduler.add(ask(name))
    _, (first, second) = step(scheduler, runner)
    assert ("a", (), FinishReason.ERROR, "no finite score") == (
        first.request_id,
        first.token_ids,
        first.finish_reason,
        first.error,
    )
    assert ("b", None) == (second.request_id, second.finish_reason)
    assert [("b", 3, 1)] == step(scheduler, runner)[0]


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_is_exact(max_tokens):
    request = ask("a", max_tokens=max_tokens)
    tokens, reason = answers(fake_engine(), [request])["a"]
    assert (max_tokens, FinishReason.LENGTH) == (len(tokens), reason)


def undisturbed(count: int = 12) -> list[int]:
    return fake_answer(ask("a", max_tokens=count))[0]


def test_a_stop_token_ends_the_request_and_is_its_last_token():
    free_run = undisturbed()
    stop = free_run[4]
    tokens, reason = answers(fake_engine(), [ask("a", max_tokens=12, stop_token_ids=frozenset({stop}))])["a"]
    assert (free_run[: free_run.index(stop) + 1], FinishReason.STOP) == (tokens, reason)


def test_a_stop_token_in_the_last_place_is_a_stop():
    free_run = undisturbed()
    place = next(at for at, token in enumerate(free_run) if at and token not in free_run[:at])
    request = ask("a", max_tokens=place + 1, stop_token_ids=frozenset({free_run[place]}))
    assert (free_run[: place + 1], FinishReason.STOP) == answers(fake_engine(), [request])["a"]


@pytest.mark.parametrize("fewest", [1, 3, 6])
def test_a_stop_token_counts_only_after_min_tokens(fewest):
    """A scripted model says the stop token each time: token number min_tokens + 1 is the first that may end."""
    scheduler, _ = machine()
    scheduler.add(ask("a", max_tokens=12, min_tokens=fewest, stop_token_ids=frozenset({9})))
    outputs: list[Output] = []
    while scheduler.num_waiting + scheduler.num_running:
        outputs += scheduler.commit(scheduler.schedule(), StepResult(tokens={"a": 9}))
    assert ([9] * (fewest + 1), FinishReason.STOP) == told(outputs)


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


def test_the_integrity_check_sees_a_request_in_two_places():
    scheduler, runner = machine()
    scheduler.add(ask("a"))
    step(scheduler, runner)
    scheduler._waiting.append(scheduler._running[0])
    with pytest.raises(AssertionError):
        scheduler.check_integrity()
