"""A step crosses to other ranks as bytes: what they compute of it is what rank 0 computes."""

from array import array
from dataclasses import replace

import numpy as np

from attend.model.engine.packing import ALL_SCORES, needs_best_alone, pack_step, unpack_step
from attend.model.engine.plan import PromptScores, StepInput
from attend.model.params import DecodingParams, SamplingParams
from attend.model.sampling_plan import Draw, SamplingPlan, TextCounts

GREEDY, WARM = SamplingParams(temperature=0), SamplingParams(temperature=0.7)


def step(draws, **fields):
    """A prompt of three tokens and a stream, in two groups of layers."""
    tables = [[array("q", [1, 2]), array("q", [3])], [array("q", [4]), array("q", [5, 0, 1 << 40])]]
    names = ["r", "s"]
    given = {
        "request_ids": names,
        "tables": tables,
        "starts": [9, 0],
        "counts": [1, 3],
        "versions": [7, 0],
        "tokens": array("q", [8, 5, 6, 7]),
    }
    given |= {"draw_rows": [0, 3][: len(draws)], "draw_ids": names[: len(draws)]}
    return StepInput(draws=draws, **given | fields)


def test_a_step_comes_back_as_it_was():
    """With requests that have odd names, and seeds of 64 bits."""
    draws = [Draw(SamplingPlan(GREEDY, seed=-(1 << 63)), 10), Draw(SamplingPlan(WARM, seed=(1 << 64) - 1, answer_index=3), 4)]
    there = step(draws, prompt_scores=[PromptScores("s", 1, [6, 7], 2)], request_ids=["\n", "é"], draw_ids=["\n", "é"])
    assert unpack_step(pack_step(there)) == there
    assert [draw.plan.key for draw in unpack_step(pack_step(there)).draws] == [draw.plan.key for draw in draws]


def test_a_step_whose_tokens_are_pending_and_one_without_requests_come_back():
    for there in (step([], early=True, pending={"a": 0}), StepInput()):
        assert unpack_step(pack_step(there)) == there


def test_draws_mean_the_same_to_every_rank():
    """True if graphs draw them, and whether their scores are gathered, decides which collectives run."""
    changing = DecodingParams(logit_bias={5: 1.0})
    draws = [
        Draw(
            SamplingPlan(params, 7, decoding=decoding or SamplingPlan(params, 7).decoding, logprobs=logprobs),
            5,
            banned,
            None,
            mask,
        )
        for params in (GREEDY, WARM, replace(GREEDY, top_k=5), replace(WARM, top_k=5))
        for decoding in (None, changing)
        for logprobs in (None, 0, 5)
        for banned in ((), (3,))
        for mask in (None, np.ones(9, np.bool_))
    ]
    grammars = [Draw(SamplingPlan(params, 7, has_grammar=True), 5) for params in (GREEDY, WARM)]
    for draw in draws + grammars:
        [told] = unpack_step(pack_step(step([draw]))).draws
        assert told.takes_the_best == draw.takes_the_best
        assert needs_best_alone(told) == needs_best_alone(draw)
        if needs_best_alone(draw):
            assert (told.plan.params.temperature, told.plan.key, told.position) == (
                draw.plan.params.temperature,
                draw.plan.key,
                5,
            )


def test_neither_texts_nor_masks_nor_hidden_sums_are_sent():
    mask, text = np.ones(1 << 17, np.bool_), TextCounts(*(array("q", [0] * 9999) for _ in range(3)))
    limited = SamplingPlan(SamplingParams(top_p=0.5), seed=1, decoding=DecodingParams(repetition_penalty=1.5))
    sent = pack_step(step([Draw(limited, 5, (1, 2), text, mask)] * 2))
    assert len(sent) < 500
    assert unpack_step(sent).draws == [ALL_SCORES] * 2
