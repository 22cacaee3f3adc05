"""MXFP4, the format of gpt-oss' experts: blocks of 32 four-bit floats with a power of two for each (OCP Microscaling 1.0).

A matrix [out, in] is kept in two tensors of bytes: NAME_blocks [out, in / 32, 16], two numbers a byte, the one of the even
column in the low half; and NAME_scales [out, in / 32], exponents of 2 with 127 added. Experts lie in front: [experts, ...].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STORED = ("U8",)
"""What both tensors are, under safetensors' name."""
BLOCK = 32
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three bits say; the fourth is the sign."""


def parts(name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the two tensors that hold the tensor `name`, [experts, in, out] in the plain form of its family."""
    *experts, columns, rows = shape
    blocks = (*experts, rows, -(-columns // BLOCK))
    return {f"{name}_blocks": (*blocks, BLOCK // 2), f"{name}_scales": blocks}


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """The matrices [experts, out, in], bfloat16, which holds every number of this format exactly; an exponent of 255 is NaN."""
    values = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)], dtype=torch.bfloat16)
    bytes_ = torch.arange(256)
    pairs = torch.stack((values[bytes_ & 15], values[bytes_ >> 4]), dim=-1).view(torch.int32).flatten()  # a byte's two numbers
    powers = torch.ldexp(torch.ones(256), bytes_ - 127).bfloat16()
    powers[255] = torch.nan
    out = torch.empty(*blocks.shape[:-1], BLOCK, dtype=torch.bfloat16)
    # an expert at a time: what lies between takes several times the room of the result
    for matrix, codes, exponents in zip(out, blocks, scales, strict=True):
        numbers = pairs.index_select(0, codes.flatten().int()).view(torch.bfloat16).view(matrix.shape)
        torch.mul(numbers, powers[exponents.int()][..., None], out=matrix)
    return out.flatten(-2)
