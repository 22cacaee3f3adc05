"""Paged attention: how the tokens of a step see the past, in KV caches that an attention backend writes and reads.

Between the engine and a backend only block ids cross. The slot mapping: token p of a request lives in slot
`blocks[p // block_size] * block_size + p % block_size`; block 0 belongs to nobody and takes padding writes. Layers that keep
the same kind of memory are a group (`ModelConfig.memory_groups`): a request has a block table for each. Under a window the
entries of blocks that no query sees any more are 0, and a backend reads nothing there.

Shapes: T tokens of this step · R requests · S key slots · B blocks · H query heads · K key/value heads · D head size.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attend.model.net.attention import PLAIN, attend, attention_scores, causal_mask, softmax_with_sinks
from attend.model.net.kv_cache import KVCache
from attend.model.net.progress import ProgressCounter
from attend.model.net.states import Recurrence, StateSlots, advance
from attend.model.sublayers import AttentionVariant
from attend.model.transfer import HostToDeviceCopy, integers

LEAST_KEYS = 64
"""Rows with fewer keys are computed together, whatever their lengths are."""
GATHERED = 1 << 14
"""Slots that the torch backend gathers at once for rows of one token, where the longest of them does not need more."""


@dataclass(slots=True)  # freezing it would cost each request a microsecond a step
class Row:
    """Tokens `start .. start + count - 1` of the request that owns `blocks`; the last `draft` do not move its state on."""

    blocks: Sequence[int]
    start: int
    count: int
    draft: int = 0


@dataclass(frozen=True)
class BatchLayout:
    """Attention metadata of a ragged batch: where a step's tokens stand, made once a step and read by every layer.

    Rows of one token come first.
    """

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
    others: "tuple[BatchLayout, ...]" = ()
    """Layouts of the same step for the other groups of layers; empty where all layers have the same tables."""
    states_R: Tensor | None = None
    sources_R: Tensor | None = None
    """int64, in a model that keeps states: the slot where each request's state is written, and the one where it is read."""
    _reads: "dict[int | None, Reads]" = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        rows: Sequence[Row],
        block_size: int,
        device: str | torch.device | HostToDeviceCopy,
        others: Sequence[Sequence[Sequence[int]]] = (),
        states: Sequence[int] | None = None,
        sources: Sequence[int] | None = None,
    ) -> "BatchLayout":
        """`rows` must have those with one token first; tokens lie in their order. They have the blocks of the first group of
        layers, `others` [G - 1][R] those of the others. Without `sources` states are read where they are written. A copy in
        the place of a device is sent: all that is in it goes to its device with the layout.
        """
        h2d_copy = device if isinstance(device, HostToDeviceCopy) else HostToDeviceCopy(device)
        num_single = sum(row.count == 1 for row in rows)
        assert all(row.count == 1 for row in rows[:num_single]), "rows of one token come first"
        num_tokens = sum(row.count for row in rows)
        widest = max(-(-(row.start + row.count) // block_size) for row in rows)
        tables = ([row.blocks for row in rows], *others)
        size = num_tokens + len(rows) * widest
        numbers = np.empty(num_tokens + len(tables) * size, dtype=np.int64)
        _positions(rows, num_single, numbers[:num_tokens])
        for group, table in enumerate(tables):
            part = numbers[num_tokens + group * size :]
            write_slots(rows, table, num_single, block_size, part[:num_tokens])
            _block_table(table, part[num_tokens:size].reshape(len(rows), widest))
        sizes = [num_tokens, *[num_tokens, size - num_tokens] * len(tables)]
        sent = [None if part is None else h2d_copy.add(part) for part in (states, sources or states)]
        positions, *parts = h2d_copy[h2d_copy.add(numbers)].split(sizes)
        states_R, sources_R = (None if part is None else h2d_copy[part] for part in sent)
        layouts: tuple[BatchLayout, ...] = ()
        for slots_T, table in zip(parts[-2::-2], parts[::-2], strict=True):  # the first group's last, for it has the others
            known = layouts if len(layouts) == len(others) else ()
            at = table.view(len(rows), widest)
            layouts = (cls(rows, slots_T, positions, at, block_size, num_single, known, states_R, sources_R), *layouts)
        return layouts[0]

    def of(self, group: int) -> "BatchLayout":
        """The layout of a group of layers."""
        return self.others[group - 1] if self.others and group else self

    def slots_of(self, rows: slice, num_keys: int) -> Tensor:
        """int64 [R, S]: the slots of the first `num_keys` tokens of each chosen request."""
        keys_S = torch.arange(num_keys, device=self.block_table_RB.device)
        blocks_RS = self.block_table_RB[rows].index_select(1, keys_S // self.block_size)
        return blocks_RS * self.block_size + keys_S % self.block_size

    @cached_property
    def spans(self) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [R] each: where a row's tokens start, how many they are, and after how many its state is kept."""
        starts, counts, kept = zip(*((row.start, row.count, row.count - row.draft) for row in self.rows), strict=True)
        return integers(starts), integers(counts), integers(kept)

    @cached_property
    def turns(self) -> StateSlots:
        """The step's updates of recurrent states; only in a model that has them."""
        assert self.states_R is not None and self.sources_R is not None, "nobody said where the states lie"
        return StateSlots(self.rows, self.sources_R, self.states_R)

    def reads(self, window: int | None) -> "Reads":
        """What the queries read where they see `window` keys at most; made at the first layer that asks."""
        if window not in self._reads:
            firsts = [0 if window is None else max(0, row.start + 1 - window) for row in self.rows]
            self._reads[window] = Reads(self._single(firsts[: self.num_single]), self._longer(firsts, window))
        return self._reads[window]

    def _single(self, firsts: Sequence[int]) -> "list[RowBatch]":
        """Rows of about the same length side by side: the longest of a group has at most twice the keys of the shortest, or
        LEAST_KEYS. So no row costs more than twice what it costs alone, whoever is in the batch.
        """
        alike: dict[int, list[int]] = {}
        lengths = [row.start + 1 - first for row, first in zip(self.rows, firsts, strict=False)]
        for at, length in enumerate(lengths):
            alike.setdefault((max(length, LEAST_KEYS) - 1).bit_length(), []).append(at)
        groups = []
        for rows in alike.values():
            most = max(1, GATHERED // max(lengths[at] for at in rows))
            groups += [self._group(rows[begin : begin + most], firsts, lengths) for begin in range(0, len(rows), most)]
        return groups

    def _group(self, rows: Sequence[int], firsts: Sequence[int], lengths: Sequence[int]) -> "RowBatch":
        device = self.positions_T.device
        rows_N = integers(rows, device)
        first_N1 = integers([firsts[at] for at in rows], device)[:, None]
        keys_NS = first_N1 + torch.arange(max(lengths[at] for at in rows), device=device)
        mask_NS = keys_NS <= self.positions_T[rows_N][:, None]
        # a shorter request reads its own first slot instead: what others left there, NaN even, is never touched
        keys_NS = torch.where(mask_NS, keys_NS, first_N1)
        slots_NS = (
            self.block_table_RB[rows_N[:, None], keys_NS // self.block_size] * self.block_size + keys_NS % self.block_size
        )
        return RowBatch(rows_N, slots_NS.flatten(), mask_NS[:, None, None, :])

    def _longer(self, firsts: Sequence[int], window: int | None) -> list[tuple[slice, Tensor, Tensor]]:
        parts, begin = [], self.num_single
        for index, row in enumerate(self.rows[begin:], start=begin):
            tokens, first = slice(begin, begin + row.count), firsts[index]
            num_keys = row.start + row.count
            slots_S = self.slots_of(slice(index, index + 1), num_keys)[0, first:]
            parts.append((tokens, slots_S, causal_mask(self.positions_T[tokens], num_keys, window)[:, first:]))
            begin += row.count
        return parts


def _positions(rows: Sequence[Row], num_single: int, positions_T: np.ndarray) -> None:
    """Write the position of each token."""
    positions_T[:num_single] = [row.start for row in rows[:num_single]]
    begin = num_single
    for row in rows[num_single:]:
        positions_T[begin : begin + row.count] = np.arange(row.start, row.start + row.count)
        begin += row.count


def write_slots(
    rows: Sequence[Row], tables: Sequence[Sequence[int]], num_single: int, block_size: int, slots_T: np.ndarray
) -> None:
    """Write the slot of each token."""
    singles = zip(rows[:num_single], tables, strict=False)
    slots_T[:num_single] = [blocks[row.start // block_size] * block_size + row.start % block_size for row, blocks in singles]
    begin = num_single
    for row, blocks in zip(rows[num_single:], tables[num_single:], strict=True) if begin < len(rows) else ():
        reach_T = np.arange(row.start, row.start + row.count)
        slots_T[begin : begin + row.count] = np.asarray(blocks)[reach_T // block_size] * block_size + reach_T % block_size
        begin += row.count


def _block_table(tables: Sequence[Sequence[int]], table_RB: np.ndarray) -> None:
    """Write each request's blocks, and 0 where it has fewer."""
    widest = table_RB.shape[1]
    for blocks_B, blocks in zip(table_RB, tables, strict=True):
        known = min(widest, len(blocks))
        blocks_B[:known] = np.frombuffer(blocks, np.int64, known) if isinstance(blocks, array) else blocks[:known]
        blocks_B[known:] = 0


class RowBatch(NamedTuple):
    """Rows of one token that are computed together."""

    rows_N: Tensor
    """int64: their places in the step, which are those of their tokens too."""
    slots: Tensor
    """int64 [N * S]: the cache slots that they read, row after row."""
    mask: Tensor
    """bool [N, 1, 1, S]: which of these slots each may see."""


class Reads(NamedTuple):
    """The slots that a step's queries read under one window, none before the first that a row's first query sees."""

    single: list[RowBatch]
    """Batches of the rows of one token."""
    longer: list[tuple[slice, Tensor, Tensor]]
    """For each other row: its tokens in T, the slots it reads [S], and what each token may see, bool [T, S]."""


class AttentionBackend(Protocol):
    """Writes a step's keys and values to the cache, then attends."""

    @property
    def name(self) -> str:
        """The backend's name in the start-up log."""
        ...

    def forward(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, layout: BatchLayout) -> Tensor:
        """The heads' outputs [T, H, D]. After it, the cache holds this step's keys and values of `layer`.

        A backend that computes models with sinks takes them as one more argument, `sinks_H`.
        """
        ...


class Attending:
    """A backend that also attends by itself, where others have written this step's keys and values."""

    def forward(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cache: KVCache,
        layout: BatchLayout,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        cache.write(layer, k_TKD, v_TKD, layout.slots_T)
        return self.attend(layer, q_THD, cache, layout, sinks_H)

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        cache: KVCache,
        layout: BatchLayout,
        sinks_H: Tensor | None = None,
        out_THD: Tensor | None = None,
    ) -> Tensor:
        """The heads' outputs [T, H, D], in `out_THD` if it is given."""
        raise NotImplementedError


@dataclass
class ReferenceBackend:
    """The equation itself, request by request, in float32: slow, and right by inspection."""

    variants: Sequence[AttentionVariant] | None = None
    """Variant of each layer's attention; None: all layers have the plain one."""
    name: ClassVar[str] = "reference"

    def forward(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cache: KVCache,
        layout: BatchLayout,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        cache.write(layer, k_TKD, v_TKD, layout.slots_T)
        variant = variant_of(self.variants, layer)
        outputs, begin = [], 0
        for index, row in enumerate(layout.rows):
            num_keys = row.start + row.count
            first = 0 if variant.window is None else max(0, row.start + 1 - variant.window)  # before it blocks may be gone
            slots_S = layout.slots_of(slice(index, index + 1), num_keys)[0, first:]
            mask_TS = causal_mask(layout.positions_T[begin : begin + row.count], num_keys, variant.window)[:, first:]
            q = q_THD[begin : begin + row.count].float()
            outputs.append(attend(q, *cache.read(layer, slots_S, torch.float32), mask_TS, variant, sinks_H))
            begin += row.count
        return torch.cat(outputs).to(q_THD.dtype)


@dataclass
class TorchBackend(Attending):
    """Gather the pages, then torch's fused attention: rows of one token in groups of like length, the others one by one."""

    variants: Sequence[AttentionVariant] | None = None
    """Variant of each layer's attention; None: all layers have the plain one."""
    name: ClassVar[str] = "torch"

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        cache: KVCache,
        layout: BatchLayout,
        sinks_H: Tensor | None = None,
        out_THD: Tensor | None = None,
    ) -> Tensor:
        """See `Attending`."""
        variant = variant_of(self.variants, layer)
        reads = layout.reads(variant.window)
        out_THD = torch.empty_like(q_THD) if out_THD is None else out_THD
        for rows_N, slots, mask in reads.single:
            pages = cache.read(layer, slots, q_THD.dtype)
            k, v = (page.unflatten(0, (len(rows_N), -1)).transpose(1, 2) for page in pages)
            q = q_THD.index_select(0, rows_N)[:, None].transpose(1, 2)
            out_THD.index_copy_(0, rows_N, fused_attention(q, k, v, mask, variant, sinks_H)[:, :, 0])
        for tokens, slots_S, mask_TS in reads.longer:
            q, k, v = (x.transpose(0, 1)[None] for x in (q_THD[tokens], *cache.read(layer, slots_S, q_THD.dtype)))
            out_THD[tokens] = fused_attention(q, k, v, mask_TS, variant, sinks_H)[0].transpose(0, 1)
        return out_THD


def variant_of(variants: Sequence[AttentionVariant] | None, layer: int) -> AttentionVariant:
    """A layer's variant; the plain one where `variants` is None."""
    return PLAIN if variants is None else variants[layer]


def fused_attention(
    q_RHTD: Tensor, k_RKSD: Tensor, v_RKSD: Tensor, mask: Tensor, variant: AttentionVariant, sinks_H: Tensor | None = None
) -> Tensor:
    """torch's fused kernel; with a soft cap or sinks, which it does not know, the equation in float32. [R, H, T, D]."""
    group = q_RHTD.shape[1] // k_RKSD.shape[1]
    if variant.softcap is None and sinks_H is None:
        if q_RHTD.shape[2] == 1:  # heads as rows of a matrix: a key is read once for all query heads that share it
            q_RKGD = q_RHTD[:, :, 0].unflatten(1, (-1, group))
            heads_RKGD = F.scaled_dot_product_attention(q_RKGD, k_RKSD, v_RKSD, attn_mask=mask, scale=variant.scale)
            return heads_RKGD.flatten(1, 2)[:, :, None]
        return F.scaled_dot_product_attention(q_RHTD, k_RKSD, v_RKSD, attn_mask=mask, scale=variant.scale, enable_gqa=group > 1)
    k_RHSD, v_RHSD = (x.float().repeat_interleave(group, dim=1) for x in (k_RKSD, v_RKSD))
    scores_RHTS = attention_scores(q_RHTD.float(), k_RHSD, variant).masked_fill(~mask, -torch.inf)
    return (softmax_with_sinks(scores_RHTS, sinks_H) @ v_RHSD).to(q_RHTD.dtype)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """A backend bound to one step: the `attention` argument of the decoder. Every layer comes by here, and counts as
    progress."""

    backend: AttentionBackend
    cache: KVCache
    layout: BatchLayout
    progress: ProgressCounter = field(default_factory=ProgressCounter, kw_only=True)

    def layout_of(self, layer: int) -> BatchLayout:
        """The layout for a layer's group of layers."""
        return self.layout.of(self.cache.group_of_layer[layer]) if self.layout.others else self.layout

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *sinks_H: Tensor) -> Tensor:
        self.progress.beat()
        return self.backend.forward(layer, q_THD, k_TKD, v_TKD, self.cache, self.layout_of(layer), *sinks_H)

    def attend(self, layer: int, q_THD: Tensor, *sinks_H: Tensor, out_THD: Tensor | None = None) -> Tensor:
        """See `Attending`, which the backend must be."""
        self.progress.beat()
        backend = cast(Attending, self.backend)
        return backend.attend(layer, q_THD, self.cache, self.layout_of(layer), *sinks_H, out_THD=out_THD)

    def recur(self, layer: int, recurrence: Recurrence, *inputs_T: Tensor) -> Tensor:
        """See Attention."""
        self.progress.beat()
        return advance(recurrence, inputs_T, self.cache.states[layer], self.layout.turns)
