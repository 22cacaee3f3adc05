"""The reference of attention: its equation, written plainly.

    Attention(Q, K, V) = softmax(Q Kᵀ / sqrt(d_k) + mask) V        (Vaswani et al. 2017, equation 1)
    MultiHead(X)       = Concat(head_1, ..., head_H) W_O           (section 3.2.2)

`attend` is the oracle: each path of `paged_attention.py` is tested against it. An `AttentionVariant` says how a layer of a
later family departs from the equation: a sliding window, soft-capped scores, a scale of its own. With attention sinks, each
head has one more score, learned, which takes its part of the softmax and has no value:

    weight of key j = exp(score_j) / (exp(sink_h) + sum over keys i of exp(score_i))

Shapes: T query tokens · S key tokens · H query heads · K key/value heads · D head size · E model width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from attend.model.config import ModelConfig
from attend.model.net.layers import make_norm
from attend.model.net.linear import Linear
from attend.model.net.rope import Rotation, apply_rotary
from attend.model.net.states import Recurrence
from attend.model.sublayers import AttentionVariant, LayerSpec


class Attention(Protocol):
    """How the tokens of this step see each other and the past."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *sinks_H: Tensor) -> Tensor:
        """The heads' outputs [T, H, D]. Only a model with sinks gives them."""
        ...

    def recur(self, layer: int, recurrence: Recurrence, *inputs_T: Tensor) -> Tensor:
        """The outputs [T, ...] of a recurrent layer. `inputs_T`: what it made of each token by itself, [T, ...]."""
        ...


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """The `attention` argument of layers of which some read the keys and values of earlier ones."""

    attention: Attention
    kv_layers: Sequence[int | None]
    """The layer whose keys and values each reads; None: its own."""
    kv_by_layer: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values that later layers read too, by layer."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *sinks_H: Tensor) -> Tensor:
        """See Attention. A layer that reads another layer's keys and values gives tensors without heads."""
        owner = self.kv_layers[layer]
        if owner is not None:
            k_TKD, v_TKD = self.kv_by_layer[owner]
        elif layer in self.kv_layers:
            self.kv_by_layer[layer] = k_TKD, v_TKD
        return self.attention(layer, q_THD, k_TKD, v_TKD, *sinks_H)

    def recur(self, layer: int, recurrence: Recurrence, *inputs_T: Tensor) -> Tensor:
        """See Attention."""
        return self.attention.recur(layer, recurrence, *inputs_T)


PLAIN = AttentionVariant()
"""The equation as it stands above."""


def causal_mask(query_positions_T: Tensor, num_keys: int, window: int | None = None) -> Tensor:
    """True where a query may look: at itself and at what came before, `window` keys at most. Returns bool [T, S]."""
    keys_S = torch.arange(num_keys, device=query_positions_T.device)
    past_TS = keys_S[None, :] <= query_positions_T[:, None]
    return past_TS if window is None else past_TS & (keys_S[None, :] > query_positions_T[:, None] - window)


def attention_scores(q: Tensor, k: Tensor, variant: AttentionVariant = PLAIN) -> Tensor:
    """Q Kᵀ / sqrt(d_k), or with the variant's scale, then within its soft cap. [..., T, D] and [..., S, D] to [..., T, S]."""
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if variant.scale is None else variant.scale)
    return scores if variant.softcap is None else variant.softcap * torch.tanh(scores / variant.softcap)


def softmax_with_sinks(scores: Tensor, sinks_H: Tensor | None) -> Tensor:
    """softmax over the keys, beside the heads' sinks where there are any. [..., H, T, S]."""
    if sinks_H is None:
        return scores.softmax(dim=-1)
    column = sinks_H.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]


