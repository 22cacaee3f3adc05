"""A decoder whose small parts are Triton kernels: on a GPU a launch costs more than most of them compute.

The same equations as `transformer.py`, in ten launches a layer. Not yet run on a GPU.

Shapes: T tokens · E model width · H query heads · K key/value heads · D head size · M width of the MLP.
"""

import torch
from torch import Tensor, nn
from triton import cdiv, next_power_of_2

from model.config import ModelConfig
from model.net.backends import Paged
from model.net.features import TRITON, features
from model.net.layers import GatedMLP
from model.net.transformer import Decoder
from model.net.triton import fused
from model.net.triton.backend import TritonBackend

GATED_AT_ONCE = 1024
"""Numbers of the MLP that one program multiplies."""


def supports(config: ModelConfig) -> bool:
    """Whether the fused kernels compute all that this model asks for."""
    return features(config) <= TRITON


class TritonDecoder:
    """`Decoder` for serving: the same call, the same scores up to rounding. Keeps the decoder that it was made from."""

    def __init__(self, net: Decoder) -> None:
        self.net = net
        self.config = net.config
        self.logits = net.logits

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attention: Paged) -> Tensor:
        """Hidden states [T, E]; see `Decoder.forward`."""
        assert isinstance(attention.backend, TritonBackend)
        residual_TE = self.net.embedding.tokens(tokens_T)
        normed_TE = torch.empty_like(residual_TE)
        update_TE = None
        for layer, block in enumerate(self.net.blocks):
            self._norm(update_TE, residual_TE, block.attention_norm, normed_TE)
            q_THD = self._turn(block.attention, normed_TE, layer, attention)
            heads_THD = attention.backend.attend(layer, q_THD, attention.cache, attention.layout)
            self._norm(block.attention.out(heads_THD.flatten(1)), residual_TE, block.mlp_norm, normed_TE)
            update_TE = _swiglu(block.mlp, normed_TE)
        self._norm(update_TE, residual_TE, self.net.norm, normed_TE)
        return normed_TE

    def _norm(self, update_TE: Tensor | None, residual_TE: Tensor, norm: nn.Module, normed_TE: Tensor) -> None:
        """residual += update; normed = residual / rms(residual) * gain."""
        updates = residual_TE if update_TE is None else update_TE
        num_tokens, width = residual_TE.shape
        fused.norm_kernel[(num_tokens,)](
            updates,
            residual_TE,
            norm.weight,
            normed_TE,
            self.config.norm_eps,
            E=width,
            E_P=next_power_of_2(width),
            UPDATES=update_TE is not None,
        )

    def _turn(self, module: nn.Module, normed_TE: Tensor, layer: int, attention: Paged) -> Tensor:
        """The step's queries, rotated, [T, H, D]; its keys and values are in the cache then."""
        config, cache, layout = self.config, attention.cache, attention.layout
        qkv = module.qkv(normed_TE)
        gains = (module.q_norm.weight, module.k_norm.weight) if config.qk_norm == "head" else (qkv, qkv)
        caches = (cache.keys[layer], cache.values[layer], layout.slots_T, layout.positions_T)
        fused.turn_kernel[(len(qkv),)](
            qkv,
            *caches,
            *self.net.rope_tables[0],
            *gains,
            config.norm_eps,
            H=config.num_heads,
            H_P=next_power_of_2(config.num_heads),
            K=config.num_kv_heads,
            K_P=next_power_of_2(config.num_kv_heads),
            D=config.head_size,
            HALF_P=next_power_of_2(config.head_size // 2),
            NORM=config.qk_norm == "head",
        )
        return qkv[:, : config.query_size].unflatten(1, (config.num_heads, config.head_size))


def _swiglu(mlp: GatedMLP, normed_TE: Tensor) -> Tensor:
    """The MLP's output [T, E]."""
    gate_up = mlp.gate_up(normed_TE)
    num_tokens, width = len(gate_up), gate_up.shape[1] // 2
    gated_TM = gate_up.new_empty(num_tokens, width)
    size = min(GATED_AT_ONCE, next_power_of_2(width))
    fused.swiglu_kernel[(num_tokens, cdiv(width, size))](gate_up, gated_TM, M=width, SIZE=size)
    return mlp.down(gated_TM)
