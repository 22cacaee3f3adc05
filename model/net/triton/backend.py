"""The Triton kernels as an attention backend: rows of one token decode in splits, longer rows prefill in tiles.

Not yet run on a GPU: its laws are tested in Triton's interpreter on the CPU, and its kernels compile for one.

Shapes: T tokens of this step · R requests · H query heads · K key/value heads · D head size · I items of work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import cdiv, next_power_of_2

from attend.model.net.kv_cache import KVCache
from attend.model.net.paged_attention import Attending, BatchLayout, variant_of
from attend.model.net.triton import kernels
from attend.model.net.triton.processors import DECODES, Processors
from attend.model.sublayers import AttentionVariant
from attend.model.transfer import integers

SPLIT = 256
"""Keys of one item of decoding. A number of tokens, not of splits: a row's result does not depend on the batch."""
STAGES = 3
"""A tile is multiplied while the next one is on its way, of decode and of prefill, where shared memory has room for it."""
SHARED = 227 << 10
"""Bytes of shared memory that a program may have on an H200, for which kernels are compiled where there is no GPU."""
WIDE = 200 << 10
"""Bytes of shared memory that only GPUs with wide matrix units have."""
PREFILL_SPLIT = 1024
"""Keys of a split of a prefill row at least."""
MAX_PARTS = 8192
"""Parts, of a token and a split, that one launch leaves behind: 128 MiB at 32 heads of 128."""
MAX_SPLITS = 64
"""Of a row: the splits of a longer one than that many have are longer, so that what they leave to combine stays small."""
MIN_LANES = 16
"""Rows and columns that the matrix units multiply at least."""
COUNTED = 256
"""Rows that sharing out counts at once: one kernel for any batch."""
COMBINED = 16
"""Splits that the combining kernel reads at once."""
MAX_GROUP = 32
MAX_HEAD = 512
LOG2_E = kernels.LOG2_E.value
INTERPRETED = not isinstance(kernels.decode_kernel, triton.JITFunction)
"""True if the kernels run in Triton's interpreter, on any device: TRITON_INTERPRET was 1 when they were imported."""


@cache
def shared_memory() -> int:
    """Bytes of shared memory that a program may have on this machine's GPU; SHARED where there is none."""
    if not torch.cuda.is_available():
        return SHARED
    return int(torch.cuda.get_device_properties().shared_memory_per_block_optin)


def has_wide_units() -> bool:
    """True if matrix units take whole operands out of shared memory, as those of H100 and B200 do. Those of other GPUs (A100,
    L4, RTX) take them from registers, of which a large tile needs too many; and most of these have 99 KiB of shared memory.
    """
    return shared_memory() >= WIDE


