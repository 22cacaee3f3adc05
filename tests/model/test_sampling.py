"""Sampling as rows: each filter keeps exactly its set, draws follow the softmax, and no row sees another."""

import math
from fractions import Fraction

import pytest
import torch

from attend.model.params import SEED_HIGH, SamplingParams
from attend.model.sampling import (
    EXCLUDED,
    UNSCORED,
    apply_min_p,
    apply_temperature,
    apply_top_k,
    apply_top_p,
    gumbel_noise,
    sample,
)
from attend.model.sampling_plan import Draw, SamplingPlan, mix

CPU = torch.device("cpu")
HALVES = torch.tensor([[0.125, 0.5, 0.25, 0.125]]).log()
"""Probabilities 1/8, 1/2, 1/4, 1/8: a clear order, and a tie at its end."""
ROWS = 20000
_MASK = (1 << 64) - 1


def draw(position=0, *, seed=0, answer=0, banned=(), **params):
    return Draw(SamplingPlan(SamplingParams(**params), seed, answer), position, banned)


def row_key(seed: int, answer: int, position: int) -> int:
    return draw(position, seed=seed, answer=answer).key


def key_of(hashed: int) -> int:
    """The row key under which token 0 gets this 64-bit hash: the finalizer of SplitMix64, run backwards."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        value = hashed
        for _ in range(64 // shift):
            value = hashed ^ value >> shift
        hashed = value * pow(factor, -1, 1 << 64) & _MASK
    return hashed


def kept(scores) -> list[int]:
    return scores[0].isfinite().nonzero().flatten().tolist()


def chi_square(tokens, probabilities) -> float:
    counts, expected = torch.bincount(tokens, minlength=len(probabilities)), probabilities * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(("scores", "token"), [([1.0, 3, 3, 2], 1), ([0.0, 0, 0, 0], 0), ([-math.inf, -9, -8, -8], 2)])
def test_greedy_takes_the_best_and_of_equals_the_lowest_id(scores, token):
    assert [token] == sample(torch.tensor([scores]), [draw(temperature=0)]).tolist()


def test_temperature_divides_what_lies_under_the_maximum():
    scores = apply_temperature(torch.tensor([[1.0, 3.0], [1e30, 3e38]]), torch.tensor([[0.5], [2.0]]))
    torch.testing.assert_close(torch.tensor([[-4.0, 0.0], [-1.5e38, 0.0]]), scores)


@pytest.mark.parametrize(
    ("k", "ids"), [(1, [1]), (2, [1, 2]), (3, [0, 1, 2, 3]), (4, [0, 1, 2, 3]), (0, [0, 1, 2, 3]), (-1, [0, 1, 2, 3])]
)
def test_top_k_keeps_the_k_best_and_ties_at_the_border(k, ids):
    assert ids == kept(apply_top_k(HALVES, [k]))


def test_top_p_counts_probability_among_what_is_left():
    """Of 1/2 and 1/4 alone, the first has two thirds: 0.6 is reached without the second."""
    left = HALVES.masked_fill(torch.tensor([True, False, False, True]), -math.inf)
    assert [1] == kept(apply_top_p(left, [0.6]))
    assert [1, 2] == kept(apply_top_p(left, [0.7]))


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.95, 0.9999, 1 - 1e-7, 1 - 1e-12])
def test_top_p_keeps_what_exact_sums_keep(p):
    """Each token whose betters have less than p, in fractions: flat and peaked rows, ties, masks."""
    dice = torch.Generator().manual_seed(7)
    for spread in (0.0, 0.01, 1.0, 4.0):
        scores = torch.randn(3, 2000, generator=dice) * spread
        scores[1] = (scores[1] * 4).round() / 4
        scores[2, torch.rand(2000, generator=dice) < 0.5] = -math.inf
        for row, kept_V in zip(scores, apply_top_p(scores, [p] * 3).isfinite(), strict=True):
            best = float(row.max())
            weights = sorted((Fraction(math.exp(score - best)) for score in row.tolist()), reverse=True)
            ordered, total, before, count = sorted(row.tolist(), reverse=True), sum(weights), Fraction(0), 0
            while count < len(ordered) and (count == 0 or before < total * Fraction(float(torch.tensor(p)))):
                before += weights[count]
                count += 1
            assert torch.equal(kept_V, (row >= ordered[count - 1]) & row.isfinite())


@pytest.mark.parametrize(
    ("p", "ids"), [(0.0, [0, 1, 2, 3]), (0.2, [0, 1, 2, 3]), (0.3, [1, 2]), (0.45, [1, 2]), (0.55, [1]), (1.0, [1])]
)
def test_min_p_keeps_what_is_likely_relative_to_the_best(p, ids):
    assert ids == kept(apply_min_p(HALVES, [p]))


@pytest.mark.parametrize(
    ("params", "ids"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.6}, {1, 2}),
        ({"min_p": 0.3}, {1, 2}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1, 2, 3}),
        ({"top_k": 1}, {1}),
        ({"banned": (1,), "top_k": 1}, {2}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_draws_come_from_exactly_what_the_filters_keep(params, ids):
    assert ids == set(sample(HALVES.repeat(400, 1), [draw(at, **params) for at in range(400)]).tolist())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_over_positions_follow_the_softmax(temperature):
    """Chi-square with 7 degrees of freedom: above 40 once in a million."""
    scores = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.0, -2.0, 1.5, 0.25])
    tokens = sample(scores.repeat(ROWS, 1), [draw(at, seed=5, temperature=temperature) for at in range(ROWS)])
    assert chi_square(tokens, (scores / temperature).softmax(0)) < 40


def mixed_rows():
    """Rows that differ in everything a row may differ in, over scores with ties, bans, NaN and nothing left."""
    dice = torch.Generator().manual_seed(3)
    scores = (torch.randn(48, 37, generator=dice) * 3).round(decimals=1)
    grid = [(t, k, p, m) for t in (0, 0.7, 1.3) for k in (0, 1, 5, 99) for p in (1.0, 0.6) for m in (0.0, 0.2)]
    draws = [
        draw(at % 5, seed=at % 3, answer=at % 2, banned=(at % 37,) * (at % 4 == 0), temperature=t, top_k=k, top_p=p, min_p=m)
        for at, (t, k, p, m) in enumerate(grid)
    ]
    scores[7, 3], scores[20, 0] = math.nan, math.nan
    scores[30] = -math.inf
    return scores, draws


def test_a_row_is_drawn_as_if_it_were_alone():
    scores, draws = mixed_rows()
    together = sample(scores.clone(), draws).tolist()
    assert together == [int(sample(scores[row : row + 1].clone(), [one])) for row, one in enumerate(draws)]
    assert {7, 20, 30} == {row for row, token in enumerate(together) if token == UNSCORED}


def test_a_banned_id_is_not_drawn_where_its_noise_is_the_largest_there_is():
    """Here token 27591 hashes to 24 ones: noise of infinity would beat its score of minus infinity."""
    scores = torch.zeros(1, 27592)
    [token] = sample(scores, [draw(475, seed=1, banned=(27591,))]).tolist()
    assert token not in (27591, -1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_row_that_is_not_finite_says_so_and_its_neighbours_their_tokens(bad, temperature):
    draws = [draw(at, temperature=temperature) for at in range(3)]
    scores = HALVES.repeat(3, 1)
    clean = sample(scores.clone(), draws).tolist()
    scores[1, 2] = bad
    assert [clean[0], UNSCORED, clean[2]] == sample(scores, draws).tolist()


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_row_with_nothing_left_says_so_and_its_neighbours_get_their_tokens(temperature):
    draws = [draw(0, temperature=temperature), draw(1, banned=(0, 1, 2, 3), temperature=temperature), draw(2, temperature=0)]
    assert EXCLUDED == sample(HALVES.repeat(3, 1), draws).tolist()[1]
    assert 1 == sample(HALVES.repeat(3, 1), draws).tolist()[2]


def test_a_row_key_is_splitmix64_so_that_a_seed_means_the_same_in_every_version():
    """The generator's published first outputs for seed 0 are its finalizer at 0, 1 and 2 times the golden ratio."""
    golden = 0x9E3779B97F4A7C15
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert published == [mix(times * golden & _MASK) for times in range(3)]
    assert mix(mix(mix(5) ^ 2) ^ 7) == row_key(5, 2, 7)


