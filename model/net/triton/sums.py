"""The sum of what ranks give, in one launch.

In Triton's interpreter it runs on the CPU, and it compiles for an H200; no GPU has run it yet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
"""Numbers that one program adds up."""


@triton.jit(do_not_specialize=["count"])
def sum_kernel(
    parts_ptr: tl.tensor,  # [N, count]
    total_ptr: tl.tensor,  # [count]
    count: tl.tensor,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Add N parts in their order in float32, and round once. Grid (count / CHUNK,)."""
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    total = tl.load(parts_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    for part in tl.static_range(1, N):
        total += tl.load(parts_ptr + part * count.to(tl.int64) + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(total_ptr + at, total.to(total_ptr.dtype.element_ty), mask=at < count)


def summed(parts: Tensor) -> Tensor:
    """The sum over the first dimension, of the others' shape: part after part in float32, rounded once. Does not wait."""
    total = torch.empty_like(parts[0])
    grid = (triton.cdiv(total.numel(), CHUNK),)
    sum_kernel[grid](parts, total, total.numel(), N=len(parts), CHUNK=CHUNK)
    return total
