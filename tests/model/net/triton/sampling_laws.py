"""The laws of drawing in Triton: the reference is `attend.model.sampling`. Run by `test_triton.py`, as `laws.py` is."""

import math
from array import array
from collections import Counter

import numpy as np
import pytest
import torch

from attend.model import sampling
from attend.model.engine import sampler as under_test
from attend.model.engine.sampler import TokenSampler
from attend.model.net.triton import limits
from attend.model.net.triton import sampling as kernels
from attend.model.net.triton.backend import INTERPRETED
from attend.model.params import DecodingParams, SamplingParams
from attend.model.sampling import EXCLUDED, UNSCORED, sample
from attend.model.sampling_plan import Draw, History, SamplingPlan, mix
from attend.model.transfer import HostToDeviceCopy

DEVICE = "cpu" if INTERPRETED else "cuda"
CHUNK = 64
VOCAB = 150
"""Two chunks and a part of one."""
CLOSE = 1e-5
"""Logarithms may differ by so much: of two tokens that are closer either may be drawn."""


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(under_test, "CHUNK", CHUNK)
    monkeypatch.setattr(under_test, "TILE", CHUNK)


def draw(position=0, *, seed=0, banned=(), mask=None, text=None, decoding=None, **params):
    plan = SamplingPlan(SamplingParams(**params), seed, decoding=DecodingParams(**decoding) if decoding else DecodingParams())
    return Draw(plan, position, banned, text, mask)


def plain(position=0, *, seed=0, **params):
    return Draw(SamplingPlan(SamplingParams(**params), seed), position)


def scores_of(num_rows, dtype=torch.float32, seed=0, vocab=VOCAB):
    """Rounded, so that many are equal."""
    dice = torch.Generator().manual_seed(seed)
    return ((torch.randn(num_rows, vocab, generator=dice) * 3 * 16).round() / 16).to(DEVICE, dtype)


def text_of(dice, prompt=40, output=30):
    """What penalties look at, in a vocabulary of VOCAB."""
    ids = torch.randint(VOCAB, (prompt + output,), generator=dice).tolist()
    return History().follow(ids[:prompt], ids[prompt:])


def changing(num_rows, seed=1, **params):
    """Rows with every change of scores, alone and together."""
    dice = torch.Generator().manual_seed(seed)
    mask = torch.rand(VOCAB, generator=dice).numpy() < 0.7
    rows = []
    for at in range(num_rows):
        decoding = {}
        if at & 1:
            decoding["logit_bias"] = {at: 2.5, 3: -100.0, VOCAB - 1: 0.3}
        if at & 2:
            decoding |= {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.3}
        if at & 4:
            decoding["allowed_token_ids"] = tuple(range(at % 3, VOCAB, 3))
        more = {"banned": (at, 7, VOCAB + 3)} if at & 8 else {}
        if at & 16:
            more["mask"] = mask
        rows.append(draw(at, seed=at, decoding=decoding, text=text_of(dice) if at & 2 else None, **more, **params))
    return rows