def attention_weights(
    q_THD: Tensor, k_SKD: Tensor, mask_TS: Tensor, variant: AttentionVariant = PLAIN, sinks_H: Tensor | None = None
) -> Tensor:
    """softmax(Q Kᵀ / sqrt(d_k) + mask): for each head and query, how much it looks at each key. [H, T, S]."""
    k_SHD = k_SKD.repeat_interleave(q_THD.shape[1] // k_SKD.shape[1], dim=1)
    scores_HTS = attention_scores(q_THD.transpose(0, 1), k_SHD.transpose(0, 1), variant)
    return softmax_with_sinks(scores_HTS.masked_fill(~mask_TS, -math.inf), sinks_H)


def attend(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    mask_TS: Tensor,
    variant: AttentionVariant = PLAIN,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(Q Kᵀ / sqrt(d_k) + mask) V. Query heads share key/value heads in groups of H / K. [T, H, D].

    The mask holds the variant's window already: `causal_mask` makes one.
    """
    weights_HTS = attention_weights(q_THD, k_SKD, mask_TS, variant, sinks_H)
    v_SHD = v_SKD.repeat_interleave(q_THD.shape[1] // v_SKD.shape[1], dim=1)
    return torch.einsum("hts,shd->thd", weights_HTS, v_SHD)


class MultiHeadAttention(nn.Module):
    """Project to heads, attend in each, concatenate, project back; with a gate, a part of the first projection, before that."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.head_size = size = spec.head_size
        self.num_queries = 2 if config.attention_gate else 1  # parts: with what gates the heads' outputs
        sizes = [*[spec.query_size] * self.num_queries, *spec.kv_projections]
        self.qkv = Linear(config.hidden_size, sizes, bias=config.qkv_bias, shard_dim="rows", unit=size)
        self.out = Linear(spec.query_size, [config.hidden_size], bias=config.out_bias, shard_dim="columns", unit=size)
        normed = {"none": (0, 0), "head": (size, size), "all": (spec.query_size, spec.kv_size)}
        of_queries, of_keys = normed[config.qk_norm]
        self.q_norm = make_norm(config, of_queries) if of_queries else nn.Identity()
        self.k_norm = make_norm(config, of_keys) if of_keys and spec.kv_projections else nn.Identity()
        self.v_norm = nn.RMSNorm(size, config.norm_eps, elementwise_affine=False) if config.value_norm else nn.Identity()
        self.norm_heads, self.norm_after_rope = config.qk_norm == "head", config.qk_norm_after_rope
        self.sinks = nn.Parameter(torch.zeros(spec.num_heads)) if config.sinks else None
        self.gates = Linear(config.hidden_size, [spec.num_heads], bias=False) if config.head_gate else None

    def forward(self, x_TE: Tensor, rotation: Rotation | None, layer: int, attention: Attention) -> Tensor:
        parts = self.qkv(x_TE).split(self.qkv.parts, dim=-1)
        (q_TQ, *gate), own = parts[: self.num_queries], parts[self.num_queries :]
        q_THD = self._norm_and_rotate(self.q_norm, q_TQ, rotation)
        k_TKD = v_TKD = q_THD[:, :0]
        if own:
            k_TKD = self._norm_and_rotate(self.k_norm, own[0], rotation)
            v_TKD = self.v_norm(self._heads(own[-1]))
        if rotation is not None and rotation.query_scale is not None:
            q_THD = q_THD * rotation.query_scale
        sinks = () if self.sinks is None else (self.sinks,)
        heads_THD = attention(layer, q_THD, k_TKD, v_TKD, *sinks)
        heads_TQ = (heads_THD if self.gates is None else heads_THD * self.gates(x_TE).sigmoid()[..., None]).flatten(-2)
        return self.out(heads_TQ * gate[0].sigmoid() if gate else heads_TQ)

    def _norm_and_rotate(self, norm: nn.Module, x_TQ: Tensor, rotation: Rotation | None) -> Tensor:
        if self.norm_after_rope:
            return norm(apply_rotary(self._heads(x_TQ), rotation))
        return apply_rotary(norm(self._heads(x_TQ)) if self.norm_heads else self._heads(norm(x_TQ)), rotation)

    def _heads(self, x_TQ: Tensor) -> Tensor:
        return x_TQ.unflatten(-1, (-1, self.head_size))
