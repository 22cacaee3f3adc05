"""Rows of a matrix as a file of blocks has them, in the mapped file: the native decoder unpacks them itself.

Shapes: R rows · B bytes of a row · G groups of columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attend.model.net.formats.codes import Codes

SLICE = 1 << 22
"""Numbers that are unpacked at once by torch: what lies between takes a few times their room."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Quantised rows of a GGUF tensor, in blocks of one type."""

    number: int | None
    """The type's number in ggml; None: native code does not unpack it."""
    bytes_RB: Tensor
    columns: int
    meaning: Callable[[Tensor], Tensor | Codes]
    """Bytes of some rows as codes or numbers."""
    groups_G: Tensor | None = None
    """Which group of columns stands in each place; None: each stands in its own."""
    change: Callable[[Tensor], Tensor] | None = None
    """Puts the rows in our order, without mixing them; None: they are in our order."""

    def numel(self) -> int:
        """Number of elements of the matrix."""
        return len(self.bytes_RB) * self.columns

    def each(self, change: Callable[[Tensor], Tensor]) -> "Blocks":
        """The same rows, put in another order by `change`."""
        return replace(self, change=change)

    def order(self) -> Tensor | None:
        """Which row stands in each place [R]; None where each stands in its own."""
        if self.change is None:
            return None
        rows_R = torch.arange(len(self.bytes_RB))
        order_R = self.change(rows_R[:, None])[:, 0].contiguous()
        return None if torch.equal(order_R, rows_R) else order_R

    def slices(self) -> Iterator[Tensor | Codes]:
        """The rows in our order, as codes or float32, so many at a time that an unpacked slice has SLICE numbers."""
        order_R, rows = self.order(), max(1, SLICE // self.columns)
        for first in range(0, len(self.bytes_RB), rows):
            places = slice(first, first + rows)
            some = self.meaning(self.bytes_RB[places if order_R is None else order_R[places]])
            if self.groups_G is not None:
                some = some.each(self._place) if isinstance(some, Codes) else self._place(some)
            yield some

    def _place(self, part_RX: Tensor) -> Tensor:
        """The columns of a part in our order: numbers or codes [R, I], or what a group has one of [R, G]."""
        assert self.groups_G is not None
        return part_RX.unflatten(1, (len(self.groups_G), -1))[:, self.groups_G].flatten(1)


class MappedFiles(NamedTuple):
    """The files in which matrices of a decoder lie until somebody copies them."""

    path: Path
    read: int
    """Bytes of them that were copied so far."""
    size: int
    """Bytes of all their matrices."""


class MappedRows(NamedTuple):
    """Rows of a matrix that lie in a mapped file, which nobody has read yet: neither are they known to be finite."""

    rows: Tensor | Blocks
    origin: str
    """File and tensor, for complaints."""

    @property
    def memory(self) -> Tensor:
        """The mapped memory in which the rows lie."""
        return self.rows.bytes_RB if isinstance(self.rows, Blocks) else self.rows

    @property
    def num_rows(self) -> int:
        """Number of rows of the matrix."""
        return self.rows.numel() // (self.rows.columns if isinstance(self.rows, Blocks) else self.rows.shape[-1])
