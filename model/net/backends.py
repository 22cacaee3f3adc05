"""How the tokens of a step see the past: paged KV caches, written and read by an attention backend.

Between the engine and a backend only block ids cross. Token p of a request lives in slot
`blocks[p // block_size] * block_size + p % block_size`; block 0 belongs to nobody and takes padding writes.

Shapes: T tokens of this step · R requests · S key slots · B blocks · H query heads · K key/value heads · D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig
from model.net.attention import attend, causal_mask


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step: tokens `start .. start + count - 1` of the request that owns `blocks`."""

    blocks: Sequence[int]
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers, each a tensor [slots, K, D]."""

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int

    @classmethod
    def allocate(cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: str) -> "KVCache":
        """Room for `num_blocks` blocks beside the reserved block 0; all of it is taken now, and not as requests come."""
        shape = ((num_blocks + 1) * block_size, config.num_kv_heads, config.head_size)
        empty = [torch.empty(shape, dtype=dtype, device=device).zero_() for _ in range(2 * config.num_layers)]
        keys, values = empty[: config.num_layers], empty[config.num_layers :]
        return cls(keys, values, block_size)


@dataclass(frozen=True)
class BatchLayout:
    """Where a step's tokens stand, made once a step and read by every layer. Rows of one token come first."""

    rows: Sequence[Row]
    slots_T: Tensor
    """int64: the cache slot of each token."""
    positions_T: Tensor
    """int64: the position of each token in its request."""
    block_table_RB: Tensor
    """int64: the blocks of each request, padded with the reserved block 0."""
    block_size: int
    num_single: int
    """How many rows, from the first on, bring just one token."""

    @classmethod
    def build(cls, rows: Sequence[Row], block_size: int, device: str) -> "BatchLayout":
        """`rows` must have those with one token first; tokens lie in the order of the rows."""
        num_single = sum(row.count == 1 for row in rows)
        assert all(row.count == 1 for row in rows[:num_single]), "rows of one token come first"
        positions = [position for row in rows for position in range(row.start, row.start + row.count)]
        slots = [
            row.blocks[position // block_size] * block_size + position % block_size
            for row in rows
            for position in range(row.start, row.start + row.count)
        ]
        widest = max(-(-(row.start + row.count) // block_size) for row in rows)
        table = [[*row.blocks[:widest], *[0] * (widest - len(row.blocks))] for row in rows]
        slots_T, positions_T, block_table_RB = (torch.tensor(values, device=device) for values in (slots, positions, table))
        return cls(rows, slots_T, positions_T, block_table_RB, block_size, num_single)

    def slots_of(self, rows: slice, num_keys: int) -> Tensor:
        """int64 [R, S]: the slots of the first `num_keys` tokens of each chosen request."""
        keys_S = torch.arange(num_keys, device=self.block_table_RB.device)
        blocks_RS = self.block_table_RB[rows].index_select(1, keys_S // self.block_size)
        return blocks_RS * self.block_size + keys_S % self.block_size

    @cached_property
    def spans(self) -> tuple[Tensor, Tensor]:
        """int64 [R] each: where a row's tokens start, and how many they are."""
        starts, counts = ([getattr(row, name) for row in self.rows] for name in ("start", "count"))
        return torch.tensor(starts), torch.tensor(counts)

    @cached_property
    def single(self) -> tuple[Tensor, Tensor]:
        """For the rows of one token: the slots they read, flat [R * S], and what they may see, bool [R, 1, 1, S]."""
        num_keys = max(row.start + 1 for row in self.rows[: self.num_single])
        mask_RS = causal_mask(self.positions_T[: self.num_single], num_keys)
        slots_RS = self.slots_of(slice(self.num_single), num_keys)
        # a shorter request reads its own first slot instead: what others left there, NaN even, is never touched
        slots_RS = torch.where(mask_RS, slots_RS, slots_RS[:, :1])
        return slots_RS.flatten(), mask_RS[:, None, None, :]

    @cached_property
    def longer(self) -> list[tuple[slice, Tensor, Tensor]]:
        """For each other row: its tokens in T, the slots it reads [S], and what each token may see, bool [T, S]."""
        parts, begin = [], self.num_single
        for index, row in enumerate(self.rows[self.num_single :], start=self.num_single):
            tokens = slice(begin, begin + row.count)
            num_keys = row.start + row.count
            slots_S = self.slots_of(slice(index, index + 1), num_keys)[0]
            parts.append((tokens, slots_S, causal_mask(self.positions_T[tokens], num_keys)))
            begin += row.count
        return parts


class AttentionBackend(Protocol):
    """Writes a step's keys and values to the cache, then attends. `name` is what the start-up line shows."""

    name: str

    def forward(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, layout: BatchLayout) -> Tensor:
        """The heads' outputs [T, H, D]. After it, the cache holds this step's keys and values of `layer`."""
        ...


def write(layer: int, k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, layout: BatchLayout) -> tuple[Tensor, Tensor]:
    """Put this step's keys and values into their slots; returns the layer's two caches."""
    keys, values = cache.keys[layer], cache.values[layer]
    keys.index_copy_(0, layout.slots_T, k_TKD)
    values.index_copy_(0, layout.slots_T, v_TKD)
    return keys, values


class ReferenceBackend:
    """The equation itself, request by request, in float32: slow, and right by inspection."""

    name = "reference"

    def forward(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, layout: BatchLayout) -> Tensor:
        keys, values = write(layer, k_TKD, v_TKD, cache, layout)
        outputs, begin = [], 0
        for index, row in enumerate(layout.rows):
            num_keys = row.start + row.count
            slots_S = layout.slots_of(slice(index, index + 1), num_keys)[0]
            mask_TS = causal_mask(layout.positions_T[begin : begin + row.count], num_keys)
            q = q_THD[begin : begin + row.count].float()
            outputs.append(attend(q, keys[slots_S].float(), values[slots_S].float(), mask_TS))
            begin += row.count
        return torch.cat(outputs).to(q_THD.dtype)


class TorchBackend:
    """Gather the pages, then torch's fused attention: all rows of one token at once, the others one by one."""

    name = "torch"

    def forward(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, layout: BatchLayout) -> Tensor:
        keys, values = write(layer, k_TKD, v_TKD, cache, layout)
        out_THD = torch.empty_like(q_THD)
        if layout.num_single:
            slots, mask = layout.single
            single = slice(layout.num_single)
            k, v = (cached.index_select(0, slots).unflatten(0, (layout.num_single, -1)) for cached in (keys, values))
            out_THD[single] = _fused(q_THD[single, None], k, v, mask)[:, 0]
        for tokens, slots_S, mask_TS in layout.longer:
            k, v = (cached.index_select(0, slots_S)[None] for cached in (keys, values))
            out_THD[tokens] = _fused(q_THD[None, tokens], k, v, mask_TS)[0]
        return out_THD


def _fused(q_RTHD: Tensor, k_RSKD: Tensor, v_RSKD: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_RTHD, k_RSKD, v_RSKD))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


BACKENDS: dict[str, type[AttentionBackend]] = {"reference": ReferenceBackend, "torch": TorchBackend}


@dataclass(frozen=True, slots=True)
class Paged:
    """A backend bound to one step: the `attention` argument of the decoder."""

    backend: AttentionBackend
    cache: KVCache
    layout: BatchLayout

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        return self.backend.forward(layer, q_THD, k_TKD, v_TKD, self.cache, self.layout)
