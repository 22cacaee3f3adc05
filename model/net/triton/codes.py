"""x Wᵀ + b where W is kept in codes of 8 or 4 bits, whole numbers or floats: each program makes its part of W plain in
registers, and nowhere else.

W is rounded to the dtype of x, as `QuantisedLinear.dense` cast to it, and products are summed in float32. A sum runs over the
columns in the same order, in tiles of the same size, however many tokens there are. The product is computed as W xᵀ: the many
rows of W fill the matrix units where there are few tokens.

In Triton's interpreter this runs on the CPU, and it compiles for an H200; no GPU has run it yet.

Shapes: T tokens · I columns of W, IN of them · O rows of W, OUT of them · G groups of 32 columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from attend.model.net.formats.codes import FP8, GROUP
from attend.model.net.linear import Linear
from attend.model.net.quantised import QuantisedLinear
from attend.model.net.triton.backend import INTERPRETED, has_wide_units

INNER = 128
"""Columns of W that a program makes plain at once; half as many of codes that a table stands for, where matrix units are not
wide. The same for any number of tokens.
"""
TOKENS = (16, 32, 64, 128)
"""Tokens of a program: the fewest that hold the step's, or the last. None of these sizes was timed. Units that are not wide
have no 128: so many sums beside the operands are more than a thread's registers.
"""
ROWS = 64
"""Rows of W of a program; twice as many from 64 tokens on."""
GROUP_SIZE = tl.constexpr(GROUP)


@triton.jit
def _plain(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    table_ptr: tl.tensor,
    units: tl.tensor,
    rows: tl.tensor,
    begin: tl.tensor,
    OUT: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    FLOATS: tl.constexpr,
    MINIMA: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
) -> tl.tensor:
    """INNER columns of W from `begin` on, float32 [ROWS, INNER]; what is outside W is finite."""
    SIZE: tl.constexpr = G * GROUP_SIZE * BITS // 8
    place = begin * BITS // 8 + tl.arange(0, INNER * BITS // 8)
    codes = tl.load(
        codes_ptr + rows[:, None] * SIZE + place[None, :], mask=(rows < OUT)[:, None] & (place < SIZE)[None, :], other=0
    )
    if BITS == 4:
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), [ROWS, INNER])
        values = tl.load(table_ptr + codes) if TABLE else codes.to(tl.float32) - 8.0
    elif FLOATS:  # e4m3 is a float16 with four bits of exponent, whose bias is less by 8
        bits = codes.to(tl.uint16)
        values = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        values = codes.to(tl.int8, bitcast=True).to(tl.float32)
    group = begin // GROUP_SIZE + tl.arange(0, INNER // GROUP_SIZE)
    at = rows[:, None] * G + group[None, :]
    inside = (rows < OUT)[:, None] & (group < G)[None, :]
    scales = tl.load(scales_ptr + at, mask=inside, other=0.0).to(tl.float32) * units[:, None]
    values = tl.reshape(values, [ROWS, INNER // GROUP_SIZE, GROUP_SIZE]) * scales[:, :, None]
    if MINIMA:
        minima = tl.load(minima_ptr + at, mask=inside, other=0.0).to(tl.float32) * units[:, None]
        values = values + minima[:, :, None]
    return tl.reshape(values, [ROWS, INNER])


@triton.jit(do_not_specialize=["num_tokens", "stride"])
def codes_kernel(
    x_ptr: tl.tensor,  # [T, I]
    codes_ptr: tl.tensor,  # uint8 [O, G * 32 * BITS / 8]
    scales_ptr: tl.tensor,  # float16 [O, G]
    minima_ptr: tl.tensor,  # float16 [O, G]
    units_ptr: tl.tensor,  # float32 [O]
    table_ptr: tl.tensor,  # float32 [16]: what codes stand for, if TABLE; else they count from -8
    bias_ptr: tl.tensor,  # [O]
    out_ptr: tl.tensor,  # [T, O]
    num_tokens: tl.tensor,
    stride: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    FLOATS: tl.constexpr,
    MINIMA: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    INNER: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """x Wᵀ + b. Grid (O / ROWS, T / TOKENS), both rounded up."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    units = tl.load(units_ptr + rows, mask=rows < OUT, other=0.0)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for begin in range(0, IN, INNER):
        w = _plain(
            codes_ptr, scales_ptr, minima_ptr, table_ptr, units, rows, begin, OUT, G, BITS, TABLE, FLOATS, MINIMA, ROWS, INNER
        )
        column = begin + tl.arange(0, INNER)
        inside = (column < IN)[:, None] & (tokens < num_tokens)[None, :]
        x = tl.load(x_ptr + tokens[None, :] * stride + column[:, None], mask=inside, other=0.0)
        w = w.to(x.dtype)
        if UPCAST:  # the interpreter multiplies the bits of bfloat16
            w, x = w.to(tl.float32), x.to(tl.float32)
        total = tl.dot(w, x, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias_ptr + rows, mask=rows < OUT, other=0.0).to(tl.float32)[:, None]
    inside = (rows < OUT)[:, None] & (tokens < num_tokens)[None, :]
    tl.store(out_ptr + tokens[None, :] * OUT + rows[:, None], total, mask=inside)


class CodesLinear(QuantisedLinear):
    """A quantised matrix that GPU kernels multiply without dequantising it first."""

    @classmethod
    def take(cls, other: QuantisedLinear) -> "CodesLinear":
        """`other` in this form, with the same tensors."""
        form = cls.of(other)
        form.share(other)
        form.bias, form.dtype = other.bias, other.dtype
        values = other.kind.values or (0,)
        form.register_buffer("table", torch.tensor(values, dtype=torch.float32, device=other.codes.device), persistent=False)
        return form

    def forward(self, x_TI: Tensor) -> Tensor:
        """x Wᵀ + b, [T, O] in the dtype of x. Waits for nothing."""
        num_tokens = len(x_TI)
        sizes, values = (TOKENS if has_wide_units() else TOKENS[:-1]), self.kind.values
        tokens = next((size for size in sizes if size >= num_tokens), sizes[-1])
        rows = ROWS if tokens < 64 else 2 * ROWS
        out_TO = x_TI.new_empty(num_tokens, self.out_features)
        table = bool(values) and values != tuple(range(-8, 8))
        inner = INNER // 2 if table and not has_wide_units() else INNER
        codes_kernel[(cdiv(self.out_features, rows), cdiv(num_tokens, tokens))](
            *(x_TI, self.codes, self.scales, self.scales if self.minima is None else self.minima, self.units, self.table),
            *(out_TO if self.bias is None else self.bias, out_TO, num_tokens, x_TI.stride(0)),
            IN=self.in_features,
            OUT=self.out_features,
            G=self.scales.shape[-1],
            BITS=self.kind.bits,
            TABLE=table,
            FLOATS=self.kind == FP8,
            MINIMA=self.minima is not None,
            BIASED=self.bias is not None,
            ROWS=rows,
            TOKENS=tokens,
            INNER=max(GROUP, min(inner, next_power_of_2(self.in_features))),
            UPCAST=INTERPRETED and x_TI.dtype == torch.bfloat16,
            num_warps=rows // 16,
            num_stages=3,
            enable_fp_fusion=False,
        )
        return out_TO


def multiply_codes(_: str, linear: Linear) -> Linear:
    """For `replace_linears`: matrices in codes in the form that a GPU multiplies. Those of experts stay as they are."""
    return CodesLinear.take(linear) if type(linear) is QuantisedLinear else linear
