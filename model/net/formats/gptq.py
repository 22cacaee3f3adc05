"""GPTQ as AutoGPTQ and GPTQModel write it: w = (q - z) s, with 4 or 8 bits.

A matrix [out, in] is kept as qweight [in * bits / 32, out], whose words hold neighbours of one row in their order; qzeros
[groups, out * bits / 32]; scales [groups, out]; and g_idx [in], the group of each column. The first version of the layout has
z - 1 in qzeros, the second has z.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from attend.model.net.formats.codes import CodeLayout, Codes
from attend.model.net.formats.format import (
    KINDS,
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
    check_order,
    count_groups,
    count_words,
    flat,
    group_of,
    has_minima,
    in_groups,
    module_of,
    not_supported,
    regroup,
    unpack_words,
)

LAYOUTS = {"gptq": 1, "gptq_v2": 0}
"""What is to be added to the zeros of each layout."""
ONES = {4: 0x11111111, 8: 0x01010101}
"""A 32-bit word whose codes are all 1, by bits of a code."""


class Gptq(Format):
    """All matrices that have a qweight."""

    def __init__(self, settings: Settings) -> None:
        self.bits, self.group = bits_of(settings, "bits"), group_of(settings, "group_size")
        layout = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
        layout = "marlin" if settings.get("is_marlin_format") else layout
        if layout not in LAYOUTS:
            known = "known: gptq, gptq_v2. Take a checkpoint of AutoGPTQ's or GPTQModel's in one of them"
            raise not_supported(f"GPTQ in the layout {layout!r} is not supported; {known}")
        others = [pattern for pattern in settings.get("dynamic") or {} if not pattern.startswith("-:")]
        if others:
            raise not_supported(f"dynamic has settings of its own for {others[0]!r}, which is not supported")
        self.added = LAYOUTS[layout]
        self.title = f"GPTQ ({layout}), {in_groups(self.bits, self.group)}"

    def parts(self, name: str, shape: Sequence[int], dtype_of: DtypeOf) -> dict[str, Part]:
        """The four tensors; a file whose columns were never sorted may do without g_idx."""
        module, (rows, columns) = module_of(name), flat(shape)
        groups, words = count_groups(columns, self.group), count_words(rows, self.bits)
        return {
            "qweight": Part(f"{module}.qweight", WORDS, ((count_words(columns, self.bits), rows),)),
            "qzeros": Part(f"{module}.qzeros", WORDS, ((groups, words),)),
            "scales": Part(f"{module}.scales", SCALES, ((groups, rows),)),
            "g_idx": Part(f"{module}.g_idx", WORDS, ((columns,),), optional=True),
        }

    def form(self, name: str, tensor: Find) -> CodeLayout:
        """Codes of 4 or 8 bits; with minima where a zero is not in the middle."""
        return CodeLayout(KINDS[self.bits], has_minima(tensor(f"{module_of(name)}.qzeros"), self._zeros))

    def read(self, name: str, shape: Sequence[int], tensors: Tensors) -> Iterator[Codes]:
        """Read all rows of a matrix as one piece of codes."""
        if "g_idx" in tensors:
            check_order(tensors["g_idx"], self.group)
        kind, numbers_OI = KINDS[self.bits], _columns(tensors["qweight"], self.bits)
        codes_OI = numbers_OI if kind.values else as_values(numbers_OI, self.bits)
        yield regroup(kind, codes_OI, tensors["scales"].T, self._zeros(tensors["qzeros"]).T)

    def _zeros(self, words: Tensor) -> Tensor:
        """[groups, out], as values. One is added to whole words: so 0 - 1, which borrows from its neighbour, is 0 again."""
        return as_values(unpack_words(words + self.added * ONES[self.bits], self.bits), self.bits)

    def is_spare(self, name: str, tensor: Callable[[], Tensor]) -> bool:
        """True if a tensor is a bias of zeros, which old writers gave to every matrix."""
        return name.endswith(".bias") and not tensor().any()


def _columns(words_WO: Tensor, bits: int) -> Tensor:
    """From 32-bit words [in * bits / 32, out] to numbers [out, in]."""
    bytes_OWN = as_bytes(words_WO).unflatten(-1, (-1, 4)).transpose(0, 1)
    if bits == 8:
        return bytes_OWN.flatten(1)
    return torch.stack((bytes_OWN & 15, bytes_OWN >> 4), dim=-1).flatten(1)
