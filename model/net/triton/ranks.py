"""The sum of an all-reduce: what the ranks have exchanged is added up in one pass.

In Triton's interpreter this runs on the CPU, and it compiles for an H200; no GPU has run it yet.

Shapes: N ranks · T tokens · E model width.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

SIZE = 1024
"""Numbers that a program adds up. Other sizes were not timed."""


@triton.jit
def add_kernel(
    parts_ptr: tl.tensor,  # [N, T, E]
    out_ptr: tl.tensor,  # [T, E]
    N: tl.constexpr,
    E: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """The sum of N parts in the order of the ranks, in float32, rounded once. Grid (T, E / SIZE rounded up)."""
    token, tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    total = tl.load(parts_ptr + token * E + column, mask=column < E, other=0.0).to(tl.float32)
    for rank in range(1, N):
        total += tl.load(parts_ptr + (rank * tokens + token) * E + column, mask=column < E, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * E + column, total, mask=column < E)


def add_parts(parts_N: Tensor) -> Tensor:
    """Sum of parts [N, ..., E] over N: [..., E], in their dtype. Waits for nothing."""
    width = parts_N.shape[-1]
    out = parts_N.new_empty(parts_N.shape[1:])
    add_kernel[(out.numel() // width, cdiv(width, SIZE))](parts_N, out, N=len(parts_N), E=width, SIZE=SIZE)
    return out
