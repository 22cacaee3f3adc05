"""Attention weights of a text, and what the model would say next after each of its tokens, from the served weights.

Computed by the reference equations in float32, beside the engine and never in its steps.

Shapes: T tokens · E model width · L layers · H query heads · K key/value heads · D head size · N chosen heads, or hidden
states · V vocabulary · C tokens of a slice · G best tokens.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.errors import EngineFailed
from attend.model.explain.reference import NUMBERS, SlicedLinear, reference
from attend.model.net.attention import attention_scores, causal_mask, softmax_with_sinks
from attend.model.net.states import Recurrence
from attend.model.net.transformer import Decoder, final_scores

FLOOR = -1e30
"""A finite score below that of every token."""


@dataclass(frozen=True, slots=True)
class Question:
    """A text, and what is to be computed of it."""

    tokens: tuple[int, ...]
    """Token ids of the text, at least one."""
    layers: tuple[int, ...]
    """Layers whose attention is kept."""
    heads: tuple[int, ...]
    """Query heads whose attention is kept, in each of these layers."""
    scores: bool = False
    """True if the scores before the softmax are kept too."""
    top: int = 1
    """How many of the likeliest next tokens to give at each position; 0 counts as 1."""
    lens: int = 0
    """How many of the likeliest tokens to give of each layer, by the logit lens (nostalgebraist 2020); 0: none."""


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Weights and scores of a layer's chosen heads."""

    weights_NTT: Tensor
    """float32: how much each token (row) attends to each (column): 0 above the diagonal, and before the layer's window."""
    sinks_NT: Tensor | None
    """float32: the share of each token's attention that goes to the head's sink. A row of weights sums to 1 less this."""
    scores_NTT: Tensor | None
    """float32: Q Kᵀ / sqrt(d_k) as the layer has it, before mask and softmax; where they are asked for."""


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


@dataclass(frozen=True, slots=True)
class LayerView:
    """The attention of one layer."""

    layer: int
    kind: Literal["attention", "state"]
    """"state" for a recurrent layer, which has no attention probabilities."""
    window: int | None
    head_weights: HeadWeights | None
    group: int = 1
    """Query heads that share a key/value head."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was computed for a question."""

    layers: tuple[LayerView, ...]
    next_tokens: NextTokens
    """The distribution of the next token after each token; `asked` is that of the token which follows in the text."""
    lens: NextTokens | None
    """The same distributions from each layer's output, by the logit lens: [L * T], layer after layer."""


@dataclass
class RecordingAttention:
    """The `attention` argument of a decoder for one sequence from its beginning."""

    config: ModelConfig
    layers: Collection[int]
    """Layers whose attention is kept."""
    heads: Sequence[int]
    """Query heads that are kept, in each of these layers."""
    scores: bool = False
    weights_by_layer: dict[int, HeadWeights] = field(default_factory=dict)
    """What each layer's attention has shown, by the number of the layer."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *sinks_H: Tensor) -> Tensor:
        """The heads' outputs [T, H, D]: softmax(Q Kᵀ / sqrt(d_k) + mask) V."""
        variant, length, group = self.config.attention_variants[layer], len(q_THD), q_THD.shape[1] // k_TKD.shape[1]
        k_HTD, v_HTD = (part.repeat_interleave(group, dim=1).transpose(0, 1) for part in (k_TKD, v_TKD))
        scores_HTT = attention_scores(q_THD.transpose(0, 1), k_HTD, variant)
        mask_TT = causal_mask(torch.arange(length), length, variant.window)
        weights_HTT = softmax_with_sinks(scores_HTT.masked_fill(~mask_TT, -math.inf), *(sinks_H or (None,)))
        if layer in self.layers:
            kept_NTT = weights_HTT[list(self.heads)]
            sinks_NT = (1 - kept_NTT.sum(dim=-1)).clamp(min=0) if sinks_H else None
            self.weights_by_layer[layer] = HeadWeights(
                kept_NTT, sinks_NT, scores_HTT[list(self.heads)] if self.scores else None
            )
        return (weights_HTT @ v_HTD).transpose(0, 1)

    def recur(self, layer: int, recurrence: Recurrence, *inputs_T: Tensor) -> Tensor:
        """See Attention. A recurrent layer has no probabilities to keep."""
        outputs, _ = recurrence.advance([part[None] for part in inputs_T], recurrence.start(1))
        return outputs[0]


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


class Explainer:
    """Answers questions about the served model. Not for two threads at once."""

    def __init__(self, decoder: Decoder) -> None:
        """`decoder`: the decoder whose matrices serve, or stand for those that do."""
        self._between: Callable[[], None] = lambda: None
        self._net = reference(decoder, lambda: self._between())
        self.config: ModelConfig = decoder.config
        self.num_layers, self.num_heads = self.config.num_layers, self.config.num_heads
        attending = (layer for layer, spec in enumerate(self.config.layers) if spec.recurrence is None)
        self.last_attention = max(attending, default=0)
        """The last layer that has weights."""

    @torch.inference_mode()
    def explain(self, question: Question, between: Callable[[], None] = lambda: None) -> Explanation:
        """`between` is called between slices of some milliseconds: what it raises ends the work. One core is used.

        Raises EngineFailed where the model's numbers are not finite.
        """
        torch.set_num_threads(1)  # counts for the thread that calls it
        self._between = between
        watched = RecordingAttention(self.config, question.layers, question.heads, question.scores)
        outputs = self._outputs(torch.tensor(question.tokens), watched, every=bool(question.lens))
        after_T = torch.tensor((*question.tokens[1:], 0))
        next_tokens = predict_next_tokens(self._net, outputs[-1], after_T, max(1, question.top))
        if not next_tokens.entropy_N.isfinite().all():
            raise EngineFailed("the model's logits are not finite")
        lens = None
        if question.lens:
            lens = predict_next_tokens(self._net, torch.cat(outputs), after_T.repeat(len(outputs)), question.lens)
        return Explanation(tuple(self._view(layer, watched) for layer in question.layers), next_tokens, lens)

    def _outputs(self, tokens_T: Tensor, watched: RecordingAttention, *, every: bool) -> Sequence[Tensor]:
        """The final norm of the last layer's output, or of every layer's: [T, E] each. See `Decoder.forward`."""
        net, positions_T, outputs = self._net, torch.arange(len(tokens_T)), []
        for layer, x_TE in enumerate(net.outputs(tokens_T, positions_T, watched)):
            if every or layer == self.num_layers - 1:
                outputs.append(net.norm(x_TE))
        return outputs

    def _view(self, layer: int, watched: RecordingAttention) -> LayerView:
        spec = self.config.layer(layer)
        if spec.recurrence is not None:
            return LayerView(layer, "state", None, None)
        return LayerView(
            layer, "attention", spec.attention.window, watched.weights_by_layer[layer], spec.num_heads // spec.num_kv_heads
        )
