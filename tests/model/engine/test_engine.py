"""The engine over a real decoder: whatever shares, splits or interrupts its steps, a request gets the tokens it gets alone."""

import random
from collections import OrderedDict

import pytest
import torch

from attend.model.engine.request import EngineStats, FinishReason, StepReport
from attend.model.errors import OutOfMemory
from attend.model.net.transformer import Decoder
from attend.model.params import DecodingParams, SamplingParams
from tests.model.checkpoints import VOCAB, tiny_config, tiny_decoder
from tests.model.engine.machines import Clock, answers, ask, fake_answer, fake_engine, run, tiny_engine, told
from tests.model.engine.test_grammars import Multiples

POISON = 95
"""A token whose embedding is NaN: it spoils the rows that see it."""
WAYS = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0},
    {"temperature": 2.0, "min_p": 0.05, "top_k": 40},
    {"temperature": 0.9},
]


@pytest.fixture(scope="module")
def net() -> Decoder:
    """A random decoder of Llama's shape, with a head of its own so that a spoilt embedding spoils no other row."""
    decoder = tiny_decoder(tiny_config(tied_head=False))
    with torch.no_grad():
        decoder.embedding.tokens.weight[POISON] = torch.nan
    return decoder


def crowd(max_tokens: int = 9) -> list:
    """Requests of every kind: greedy and drawn, short and long prompts, with and without stop tokens."""
    dice = random.Random(4)
    return [
        ask(
            f"r{at}",
            dice.choices(range(POISON), k=1 + 5 * at % 23),
            max_tokens,
            sampling=SamplingParams(**way),
            seed=dice.randint(-(2**63), 2**63 - 1),
            answer_index=at % 3,
            stop_token_ids=frozenset(dice.sample(range(POISON), 3 * at)),
            min_tokens=at % 4,
        )
        for at, way in enumerate(WAYS)
    ]


@pytest.fixture(scope="module")
def alone(net):
    """What each of the crowd gets from an engine of its own, whole prompt first."""
    return {name: told for request in crowd() for name, told in answers(tiny_engine(net), [request]).items()}


def test_batched_requests_get_the_tokens_they_get_alone(net, alone):
    """And the crowd ends in both ways, or the comparison would say little."""
    assert alone == answers(tiny_engine(net), crowd())
    assert {FinishReason.STOP, FinishReason.LENGTH} == {reason for _, reason in alone.values()}


@pytest.mark.parametrize("changes", [{}, {"draft_tokens": 40, "max_batch_requests": 2}, {"async_scheduling": True}], ids=str)
def test_what_a_model_bans_is_drawn_in_no_way_and_the_rest_as_if_it_alone_were_allowed(net, changes):
    """Greedy or drawn, guessed or not, in steps that are submitted early, with other bans, and under a grammar."""
    more = [{}, {"bad_words": [[7], [8, 9]]}, {"min_tokens": 5, "stop_token_ids": frozenset(range(40))}, {"logprobs": 1}]
    kinds = [{"sampling": SamplingParams(**way), "grammar": None} | each for way in WAYS for each in more]
    kinds += [{"sampling": SamplingParams(**way), "grammar": Multiples} for way in WAYS]
    banned, allowed = range(1, VOCAB, 3), [token for token in range(VOCAB) if token % 3 != 1]

    def draw(**fields):
        made = [each | {"grammar": each["grammar"] and each["grammar"]()} | fields for each in kinds]
        requests = [ask(f"{at}", [7, 8, 9, 7, 8, 9, at], 20, seed=at, **each) for at, each in enumerate(made)]
        engine = tiny_engine(net, num_blocks=999, **changes)
        return answers(engine, requests), engine

    found, engine = draw(banned_tokens=(*banned, 10**6))
    assert found == draw(decoding=DecodingParams(allowed_token_ids=tuple(allowed)))[0]
    assert not {token for tokens, _ in found.values() for token in tokens} & {*banned}
    assert bool(engine.stats().num_accepted) == ("draft_tokens" in changes)


