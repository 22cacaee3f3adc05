"""The native draw is that of the plain equation, and keeps exactly the tokens that the plain limits keep."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attend.model import sampling
from attend.model.net.native.drawing import draw_tokens, logprobs
from attend.model.params import DecodingParams, SamplingParams
from attend.model.sampling_plan import MASK_64, Draw, History, SamplingPlan
from tests.conftest import examples
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
        top_p=dice.choice([0.95, 0.5, 0.0, 1 - 1e-7, 1 - 1e-12, 0.9999, 0.3, 1 - dice.random()]),
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
        found = draw_tokens(scores.repeat(len(tokens), 1), draws)
        assert found.tolist() == sampling.sample(scores.repeat(len(tokens), 1), draws).tolist(), plan.params
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
        found = draw_tokens(scores, draws)
        assert torch.equal(found, sampling.sample(scores, draws))
        for first in range(0, 48, 5):
            assert (
                found[first : first + 2].tolist() == draw_tokens(scores[first : first + 2], draws[first : first + 2]).tolist()
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
        for best in (draw_tokens, sampling.sample):
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


def random_decoding(dice, size):
    """Changes of scores, each of which may be absent."""
    some = [dice.randrange(size) for _ in range(dice.randrange(6))]
    return DecodingParams(
        presence_penalty=dice.choice([0, 0, 1.7, -0.3]),
        frequency_penalty=dice.choice([0, 0, 0.1, -2.0, 1.9]),
        repetition_penalty=dice.choice([1, 1, 1.3, 0.7, 1e-30]),
        logit_bias={token: dice.choice([-100.0, 100.0, 0.3, -1.7]) for token in some},
        allowed_token_ids=tuple({dice.randrange(size) for _ in range(dice.choice([1, 5, size]))})
        if dice.random() < 0.3
        else (),
    )


def random_draw(dice, numbers, size):
    """A draw whose scores are changed in some ways, or in none."""
    plan = SamplingPlan(random_limits(dice, size), seed=dice.randrange(1 << 60), decoding=random_decoding(dice, size))
    if dice.random() < 0.3:
        plan = SamplingPlan(SamplingParams(temperature=dice.choice([0, 0.7])), seed=plan.seed, decoding=plan.decoding)
    banned = tuple(dice.randrange(2 * size) for _ in range(dice.choice([0, 0, 3])))
    prompt, output = ([dice.randrange(size) for _ in range(dice.randrange(20))] for _ in range(2))
    text = History().follow(prompt, output) if dice.random() < 0.8 else None
    mask = (torch.rand(size, generator=numbers) < dice.choice([0.02, 0.5, 1])).numpy() if dice.random() < 0.3 else None
    return Draw(plan, dice.randrange(1000), banned, text, mask)


def test_scores_are_changed_as_the_plain_changes_have_it(variant):
    """A change by one bit shows where a score is a border, or the best of equals: scores are coarse."""
    dice, numbers, excluded = random.Random(3), torch.Generator().manual_seed(3), 0
    for _ in range(examples(100)):
        scores = torch.stack([random_scores(dice, numbers).repeat(5000)[:40] for _ in range(8)])
        draws = [random_draw(dice, numbers, 40) for _ in range(8)]
        before = scores.clone()
        found = draw_tokens(scores, draws)
        assert found.tolist() == sampling.sample(scores, draws).tolist()
        assert torch.equal(scores, before), "log probabilities are made of the model's own scores"
        excluded += int((found == sampling.EXCLUDED).sum())
    assert excluded > examples(100) // 5


def test_log_probabilities_are_those_of_the_plain_softmax(variant):
    dice, numbers = random.Random(4), torch.Generator().manual_seed(4)
    for _ in range(examples(200)):
        scores = random_scores(dice, numbers)
        size = len(scores)
        rows = torch.stack([scores, scores.flip(0), scores * 2])
        tokens, top = [dice.randrange(size) for _ in range(3)], [dice.choice([0, 1, 5, 20, size + 1]) for _ in range(3)]
        others = [tuple(dice.randrange(size) for _ in range(dice.randrange(4))) for _ in range(3)]
        found, wanted = logprobs(rows, tokens, top, others), sampling.row_logprobs(rows, tokens, top, others)
        exact = rows.double().log_softmax(dim=-1)
        for row, ((value, best), (_, likeliest)) in enumerate(zip(found, wanted, strict=True)):
            pairs = [(tokens[row], value), *best]
            assert [value for _, value in pairs] == pytest.approx(
                [float(exact[row, token]) for token, _ in pairs], abs=1e-6, rel=1e-6
            )
            assert [value for _, value in best] == pytest.approx([value for _, value in likeliest], abs=2e-6, rel=2e-6)
            kept = best[: len(best) - len(others[row])]
            by_score = sorted(range(size), key=lambda token: (-float(rows[row, token]), token))
            assert [token for token, _ in kept] == by_score[: len(kept)]
