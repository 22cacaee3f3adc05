"""The completions that a model card is made of: the engine's greedy tokens, prompt by prompt."""

import asyncio

import pytest

from attend.model.__main__ import Completion, complete_prompts
from attend.model.errors import EngineFailed
from attend.model.params import SamplingParams
from tests.fakes import INFO, FakeEngine, successor

END = INFO.eos_token_ids[0]


def run(engine: FakeEngine, prompts: list[list[int]], max_tokens: int = 5) -> list[Completion]:
    return asyncio.run(complete_prompts(engine, prompts, max_tokens))


def test_each_prompt_has_its_own_completion():
    """In the order of the prompts, all of their tokens, however many come at a time."""
    for burst in (1, 3):
        done = run(FakeEngine(burst=burst), [[10], [40, 50], [70]])
        assert [[11, 12, 13, 14, 15], [51, 52, 53, 54, 55], [71, 72, 73, 74, 75]] == [one.token_ids for one in done]
        assert not any(one.ended_by_model for one in done)


def test_a_text_that_the_model_ends_is_told_from_one_that_was_cut_off():
    def rule(request):
        return END if request.prompt[0] == 10 and len(request.output) == 2 else successor(request)

    ended, cut_off = run(FakeEngine(rule), [[10], [40]])
    assert (ended.ended_by_model, cut_off.ended_by_model) == (True, False)
    assert [11, 12, END] == ended.token_ids


def test_completions_are_greedy():
    engine = FakeEngine()
    run(engine, [[1], [2]])
    assert [SamplingParams(temperature=0)] * 2 == [request.sampling for request in engine.requests]


def test_a_completion_that_ends_with_an_error_is_none():
    engine = FakeEngine()
    engine.broken_after = 2
    with pytest.raises(EngineFailed, match="prompt 0"):
        run(engine, [[10]])
