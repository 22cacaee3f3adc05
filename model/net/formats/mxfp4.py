"""MXFP4, the format of gpt-oss' experts: blocks of 32 four-bit floats with a power of two for each (OCP Microscaling 1.0).

A matrix [out, in] is kept in two tensors of bytes: NAME_blocks [out, in / 32, 16], two numbers a byte, the one of the even
column in the low half; and NAME_scales [out, in / 32], exponents of 2 with 127 added. Experts lie in front: [experts, ...].
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attend.model.net.formats.codes import GROUP, MXFP4, CodeLayout, Codes
from attend.model.net.formats.format import DtypeOf, Find, Format, Part, Settings, Tensors, count_groups

BYTES = ("U8",)
"""Dtype of both tensors, by its name in safetensors."""


class Mxfp4(Format):
    """All matrices that are kept in blocks."""

    title = "MXFP4, floats of 4 bits, a power of two for 32 columns of a row"

    def __init__(self, settings: Settings) -> None:
        """Take the settings of config.json, which choose nothing."""

    def holds(self, name: str, dtype_of: DtypeOf) -> bool:
        """True if there are blocks in place of a plain matrix."""
        return dtype_of(name) is None and dtype_of(f"{name}_blocks") is not None

    def parts(self, name: str, shape: Sequence[int], dtype_of: DtypeOf) -> dict[str, Part]:
        """The tensors of a matrix: its blocks and their scales."""
        *rows, columns = shape
        groups = (*rows, count_groups(columns, GROUP))
        return {
            "blocks": Part(f"{name}_blocks", BYTES, ((*groups, GROUP // 2),)),
            "scales": Part(f"{name}_scales", BYTES, (groups,)),
        }

    def form(self, name: str, tensor: Find) -> CodeLayout:
        """The form in memory: codes of MXFP4."""
        return CodeLayout(MXFP4)

    def read(self, name: str, shape: Sequence[int], tensors: Tensors) -> Iterator[Codes]:
        """Experts one after the other, [1, out, in]: all of them at once would take their room twice."""
        size = 1 if len(shape) > 2 else len(tensors["blocks"])
        for blocks, scales in zip(tensors["blocks"].split(size), tensors["scales"].split(size), strict=True):
            yield codes_of(blocks.flatten(-2), scales)


def codes_of(bytes_OB: Tensor, exponents_OG: Tensor) -> Codes:
    """Codes from bytes [..., out, in / 2] and exponents [..., out, in / 32]; an exponent of 255 is NaN."""
    codes_OI = torch.stack((bytes_OB & 15, bytes_OB >> 4), dim=-1).flatten(-2)
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - 128)  # values of this kind are doubled
    powers[255] = torch.nan
    return Codes(MXFP4, codes_OI, powers[exponents_OG.int()])
