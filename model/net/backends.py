"""How the tokens of a step see the past: paged KV caches, written and read by an attention backend.

Between the engine and a backend only block ids cross. Token p of a request lives in slot
`blocks[p // block_size] * block_size + p % block_size`; block 0 belongs to nobody and takes padding writes.

Shapes: T tokens of this step · R requests · S key slots · B blocks · H query heads · K key/value heads · D head size.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import AttentionVariant, ModelConfig
from model.net.attention import PLAIN, attend, attention_scores, causal_mask
from model.transfer import integers


@dataclass(slots=True)  # freezing it would cost each request a microsecond a step
class Row:
    """One request's share of a step: tokens `start .. start + count - 1` of the request that owns `blocks`."""

    blocks: Sequence[int]
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers, each a tensor [slots, K, D].

    A layer with a window keeps all tokens too: none is freed when it falls out of every query's sight.
    """

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int

    @classmethod
    def allocate(cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: str) -> "KVCache":
        """Room for `num_blocks` blocks beside the reserved block 0; all of it is taken now, and not as requests come."""
        shape = (2 * config.num_layers, (num_blocks + 1) * block_size, config.num_kv_heads, config.head_size)
        count = math.prod(shape)
        memory = _large_pages(count, dtype) if device == "cpu" else torch.empty(count, dtype=dtype, device=device)
        parts = memory.zero_().view(shape).unbind()
        return cls(list(parts[: config.num_layers]), list(parts[config.num_layers :]), block_size)


def _large_pages(count: int, dtype: torch.dtype) -> Tensor:
    """Memory for so many numbers, in large pages where the system has them.

    A step reads pieces of 4 KB from all over the cache: in pages of that size each had to be looked up anew.
    """
    memory = mmap.mmap(-1, count * dtype.itemsize, mmap.MAP_PRIVATE)
    with suppress(AttributeError, OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


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
    _reads: "dict[int | None, Reads]" = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, rows: Sequence[Row], block_size: int, device: str | torch.device) -> "BatchLayout":
        """`rows` must have those with one token first; tokens lie in the order of the rows."""
        num_single = sum(row.count == 1 for row in rows)
        assert all(row.count == 1 for row in rows[:num_single]), "rows of one token come first"
        widest = max(-(-(row.start + row.count) // block_size) for row in rows)
        slots: list[int] = []
        positions: list[int] = []
        table: list[int] = []
        for row in rows:
            reach = range(row.start, row.start + row.count)
            positions += reach
            slots += [row.blocks[position // block_size] * block_size + position % block_size for position in reach]
            table += row.blocks[:widest]
            table += [0] * (widest - len(row.blocks))
        numbers = integers([*slots, *positions, *table], device)
        slots_T, positions_T, table_N = numbers.split([len(slots), len(positions), len(table)])
        return cls(rows, slots_T, positions_T, table_N.view(len(rows), widest), block_size, num_single)

    def slots_of(self, rows: slice, num_keys: int) -> Tensor:
        """int64 [R, S]: the slots of the first `num_keys` tokens of each chosen request."""
        keys_S = torch.arange(num_keys, device=self.block_table_RB.device)
        blocks_RS = self.block_table_RB[rows].index_select(1, keys_S // self.block_size)
        return blocks_RS * self.block_size + keys_S % self.block_size

    @cached_property
    def spans(self) -> tuple[Tensor, Tensor]:
        """int64 [R] each: where a row's tokens start, and how many they are."""
        return integers([row.start for row in self.rows]), integers([row.count for row in self.rows])

    def reads(self, window: int | None) -> "Reads":
        """What the queries read where they see `window` keys at most; made at the first layer that asks."""
        if window not in self._reads:
            firsts = [0 if window is None else max(0, row.start + 1 - window) for row in self.rows]
            self._reads[window] = Reads(self._single(firsts[: self.num_single]), self._longer(firsts, window))
        return self._reads[window]

    def _single(self, firsts: Sequence[int]) -> tuple[Tensor, Tensor]:
        num_keys = max((row.start + 1 - first for row, first in zip(self.rows, firsts, strict=False)), default=0)
        first_R1 = torch.tensor(firsts, dtype=torch.int64, device=self.positions_T.device)[:, None]
        keys_RS = first_R1 + torch.arange(num_keys, device=first_R1.device)
        mask_RS = keys_RS <= self.positions_T[: self.num_single, None]
        # a shorter request reads its own first slot instead: what others left there, NaN even, is never touched
        keys_RS = torch.where(mask_RS, keys_RS, first_R1)
        blocks_RS = self.block_table_RB[: self.num_single].gather(1, keys_RS // self.block_size)
        slots_RS = blocks_RS * self.block_size + keys_RS % self.block_size
        return slots_RS.flatten(), mask_RS[:, None, None, :]

    def _longer(self, firsts: Sequence[int], window: int | None) -> list[tuple[slice, Tensor, Tensor]]:
        parts, begin = [], self.num_single
        for index, row in enumerate(self.rows[begin:], start=begin):
            tokens, first = slice(begin, begin + row.count), firsts[index]
            num_keys = row.start + row.count
            slots_S = self.slots_of(slice(index, index + 1), num_keys)[0, first:]
            parts.append((tokens, slots_S, causal_mask(self.positions_T[tokens], num_keys, window)[:, first:]))
            begin += row.count
        return parts


class Reads(NamedTuple):
    """The slots that a step's queries read under one window, none before the first that a row's first query sees."""

    single: tuple[Tensor, Tensor]
    """For the rows of one token: the slots they read, flat [R * S], and what they may see, bool [R, 1, 1, S]."""
    longer: list[tuple[slice, Tensor, Tensor]]
    """For each other row: its tokens in T, the slots it reads [S], and what each token may see, bool [T, S]."""


class AttentionBackend(Protocol):
    """Writes a step's keys and values to the cache, then attends. `name` is what the start-up line shows."""

    name: str

    def forward(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, layout: BatchLayout) -> Tensor:
        """The heads' outputs [T, H, D]. After it, the cache holds this step's keys and values of `layer`."""
        ...


class BackendKind(Protocol):
    """A class of backends, before one is made for a model."""

    def __call__(self, variants: Sequence[AttentionVariant]) -> AttentionBackend:
        """With one variant per layer: `config.attention_variants`."""
        ...

    def supports(self, config: ModelConfig, dtype: torch.dtype, device: str, block_size: int) -> bool:
        """Whether it gives this model the reference's answers on this device."""
        ...


def write(layer: int, k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, layout: BatchLayout) -> tuple[Tensor, Tensor]:
    """Put this step's keys and values into their slots; returns the layer's two caches."""
    keys, values = cache.keys[layer], cache.values[layer]
    keys.index_copy_(0, layout.slots_T, k_TKD)
    values.index_copy_(0, layout.slots_T, v_TKD)
    return keys, values


@dataclass
class ReferenceBackend:
    """The equation itself, request by request, in float32: slow, and right by inspection."""

    variants: Sequence[AttentionVariant] | None = None
    """One for each layer; None: the plain equation in all of them."""
    name: ClassVar[str] = "reference"

    @staticmethod
    def supports(config: ModelConfig, dtype: torch.dtype, device: str, block_size: int) -> bool:
        return True

    def forward(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, layout: BatchLayout) -> Tensor:
        keys, values = write(layer, k_TKD, v_TKD, cache, layout)
        variant = variant_of(self.variants, layer)
        outputs, begin = [], 0
        for index, row in enumerate(layout.rows):
            num_keys = row.start + row.count
            slots_S = layout.slots_of(slice(index, index + 1), num_keys)[0]
            mask_TS = causal_mask(layout.positions_T[begin : begin + row.count], num_keys, variant.window)
            q = q_THD[begin : begin + row.count].float()
            outputs.append(attend(q, keys[slots_S].float(), values[slots_S].float(), mask_TS, variant))
            begin += row.count
        return torch.cat(outputs).to(q_THD.dtype)


@dataclass
class TorchBackend:
    """Gather the pages, then torch's fused attention: all rows of one token at once, the others one by one."""

    variants: Sequence[AttentionVariant] | None = None
    """One for each layer; None: the plain equation in all of them."""
    name: ClassVar[str] = "torch"

    @staticmethod
    def supports(config: ModelConfig, dtype: torch.dtype, device: str, block_size: int) -> bool:
        return True

    def forward(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, layout: BatchLayout) -> Tensor:
        keys, values = write(layer, k_TKD, v_TKD, cache, layout)
        variant = variant_of(self.variants, layer)
        reads = layout.reads(variant.window)
        out_THD = torch.empty_like(q_THD)
        if layout.num_single:
            slots, mask = reads.single
            single = slice(layout.num_single)
            pages = (cached.index_select(0, slots).unflatten(0, (layout.num_single, -1)) for cached in (keys, values))
            k, v = (page.transpose(1, 2) for page in pages)
            out_THD[single] = fused(q_THD[single, None].transpose(1, 2), k, v, mask, variant)[:, :, 0]
        for tokens, slots_S, mask_TS in reads.longer:
            q, k, v = (
                x.transpose(0, 1)[None] for x in (q_THD[tokens], keys.index_select(0, slots_S), values.index_select(0, slots_S))
            )
            out_THD[tokens] = fused(q, k, v, mask_TS, variant)[0].transpose(0, 1)
        return out_THD


def variant_of(variants: Sequence[AttentionVariant] | None, layer: int) -> AttentionVariant:
    """A layer's variant, plain where none were given."""
    return PLAIN if variants is None else variants[layer]


def fused(q_RHTD: Tensor, k_RKSD: Tensor, v_RKSD: Tensor, mask: Tensor, variant: AttentionVariant) -> Tensor:
    """torch's fused kernel, but for a soft cap, which it does not know: then the equation, in float32. [R, H, T, D]."""
    group = q_RHTD.shape[1] // k_RKSD.shape[1]
    if variant.softcap is None:
        return F.scaled_dot_product_attention(q_RHTD, k_RKSD, v_RKSD, attn_mask=mask, scale=variant.scale, enable_gqa=group > 1)
    k_RHSD, v_RHSD = (x.float().repeat_interleave(group, dim=1) for x in (k_RKSD, v_RKSD))
    scores_RHTS = attention_scores(q_RHTD.float(), k_RHSD, variant).masked_fill(~mask, -torch.inf)
    return (scores_RHTS.softmax(dim=-1) @ v_RHSD).to(q_RHTD.dtype)


BACKENDS: dict[str, BackendKind] = {"reference": ReferenceBackend, "torch": TorchBackend}


@dataclass(frozen=True, slots=True)
class Paged:
    """A backend bound to one step: the `attention` argument of the decoder."""

    backend: AttentionBackend
    cache: KVCache
    layout: BatchLayout

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        return self.backend.forward(layer, q_THD, k_TKD, v_TKD, self.cache, self.layout)
