"""In which order a row's parameters act on its scores, and what lies exactly on a border."""

import pytest
import torch

from attend.model.params import DecodingParams, SamplingParams
from attend.model.sampling import apply_top_p, limit_scores, sample
from attend.model.sampling_plan import Draw, SamplingPlan

HALVES = torch.tensor([[0.125, 0.5, 0.25, 0.125]]).log()
"""Probabilities 1/8, 1/2, 1/4, 1/8: float32 holds them and their sums without rounding."""


def kept(scores: torch.Tensor) -> list[int]:
    return scores[0].isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize(("p", "ids"), [(0.5, [1]), (0.75, [1, 2]), (0.875, [0, 1, 2, 3])])
def test_top_p_ends_with_the_token_that_reaches_exactly_p(p, ids):
    assert ids == kept(apply_top_p(HALVES, [p]))


@pytest.mark.parametrize(
    ("params", "at_half", "at_one", "at_two"),
    [
        ({"top_p": 0.7}, [1], [1, 2], [0, 1, 2, 3]),
        ({"min_p": 0.4}, [1], [1, 2], [0, 1, 2, 3]),
        ({"top_p": 0.7, "min_p": 0.4}, [1], [1, 2], [0, 1, 2, 3]),
        ({"top_k": 2, "top_p": 0.7}, [1], [1, 2], [1, 2]),
    ],
    ids=str,
)
def test_temperature_comes_before_the_limits(params, at_half, at_one, at_two):
    """At 0.5 the probabilities are 1/22, 16/22, 4/22, 1/22; at 2 they are 0.18, 0.37, 0.26, 0.18."""
    for temperature, ids in ((0.5, at_half), (1.0, at_one), (2.0, at_two)):
        asked = SamplingParams(temperature=temperature, **params)
        assert ids == kept(limit_scores(HALVES, [asked]))
        draws = [Draw(SamplingPlan(asked, 3), position) for position in range(300)]
        assert set(ids) == set(sample(HALVES.repeat(300, 1), draws).tolist())


@pytest.mark.parametrize(
    ("params", "ids"),
    [
        ({"top_k": 2, "top_p": 0.65}, [1]),  # of 1/2 and 1/4 alone the first has 2/3
        ({"top_k": 2, "top_p": 0.7}, [1, 2]),
        ({"top_p": 0.6, "min_p": 0.5}, [1, 2]),
        ({"top_p": 0.6, "min_p": 0.51}, [1]),
    ],
    ids=str,
)
def test_top_k_comes_before_top_p_and_min_p_is_relative_to_the_best(params, ids):
    assert ids == kept(limit_scores(HALVES, [SamplingParams(**params)]))


def test_changes_of_the_scores_come_before_temperature_and_limits():
    """A bias of ln 4 makes 1/8 as likely as 1/2 was, whatever the temperature: it is divided by it like any score."""
    biased = DecodingParams(logit_bias={0: 1.5})  # above ln 4: 0 becomes the best
    for temperature in (0.25, 1.0, 2.0):
        asked = SamplingParams(temperature=temperature, top_k=1)
        assert [0] == sample(HALVES, [Draw(SamplingPlan(asked, 1, decoding=biased), 0)]).tolist()
    slight = DecodingParams(logit_bias={0: 1.3})  # below it: 1 stays the best, also at a temperature that would weigh it more
    for temperature in (0.25, 1.0, 2.0):
        asked = SamplingParams(temperature=temperature, top_k=1)
        assert [1] == sample(HALVES, [Draw(SamplingPlan(asked, 1, decoding=slight), 0)]).tolist()
