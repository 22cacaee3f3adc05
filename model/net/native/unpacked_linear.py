"""The matrices of a native decoder, read back from its memory: the only place where they are once it serves.

Shapes: O rows of a matrix · I columns.
"""

import ctypes
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from attend.model.net.linear import SHAPE, Linear


class Holder(Protocol):
    """A native decoder, which holds packed matrices."""

    library: ctypes.CDLL
    handle: int


class UnpackedLinear(Linear):
    """A matrix whose numbers lie in a native decoder: it can be read, slice by slice, but neither filled in nor multiplied."""

    ATTRIBUTES = (*SHAPE, "holder", "number", "first")
    holder: Holder
    """The decoder whose memory has this matrix; it is kept alive."""
    number: int
    """Number of the matrix in the library, as `attend_pack` counts; of experts that of the first one."""
    first: int
    """First row of this matrix within the packed one: the gate of a shared expert lies below the router."""

    @classmethod
    def inside(cls, holder: Holder, linear: Linear, number: int, first: int) -> "UnpackedLinear":
        """What stands for `linear`, which the holder packs as (a part of) its matrix `number`. The bias is shared."""
        form = cls.of(linear, holder=holder, number=number, first=first)
        form.bias = linear.bias
        return form

    def make_room(self, kind: str, dtype: torch.dtype, device: str | torch.device) -> None:
        """Nothing: there is room in the native decoder."""

    def slices(self, rows: int, expert: int | None = None) -> Iterator[Tensor]:
        """See Linear. The slices are float32."""
        for begin in range(0, self.out_features, rows):
            yield self.rows_from(begin, min(rows, self.out_features - begin), expert or 0)

    def rows_from(self, begin: int, count: int, expert: int = 0) -> Tensor:
        """`count` rows of the matrix from `begin` on, float32 [count, I]."""
        some_OI = torch.empty(count, self.in_features)
        where = (self.number + expert, self.first + begin, count, some_OI.data_ptr())
        self.holder.library.attend_unpack(self.holder.handle, *where)
        return some_OI

    def dense(self) -> Tensor:
        """The matrix, float32 [O, I], or that of each expert [X, O, I]."""
        experts = self.whole[0] if len(self.whole) > 2 else 1
        return torch.stack([self.rows_from(0, self.out_features, expert) for expert in range(experts)]).view(self.whole)

    def select(self, rows_N: Tensor) -> Tensor:
        """Some rows of the matrix, float32 [N, I]."""
        return torch.cat([self.rows_from(row, 1) for row in rows_N.tolist()])
