"""Sampling: from scores (logits) to tokens, as pure functions on rows. A row's token depends on that row alone.

What vLLM does by logits processors stands here too: repetition, presence and frequency penalties, logit bias, bans, bitmasks.

Randomness has no state: the noise of a token is a hash of (seed, answer index, position, token id), and the drawn
token is argmax(score / temperature + Gumbel noise), which draws from softmax(score / temperature) exactly
(Gumbel 1954; Maddison et al. 2014). So a request can be preempted, replayed or batched with others and draw
the same tokens; and because noise is keyed by token id, small differences of the scores rarely change a draw.

Shapes: R rows · V vocabulary.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attend.model.params import DecodingParams, SamplingParams
from attend.model.sampling_plan import LEAST_TEMPERATURE, Draw, reach
from attend.model.transfer import column, integers, to_device

LARGEST = 1e9
"""A penalty makes no score larger: a division by next to nothing would make it infinite."""
UNSCORED, EXCLUDED = -1, -2
"""Instead of a token: the row's scores are not finite; they are, but its parameters leave no token to draw."""


SHORT_LIST = 1024
"""How many of the likeliest tokens are sorted first: where they reach top-p, the others need not be sorted."""
WHOLE = 2.0**44
"""What the likeliest token weighs in top-p. Weights are whole numbers: their sums have no order. V may be 2^19."""