def test_a_row_that_is_not_a_number_fails_alone(net, alone):
    """Its neighbours in the same steps, and those who get its blocks after it, get the tokens they get alone."""
    engine = tiny_engine(net, num_blocks=42, block_size=2)
    bad = ask("bad", [3, POISON, 4], 5)
    found = run(engine, [bad, *crowd()])
    [last] = found.pop("bad")
    assert ((), FinishReason.ERROR) == (last.token_ids, last.finish_reason)
    assert "not finite" in last.error
    assert alone == {name: told(outputs) for name, outputs in found.items()}
    assert alone == answers(engine, crowd())  # over blocks that the bad one has spoilt


def raising(engine, when, error=RuntimeError):
    """Have each step of the engine raise for which `when(step)` is true; returns the sizes of the steps that did."""
    submit, raised = engine.runner.submit, []

    def failing(step):
        if when(step):
            raised.append(len(step.request_ids))
            raise error("a step fell over")
        return submit(step)

    engine.runner.submit = failing
    return raised


@pytest.mark.parametrize("early", [False, True], ids=["waiting", "early"])
@pytest.mark.parametrize("changes", [{}, {"prefix_caching": True, "block_size": 2}, {"max_batch_tokens": 4}], ids=str)
def test_a_request_that_every_step_falls_over_ends_alone(net, alone, changes, early):
    """Its neighbours in the same steps get the tokens that they get alone."""
    engine = tiny_engine(net, async_scheduling=early, **changes)
    raised = raising(engine, lambda step: "bad" in step.request_ids)
    requests = crowd()
    found = run(engine, [*requests[:3], ask("bad", [3, 4], 5), *requests[3:]])
    [last] = found.pop("bad")
    assert ((), FinishReason.ERROR, "the step failed: RuntimeError") == (last.token_ids, last.finish_reason, last.error)
    assert alone == {name: told(outputs) for name, outputs in found.items()}
    assert raised[-1] == 1


def test_one_bad_request_of_many_costs_the_others_a_few_parts_of_steps():
    engine, parts = fake_engine(max_batch_requests=64, num_blocks=256), []
    raising(engine, lambda step: parts.append(step) or any("r40" == name for name in step.request_ids))
    found = run(engine, [ask(f"r{at}", [at, 2], 1) for at in range(64)])
    assert ["r40"] == [name for name, outputs in found.items() if outputs[-1].finish_reason is FinishReason.ERROR]
    assert len(parts) == 1 + 2 * 6, "halves of 64"


def test_a_request_that_fails_later_keeps_its_tokens_and_ends_alone(net, alone):
    engine = tiny_engine(net, async_scheduling=True)
    raising(engine, lambda step: any(n == "bad" and at >= 5 for n, at in zip(step.request_ids, step.starts, strict=True)))
    found = run(engine, [*crowd(), ask("bad", [3, 4], 9)])
    tokens, reason = told(found.pop("bad"))
    assert (reason, tokens) == (FinishReason.ERROR, answers(tiny_engine(net), [ask("bad", [3, 4], 9)])["bad"][0][:4])
    assert alone == {name: told(outputs) for name, outputs in found.items()}


@pytest.mark.parametrize("early", [False, True], ids=["waiting", "early"])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_step_that_raises_once_ends_nobody(net, alone, early, at):
    engine, steps = tiny_engine(net, async_scheduling=early), []
    raising(engine, lambda step: not steps.append(step) and len(steps) == at + 1)
    found = answers(engine, crowd())
    assert len(steps[at].request_ids) > 1
    assert alone == found


@pytest.mark.parametrize("error", [OutOfMemory, RuntimeError], ids=["memory", "another"])
def test_a_step_without_memory_is_computed_in_smaller_parts(net, alone, error):
    """From then on all steps are smaller. Another error of so large a step ends its request."""
    engine = tiny_engine(net, max_batch_requests=2, max_batch_tokens=64)
    raising(engine, lambda step: step.num_tokens > 7, error)
    long = ask("long", [1 + at % 9 for at in range(40)])
    found = answers(engine, [*crowd(), long])
    whole = answers(tiny_engine(net), [ask("long", long.prompt)])
    if error is RuntimeError:
        assert found.pop("long")[1] is FinishReason.ERROR
        assert engine.scheduler.budget == 64
    else:
        assert found == alone | whole
        assert engine.scheduler.budget == 4


