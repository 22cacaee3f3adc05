"""Weights in floats of 8 bits (e4m3) with scales in float: of the whole matrix, of each row, or of blocks such as 128 x 128.

NAME is kept beside NAME_scale_inv (DeepSeek, Qwen3: of blocks) or NAME_scale (of a matrix or its rows). Both are multiplied
by. Triton multiplies them as they are; elsewhere they become plain numbers.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from attend.model.net.formats.codes import FP8, GROUP, CodeLayout, Codes
from attend.model.net.formats.format import SCALES, DtypeOf, Find, Format, Part, Settings, Tensors, not_supported

FLOATS = ("F8_E4M3",)
POWERS = "F8_E8M0"
"""Scales that are powers of two, in a byte each."""
PLAIN = "its FP8 weights are dequantised unless Triton serves the whole model: no CPU multiplies FP8"
SPARE = (".input_scale", ".activation_scale", ".input_scale_ub", ".output_scale", ".k_scale", ".v_scale", ".q_scale")
"""Endings of the names of scales of activations: those are not rounded here, or with scales of our own."""


class Fp8(Format):
    """All matrices that are stored in e4m3."""

    def __init__(self, settings: Settings) -> None:
        block = settings.get("weight_block_size")
        if block is not None and not is_block(block):
            raise not_supported(f"weight_block_size must be two numbers of rows and columns; got {block!r}")
        self.block: tuple[int, int] | None = None if block is None else (block[0], block[1])
        if settings.get("fmt", "e4m3") != "e4m3":
            raise not_supported(f"FP8 in the format {settings['fmt']!r} is not supported; known: 'e4m3'")
        self.title = "FP8, " + (
            "scales of rows or of matrices" if block is None else f"scales of blocks of {block[0]} x {block[1]}"
        )
        self.notes = (PLAIN,)

    def holds(self, name: str, dtype_of: DtypeOf) -> bool:
        """True if it is stored in these floats."""
        return dtype_of(name) in FLOATS

    def parts(self, name: str, shape: Sequence[int], dtype_of: DtypeOf) -> dict[str, Part]:
        """The matrix and its scales, under whichever name they are there."""
        plain = dtype_of(f"{name}_scale") is not None or (self.block is None and dtype_of(f"{name}_scale_inv") is None)
        return matrix_parts(name, f"{name}_scale" if plain else f"{name}_scale_inv", shape, self.block)

    def form(self, name: str, tensor: Find) -> CodeLayout | None:
        """The floats themselves, where their blocks are whole groups of columns."""
        return form_of(self.block)

    def read(self, name: str, shape: Sequence[int], tensors: Tensors) -> Iterator[Tensor | Codes]:
        """Read all rows of a matrix as one piece."""
        yield to_codes(tensors["weight"], tensors["scale"], self.block)

    def is_spare(self, name: str, tensor: Callable[[], Tensor]) -> bool:
        """True if a tensor has no use: scales of activations have none."""
        return name.endswith(SPARE)


def is_block(block: object) -> bool:
    """True if it is the rows and columns of a block."""
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def matrix_parts(name: str, scale: str, shape: Sequence[int], block: tuple[int, int] | None) -> dict[str, Part]:
    """A matrix and its scales: of blocks, or of each row or the whole."""
    *experts, rows, columns = shape
    if block is None:
        shapes = ((), (1,), (rows, 1), (rows,)) if not experts else ((*experts, rows, 1), (*experts, 1, 1))
    else:
        shapes = ((*experts, -(-rows // block[0]), -(-columns // block[1])),)
    return {
        "weight": Part(name, FLOATS, (tuple(shape),)),
        "scale": Part(scale, (*SCALES, POWERS), shapes),
    }


def form_of(block: tuple[int, int] | None) -> CodeLayout | None:
    """What keeps floats with scales of blocks, or of rows or the matrix; None: plain numbers."""
    return CodeLayout(FP8) if block is None or block[1] % GROUP == 0 else None


def to_codes(weight_OI: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor | Codes:
    """The matrix as codes where its blocks are whole groups, else dequantised."""
    if form_of(block) is None:
        return dense(weight_OI, scale, block)
    scale, groups = scale.float(), -(-weight_OI.shape[-1] // GROUP)
    if block is not None:
        rows_OG = scale.repeat_interleave(block[0], dim=-2)[..., : weight_OI.shape[-2], :]
        scale = rows_OG.repeat_interleave(block[1] // GROUP, dim=-1)[..., :groups]
    elif scale.dim() == 1:
        scale = scale[:, None]
    return Codes(FP8, weight_OI.view(torch.int8), scale.expand(*weight_OI.shape[:-1], groups).contiguous())


def dense(weight_OI: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """The dequantised matrix, float32 [O, I]."""
    dense_OI, scale = weight_OI.float(), scale.float()
    if block is None:
        return dense_OI.mul_(scale[:, None] if scale.dim() == 1 else scale)
    scales_OG = scale.repeat_interleave(block[0], dim=-2)[..., : dense_OI.shape[-2], :]
    for group, columns_OI in enumerate(dense_OI.split(block[1], dim=-1)):
        columns_OI.mul_(scales_OG[..., group : group + 1])
    return dense_OI
