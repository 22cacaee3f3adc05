"""Blocks of ggml's types -> codes. Source: ggml-common.h and ggml-quants.c of llama.cpp.

A block of most types is 32 columns. In a block's bytes the low halves are its first 16 columns, the high halves the others.

Shapes: R rows · B bytes · N blocks of a row · S blocks of 32 in a block of 256.
"""

from collections.abc import Callable

import numpy
import torch
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from torch import Tensor

from attend.model.net.formats import ggml_grids
from attend.model.net.formats.codes import INT4, INT8, IQ4_NL, MXFP4, CodeLayout, Codes, Kind
from attend.model.net.formats.ggml_grids import half

Parts = tuple[Kind, Tensor, Tensor, Tensor | None]
"""Kind, codes [R, N, S, 32] or [R, N, 32], scales and minima [R, N, S] or [R, N]."""


def _blocks(kind: Type, bytes_RB: Tensor) -> Tensor:
    return bytes_RB.view(len(bytes_RB), -1, GGML_QUANT_SIZES[kind][1])


def numbers_of(kind: Type, bytes_RB: Tensor) -> Tensor:
    """The numbers [R, I] of rows of whole blocks, of any type."""
    if kind in NUMBERED:
        return NUMBERED[kind](_blocks(kind, bytes_RB))
    with numpy.errstate(invalid="ignore", over="ignore"):  # a scale that is not finite is noted by the caller
        return torch.from_numpy(dequantize(bytes_RB.numpy(), kind))


def codes_of(kind: Type, bytes_RB: Tensor) -> Codes:
    """The codes of whole blocks of a type in `CODED`."""
    meaning, codes, scales, minima = CODED[kind](_blocks(kind, bytes_RB))
    return Codes(meaning, codes.flatten(1), scales.flatten(1), None if minima is None else minima.flatten(1))


def _nibbles(bytes_RNB: Tensor) -> Tensor:
    """Low halves, then high halves."""
    return torch.cat((bytes_RNB & 15, bytes_RNB >> 4), dim=-1)


def _bits(bytes_RNB: Tensor) -> Tensor:
    """The fifth bits of 32 columns, from 4 bytes, each as 16 or 0."""
    bits = bytes_RNB[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _to_signed(codes: Tensor, zero: int) -> Tensor:
    """Codes from 0 on, less the one that means zero."""
    return codes.to(torch.int8) - zero


def _q4_1(blocks: Tensor) -> Parts:
    scales = half(blocks, 0)
    return INT4, _nibbles(blocks[..., 4:]), scales, half(blocks, 2) + 8 * scales  # code 8 is the value 0


def _q5_0(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6])
    return INT8, _to_signed(codes, 16), half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8])
    return INT8, _to_signed(codes, 0), half(blocks, 0), half(blocks, 2)


def _iq4_xs(blocks: Tensor) -> Parts:
    places = torch.arange(8)
    low = blocks[..., 4:8, None] >> torch.tensor([0, 4], dtype=torch.uint8) & 15
    high = blocks[..., 2:4].contiguous().view(torch.int16).int() >> 2 * places & 3
    scales = (low.flatten(-2) | high << 4) - 32
    return IQ4_NL, _nibbles(blocks[..., 8:].unflatten(-1, (8, 16))), half(blocks, 0)[..., None] * scales, None


def _mxfp4(blocks: Tensor) -> Parts:
    powers = torch.ldexp(
        torch.ones(blocks.shape[:-1]), blocks[..., 0].int() - 128
    )  # less one more, since the values are doubled
    return MXFP4, _nibbles(blocks[..., 1:]), powers, None


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [R, N, 8] of a block of 256: 6 bits each in 12 bytes, times a float16 of the block."""
    low, middle, high = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=-1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=-1)
    return half(blocks, 0)[..., None] * scales, -half(blocks, 2)[..., None] * minima


def _q4_k(blocks: Tensor) -> Parts:
    scales, minima = _k_scales(blocks)
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    return INT4, codes, scales, minima + 8 * scales


def _q5_k(blocks: Tensor) -> Parts:
    scales, minima = _k_scales(blocks)
    codes = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    bits = blocks[..., 16:48][..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return INT8, _to_signed(codes | bits << 4, 0), scales, minima


CODED: dict[Type, Callable[[Tensor], Parts]] = {
    Type.Q4_0: lambda blocks: (INT4, _nibbles(blocks[..., 2:]), half(blocks, 0), None),
    Type.Q4_1: _q4_1,
    Type.Q5_0: _q5_0,
    Type.Q5_1: _q5_1,
    Type.Q8_0: lambda blocks: (INT8, blocks[..., 2:].contiguous().view(torch.int8), half(blocks, 0), None),
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.IQ4_NL: lambda blocks: (IQ4_NL, _nibbles(blocks[..., 2:]), half(blocks, 0), None),
    Type.IQ4_XS: _iq4_xs,
    Type.MXFP4: _mxfp4,
    Type.IQ3_S: ggml_grids.iq3_s,
    Type.IQ3_XXS: ggml_grids.iq3_xxs,
    Type.IQ2_XXS: ggml_grids.iq2_xxs,
    Type.IQ1_S: ggml_grids.iq1_s,
    Type.TQ1_0: ggml_grids.tq1_0,
    Type.TQ2_0: ggml_grids.tq2_0,
}
"""Types whose numbers codes hold as they are: up to the rounding of a minimum in float32."""
HALVES = (Type.Q2_K, Type.Q3_K, Type.Q6_K, Type.IQ2_XS, Type.IQ2_S, Type.IQ1_M)
"""Types with scales for 16 columns."""
NUMBERED = {Type.IQ2_XS: ggml_grids.iq2_xs, Type.IQ2_S: ggml_grids.iq2_s, Type.IQ1_M: ggml_grids.iq1_m}
"""Types that are unpacked here, to numbers."""
NATIVE = (
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
    *(Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4),
)
"""Types that native code unpacks."""
FORMS = {
    Type.Q4_0: CodeLayout(INT4),
    Type.Q4_1: CodeLayout(INT4, has_minima=True),
    Type.Q5_0: CodeLayout(INT8),
    Type.Q5_1: CodeLayout(INT8, has_minima=True),
    Type.Q8_0: CodeLayout(INT8),
    Type.Q4_K: CodeLayout(INT4, has_minima=True),
    Type.Q5_K: CodeLayout(INT8, has_minima=True),
    Type.IQ4_NL: CodeLayout(IQ4_NL),
    Type.IQ4_XS: CodeLayout(IQ4_NL),
    Type.MXFP4: CodeLayout(MXFP4),
    Type.IQ3_S: CodeLayout(ggml_grids.IQ3_S),
    Type.IQ3_XXS: CodeLayout(ggml_grids.IQ3_XXS),
    Type.IQ2_XXS: CodeLayout(ggml_grids.IQ2_XXS),
    Type.IQ1_S: CodeLayout(ggml_grids.IQ1_S),
    **dict.fromkeys((Type.TQ1_0, Type.TQ2_0), CodeLayout(INT4)),
    **{kind: CodeLayout(INT8, rounded_types=(kind.name,)) for kind in HALVES},
}
"""What keeps a matrix of a type in memory. Scales for 16 columns have no place in codes: such numbers are rounded once more, to
8 bits. That is little beside the rounding of the type itself.
"""