class Tensors:
    """What a step holds while it is computed; `alive` counts them."""

    alive = 0

    def __init__(self):
        Tensors.alive += 1

    def __del__(self):
        Tensors.alive -= 1


def test_a_failed_step_holds_nothing_while_it_is_computed_again():
    """Its tensors would take the memory for want of which it failed, and those of each failed part too."""
    engine, alive = fake_engine(max_batch_requests=4, max_batch_tokens=64), []
    submit = engine.runner.submit

    def failing(step):
        held = Tensors()
        alive.append(Tensors.alive)
        if step.num_tokens > 4:
            raise OutOfMemory(f"no room beside {held}") from RuntimeError("out of memory")
        return submit(step)

    engine.runner.submit = failing
    requests = [ask(name, [1, 2, 3]) for name in "abcd"]
    assert answers(engine, requests) == {request.request_id: fake_answer(request) for request in requests}
    assert set(alive) == {1}


def test_a_request_that_fails_among_early_steps_sends_nobody_back_to_its_first_token(net):
    engine = tiny_engine(net, prefix_caching=True, block_size=2, async_scheduling=True)
    requests = [ask(name, [at + 1, 2, 3], 12) for at, name in enumerate("abc")]
    for request in [*requests, ask("bad", [7, 8], 12)]:
        engine.add(request)
    for _ in range(6):
        engine.step()
    raising(engine, lambda step: "bad" in step.request_ids)
    while engine.has_work:
        engine.step()
    assert [request.num_preemptions for request in requests] == [0, 0, 0]


def test_a_step_reports_its_seconds_requests_and_tokens():
    clock = Clock()
    engine, reports = fake_engine(clock, max_batch_tokens=6), []
    engine.observer = reports.append
    submit = engine.runner.submit

    def slow(plan):
        clock.now += 0.25
        return submit(plan)

    engine.runner.submit = slow
    run(engine, [ask("a", [1, 2, 3, 4], 2), ask("b", [1, 2, 3], 2)])
    assert [StepReport(0.25, 2, 6, 1, 0), StepReport(0.25, 2, 2, 2, 1), StepReport(0.25, 1, 1, 1, 1)] == reports


def test_guesses_are_no_tokens_of_a_report():
    request = ask("a", [1], 60, seed=2)
    engine, reports = fake_engine(draft_tokens=15), []
    engine.observer = reports.append
    assert {"a": fake_answer(ask("a", [1], 60, seed=2))} == answers(engine, [request])
    assert {1} == {report.num_tokens for report in reports}
    assert 60 == sum(report.num_drawn for report in reports) > len(reports)


def test_an_idle_step_does_and_reports_nothing():
    engine, reports = fake_engine(), []
    engine.observer = reports.append
    assert [] == engine.step()
    assert [] == reports
    assert [] == engine.runner.plans


def test_stats_count_requests_free_blocks_and_preemptions():
    engine = fake_engine(num_blocks=4, block_size=1, max_batch_requests=2)
    assert EngineStats(0, 0, 4, 0) == engine.stats()
    for name in "abc":
        engine.add(ask(name, [1], max_tokens=3))
    assert EngineStats(0, 3, 4, 0) == engine.stats()
    engine.step()
    assert EngineStats(2, 1, 2, 0) == engine.stats()
    engine.step()
    engine.step()
    assert EngineStats(0, 2, 4, 1) == engine.stats()


def test_going_idle_checks_the_books():
    engine = fake_engine()
    engine.add(ask("a", max_tokens=1))
    engine.scheduler.tables.groups[0].pool._free.popitem()
    with pytest.raises(AssertionError, match="lost or doubled"):
        engine.step()


class Uncounted(OrderedDict):
    """Blocks that nobody may go through one by one."""

    def __iter__(self):
        raise AssertionError("a step went through all blocks of the pool")


def test_going_idle_costs_the_same_however_large_the_pool_is():
    engine = fake_engine()
    engine.scheduler.tables.groups[0].pool._free = Uncounted(engine.scheduler.tables.groups[0].pool._free)
    engine.add(ask("a", max_tokens=1))
    engine.step()
    assert not engine.has_work
