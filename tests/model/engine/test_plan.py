"""What a plan says of its step: tokens, rows, who completes, who draws, who is still waiting for it; and what crosses whole."""

import pytest

from attend.model.engine.plan import Plan, ScheduledTokens, StepInput, StepResult
from attend.model.engine.request import Request
from attend.model.params import SamplingParams


def request(name: str = "a", prompt: int = 600, output: int = 0, max_tokens: int = 4) -> Request:
    return Request(name, range(prompt), max_tokens, SamplingParams(temperature=0), output=[0] * output)


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


def test_a_token_under_way_lies_beyond_what_is_known_and_a_step_over_it_draws():
    item = ScheduledTokens(request(output=1), 601, 1, input_pending=True)
    assert item.completes
    assert item.draws
    assert not Plan((item,), 1).has_parts
    assert Plan((item, ScheduledTokens(request(), 0, 300)), 1).has_parts
    assert Plan((ScheduledTokens(request(output=1), 600, 1),), 1).has_parts


@pytest.mark.parametrize(
    "record", [ScheduledTokens(request(), 0, 1), Plan(()), StepInput(), StepResult()], ids=lambda record: type(record).__name__
)
def test_the_records_of_every_step_are_small(record):
    """No dictionary of its own: one is made for each request in each step."""
    assert not hasattr(record, "__dict__")
