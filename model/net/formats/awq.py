"""AWQ as AutoAWQ writes it (version gemm): w = (q - z) s with q and z from 0 to 15.

A matrix [out, in] is kept as qweight [in, out / 8], qzeros [groups, out / 8] and scales [groups, out]. A word of 32 bits has
eight neighbours of one column, not in their order.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attend.model.net.formats.codes import INT4, CodeLayout, Codes
from attend.model.net.formats.format import (
    SCALES,
    WORDS,
    DtypeOf,
    Find,
    Format,
    Part,
    Settings,
    Tensors,
    as_bytes,
    as_values,
    bits_of,
    count_groups,
    count_words,
    flat,
    group_of,
    has_minima,
    in_groups,
    module_of,
    not_supported,
    regroup,
)

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The neighbours that a word holds, from its lowest bits on."""


class Awq(Format):
    """All matrices that have a qweight."""

    def __init__(self, settings: Settings) -> None:
        bits_of(settings, "bits", "w_bit", supported_bits=(BITS,))
        self.group = group_of(settings, "group_size", "q_group_size")
        self.title = f"AWQ, {in_groups(BITS, self.group)}"
        layout = str(settings.get("version") or settings.get("format") or "gemm").lower()
        if layout != "gemm" or settings.get("backend") == "llm-awq":
            layout = "llm-awq" if settings.get("backend") == "llm-awq" else layout
            raise not_supported(
                f"AWQ in the layout {layout!r} is not supported; known: 'gemm'. Take a checkpoint of AutoAWQ's in it"
            )

    def parts(self, name: str, shape: Sequence[int], dtype_of: DtypeOf) -> dict[str, Part]:
        """The tensors of a matrix: qweight, qzeros, scales."""
        module, (rows, columns) = module_of(name), flat(shape)
        groups, words = count_groups(columns, self.group), count_words(rows, BITS)
        return {
            "qweight": Part(f"{module}.qweight", WORDS, ((columns, words),)),
            "qzeros": Part(f"{module}.qzeros", WORDS, ((groups, words),)),
            "scales": Part(f"{module}.scales", SCALES, ((groups, rows),)),
        }

    def form(self, name: str, tensor: Find) -> CodeLayout:
        """Codes of 4 bits; with minima where a zero is not 8."""
        return CodeLayout(INT4, has_minima(tensor(f"{module_of(name)}.qzeros"), lambda zeros: as_values(_rows(zeros), BITS)))

    def read(self, name: str, shape: Sequence[int], tensors: Tensors) -> Iterator[Codes]:
        """Read all rows of a matrix as one piece of codes."""
        zeros_OG = as_values(_rows(tensors["qzeros"]), BITS)
        yield regroup(INT4, _rows(tensors["qweight"]), tensors["scales"].T, zeros_OG)


def _rows(words_IW: Tensor) -> Tensor:
    """From 32-bit words [in, out / 8] to numbers [out, in]."""
    bytes_WIN = as_bytes(words_IW.T).unflatten(-1, (-1, 4))
    rows_WNI = torch.empty(words_IW.shape[1], len(ORDER), len(words_IW), dtype=torch.uint8)
    for place, neighbour in enumerate(ORDER):
        byte_WI = bytes_WIN[..., place // 2]
        rows_WNI[:, neighbour] = byte_WI >> 4 if place % 2 else byte_WI & 15
    return rows_WNI.flatten(0, 1)
