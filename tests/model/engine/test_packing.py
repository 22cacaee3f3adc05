"""A step crosses to other ranks as bytes: what they compute of it is what rank 0 computes."""

from array import array

import numpy as np

from attend.model.engine.plan import PromptScores, StepInput
from attend.model.engine.ranks import TOLD, pack_step, unpack_step
from attend.model.params import DecodingParams, SamplingParams
from attend.model.sampling_plan import Draw, SamplingPlan, TextCounts


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
    """With requests that have odd names; how they draw stays on rank 0."""
    there = step([TOLD] * 2, prompt_scores=[PromptScores("s", 1, [6, 7], 2)], request_ids=["\n", "é"], draw_ids=["\n", "é"])
    assert unpack_step(pack_step(there)) == there


def test_a_step_whose_tokens_are_pending_and_one_without_requests_come_back():
    for there in (step([], early=True, pending={"a": 0}), StepInput()):
        assert unpack_step(pack_step(there)) == there


def test_neither_texts_nor_masks_nor_hidden_sums_are_sent():
    mask, text = np.ones(1 << 17, np.bool_), TextCounts(*(array("q", [0] * 9999) for _ in range(3)))
    limited = SamplingPlan(SamplingParams(top_p=0.5), seed=1, decoding=DecodingParams(repetition_penalty=1.5))
    sent = pack_step(step([Draw(limited, 5, (1, 2), text, mask)] * 2))
    assert len(sent) < 500
    assert unpack_step(sent).draws == [TOLD] * 2
