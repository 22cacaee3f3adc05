"""Quantised matrices: the integer codes that files of quantised weights hold, and what `quantise` makes of plain ones.

Columns belong together in groups of 32. Column k of row o is

    scales[o, k // 32] * value(codes[o, k]) + minima[o, k // 32]

where the value of a code of 8 bits is itself, or a float of 8 bits, and that of 4 bits stands in a table of 16.

Shapes: O rows · I columns · G groups.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
"""Columns that share a scale; formats with larger groups repeat theirs."""
SLICE = 1 << 18
"""Numbers that are quantised at once: what lies between takes a few times their room."""


class Kind(NamedTuple):
    """A kind of quantised number: its bits, and the value of each code."""

    name: str
    bits: int
    values: tuple[int, ...] = ()
    """Values of the 16 codes of 4 bits; empty where a code is its own value, from -128 to 127, or a float."""


INT8 = Kind("int8", 8)
INT4 = Kind("int4", 4, tuple(range(-8, 8)))
IQ4_NL = Kind("iq4_nl", 4, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
"""Steps that widen with the distance from zero: a table of llama.cpp's ggml-common.h."""
MXFP4 = Kind("mxfp4", 4, (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
"""Floats with two bits of exponent and one of mantissa, doubled (OCP Microscaling 1.0)."""
FP8 = Kind("fp8", 8)
"""Floats with four bits of exponent and three of mantissa (e4m3fn): a code is the bits of one, as int8."""
LARGEST_FP8 = 448.0
KINDS = {kind.name: kind for kind in (INT8, INT4, IQ4_NL, MXFP4)}
"""Kinds with integer codes of 4 or 8 bits, by name; FP8 is not among them."""


class CodeLayout(NamedTuple):
    """The quantised form that a matrix is kept in."""

    kind: Kind
    has_minima: bool = False
    rounded_types: tuple[str, ...] = ()
    """Types of the files whose numbers are rounded once more."""

    def common_layout(self, other: "CodeLayout") -> "CodeLayout":
        """What holds the rows of both: values of 4 bits are values of 8 bits, too."""
        kind = self.kind if self.kind == other.kind else INT8
        rounded = tuple(sorted({*self.rounded_types, *other.rounded_types}))
        return CodeLayout(kind, self.has_minima or other.has_minima, rounded)


class Codes(NamedTuple):
    """Rows of a matrix. There may be dimensions before them, as those of experts."""

    kind: Kind
    codes_OI: Tensor
    """int8, or uint8 for codes of 4 bits: one in a byte."""
    scales_OG: Tensor
    """Scales of the groups, float32 [O, G]."""
    minima_OG: Tensor | None = None
    """Minima of the groups, float32 [O, G]; None: all are zero."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, [O, I]."""
        return self.codes_OI.shape

    def numel(self) -> int:
        """Number of elements of the matrix."""
        return self.codes_OI.numel()

    def dense(self) -> Tensor:
        """The numbers themselves, float32."""
        columns, codes_OI = self.shape[-1], self.codes_OI
        if columns % GROUP:
            codes_OI = torch.nn.functional.pad(codes_OI, (0, -columns % GROUP))  # which copies, also where it adds nothing
        dense_OGN = values_of(self.kind, codes_OI).unflatten(-1, (-1, GROUP)).mul_(self.scales_OG[..., None])
        if self.minima_OG is not None:
            dense_OGN.add_(self.minima_OG[..., None])
        return dense_OGN.flatten(-2)[..., :columns]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Codes":
        """The same change to the rows of codes, scales and minima: it must neither mix rows nor reorder columns."""
        minima = None if self.minima_OG is None else change(self.minima_OG)
        return Codes(self.kind, change(self.codes_OI), change(self.scales_OG), minima)


def values_of(kind: Kind, codes: Tensor) -> Tensor:
    """The values that codes stand for, float32, in the shape of the codes."""
    if kind == FP8:
        return codes.view(torch.float8_e4m3fn).float()
    if not kind.values:
        return codes.float()
    first = kind.values[0]
    if kind.values == tuple(range(first, first + 16)):  # several times faster than the table
        return codes.float().add_(first)
    return _table(kind, codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


@cache
def _table(kind: Kind, device: torch.device) -> Tensor:
    """The values of 16 codes: made once, as a step that is recorded may copy nothing to a device."""
    return torch.tensor(kind.values, dtype=torch.float32, device=device)


def quantise(matrix_OI: Tensor, kind: Kind) -> Codes:
    """The codes of `kind`, int8, int4 or fp8, that come near a matrix of finite numbers. Rows are computed independently."""
    rows_RI = matrix_OI.flatten(0, -2)
    columns, count = rows_RI.shape[1], max(1, SLICE // max(1, rows_RI.shape[1]))
    choose = {"int8": _eight_bits, "int4": _four_bits, "fp8": _floats}[kind.name]
    codes_RI = torch.empty(rows_RI.shape, dtype=torch.uint8 if kind.values else torch.int8)
    scales_RG = torch.empty(len(rows_RI), -(-columns // GROUP))
    for first in range(0, len(rows_RI), count):
        slice_RI = rows_RI[first : first + count].float()
        groups_RGN = torch.nn.functional.pad(slice_RI, (0, -columns % GROUP)).unflatten(-1, (-1, GROUP))
        codes_RGN, scales_RG[first : first + count] = choose(groups_RGN)
        codes_RI[first : first + count] = codes_RGN.flatten(-2)[:, :columns]
    return Codes(kind, codes_RI.view(matrix_OI.shape), scales_RG.view(*matrix_OI.shape[:-1], -1))


def _eight_bits(groups_RGN: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of a group becomes 127 or -127."""
    largest_RG = groups_RGN.abs().amax(-1)
    return (_shares(groups_RGN, largest_RG) * 127).round().to(torch.int8), largest_RG / 127


def _floats(groups_RGN: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of a group becomes the largest float, or its negative."""
    largest_RG = groups_RGN.abs().amax(-1)
    floats_RGN = (_shares(groups_RGN, largest_RG) * LARGEST_FP8).to(torch.float8_e4m3fn)
    return floats_RGN.view(torch.int8), largest_RG / LARGEST_FP8


STEPS = torch.linspace(-9.2, -6.8, 13).tolist()
"""What the largest number of a group may become before it is rounded to a value from -8 to 7."""


def _four_bits(groups_RGN: Tensor) -> tuple[Tensor, Tensor]:
    """For several first guesses: the values, then the scale that makes their squared error least. The best of them is taken."""
    largest_RG = groups_RGN.gather(-1, groups_RGN.abs().argmax(-1, keepdim=True)).squeeze(-1)
    shares_RGN = _shares(groups_RGN, largest_RG)
    best_RG, scales_RG = torch.full_like(largest_RG, -1.0), torch.ones_like(largest_RG)
    for step in STEPS:
        values_RGN = _values(shares_RGN, torch.full_like(largest_RG, 1 / step))
        product_RG, square_RG = (values_RGN * shares_RGN).sum(-1), (values_RGN * values_RGN).sum(-1).clamp(min=1)
        gain_RG = product_RG * product_RG / square_RG  # how much of the squares the values account for
        scales_RG = torch.where(gain_RG > best_RG, product_RG / square_RG, scales_RG)
        best_RG = torch.maximum(gain_RG, best_RG)
    return (_values(shares_RGN, scales_RG) + 8).to(torch.uint8), scales_RG * largest_RG


def _shares(groups_RGN: Tensor, largest_RG: Tensor) -> Tensor:
    """Numbers as parts of the largest of their group; zeros where that is zero."""
    return groups_RGN / torch.where(largest_RG == 0, 1, largest_RG)[..., None]


def _values(shares_RGN: Tensor, scales_RG: Tensor) -> Tensor:
    return (shares_RGN / scales_RG[..., None]).round().clamp(-8, 7)
