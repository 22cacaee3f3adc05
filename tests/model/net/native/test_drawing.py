"""The native draw is that of the plain equation, and keeps exactly the tokens that the plain limits keep."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attend.model import sampling
from attend.model.net.native.decoder import best_tokens
from attend.model.params import SamplingParams
from attend.model.sampling_plan import MASK_64, Draw, SamplingPlan
from tests.model.net.native.test_native import needs_library
from tests.model.test_sampling import key_of

pytestmark = [needs_library, pytest.mark.by_loops("amx")]
GOLDEN = 0x9E3779B97F4A7C15


def drawn(at, **params):
    return Draw(SamplingPlan(SamplingParams(**params), seed=at), at)


def favouring(plan, token):
    """A draw in which this token has the largest noise there is."""
    key = key_of(MASK_64) ^ (token * GOLDEN & MASK_64)
    return Draw(plan, plan.key ^ (key_of(key) - GOLDEN & MASK_64))


def random_scores(dice, numbers):
    """A row: of any size, flat or peaked, with ties, with masked tokens, with one that has nearly all the mass."""
    size = dice.choice([1, 2, 15, 16, 17, 100, 1000, 5000])
    scores = torch.randn(size, generator=numbers) * dice.choice([0, 0.01, 0.3, 1, 3, 8])
    if dice.random() < 0.3:
        scores = (scores * 4).round() / 4
    if dice.random() < 0.3:
        scores[torch.rand(size, generator=numbers) < dice.choice([0.1, 0.9, 0.999])] = -torch.inf
    if dice.random() < 0.2:
        scores[dice.randrange(size)] = scores.max() + dice.choice([0, 1, 5, 30])
    if not scores.isfinite().any():
        scores[0] = 0
    return scores


def random_limits(dice, size):
    """Limits of which at least one may leave something out."""
    return SamplingParams(
        temperature=dice.choice([0.7, 1, 2, 0.1, 1e-30, 1e-45]),
        top_k=dice.choice([0, 0, 1, 2, 20, size // 2, size - 1, size, size + 1, 2**62]),
        top_p=dice.choice([0.95, 0.5, 1e-9, 1 - 1e-7, 1 - 1e-12, 0.9999, 0.3, 1 - dice.random()]),
        min_p=dice.choice([0, 0, 0, 1.0, 0.05, 0.5, 1e-30, 5e-324, dice.random()]),
    )


def test_the_least_that_limits_keep_and_the_best_that_they_drop_are_those_of_the_plain_limits(variant):
    """Each of the two is drawn if it is kept: its noise is the largest."""
    dice, numbers, told = random.Random(1), torch.Generator().manual_seed(1), {True: 0, False: 0}
    for _ in range(200):
        scores = random_scores(dice, numbers)
        plan = SamplingPlan(random_limits(dice, len(scores)), seed=dice.randrange(1 << 60))
        kept = sampling.limit_scores(scores[None], [plan.params])[0].isfinite()
        tokens = [int(torch.where(kept, scores, torch.inf).argmin()), dice.randrange(len(scores))]
        if not kept.all():
            tokens.append(int(torch.where(kept, -torch.inf, scores).argmax()))
        draws = [favouring(plan, token) for token in tokens]
        found = best_tokens(scores.repeat(len(tokens), 1), draws)
        assert found.tolist() == sampling.best_tokens(scores.repeat(len(tokens), 1), draws).tolist(), plan.params
        for token, one in zip(tokens, found.tolist(), strict=True):
            told[bool(kept[token])] += (one == token) == bool(kept[token])
    assert min(told.values()) > 100, "few rows say where the border lies"


def test_a_draw_is_that_of_the_plain_equation_and_does_not_depend_on_the_other_rows(variant):
    """Up to rounding of the noise, which decides none of these."""
    dice = torch.Generator().manual_seed(2)
    limits = [{}, {"top_k": 7}, {}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 4000, "top_p": 0.8, "min_p": 0.01}]
    for size in (1, 15, 16, 17, 1000, 8192):
        scores = torch.randn(48, size, generator=dice) * 3
        scores[torch.rand(scores.shape, generator=dice) < 0.3] = -torch.inf
        scores[:, 0] = 0.0
        draws = [drawn(at, temperature=[0.0, 1.0, 0.3, 2.0][at % 4], **limits[at // 4 % 6]) for at in range(48)]
        found = best_tokens(scores, draws)
        assert torch.equal(found, sampling.best_tokens(scores, draws))
        for first in range(0, 48, 5):
            assert (
                found[first : first + 2].tolist() == best_tokens(scores[first : first + 2], draws[first : first + 2]).tolist()
            )


@pytest.mark.parametrize("limits", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.2}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_without_a_finite_best_score_draws_no_token(variant, temperature, limits):
    for size in (3, 16, 40):
        scores = torch.zeros(5, size)
        scores[0, -1] = torch.nan
        scores[1] = -torch.inf
        scores[2, 1] = torch.inf
        scores[3, :-1] = -torch.inf
        for best in (best_tokens, sampling.best_tokens):
            found = best(scores, [drawn(7, temperature=temperature, **limits)] * 5).tolist()
            assert found[:4] == [-1, -1, -1, size - 1]
            assert 0 <= found[4] < size


class Calls(TorchDispatchMode):
    """The names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_limits_cost_no_call_of_torch():
    scores, calls = torch.randn(4, 500, generator=torch.Generator().manual_seed(1)), []
    for limits in ({}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}):
        with Calls() as seen:
            sampling.sample(scores, [drawn(at, **limits) for at in range(4)], best_tokens)
        calls.append(seen.names)
    assert calls[0] == calls[1]