def changed(scores_RV, draws):
    """What the kernel makes of the scores."""
    drawer, rows = TokenSampler(VOCAB, DEVICE), len(draws)
    chunks = -(-VOCAB // CHUNK)
    out_RV = torch.zeros(rows, VOCAB, device=DEVICE)
    rest = [torch.empty(2 * rows * chunks, dtype=kind, device=DEVICE) for kind in (torch.float32, torch.int64, torch.int32)]
    numbers = drawer._receive(draws)
    kernels.highest_kernel[(rows, chunks)](
        *(scores_RV, *numbers, drawer._texts.counts, out_RV, *rest, *[torch.empty_like(rest[1])] * 2, scores_RV.stride(0)),
        V=VOCAB,
        CHUNK=CHUNK,
        CHANGES=True,
        LIMITED=False,
        **under_test.OPTIONS,
    )
    return out_RV


def wanted_changes(scores_RV, draws):
    scores_RV = scores_RV.float().clone()
    for row, each in enumerate(draws):
        sampling.change_scores(scores_RV[row], each)
    return sampling.apply_masks(scores_RV, draws)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_greedy_token_is_the_references_and_of_equals_the_lowest(dtype):
    for vocab in (1, CHUNK - 1, CHUNK, VOCAB):
        scores_RV = scores_of(20, dtype, vocab=vocab)
        draws = [plain(temperature=0)] * 20
        assert torch.equal(TokenSampler(vocab, DEVICE)(scores_RV, draws), sample(scores_RV, draws))


def test_changed_scores_have_the_references_bits():
    scores_RV, draws = scores_of(32), changing(32)
    scores_RV[5, 3], scores_RV[7, 9] = torch.nan, -torch.inf
    wanted_RV, found_RV = wanted_changes(scores_RV.cpu(), draws), changed(scores_RV, draws).cpu()
    assert torch.equal(found_RV.view(torch.int32), wanted_RV.view(torch.int32))


def near(scores_RV, draws, tokens_R):
    """True if the reference, too, would draw each token, or one that is closer to it than logarithms are exact."""
    scores_RV = wanted_changes(scores_RV.cpu(), draws)
    for scores, each, token in zip(scores_RV, draws, tokens_R.tolist(), strict=True):
        if each.plan.is_limited:
            scores = sampling.limit_scores(scores[None], [each.plan.params])[0]
        if not each.plan.is_greedy:
            scores = sampling.apply_temperature(scores[None], torch.tensor([[each.plan.params.temperature]]))
            scores = (scores + sampling.gumbel_noise([mix(each.plan.key ^ each.position)], VOCAB, scores.device))[0]
        assert scores[token] >= scores.max() - CLOSE, (token, scores.argmax())
    return True


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0, 1e-60])
def test_a_drawn_token_is_the_references_up_to_the_rounding_of_two_logarithms(temperature):
    scores_RV = scores_of(64)
    draws = [plain(at, seed=at, temperature=temperature) for at in range(64)]
    tokens_R = TokenSampler(VOCAB, DEVICE)(scores_RV, draws)
    assert near(scores_RV, draws, tokens_R)
    assert (tokens_R == sample(scores_RV, draws)).sum() >= 63
    if temperature == 1:
        assert len(set(tokens_R.tolist())) > 10


LIMITS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB - 1},
    {"top_k": VOCAB},
    {"top_p": 1e-9},
    {"top_p": 0.3},
    {"top_p": 0.99},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.1, "temperature": 0.4},
    {"top_k": 3, "top_p": 0.9999},
]


FAR = (limits.BINS.value - 1) / limits.PER_UNIT.value
"""What is so far below the best is never drawn; a border may or may not leave it."""


def borders(scores_RV, draws, room=under_test.ROOM):
    """How far below the best a token may be, int64 [R]; with room for so many scores. -1: whole rows are searched."""
    return searched(scores_RV, draws, room)[0]


