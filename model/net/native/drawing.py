"""Tokens and log probabilities from scores, a row at a time: up to rounding of the noise those of `model/sampling.py`.

Shapes: R rows · V vocabulary.
"""

import ctypes
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attend.model.net.native.library import check_memory, native
from attend.model.params import DecodingParams
from attend.model.sampling_plan import LEAST_TEMPERATURE, Draw, reach

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
NOTHING: "array[int]" = array("q")


class _Changes(ctypes.Structure):
    """Penalties, biases and bans of one row of scores, as the library reads them."""

    _fields_ = (
        ("refused", _P),
        *(("biased", _P), ("biases", _P), ("num_biased", _I)),
        *(("seen", _P), ("num_seen", _I)),
        *(("drawn", _P), ("counts", _P), ("num_drawn", _I)),
        *(("banned", _P), ("num_banned", _I)),
        ("allowed", _P),
        *(("repetition", _F), ("frequency", _F), ("presence", _F)),
    )


class _Draw(ctypes.Structure):
    """Parameters of one row's draw, as the library reads them."""

    _fields_ = (
        ("changes", ctypes.POINTER(_Changes)),
        ("key", ctypes.c_uint64),
        ("top_k", _I),
        *(("temperature", _F), ("top_p", _F), ("reach", _F)),
    )


class _LogprobRequest(ctypes.Structure):
    """What is asked of a row's log probabilities, and where they go."""

    _fields_ = (("token", _I), ("top", _I), ("others", _P), ("num_others", _I), ("values", _P), ("likeliest", _P))


def draw_tokens(scores_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw as in sampling.py, for float32 scores on a CPU: token ids int64 [R], or UNSCORED or EXCLUDED."""
    scores_RV = scores_RV.contiguous()
    tokens_R = torch.empty(len(draws), dtype=torch.int64)
    rows, held = draw_rows(draws, scores_RV.shape[1])
    check_memory(native().attend_draw(scores_RV.data_ptr(), *scores_RV.shape, rows, tokens_R.data_ptr()))
    del held
    return tokens_R


def draw_rows(draws: Sequence[Draw], vocab_size: int) -> tuple[ctypes.Array, list[Any]]:
    """How the rows draw, as the library takes it, and what must live until it has drawn."""
    held: list[Any] = []
    return (_Draw * len(draws))(*[_row(draw, vocab_size, held) for draw in draws]), held


def _row(draw: Draw, vocab_size: int, held: list[Any]) -> tuple[Any, int, int, float, float, float]:
    params = draw.plan.params
    changes = None
    if draw.awaits_mask:
        return changes, 0, 0, 0.0, 1.0, math.inf
    if draw.may_exclude:
        held.append(_Changes(*_changes(draw, vocab_size, held)))
        changes = ctypes.pointer(held[-1])
    if draw.plan.is_greedy:
        return changes, 0, 0, 0.0, 1.0, math.inf
    temperature = max(params.temperature, LEAST_TEMPERATURE)
    return changes, draw.key, max(params.top_k, 0), temperature, params.top_p, reach(params.min_p)


def _changes(draw: Draw, vocab_size: int, held: list[Any]) -> Iterator[Any]:
    decoding = draw.plan.decoding
    refused = _refused_mask(decoding, vocab_size) if decoding.allowed_token_ids else None
    tokens, biases = _biases(decoding)
    text = draw.text if draw.plan.penalizes else None
    seen, drawn, counts = (NOTHING, NOTHING, NOTHING) if text is None else text
    banned = array("q", draw.banned_tokens)
    held += (refused, tokens, biases, banned)
    yield None if refused is None else refused.data_ptr()
    yield from (tokens.buffer_info()[0], *biases.buffer_info())
    yield from seen.buffer_info()
    yield from (drawn.buffer_info()[0], *counts.buffer_info())
    yield from banned.buffer_info()
    yield None if draw.mask is None else draw.mask.ctypes.data
    yield from (decoding.repetition_penalty, decoding.frequency_penalty, decoding.presence_penalty)


def _refused_mask(decoding: DecodingParams, vocab_size: int) -> Tensor:
    """True if a token is not among the allowed ones, bool [V]."""
    known: Tensor | None = decoding.derived_values.get(("native", vocab_size))
    if known is None:
        known = torch.ones(vocab_size, dtype=torch.bool)
        known[torch.tensor(decoding.allowed_token_ids)] = False
        decoding.derived_values["native", vocab_size] = known
    return known


def _biases(decoding: DecodingParams) -> "tuple[array[int], array[float]]":
    """Tokens, and what is added to the scores of each."""
    known = decoding.derived_values.get("biases")
    if known is None:
        known = array("q", decoding.logit_bias), array("f", decoding.logit_bias.values())
        decoding.derived_values["biases"] = known
    return known


def logprobs(
    logits_RV: Tensor, tokens: Sequence[int], top: Sequence[int], others: Sequence[Sequence[int]] = ()
) -> list[tuple[float, list[tuple[int, float]]]]:
    """That of sampling.py, for float32 on a CPU. Of equally likely tokens the lower comes first. A row whose scores are not
    finite has NaN, whatever the tokens.
    """
    logits_RV, vocab_size = logits_RV.contiguous(), logits_RV.shape[1]
    tops = [min(count, vocab_size) for count in top]
    more = [array("q", each) for each in others] or [NOTHING] * len(tops)
    values = [array("f", [math.nan] * (1 + count + len(some))) for count, some in zip(tops, more, strict=True)]
    ids = [array("q", range(count)) for count in tops]
    rows = (_LogprobRequest * len(tops))(
        *(
            (token, count, *some.buffer_info(), found.buffer_info()[0], likeliest.buffer_info()[0])
            for token, count, some, found, likeliest in zip(tokens, tops, more, values, ids, strict=True)
        )
    )
    native().attend_score(logits_RV.data_ptr(), *logits_RV.shape, rows)
    return [
        (found[0], list(zip((*likeliest, *some), found[1:], strict=True)))
        for found, likeliest, some in zip(values, ids, more, strict=True)
    ]
