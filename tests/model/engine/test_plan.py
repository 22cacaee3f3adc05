"""What a plan says of its step: tokens, rows, who completes, who draws, who is still waiting for it; and what crosses whole."""

import pickle
from array import array
from dataclasses import FrozenInstanceError

import pytest

from attend.model.engine.plan import Plan, ScheduledTokens, StepInput, StepResult
from attend.model.engine.request import FinishReason, Request
from attend.model.params import SamplingParams


def request(name: str = "a", prompt: int = 600, output: int = 0, max_tokens: int = 4) -> Request:
    return Request(name, range(prompt), max_tokens, SamplingParams(temperature=0), output=[0] * output)


def test_an_empty_plan_computes_nothing_and_nobody_waits_for_it():
    plan = Plan(())
    assert (0, 0) == (plan.num_tokens, plan.num_prompt_tokens)
    assert plan.is_over
    assert not plan.has_parts


def test_the_tokens_of_a_step_are_those_of_its_streams_its_prompts_and_its_drafts():
    streams = [ScheduledTokens(request(f"s{at}", 8, 1), 8, 1, draft=(1, 2, 3)) for at in range(3)]
    plan = Plan(
        (*streams, ScheduledTokens(request("p"), 0, 2), ScheduledTokens(request("q"), 8, 3)), num_streams=3, num_drafted=9
    )
    assert (5, 17) == (plan.num_prompt_tokens, plan.num_tokens)
    assert plan.num_tokens == sum(item.num_rows for item in plan.scheduled_tokens)
    assert [4, 4, 4, 2, 3] == [item.num_rows for item in plan.scheduled_tokens]


@pytest.mark.parametrize(
    ("start", "count", "completes"), [(0, 600, True), (300, 300, True), (599, 1, True), (0, 599, False), (300, 1, False)]
)
def test_a_part_completes_a_prompt_if_it_is_the_last_and_only_then_a_token_is_drawn(start, count, completes):
    item = ScheduledTokens(request(), start, count)
    assert completes is item.completes is item.draws


def test_what_was_drawn_already_counts_as_prompt_of_what_follows():
    assert not ScheduledTokens(request(output=3), 0, 600).completes
    assert ScheduledTokens(request(output=3), 0, 603).completes


@pytest.mark.parametrize(("max_tokens", "draws"), [(0, False), (1, True), (2, True)])
def test_a_request_for_no_token_completes_and_draws_none(max_tokens, draws):
    item = ScheduledTokens(request(max_tokens=max_tokens), 0, 600)
    assert item.completes
    assert draws is item.draws


def test_a_token_under_way_lies_beyond_what_is_known_and_a_step_over_it_draws():
    item = ScheduledTokens(request(output=1), 601, 1, input_pending=True)
    assert item.completes
    assert item.draws
    assert not Plan((item,), 1).has_parts
    assert Plan((item, ScheduledTokens(request(), 0, 300)), 1).has_parts
    assert Plan((ScheduledTokens(request(output=1), 600, 1),), 1).has_parts


def test_a_plan_is_over_when_the_last_of_its_requests_has_ended():
    requests = [request(name) for name in "ab"]
    plan = Plan(tuple(ScheduledTokens(each, 0, 600) for each in requests))
    assert not plan.is_over
    requests[1].finish_reason = FinishReason.ABORT
    assert not plan.is_over
    requests[0].finish_reason = FinishReason.STOP
    assert plan.is_over


def test_a_fresh_input_holds_nothing_of_another():
    one, other = StepInput(), StepInput()
    one.counts.append(3)
    one.tokens.append(7)
    one.drafts["a"] = (1,)
    assert (3, 0) == (one.num_tokens, other.num_tokens)
    assert (array("q"), {}) == (other.tokens, other.drafts)
    assert not other.early


def test_an_input_counts_every_row_once_and_crosses_to_another_process_whole():
    step = StepInput(request_ids=["a", "b"], starts=[0, 8], counts=[5, 1], tokens=array("q", [1, 2, 3, 4, 5, 2**40]))
    assert len(step.tokens) == step.num_tokens == 6
    assert step == pickle.loads(pickle.dumps(step))
    result = StepResult(tokens={"a": 3}, errors={"b": "no finite score"}, more={"a": [4]}, put_off={"c": "no room"})
    assert result == pickle.loads(pickle.dumps(result))


@pytest.mark.parametrize("record", [Plan(()), StepResult()], ids=lambda record: type(record).__name__)
def test_what_was_planned_and_what_came_of_it_do_not_change(record):
    name = type(record).__slots__[0]
    with pytest.raises(FrozenInstanceError):
        setattr(record, name, getattr(record, name))


@pytest.mark.parametrize(
    "record", [ScheduledTokens(request(), 0, 1), Plan(()), StepInput(), StepResult()], ids=lambda record: type(record).__name__
)
def test_the_records_of_every_step_are_small(record):
    """No dictionary of its own: one is made for each request in each step."""
    assert not hasattr(record, "__dict__")
