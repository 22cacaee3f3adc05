"""What readers of quantised checkpoints share.

A format says which tensors of the files hold a matrix, and makes of them codes, or plain numbers where a CPU has no better
form of them. Matrices are [out, in] or [experts, out, in], whatever the order of the tensors that hold them.

Shapes: O rows · I columns · G groups of columns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attend.model.errors import CheckpointError
from attend.model.net.formats.codes import GROUP, INT4, INT8, CodeLayout, Codes, Kind

Settings = Mapping[str, Any]
"""`quantization_config` of config.json."""
Tensors = Mapping[str, Tensor]
"""The tensors that hold a matrix, by their roles in `Format.parts`."""
DtypeOf = Callable[[str], str | None]
"""What a tensor of the files is stored in, under safetensors' name; None where there is no tensor of this name."""
Find = Callable[[str], Tensor | None]
"""A tensor of the files; None where there is none of this name."""
SCALES = ("F32", "BF16", "F16", "F64")
WORDS = ("I32",)
KINDS = {4: INT4, 8: INT8}
"""Kinds of integers, by the bits of a code."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that holds a share of a quantised matrix."""

    name: str
    stored_dtypes: tuple[str, ...]
    """Names of the dtypes that it may be stored in."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes that it may have."""
    optional: bool = False


class Format:
    """How some of the matrices of a checkpoint are written. Methods raise ValueError where they cannot be what was found."""

    title: str
    """Name of the format and its bits, for the log."""
    notes: tuple[str, ...] = ()
    """What is not carried out, or carried out in another way: for the log."""

    def holds(self, name: str, dtype_of: DtypeOf) -> bool:
        """True if the matrix `name` is written in this format: as a qweight. A matrix that lacks its qweight counts too, where
        there are scales and no plain matrix.
        """
        module = module_of(name)
        return dtype_of(f"{module}.qweight") is not None or (
            dtype_of(name) is None and dtype_of(f"{module}.scales") is not None
        )

    def parts(self, name: str, shape: Sequence[int], dtype_of: DtypeOf) -> dict[str, Part]:
        """The tensors that hold a matrix of this shape, by their roles."""
        raise NotImplementedError

    def form(self, name: str, tensor: Find) -> CodeLayout | None:
        """What keeps a matrix that is held, whose parts nobody has looked at yet; None: plain numbers.

        Codes have its rows first; plain numbers lie as those of its family do.
        """
        raise NotImplementedError

    def read(self, name: str, shape: Sequence[int], tensors: Tensors) -> Iterator[Tensor | Codes]:
        """A matrix, in pieces with all of its dimensions, in the order of its rows."""
        raise NotImplementedError

    def is_spare(self, name: str, tensor: Callable[[], Tensor]) -> bool:
        """True if a tensor that no matrix needs may be ignored: it changes nothing of what is computed here."""
        return False


def module_of(name: str) -> str:
    """The module that has a matrix."""
    return name.removesuffix(".weight")


def read_integer(settings: Settings, *keys: str, default: int | None = None) -> int:
    """A whole number under one of several names."""
    key = next((key for key in keys if settings.get(key) is not None), keys[0])
    value = default if settings.get(key) is None else settings[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise not_supported(f"{key} must be an integer; got {value!r}")
    return value


def bits_of(settings: Settings, *keys: str, supported_bits: Sequence[int] = (4, 8)) -> int:
    """Bits of a weight. Raises CheckpointError for those that are not read."""
    bits = read_integer(settings, *keys)
    if bits not in supported_bits:
        raise not_supported(f"weights of {bits} bits are not supported; known: {', '.join(map(str, supported_bits))}")
    return bits


def group_of(settings: Settings, *keys: str) -> int:
    """Columns that share a scale; -1: all of a row do."""
    group = read_integer(settings, *keys, default=-1)
    if group != -1 and (group < GROUP or group % GROUP):
        raise not_supported(f"groups of {group} columns are not supported; known: multiples of {GROUP}, and -1 for whole rows")
    return group


def not_supported(why: str) -> CheckpointError:
    """The error for a `quantization_config` that is not carried out."""
    return CheckpointError(f"config.json: quantization_config: {why}")


def in_groups(bits: int, group: int) -> str:
    """Bits and groups as a sentence for log lines and errors."""
    return f"{bits} bits, a scale for " + ("each row" if group == -1 else f"{group} columns of a row")


def flat(shape: Sequence[int]) -> tuple[int, int]:
    """The rows and columns of one matrix. Raises ValueError where it is more."""
    if len(shape) != 2:
        raise ValueError(f"a tensor {list(shape)} of all experts is not supported in this format; known: one matrix for each")
    return shape[0], shape[1]


def count_groups(columns: int, group: int) -> int:
    """How many groups a row has. Raises ValueError where they do not divide it."""
    if group == -1:
        return 1
    if columns % group:
        raise ValueError(f"groups of {group} do not divide {columns} columns")
    return columns // group


def count_words(numbers: int, bits: int) -> int:
    """How many words of 32 bits hold so many numbers. Raises ValueError where some bits would be left."""
    if numbers * bits % 32:
        raise ValueError(f"{numbers} values of {bits} bits do not fill whole 32-bit words")
    return numbers * bits // 32


def check_order(g_idx: Tensor, group: int) -> None:
    """Raise ValueError where columns do not belong to groups in their own order."""
    columns_I = torch.arange(len(g_idx))
    if not torch.equal(g_idx.long(), torch.zeros_like(columns_I) if group == -1 else columns_I // group):
        raise ValueError(
            "its columns were sorted by their activations before they were grouped (act-order), which is not supported: "
            "take a checkpoint that was quantised without it (desc_act false, actorder null or weight)"
        )


def as_bytes(words: Tensor) -> Tensor:
    """int32 [..., W] as bytes [..., W * 4], that of the lowest bits first."""
    if words.stride(-1) != 1:  # `contiguous` leaves that of a single column as it is
        words = words.clone(memory_format=torch.contiguous_format)
    return words.view(torch.uint8)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., W] to the numbers that lie in it from the lowest bits on, uint8 [..., W * 32 / bits]."""
    bytes_ = as_bytes(words)
    return bytes_ if bits == 8 else torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)


def has_minima(zeros: Tensor | None, middle: Callable[[Tensor], Tensor]) -> bool:
    """True if packed zero points, as values, are not all 0."""
    return zeros is not None and zeros.dtype == torch.int32 and zeros.dim() == 2 and bool(middle(zeros).any())


def as_values(numbers: Tensor, bits: int) -> Tensor:
    """Numbers from 0 on, uint8, as values of which half are below 0."""
    return (numbers ^ (1 << bits - 1)).view(torch.int8) if bits == 8 else numbers.to(torch.int8) - 8


def regroup(kind: Kind, codes_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor | None) -> Codes:
    """Codes for (value - zero) scale, with groups of any size that is a multiple of ours, or one for a row."""
    groups = -(-codes_OI.shape[-1] // GROUP)
    scales_OG = scales_OG.float()
    minima_OG = None if zeros_OG is None or not zeros_OG.any() else -zeros_OG.float() * scales_OG
    return Codes(
        kind, codes_OI, _repeat_groups(scales_OG, groups), None if minima_OG is None else _repeat_groups(minima_OG, groups)
    )


def _repeat_groups(part_OG: Tensor, groups: int) -> Tensor:
    if part_OG.shape[-1] == 1:
        return part_OG.expand(*part_OG.shape[:-1], groups)
    return part_OG.repeat_interleave(groups // part_OG.shape[-1], dim=-1)