def best_tokens(scores_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The token of the largest score; where the temperature is above 0, of the largest score / temperature + Gumbel noise among
    the tokens that the row's limits leave.

    UNSCORED where a row has no finite score.
    """
    limited = [row for row, draw in enumerate(draws) if draw.plan.is_limited and not draw.awaits_mask]
    if limited:
        picked = integers(limited, scores_RV.device)
        some_NV = limit_scores(scores_RV[picked], [draws[row].plan.params for row in limited])
        scores_RV = scores_RV.index_copy(0, picked, some_NV)
    best_R, tokens_R = add_noise(scores_RV, draws).max(dim=-1)
    return tokens_R.masked_fill(~best_R.isfinite(), UNSCORED)


def add_noise(scores_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Score / temperature + Gumbel noise in the rows whose temperature is above 0; the others as they are."""
    noisy = [(row, draw) for row, draw in enumerate(draws) if not draw.plan.is_greedy]
    if not noisy:
        return scores_RV
    picked = integers([row for row, _ in noisy], scores_RV.device)
    some_NV = apply_temperature(scores_RV[picked], column([draw.plan.params.temperature for _, draw in noisy], scores_RV))
    noise_NV = gumbel_noise([draw.key for _, draw in noisy], scores_RV.shape[1], scores_RV.device)
    return scores_RV.index_copy(0, picked, some_NV + noise_NV)


def sample(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Token ids int64 [R], or UNSCORED or EXCLUDED."""
    scores_RV = logits_RV.float()
    changed = [row for row, draw in enumerate(draws) if draw.banned_tokens or draw.plan.changes_scores]
    if changed and scores_RV is logits_RV:
        scores_RV = scores_RV.clone()  # float() gives float32 logits back as they are, and they are the caller's
    for row in changed:
        change_scores(scores_RV[row], draws[row])
    scores_RV = apply_masks(scores_RV, draws)
    return _mark_faulty_rows(best_tokens(scores_RV, draws), logits_RV, draws)


def best(logits_RV: Tensor) -> Tensor:
    """What `sample` draws where every row takes the best of the model's scores, without a copy of them in float32."""
    best_R, tokens_R = logits_RV.max(dim=-1)
    return tokens_R.masked_fill(~best_R.isfinite(), UNSCORED)


def _mark_faulty_rows(tokens_R: Tensor, logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The tokens, with EXCLUDED where it was not the model that left none to draw."""
    rows = [row for row, draw in enumerate(draws) if draw.may_exclude]
    if not rows:
        return tokens_R
    picked = integers(rows, tokens_R.device)
    some_N = tokens_R[picked]
    finite_N = logits_RV[picked].amax(dim=-1).isfinite()
    return tokens_R.index_copy(0, picked, some_N.masked_fill((some_N < 0) & finite_N, EXCLUDED))


def sample_by_row(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """As `sample`, row by row where needed, so that no row's token can depend on the others.

    Torch may round logarithms and exponentials at the end of a tensor otherwise than in its middle: rows that need them go one
    by one. The largest of a row is the largest.
    """
    if all(draw.plan.is_greedy for draw in draws):
        return sample(logits_RV, draws)
    return torch.cat([sample(logits_RV[row : row + 1], [draw]) for row, draw in enumerate(draws)])


def change_scores(scores_V: Tensor, draw: Draw) -> None:
    """Apply a row's decoding parameters and bans, but not its mask, in place."""
    decoding, device = draw.plan.decoding, scores_V.device
    if decoding.allowed_token_ids:
        scores_V.masked_fill_(_refused_mask(decoding, len(scores_V), device), -math.inf)
    if decoding.logit_bias:
        biases = torch.tensor(list(decoding.logit_bias.values()), dtype=scores_V.dtype)
        scores_V[integers(decoding.logit_bias, device)] += to_device(biases, device)
    if draw.plan.penalizes:
        _penalize(scores_V, draw)
    if draw.banned_tokens:
        known = [
            token for token in draw.banned_tokens if token < len(scores_V)
        ]  # a tokenizer may know more than the model does
        if known:
            scores_V.index_fill_(0, integers(known, device), -math.inf)


def _penalize(scores_V: Tensor, draw: Draw) -> None:
    decoding, device, text = draw.plan.decoding, scores_V.device, draw.text
    if text is None:
        return
    if decoding.repetition_penalty != 1 and text.seen_tokens:
        seen = integers(text.seen_tokens, device)
        scores = scores_V[seen]
        penalized = torch.where(scores > 0, scores / decoding.repetition_penalty, scores * decoding.repetition_penalty)
        scores_V[seen] = torch.where(scores.isfinite(), penalized.clamp(-LARGEST, LARGEST), scores)
    if text.output_tokens and (decoding.frequency_penalty or decoding.presence_penalty):
        counts = integers(text.counts, device)
        scores_V[integers(text.output_tokens, device)] -= decoding.frequency_penalty * counts + decoding.presence_penalty


def _refused_mask(decoding: DecodingParams, size: int, device: torch.device) -> Tensor:
    """True if a token is not among the allowed ones, bool [V]. They may be many."""
    known = decoding.derived_values.get((size, device))
    if known is None:
        known = torch.ones(size, dtype=torch.bool)
        known[torch.tensor(decoding.allowed_token_ids)] = False
        decoding.derived_values[size, device] = known = to_device(known, device)
    return known


def apply_masks(scores_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Scores with -inf where a row's grammar allows no token: all rows at once, for each call costs as much as its work."""
    if all(draw.mask is None for draw in draws):
        return scores_RV
    every = np.ones(scores_RV.shape[1], dtype=np.bool_)
    refused_RV = np.logical_not(np.stack([every if draw.mask is None else draw.mask for draw in draws]))
    return scores_RV.masked_fill(to_device(torch.from_numpy(refused_RV), scores_RV.device), -math.inf)


def row_logprobs(
    logits_RV: Tensor, tokens: Sequence[int], top: Sequence[int], others: Sequence[Sequence[int]] = ()
) -> list[tuple[float, list[tuple[int, float]]]]:
    """For each row: the log probability of its token, and the `top` likeliest tokens with theirs, then `others` with theirs.

    They are the model's own, before any parameter changed the scores.
    """
    scores_RV = logits_RV.float().log_softmax(dim=-1)
    chosen = scores_RV.gather(1, integers(tokens, scores_RV.device)[:, None])[:, 0].tolist()
    best = scores_RV.topk(min(max(top), scores_RV.shape[1]), dim=-1)
    ids, values = best.indices.tolist(), best.values.tolist()
    found = [(chosen[row], list(zip(ids[row][:k], values[row][:k], strict=True))) for row, k in enumerate(top)]
    for row, more in enumerate(others):
        if more:
            some = scores_RV[row, integers(more, scores_RV.device)].tolist()
            found[row][1].extend(zip(more, some, strict=True))
    return found


def limit_scores(scores_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scores without the tokens that top-k, top-p and min-p leave out of them over the temperature, in this order."""
    scaled_RV = apply_temperature(scores_RV, column([p.temperature for p in params], scores_RV))
    scaled_RV = apply_top_k(scaled_RV, [p.top_k for p in params])
    scaled_RV = apply_top_p(scaled_RV, [p.top_p for p in params])
    return scores_RV.masked_fill(apply_min_p(scaled_RV, [p.min_p for p in params]).isneginf(), -math.inf)


def apply_temperature(scores_RV: Tensor, temperature_R1: Tensor) -> Tensor:
    """Scores divided by the temperature, which float32 may round to 0, after taking away the maximum so that none overflows."""
    return (scores_RV - scores_RV.amax(dim=-1, keepdim=True)) / temperature_R1.clamp(min=LEAST_TEMPERATURE)


def apply_top_k(scores_RV: Tensor, top_k: Sequence[int]) -> Tensor:
    """Keep the tokens that score no less than the k-th best: ties at the border all stay. k < 1 keeps all."""
    vocab_size = scores_RV.shape[1]
    border_R1 = scores_RV.new_full((len(top_k), 1), -math.inf)
    for k in {k for k in top_k if 0 < k < vocab_size}:  # rows with the same k together: a large one costs no other row
        rows = integers([row for row, own in enumerate(top_k) if own == k], scores_RV.device)
        border_R1.index_copy_(0, rows, scores_RV[rows].topk(k, dim=-1).values[:, -1:])
    return scores_RV.masked_fill(scores_RV < border_R1, -math.inf)


def apply_top_p(scores_RV: Tensor, top_p: Sequence[float]) -> Tensor:
    """Keep the likeliest tokens up to the one that makes their sum reach p (Holtzman et al. 2020). Ties there all stay."""
    rows = [row for row, p in enumerate(top_p) if p < 1]
    if not rows:
        return scores_RV
    picked = integers(rows, scores_RV.device)
    some_NV = scores_RV[picked]
    weights_NV = (some_NV - some_NV.amax(dim=-1, keepdim=True)).double().exp().mul(WHOLE).round().long()
    total_N1 = weights_NV.sum(dim=-1, keepdim=True)
    p_N1 = column([top_p[row] for row in rows], scores_RV)
    target_N1 = (total_N1 * p_N1.double()).ceil().long().clamp(min=1).minimum(total_N1)
    return scores_RV.index_copy(0, picked, some_NV.masked_fill(some_NV < _border(some_NV, weights_NV, target_N1), -math.inf))


def _border(scores_RV: Tensor, weights_RV: Tensor, target_R1: Tensor) -> Tensor:
    """The least score [R, 1] for which all that are higher weigh less than the target."""
    size = scores_RV.shape[1]
    if scores_RV.is_cuda or size <= SHORT_LIST:  # a GPU sorts fast, and to look at the short list would wait for it
        return _border_among(size, scores_RV, weights_RV, target_R1)[0]
    border_R1, reached_R = _border_among(SHORT_LIST, scores_RV, weights_RV, target_R1)
    far = (~reached_R).nonzero()[:, 0]
    if len(far):
        border_R1[far] = _border_among(size, scores_RV[far], weights_RV[far], target_R1[far])[0]
    return border_R1


def _border_among(size: int, scores_RV: Tensor, weights_RV: Tensor, target_R1: Tensor) -> tuple[Tensor, Tensor]:
    """The border [R, 1] among so many of the best scores, and whether they reach the target [R]."""
    best_RS, tokens_RS = scores_RV.topk(size, dim=-1)
    sums_RS = weights_RV.gather(1, tokens_RS).cumsum(dim=-1)
    kept_R1 = 1 + (sums_RS[:, :-1] < target_R1).sum(dim=-1, keepdim=True)
    return best_RS.gather(1, kept_R1 - 1), sums_RS[:, -1] >= target_R1[:, 0]


def apply_min_p(scores_RV: Tensor, min_p: Sequence[float]) -> Tensor:
    """Keep the tokens whose probability is at least min_p times the best one's (Nguyen et al. 2024); 0 keeps all."""
    if not any(min_p):
        return scores_RV
    least_R1 = scores_RV.amax(dim=-1, keepdim=True) - column([reach(p) for p in min_p], scores_RV)
    return scores_RV.masked_fill(scores_RV < least_R1, -math.inf)


def gumbel_noise(keys: Sequence[int], num_tokens: int, device: torch.device) -> Tensor:
    """-log(-log(u)) with u a hash of (row key, token id), float32 [R, V]: the same on every device up to rounding."""
    keys_R1 = integers([_to_signed(key) for key in keys], device)[:, None]
    ids_V = torch.arange(num_tokens, device=device)
    hash_RV = keys_R1 ^ (ids_V * _to_signed(0x9E3779B97F4A7C15))[None]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hash_RV = (hash_RV ^ _shift_right(hash_RV, shift)) * _to_signed(factor)
    # 23 bits and a half bit are all that float32 holds: with one more, u could round to 1 and its noise be infinite
    uniform_RV = ((hash_RV ^ _shift_right(hash_RV, 31)) >> 41 & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform_RV.log_().neg_().log_().neg_()


def _to_signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(values: Tensor, places: int) -> Tensor:
    """Logical shift to the right; torch's own copies the sign."""
    return (values >> places) & ((1 << (64 - places)) - 1)
