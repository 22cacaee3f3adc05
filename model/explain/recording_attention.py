"""Attention over one whole sequence by the equation, which keeps the probabilities that it computes on the way.

Shapes: T tokens · H query heads · K key/value heads · D head size · N chosen heads.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.net.attention import attention_scores, causal_mask, softmax_with_sinks
from attend.model.net.states import Recurrence


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Weights and scores of a layer's chosen heads."""

    weights_NTT: Tensor
    """float32: how much each token (row) attends to each (column): 0 above the diagonal, and before the layer's window."""
    sinks_NT: Tensor | None
    """float32: the share of each token's attention that goes to the head's sink. A row of weights sums to 1 less this."""
    scores_NTT: Tensor | None
    """float32: Q Kᵀ / sqrt(d_k) as the layer has it, before mask and softmax; where they are asked for."""


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
