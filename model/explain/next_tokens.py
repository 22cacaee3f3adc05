"""The distribution of the next token from hidden states, without holding the scores of the whole vocabulary.

Rows of the head are multiplied slice by slice. Of each distribution its sum, its entropy's sum and its best tokens are kept.

Shapes: N hidden states · E model width · V vocabulary · C tokens of a slice · G best tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attend.model.explain.reference import NUMBERS, SlicedLinear
from attend.model.net.transformer import Decoder, final_scores

FLOOR = -1e30
"""A finite score below that of every token."""


@dataclass(frozen=True, slots=True)
class NextTokens:
    """Distributions of the next token, one for each hidden state."""

    best_NG: Tensor
    """int64: the most likely tokens, the likeliest first."""
    logprobs_NG: Tensor
    """float32: natural log probability of the token that was asked for."""
    asked_N: Tensor
    """float32: that of the token that was asked for."""
    entropy_N: Tensor
    """float32: entropy of each token's distribution, in nats."""


def predict_next_tokens(net: Decoder, hidden_NE: Tensor, asked_N: Tensor, count: int) -> NextTokens:
    """The distributions behind the final norm's outputs `hidden_NE`. `asked_N`: int64, a token for each. `count`: G, from 1.

    One pass over the head. Of each row it keeps the largest score m, sum exp(s - m), sum exp(s - m) (s - m), and the best.
    """
    head = net.head
    assert isinstance(head, SlicedLinear) and head.source[0].bias is None
    size = len(hidden_NE)
    most_N, total_N, weighted_N = torch.full((size,), FLOOR), torch.zeros(size), torch.zeros(size)
    best_NG, scores_NG = torch.zeros(size, count, dtype=torch.int64), torch.full((size, count), -math.inf)
    asked_scores_N, first = torch.full((size,), -math.inf), 0
    for slice_CE in head.slices(max(1, NUMBERS // max(head.in_features, size))):
        scores_NC = final_scores(hidden_NE @ slice_CE.T, net.config)
        new_N = torch.maximum(most_N, scores_NC.amax(dim=-1))
        sunk_N, below_NC = most_N - new_N, scores_NC - new_N[:, None]
        weighted_N = (weighted_N + sunk_N * total_N) * sunk_N.exp() + (below_NC.exp() * below_NC).sum(dim=-1)
        total_N = total_N * sunk_N.exp() + below_NC.exp().sum(dim=-1)
        most_N = new_N
        all_NX = torch.cat((scores_NG, scores_NC), dim=-1)
        tokens_NX = torch.cat((best_NG, torch.arange(first, first + len(slice_CE)).expand(size, -1)), dim=-1)
        scores_NG, places_NG = all_NX.topk(count, dim=-1)
        best_NG = tokens_NX.gather(-1, places_NG)
        here_N = ((asked_N >= first) & (asked_N < first + len(slice_CE))).nonzero()[:, 0]
        asked_scores_N[here_N] = scores_NC[here_N, asked_N[here_N] - first]
        first += len(slice_CE)
    sum_N = most_N + total_N.log()
    return NextTokens(best_NG, scores_NG - sum_N[:, None], asked_scores_N - sum_N, total_N.log() - weighted_N / total_N)
