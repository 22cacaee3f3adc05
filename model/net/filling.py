"""Weight loading: a parameter of a decoder is filled in with what the files have of it, piece by piece."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attend.model.net.formats.blocks import Blocks, MappedRows
from attend.model.net.formats.codes import FP8, Codes
from attend.model.net.formats.weights import Weights
from attend.model.net.linear import Linear
from attend.model.net.quantised import QuantisedLinear


class Slot(NamedTuple):
    """A parameter that the files fill."""

    ours: str
    module: nn.Module
    kind: str
    """Name of the parameter in its module."""
    shape: tuple[int, ...]
    """Shape of the whole parameter, whatever part of it this rank has."""

    @property
    def width(self) -> int:
        """Numbers in a row; those of a bias are rows themselves."""
        return self.shape[-1] if self.kind == "weight" else 1


class Filler:
    """Fills a parameter with its pieces, one after the other, or leaves all of them in the mapped file."""

    def __init__(self, slot: Slot, weights: Weights, dtype: torch.dtype, device: str) -> None:
        self._slot, self._weights, self._dtype, self._device = slot, weights, dtype, device
        self._first = 0
        """Number of the next row to be filled."""
        self.unread = 0
        """Bytes of rows that are left in the file, to be unpacked later."""
        self.dequantised = False
        """True if codes have become numbers: of floats a note has told."""
        self.rounded: set[torch.dtype] = set()
        """Dtypes of files whose numbers were rounded to a coarser one."""

    def leave(self, piece: Tensor | Codes | Blocks, *, tied_head: bool) -> bool:
        """Leave (a part of) a matrix in the file, if its form allows it.

        The vectors of tokens are read from time to time, and so they come into memory, unless the head has them too.
        """
        slot, weights = self._slot, self._weights
        if slot.kind != "weight" or self._first or isinstance(piece, Codes):
            return False
        if isinstance(piece, Tensor) and (piece.dim() < 2 or piece.dtype != self._dtype or not weights.owns(piece)):
            return False
        unread = MappedRows(piece, weights.origin)
        if slot.ours.startswith("per_layer.tokens."):  # whose rows are read in each step
            left = False
        elif isinstance(slot.module, Linear):
            left = slot.module.leave(unread)
        else:
            left = tied_head and slot.ours.startswith("embedding.tokens.") and isinstance(piece, Tensor)
            if left:
                slot.module.weight, slot.module.mapped_rows = nn.Parameter(piece, requires_grad=False), (unread,)
        self.unread += unread.memory.nbytes if left else 0
        return left

    def fill(self, piece: Tensor | Codes | Blocks) -> Iterator[None]:
        """Take over a piece, slice by slice: between two of them pages may be released. Ends after noting what is wrong."""
        if self.unread:  # the matrix has parts of both kinds
            parts, origin = self._slot.module.mapped_rows, self._weights.origin
            self.unread, self._slot.module.mapped_rows = 0, ()
            for part in parts:
                self._weights.origin = part.origin
                yield from self.fill(part.rows)
            self._weights.origin = origin
        for some in piece.slices() if isinstance(piece, Blocks) else (piece,):
            if not self._weights.are_finite(some):
                return
            coded = isinstance(piece, Blocks) or (isinstance(some, Codes) and some.kind != FP8)
            self.dequantised |= coded and not isinstance(self._slot.module, QuantisedLinear)
            if isinstance(some, Tensor) and some.dim() > 1 and isinstance(piece, Tensor) and self._loses(some.dtype):
                self.rounded.add(some.dtype)
            self._put_tensor(some)
            self._first += some.numel() // self._slot.width
            del some
            yield

    def _loses(self, stored: torch.dtype) -> bool:
        """True if numbers of this type do not keep all their bits."""
        kept = torch.float32 if isinstance(self._slot.module, QuantisedLinear) else self._dtype  # codes are another matter
        return torch.promote_types(stored, kept) != kept

    def _put_tensor(self, tensor: Tensor | Codes) -> None:
        module, kind, first = self._slot.module, self._slot.kind, self._first
        if isinstance(module, Linear):
            if first == 0:
                module.make_room(kind, self._dtype, self._device)
            module.fill(kind, first, tensor)
            return
        numbers, width = tensor.dense() if isinstance(tensor, Codes) else tensor, self._slot.width
        if first == 0:
            room = torch.empty(self._slot.shape, dtype=self._dtype, device=self._device)
            setattr(module, kind, nn.Parameter(room, requires_grad=False))
        getattr(module, kind).data.view(-1)[first * width : first * width + numbers.numel()].copy_(numbers.flatten())