def searched(scores_RV, draws, room):
    """Borders, and what the bins hold afterwards."""
    (num_rows, vocab), chunk = scores_RV.shape, under_test.CHUNK
    drawer, num_chunks = TokenSampler(vocab, DEVICE), -(-vocab // chunk)
    found_R = torch.full((num_rows,), -1, dtype=torch.int64, device=DEVICE)
    bins = torch.zeros(num_rows, limits.COLUMNS.value, dtype=torch.int64, device=DEVICE)
    candidates = torch.full((num_rows, max(room, 0)), torch.nan, device=DEVICE)
    given = (scores_RV, drawer._receive(draws)[0], scores_RV.float().amax(1, keepdim=True), bins)
    sizes = {"V": vocab, "S": 1, "S_P": 1} | under_test.OPTIONS
    grid, stride = (num_rows, num_chunks), scores_RV.stride(0)
    limits.count_kernel[grid](*given, stride, CHUNK=chunk, **sizes)
    limits.collect_kernel[grid](*given, candidates, stride, CHUNK=chunk, ROOM=room, **sizes)
    limits.limit_kernel[(num_rows,)](*given, candidates, found_R, stride, TILE=under_test.TILE, ROOM=room, **sizes)
    return found_R, bins


def kept(scores_RV, draws):
    """Which tokens the borders of the kernel leave, bool [R, V]."""
    scaled_RV = sampling.apply_temperature(scores_RV.float().cpu(), torch.tensor([[d.plan.params.temperature] for d in draws]))
    return scaled_RV.abs().view(torch.int32).long() <= borders(scores_RV, draws).cpu()[:, None]


@pytest.mark.parametrize("way", LIMITS, ids=str)
def test_the_candidates_are_the_references_ties_included(way):
    """Top-p to the rounding of the sum: here no sum is so close to p that it decides."""
    scores_RV = scores_of(12)
    scores_RV[3] = 1.0
    scores_RV[4, ::2] = -torch.inf
    draws = [plain(**way)] * 12
    wanted_RV = sampling.limit_scores(scores_RV.cpu(), [each.plan.params for each in draws])
    given = scores_RV.cpu().isfinite()
    assert torch.equal(kept(scores_RV, draws) & given, wanted_RV.isfinite())


def shapes(vocab, dice):
    """Scores of many shapes [12, V]: peaked, flat, equal, rounded, with -inf, all but one equal, far apart."""
    normal = torch.randn(12, vocab, generator=dice)
    rows = [normal[0] * 3, normal[1] * 0.01, torch.zeros(vocab), (normal[3] * 2).round(), normal[4] * 40, normal[5] ** 3]
    rows += [torch.where(normal[6] > 1, normal[6], -torch.inf), -normal[7].abs() - 20, normal[8] * 3, normal[9] * 6]
    rows += [torch.full((vocab,), -3.0), (normal[11] * 3).bfloat16().float()]
    rows[7][vocab // 2], rows[8][::2], rows[10][vocab // 3] = 0.0, -torch.inf, 5.0
    return torch.stack(rows).to(DEVICE)


WAYS = [{"top_p": p} for p in (1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999, 0.9999999)]
WAYS += [{"top_k": k} for k in (1, 40, 500)] + [{"top_k": 40, "top_p": 0.9}, {"top_k": 500, "top_p": 0.99, "min_p": 0.01}, {}]


@pytest.mark.parametrize("turn", range(len(WAYS)))
@pytest.mark.parametrize("vocab", [1, CHUNK, 700])
def test_a_border_found_among_candidates_is_that_of_the_whole_row(vocab, turn, monkeypatch):
    """To the bit, wherever the bins say that it lies, and where a row's candidates are too many for their room."""
    monkeypatch.setattr(under_test, "TILE", 1024)
    monkeypatch.setattr(under_test, "CHUNK", CHUNK if vocab < 700 else 256)
    scores_RV = shapes(vocab, torch.Generator().manual_seed(vocab))
    ways = [WAYS[(turn + row) % len(WAYS)] for row in range(12)]
    draws = [plain(temperature=(1.0, 0.2, 1.7)[(turn + row) % 3], **way) for row, way in enumerate(ways)]
    temperatures_R1 = torch.tensor([[draw.plan.params.temperature] for draw in draws], device=DEVICE)
    scaled_RV = sampling.apply_temperature(scores_RV, temperatures_R1)
    bits_RV = scaled_RV.abs().view(torch.int32)
    whole_R, few_R, found_R = (borders(scores_RV, draws, room) for room in (-1, 20, under_test.ROOM))
    for each_R in (few_R, found_R):
        assert torch.equal(
            (bits_RV <= each_R[:, None]) & (scaled_RV > -FAR), (bits_RV <= whole_R[:, None]) & (scaled_RV > -FAR)
        )
        for row, way in enumerate(ways):
            assert "top_k" in way or each_R[row] == whole_R[row], way


def test_top_p_keeps_a_token_if_those_above_it_have_less_than_p():
    """Probabilities 1/2, 1/4, 1/8, 1/8: at p = 1/2 the best alone, a little above it the next one, too."""
    scores_RV = torch.full((4, VOCAB), -torch.inf, device=DEVICE)
    scores_RV[:, 5:9] = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    draws = [plain(top_p=p) for p in (0.499, 0.501, 0.7501, 0.8)]
    counts = (kept(scores_RV, draws) & scores_RV.cpu().isfinite()).sum(1)
    assert counts.tolist() == [1, 2, 4, 4]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_without_a_token_says_whose_fault_it_is():
    scores_RV = scores_of(6)
    scores_RV[0, 80] = torch.nan
    scores_RV[1] = -torch.inf
    scores_RV[2, 3] = torch.inf
    nobody = np.zeros(VOCAB, np.bool_)
    for temperature in (0, 0.7):
        draws = [
            *(plain(temperature=temperature), plain(temperature=temperature)),
            draw(banned=(1,), temperature=temperature),
            draw(mask=nobody, temperature=temperature),
            draw(decoding={"allowed_token_ids": (4,)}, banned=(4,), temperature=temperature),
            plain(temperature=temperature),
        ]
        tokens = TokenSampler(VOCAB, DEVICE)(scores_RV, draws).tolist()
        assert tokens[:5] == [UNSCORED, UNSCORED, UNSCORED, EXCLUDED, EXCLUDED]
        assert 0 <= tokens[5] < VOCAB
        assert tokens[:5] == sample(scores_RV, draws).tolist()[:5]


def test_a_row_draws_beside_others_what_it_draws_alone():
    scores_RV, draws = scores_of(32), changing(32, temperature=0.9, top_p=0.8)
    together_R = TokenSampler(VOCAB, DEVICE)(scores_RV, draws)
    alone = [TokenSampler(VOCAB, DEVICE)(scores_RV[at : at + 1], draws[at : at + 1]).item() for at in range(0, 32, 5)]
    assert together_R[::5].tolist() == alone


def test_counts_that_were_told_and_never_written_are_sent_again():
    """An error of the step came between."""
    history, prompt, output = History(), [1, 2, 3], [3, 4]
    scores_RV, drawer = scores_of(1), TokenSampler(VOCAB, DEVICE)
    penalties = {"repetition_penalty": 2.0, "frequency_penalty": 1.5}
    for position in range(4):
        draws = [draw(position, text=history.follow(prompt, output), decoding=penalties, temperature=0.0)]
        if position in (0, 2):
            drawer.stage(draws, HostToDeviceCopy(DEVICE))
        else:
            assert drawer(scores_RV, draws).tolist() == sample(scores_RV, draws).tolist()
            [line] = [known.line for known in drawer._texts._known.values()]
            counts = Counter(output)
            assert drawer._texts.counts[line].tolist() == [
                1 + counts[token] if token in counts or token in prompt else 0 for token in range(VOCAB)
            ]
        output.append(int(torch.randint(VOCAB, (1,))))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_what_may_be_largest_and_smallest_is_drawn_without_overflow():
    scores_RV = torch.full((3, VOCAB), -3.0e38, device=DEVICE)
    scores_RV[:, 70] = 3.0e38
    scores_RV[2] = -0.0
    scores_RV[2, 9] = 0.0
    draws = [plain(temperature=0), plain(temperature=1e-30, top_p=0.5), plain(temperature=0)]
    assert TokenSampler(VOCAB, DEVICE)(scores_RV, draws).tolist() == [70, 70, 0]
    assert math.isfinite(float(scores_RV[0, 0]))
    assert array("q", [70, 70, 0]).tolist() == sample(scores_RV, draws).tolist()