class Tiles(NamedTuple):
    """How much a program takes at once. Larger ones spill registers, or take more shared memory than there is, when they are
    compiled for the GPUs of tests/model/net/triton/compiles.py; none was timed.
    """

    keys: int
    """Keys in a tile of prefill."""
    decode_keys: int
    """Keys in a tile of decode, which holds STAGES - 1 tiles of keys and values: small ones leave room for more programs."""
    lanes: int
    """Queries times heads of a prefill tile."""
    warps: int
    """Warps of a prefill program; decode has 4."""

    @classmethod
    def of(cls, size_p: int, group: int, itemsize: int) -> "Tiles":
        """For heads of `size_p` numbers of `itemsize` bytes, so many to a key/value head: a tile has one query at least.

        Float32 has no matrix units that keep all its bits.
        """
        if itemsize == 4:
            lanes = max(16, next_power_of_2(group))
            few = size_p > 128 or (group > 16 and not has_wide_units())
            return cls(16, 16 if few else 32, lanes, lanes // 4)
        decode_keys = 16 if size_p > 256 else 32
        if has_wide_units():
            return cls(16 if size_p > 256 else 64, decode_keys, 128 if size_p <= 128 else 64, 8)
        keys = min(64, max(16, 4096 // size_p))
        return cls(keys, decode_keys, min(128, max(MAX_GROUP, 16384 // size_p)), 8)

    def stages(self, size_p: int, itemsize: int) -> int:
        """Of prefill: STAGES, or one less where the queries and so many tiles of keys and of values do not fit. Wide units
        read a tile while the next one is written: that is one more.
        """
        tiles = STAGES if has_wide_units() else STAGES - 1
        needed = (self.lanes + 2 * tiles * self.keys) * size_p * itemsize
        return STAGES if needed <= shared_memory() else STAGES - 1


@dataclass(frozen=True, slots=True)
class Shares:
    """Items of work, and whose they are: row r has `first[r] .. first[r + 1] - 1`."""

    first_R: Tensor
    """int64 [R + 1]: the first item of each row, and the end of the last."""
    rows_I: Tensor
    """int64. May be longer than the items are; `first_R[-1]` is their number."""

    @classmethod
    def split_rows(cls, last_R: Tensor, size: int, limit: int, at_most: int, most: int = 0) -> "Shares":
        """Cut each row's `last + 1` units, or `limit` of them (0: no limit), into items of `size`, `at_most` in all.

        A row gets at most `most` items, if that is not 0: a multiple of `size` each.
        """
        num_rows = len(last_R)
        shares = cls(last_R.new_empty(num_rows + 1), last_R.new_empty(at_most))
        kernels.share_kernel[(num_rows,)](last_R, shares.first_R, shares.rows_I, num_rows, size, limit, most, ROWS=COUNTED)
        return shares


@dataclass(frozen=True, slots=True)
class Longer:
    """Rows of several tokens that one launch computes: R of them, in I tiles."""

    places_R7: Tensor
    """int64: their starts, their tokens less one, where these lie in T, the lines of the table, how many splits their keys
    have, of how many tiles, and where their parts begin.
    """
    shares: Shares
    splits: int
    """The most splits of any row."""
    first: Tensor
    """int64: where the parts of each token begin that has several, and where those of the last one end."""
    tokens: Tensor
    """int64: where these tokens lie in T. `num_parts` 0: nobody reads both."""
    num_parts: int

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]], queries: int, device: torch.device) -> "Longer":
        """`rows`: the columns of `places`."""
        first, tokens = [], []
        for _, last, begin, _, splits, _, parts in rows:
            if splits > 1:
                first += range(parts, parts + (last + 1) * splits, splits)
                tokens += range(begin, begin + last + 1)
        num_parts = max((parts + (last + 1) * splits for _, last, _, _, splits, _, parts in rows if splits > 1), default=0)
        numbers = integers([*(number for row in rows for number in row), *first, num_parts, *tokens], device)
        places_R7, first_, tokens_ = numbers.split([7 * len(rows), len(first) + 1, len(tokens)])
        places_R7 = places_R7.view(-1, 7)
        shares = Shares.split_rows(places_R7[:, 1].contiguous(), queries, 0, sum(cdiv(row[1] + 1, queries) for row in rows))
        return cls(places_R7, shares, max(row[4] for row in rows), first_, tokens_, num_parts)


def splits_of(programs: int, keys: int) -> int:
    """How many splits the keys of a prefill row have that starts so many programs without: it depends on the row alone.

    A row of few tokens would leave processors idle on a long past: its keys are cut, for twice as many programs as these.
    """
    count = Processors.here().count
    return max(1, min(cdiv(2 * count, programs), keys // PREFILL_SPLIT)) if programs < count else 1


@dataclass(frozen=True)
class StepPlan:
    """What the kernels need of a layout beside its own tensors and its tables, made once a step and read by every layer."""

    layout: BatchLayout
    decodes: dict[int, Shares] = field(default_factory=dict)
    """By window, 0 for none: how decode's keys are split."""
    prefills: dict[tuple[int, ...], list[Longer]] = field(default_factory=dict)
    """By window, queries in a tile, keys in a tile, and key/value heads: how prefill's keys are split."""

    @cached_property
    def longer(self) -> Tensor:
        """Starts, tokens less one, and places in T of the longer rows, int64 [3, R]; without any, what nobody reads."""
        rows, begin, places = self.layout.rows[self.layout.num_single :], self.layout.num_single, []
        if not rows:
            return self.layout.positions_T.expand(3, -1)
        for row in rows:
            places += [row.start, row.count - 1, begin]
            begin += row.count
        return integers(places, self.layout.positions_T.device).view(-1, 3).T.contiguous()

    @cached_property
    def own(self) -> Tensor:
        """int64: places in T of the rows of one token, which are their numbers."""
        return torch.arange(self.layout.num_single, device=self.layout.positions_T.device)

    def decode(self, window: int) -> Shares:
        """The splits of the rows of one token. Their number on the host is that of `rows`, which may be more than there are."""
        if window not in self.decodes:
            layout = self.layout
            single = layout.rows[: layout.num_single]
            at_most = sum(min(MAX_SPLITS, cdiv(min(row.start + 1, window or row.start + 1), SPLIT)) for row in single)
            self.decodes[window] = Shares.split_rows(layout.positions_T[: len(single)], SPLIT, window, at_most, MAX_SPLITS)
        return self.decodes[window]

    def prefill(self, window: int, tiles: Tiles, queries: int, kv_heads: int) -> list[Longer]:
        """The longer rows, in tiles of so many queries; one launch for each group."""
        key = (window, queries, tiles.keys, kv_heads)
        if key not in self.prefills:
            layout, begin = self.layout, self.layout.num_single
            groups, parts = [[]], 0
            for line, row in enumerate(layout.rows[begin:], start=layout.num_single):
                keys = min(row.start + row.count, window + queries + tiles.keys) if window else row.start + row.count
                splits = splits_of(cdiv(row.count, queries) * kv_heads, keys)
                size = cdiv(keys, splits * tiles.keys)
                needed = row.count * splits if splits > 1 else 0
                if needed and parts + needed > MAX_PARTS and parts:
                    groups.append([])
                    parts = 0
                groups[-1].append((row.start, row.count - 1, begin, line, splits, size, parts))
                parts, begin = parts + needed, begin + row.count
            device = layout.positions_T.device
            self.prefills[key] = [Longer.of(group, queries, device) for group in groups]
        return self.prefills[key]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's cache, and what its kernels are told of its shapes and its variant."""

    keys: Tensor
    values: Tensor
    sinks: Tensor | None
    scale: float
    cap: float
    tiles: Tiles
    sizes: dict[str, Any]

    @classmethod
    def of(
        cls,
        variant: AttentionVariant,
        q_THD: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        block_size: int,
    ) -> "_Layer":
        num_kv_heads, size = keys.shape[1:]
        size_p = max(MIN_LANES, next_power_of_2(size))
        tiles = Tiles.of(size_p, q_THD.shape[1] // num_kv_heads, keys.element_size())
        scale = size**-0.5 if variant.scale is None else variant.scale
        sizes = {
            "K": num_kv_heads,
            "GROUP": q_THD.shape[1] // num_kv_heads,
            "D": size,
            "D_P": size_p,
            "BLOCK": block_size,
            "WINDOW": variant.window or 0,
            "CAPPED": variant.softcap is not None,
            "UPCAST": INTERPRETED and keys.dtype == torch.bfloat16,
        }
        if variant.softcap is None:
            return cls(keys, values, sinks, scale * LOG2_E, 0.0, tiles, sizes)
        return cls(keys, values, sinks, scale / variant.softcap, variant.softcap * LOG2_E, tiles, sizes)

    def decode(self, q_RHD: Tensor, table_RB: Tensor, positions_R: Tensor, plan: StepPlan, out_RHD: Tensor) -> None:
        """Attention of one token a row, into `out`."""
        shares, own_R = plan.decode(self.sizes["WINDOW"]), plan.own
        num_rows, heads, size = q_RHD.shape
        at_most, num_kv_heads = len(shares.rows_I), self.sizes["K"]
        parts_IHD = torch.empty(at_most, heads, size, dtype=torch.float32, device=q_RHD.device)
        weights_IH = parts_IHD.new_empty(at_most, heads)
        group_p = max(MIN_LANES, next_power_of_2(self.sizes["GROUP"]))
        compiled_for = (q_RHD.dtype, group_p, *self.sizes.values())
        programs = DECODES.get(compiled_for, Processors.here().count)
        built = kernels.decode_kernel[(min(at_most, max(1, programs // num_kv_heads)), num_kv_heads)](
            q_RHD,
            self.keys,
            self.values,
            parts_IHD,
            weights_IH,
            table_RB,
            positions_R,
            shares.first_R,
            shares.rows_I,
            q_RHD.stride(0),
            table_RB.stride(0),
            num_rows,
            self.scale,
            self.cap,
            **self.sizes,
            TILE=self.tiles.decode_keys,
            GROUP_P=group_p,
            SPLIT=SPLIT,
            MOST=MAX_SPLITS,
            num_stages=STAGES,
        )
        if compiled_for not in DECODES and hasattr(built, "n_regs"):  # it was launched, and not interpreted
            DECODES[compiled_for] = Processors.here().programs(built.metadata.shared, built.n_regs, built.metadata.num_warps)
        self._combine(parts_IHD, weights_IH, out_RHD, shares.first_R, own_R)

    def _combine(self, parts_IHD: Tensor, weights_IH: Tensor, out_THD: Tensor, first_R: Tensor, tokens_R: Tensor) -> None:
        """Write the mean of each row's parts to its token's place in `out`."""
        kernels.combine_kernel[(len(tokens_R), parts_IHD.shape[1])](
            *(parts_IHD, weights_IH, out_THD, out_THD if self.sinks is None else self.sinks, first_R, tokens_R),
            H=parts_IHD.shape[1],
            D=self.sizes["D"],
            D_P=self.sizes["D_P"],
            TILE=COMBINED,
            SINKS=self.sinks is not None,
        )

    def prefill(self, q_THD: Tensor, table_RB: Tensor, longer: Longer, out_THD: Tensor) -> None:
        """Causal attention of rows of several tokens, into `out`."""
        parts_IHD = q_THD.new_empty(longer.num_parts, *q_THD.shape[1:], dtype=torch.float32)
        weights_IH = parts_IHD.new_empty(parts_IHD.shape[:2])
        kernels.prefill_kernel[(len(longer.shares.rows_I), self.sizes["K"], longer.splits)](
            *(q_THD, self.keys, self.values, out_THD, parts_IHD, weights_IH),
            out_THD if self.sinks is None else self.sinks,
            table_RB,
            longer.places_R7,
            longer.shares.first_R,
            longer.shares.rows_I,
            q_THD.stride(0),
            table_RB.stride(0),
            self.scale,
            self.cap,
            **self.sizes,
            SINKS=self.sinks is not None,
            QUERIES=self.queries,
            LANES=self.tiles.lanes,
            TILE=self.tiles.keys,
            num_warps=self.tiles.warps,
            num_stages=self.tiles.stages(self.sizes["D_P"], self.keys.element_size()),
        )
        if longer.num_parts:
            self._combine(parts_IHD, weights_IH, out_THD, longer.first, longer.tokens)

    @property
    def queries(self) -> int:
        """Queries, tokens of one request, in a tile of prefill."""
        return self.tiles.lanes // int(self.sizes["GROUP"])


class TritonBackend(Attending):
    """Keys and values lie in the cache as [slots, K, D]; the kernels read them there, page by page."""

    name = "triton"

    def __init__(self, variants: Sequence[AttentionVariant] | None = None) -> None:
        """Variant of each layer's attention; None: all layers have the plain one."""
        self.variants = variants
        self._plan: StepPlan | None = None

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
        plan, variant = self.plan(layout), variant_of(self.variants, layer)
        q_THD = q_THD.flatten(1).unflatten(1, q_THD.shape[1:])  # heads side by side; a copy only if they are not
        at = _Layer.of(variant, q_THD, cache.keys[layer], cache.values[layer], sinks_H, cache.block_size)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format) if out_THD is None else out_THD
        single, table_RB = layout.num_single, layout.block_table_RB
        if single:
            at.decode(q_THD[:single], table_RB[:single], layout.positions_T[:single], plan, out_THD[:single])
        if single < len(layout.rows):
            for longer in plan.prefill(variant.window or 0, at.tiles, at.queries, at.sizes["K"]):
                at.prefill(q_THD, table_RB, longer, out_THD)
        return out_THD

    def plan(self, layout: BatchLayout) -> StepPlan:
        """What the layers of a step share, of whichever group they are."""
        if self._plan is None or self._plan.layout.positions_T is not layout.positions_T:
            self._plan = StepPlan(layout)
        return self._plan