def test_the_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary():
    keys = [row_key(9, 1, at) for at in range(3)]
    longest = gumbel_noise(keys, 1000, CPU)
    for size in (1, 2, 7, 8, 33, 999):
        torch.testing.assert_close(longest[:, :size], gumbel_noise(keys, size, CPU), rtol=0, atol=1e-6)


@pytest.mark.parametrize("uniform", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_noise_is_minus_log_minus_log_of_the_hash_as_a_fraction(uniform):
    noise = gumbel_noise([key_of(int(uniform * 2**64))], 1, CPU).item()
    assert pytest.approx(-math.log(-math.log(uniform)), abs=1e-3) == noise


def uniforms(keys, vocab_size):
    """The hashes as fractions again: exp(-exp(-noise))."""
    return gumbel_noise(keys, vocab_size, CPU).neg().exp().neg().exp().flatten()


@pytest.mark.parametrize(
    "keys",
    [
        [row_key(seed, 0, 0) for seed in range(256)],
        [row_key(0, 0, position) for position in range(256)],
        [row_key(0, answer, 0) for answer in range(256)],
        [row_key(SEED_HIGH - at, 7, at) for at in range(256)],
    ],
    ids=["seeds", "positions", "choices", "mixed"],
)
def test_the_hash_is_uniform_over_ids_and_rows(keys):
    """Mean, variance, 64 bins (chi-square with 63 degrees: above 140 once in 10 million), and no neighbour is a hint."""
    values = uniforms(keys, 256)
    assert pytest.approx(0.5, abs=0.006) == values.mean().item()
    assert pytest.approx(1 / 12, abs=0.003) == values.var().item()
    assert chi_square((values * 64).long().clamp(max=63), torch.full((64,), 1 / 64)) < 140
    for neighbour in (1, 256):  # the next id, and the next row
        pairs = torch.stack([values[:-neighbour], values[neighbour:]])
        assert abs(torch.corrcoef(pairs)[0, 1].item()) < 0.02
