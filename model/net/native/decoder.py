"""A decoder whose small parts are native kernels: for bfloat16 on a CPU, where those parts take longer than the matrices.

The same equations as `transformer.py`, with the residual stream in one buffer: norm and addition are one pass over it, and
so are norm, rotation and the write to the cache. Between them stand the packed matrices.

Shapes: T tokens · E model width · H query heads · K key/value heads · D head size · M width of the MLP.
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.net.backends import BatchLayout, KVCache, Paged
from model.net.native.library import load, variant
from model.net.transformer import Decoder

MAX_GROUP = 16
MAX_HEAD = 256


def supports(config: ModelConfig, block_size: int) -> bool:
    """Whether the kernels carry out this kind of decoder. Sizes that they read in vectors must be whole ones."""
    kind = config.positions == "rotary" and config.norm == "rmsnorm" and config.gated_mlp and config.activation == "silu"
    heads = config.head_size % 32 == 0 and config.head_size <= MAX_HEAD and config.num_heads // config.num_kv_heads <= MAX_GROUP
    return kind and heads and not config.post_norm and not config.scale_embedding and block_size % 32 == 0


def native() -> ctypes.CDLL:
    """The library, which must be there."""
    library = load()
    assert library is not None, "the native kernels are not built"
    return library


class NativeBackend:
    """Keys lie in the cache as [block][K][B][D], values as [block][K][D][B]: as the matrix units read them."""

    def __init__(self) -> None:
        self._library = native()
        self.name = f"native-{variant()}"

    def forward(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, layout: BatchLayout) -> Tensor:
        """For a plain decoder, which has rotated its queries and keys itself."""
        qkv = torch.cat([part.flatten(1) for part in (q_THD, k_TKD, v_TKD)], dim=1)
        heads = (q_THD.shape[1], k_TKD.shape[1], q_THD.shape[2])
        self.write(layer, qkv, heads, cache, layout)
        return self.attend(layer, qkv, heads, cache, layout).view_as(q_THD)

    def write(
        self,
        layer: int,
        qkv: Tensor,
        heads: tuple[int, int, int],
        cache: KVCache,
        layout: BatchLayout,
        turns: tuple[int, ...] = (0, 0, 0, 0),
        eps: float = 0.0,
    ) -> None:
        """Norm and rotate `qkv` [T, (H + 2K) D] by `turns`, the addresses of both gains, of cos and of sin; fill the cache."""
        places = (layout.positions_T.data_ptr(), layout.slots_T.data_ptr())
        caches = (cache.keys[layer].data_ptr(), cache.values[layer].data_ptr(), cache.block_size)
        self._library.attend_write(qkv.data_ptr(), len(qkv), *heads, *caches, *places, *turns, eps)

    def attend(self, layer: int, qkv: Tensor, heads: tuple[int, int, int], cache: KVCache, layout: BatchLayout) -> Tensor:
        """The heads' outputs, [T, H D]."""
        out = torch.empty(len(qkv), heads[0] * heads[2], dtype=torch.bfloat16)
        starts_R, counts_R = layout.spans
        table = layout.block_table_RB
        caches = (cache.keys[layer].data_ptr(), cache.values[layer].data_ptr(), cache.block_size)
        rows = (starts_R.data_ptr(), counts_R.data_ptr(), len(table), table.data_ptr(), table.shape[1])
        self._library.attend_paged(qkv.data_ptr(), *heads, *caches, *rows, out.data_ptr(), heads[2] ** -0.5)
        return out


Matrix = Callable[[Tensor], Tensor]


class _Layer(NamedTuple):
    attention_gain: int
    qkv: Matrix
    turns: tuple[int, int]
    out: Matrix
    mlp_gain: int
    gate_up: Matrix
    down: Matrix


class NativeDecoder:
    """`Decoder` for serving: the same call, the same scores up to rounding. Keeps the decoder that it was made from."""

    def __init__(self, net: Decoder) -> None:
        self.net = net
        self.config = net.config
        self.logits = net.logits
        self._library = native()
        self._heads = (net.config.num_heads, net.config.num_kv_heads, net.config.head_size)
        self._layers = [
            _Layer(
                _address(block.attention_norm),
                block.attention.qkv.forward,
                (_address(block.attention.q_norm), _address(block.attention.k_norm)),
                block.attention.out.forward,
                _address(block.mlp_norm),
                block.mlp.gate_up.forward,
                block.mlp.down.forward,
            )
            for block in net.blocks
        ]
        self._tables = (net.cos.data_ptr(), net.sin.data_ptr())

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attention: Paged) -> Tensor:
        """Hidden states [T, E]; see `Decoder.forward`."""
        backend, cache, layout = attention.backend, attention.cache, attention.layout
        assert isinstance(backend, NativeBackend)
        eps = self.config.norm_eps
        residual_TE = self.net.embedding.tokens(tokens_T)
        normed_TE = torch.empty_like(residual_TE)
        gated_TM = residual_TE.new_empty(len(residual_TE), self.config.mlp_size)
        update = None
        for at, layer in enumerate(self._layers):
            self._norm(update, residual_TE, layer.attention_gain, normed_TE)
            qkv = layer.qkv(normed_TE)
            backend.write(at, qkv, self._heads, cache, layout, (*layer.turns, *self._tables), eps)
            update = layer.out(backend.attend(at, qkv, self._heads, cache, layout))
            self._norm(update, residual_TE, layer.mlp_gain, normed_TE)
            gate_up = layer.gate_up(normed_TE)
            self._library.attend_silu(gate_up.data_ptr(), gated_TM.data_ptr(), *gated_TM.shape)
            update = layer.down(gated_TM)
        self._norm(update, residual_TE, _address(self.net.norm), normed_TE)
        return normed_TE

    def _norm(self, update_TE: Tensor | None, residual_TE: Tensor, gain: int, normed_TE: Tensor) -> None:
        """residual += update; normed = residual / rms(residual) * gain."""
        update = None if update_TE is None else update_TE.data_ptr()
        sizes = (*residual_TE.shape, self.config.norm_eps)
        self._library.attend_norm(update, residual_TE.data_ptr(), gain, normed_TE.data_ptr(), *sizes)


def _address(norm: nn.Module) -> int:
    """Of a norm's gain; 0 where there is no norm."""
    return norm.weight.data_ptr() if isinstance(norm, nn.RMSNorm) else 0
