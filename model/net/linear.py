"""Every matrix of a decoder is a `Linear`. It owns how its numbers are kept, how they are filled in, and how they multiply.

A form is a subclass that keeps or multiplies them in another way: it overrides `make_room`, `store`, `dense` and `forward`, as
far as they differ. `replace_linears` puts forms, and shards, into a decoder by name: before its weights are read, or after.

Shapes: T tokens · I numbers of a token that go in · O that come out · X experts.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attend.model.net.formats.blocks import MappedRows
from attend.model.net.formats.codes import Codes

ShardDim = Literal["rows", "columns"]
"""How shards share a matrix: each has some rows of every part, or some columns. The products of the latter are summed."""
ABSORBED = "kv_up"
"""How names of matrices end whose parts multiply queries and outputs (`latent.py`): they are read whole at each step, so no
form may keep them that makes their numbers anew, or adds to their products.
"""
SHAPE = ("in_features", "out_features", "parts", "shard_dim", "unit", "whole", "rows", "columns", "biases")
"""Attributes that forms of one matrix have in common."""


class Linear(nn.Linear):
    """x Wᵀ + b, from [T, I] to [T, O]; the plain form.

    W [O, I] is made of parts that lie under each other, such as the rows of queries, of keys, and of values.
    """

    ATTRIBUTES: tuple[str, ...] = SHAPE
    """What `of` takes over from another matrix: forms may add theirs."""
    mapped_rows: tuple[MappedRows, ...] = ()
    """The rows of the weight in a mapped file, in place of the weight."""

    def __init__(
        self, size_in: int, parts: Sequence[int], *, bias: bool, shard_dim: ShardDim | None = None, unit: int = 1
    ) -> None:
        """`parts`: rows of each. `unit`: rows or columns that no shard divides, such as those of a head."""
        super().__init__(size_in, sum(parts), bias=bias)
        self._describe((sum(parts), size_in), parts, shard_dim, unit)

    def _describe(self, whole: tuple[int, ...], parts: Sequence[int], shard_dim: ShardDim | None, unit: int) -> None:
        self.parts, self.shard_dim, self.unit = tuple(parts), shard_dim, unit
        self.whole = whole
        """The shape of the whole matrix, of all shards together."""
        self.rows, self.columns = [range(_product(whole[:-1]))], range(whole[-1])
        """Which rows and columns of the whole are here."""
        self.biases = "none" if self.bias is None else "here"
        """`elsewhere`: another shard has them."""

    @classmethod
    def of(cls, linear: "Linear", **changes: object) -> Self:
        """A matrix like another in this form, without numbers, on the meta device."""
        form = cls.__new__(cls)
        nn.Module.__init__(form)
        for name in cls.ATTRIBUTES:
            setattr(form, name, changes[name] if name in changes else getattr(linear, name))
        for kind in ("weight", "bias"):
            form.register_parameter(kind, None)
            form.make_room(kind, torch.get_default_dtype(), "meta")
        return form

    def shard(self, rank: int, ranks: int) -> "Linear":
        """The part of this matrix that shard `rank` of `ranks` has, without numbers. Only the first adds the bias to a sum.

        Where a part has fewer units than there are shards, such as heads of keys, several shards have the same unit.
        """
        if self.shard_dim is None:
            return self
        sizes = self.parts if self.shard_dim == "rows" else (self.in_features,)
        alone = self.shard_dim == "columns" or self.unit == 1  # a unit that two shards have would be added twice
        if any(size % (ranks * self.unit) and (alone or ranks * self.unit % size) for size in sizes):
            raise ValueError(f"{sizes} {self.shard_dim} in units of {self.unit} cannot be divided among {ranks} ranks")
        begins = [sum(sizes[:n]) for n in range(len(sizes))]
        mine = [
            range(begin + low, begin + low + max(self.unit, size // ranks))
            for begin, low, size in zip(begins, (self._begin(size, rank, ranks) for size in sizes), sizes, strict=True)
        ]
        if self.shard_dim == "rows":
            return self.of(self, rows=mine, parts=tuple(map(len, mine)), out_features=sum(map(len, mine)))
        biases = "elsewhere" if self.biases == "here" and rank > 0 else self.biases
        return self.of(self, columns=mine[0], in_features=len(mine[0]), biases=biases)

    def _begin(self, size: int, rank: int, ranks: int) -> int:
        return rank * (size // self.unit) // ranks * self.unit

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the whole matrix and, where there is one, of its bias: what is to be filled in."""
        return {"weight": self.whole} | ({} if self.biases == "none" else {"bias": self.whole[:-1]})

    def make_room(self, kind: str, dtype: torch.dtype, device: str | torch.device) -> None:
        """Take the memory of a weight or a bias that is here, before anything is filled in."""
        several = (sum(map(len, self.rows)) // self.out_features,) if len(self.whole) > 2 else ()
        shape = (*several, self.out_features, self.in_features)
        if kind == "weight" or self.biases == "here":
            room = torch.empty(shape if kind == "weight" else shape[:-1], dtype=dtype, device=device)
            setattr(self, kind, nn.Parameter(room, requires_grad=False))

    def fill(self, kind: str, first: int, tensor: Tensor | Codes) -> None:
        """Take over rows of the whole matrix from `first` on, or so much of its bias; what other shards have is passed over.

        The tensor may have any dtype and layout, and more dimensions where its numbers are in the order of the rows.
        """
        if kind == "bias" and self.biases != "here":
            return
        if isinstance(tensor, Codes) and len(self.columns) * sum(map(len, self.rows)) < _product(self.whole):
            tensor = tensor.dense()  # a shard may begin within a group
        count, at = tensor.numel() // (self.whole[-1] if kind == "weight" else 1), 0
        if kind == "weight" and len(self.columns) < self.whole[-1]:
            assert isinstance(tensor, Tensor)
            tensor = tensor[..., self.columns.start : self.columns.stop]
        for rows in self.rows:
            low, high = max(first, rows.start), min(first + count, rows.stop)
            if high - low == count:
                self.store(kind, at + low - rows.start, tensor)
            elif low < high:
                assert isinstance(tensor, Tensor)
                lines = tensor.reshape(count, *tensor.shape[tensor.dim() - (kind == "weight") :])
                self.store(kind, at + low - rows.start, lines[low - first : high - first])
            at += len(rows)

    @torch.no_grad()
    def store(self, kind: str, first: int, tensor: Tensor | Codes) -> None:
        """Copy numbers to the rows of this shard from `first` on."""
        tensor = tensor.dense() if isinstance(tensor, Codes) else tensor
        width = self.in_features if kind == "weight" else 1
        lines = getattr(self, kind).view(-1, width)[first : first + tensor.numel() // width]
        lines.view(tensor.shape).copy_(tensor)

    def adopt(self, tensor: Tensor) -> bool:
        """Take a whole matrix as it lies, without a copy, where this form can."""
        fits = type(self).store is Linear.store and tensor.is_contiguous() and tensor.shape == self.weight.shape
        if fits:
            self.weight = nn.Parameter(tensor, requires_grad=False)
        return fits

    def leave(self, mapped_rows: MappedRows) -> bool:
        """Leave the next rows of the whole matrix where they lie, where whoever packs this form can read them there."""
        fits = type(self).store is Linear.store and isinstance(mapped_rows.rows, Tensor) and mapped_rows.rows.is_contiguous()
        if fits:
            self.mapped_rows += (mapped_rows,)
            self.weight = None
        return fits

    def share(self, other: nn.Module) -> None:
        """Have the numbers of another matrix, without a copy."""
        self.weight, self.mapped_rows = other.weight, getattr(other, "mapped_rows", ())

    def dense(self) -> Tensor:
        """The matrix [O, I], for those who keep it in a form of their own."""
        if self.weight is None:
            return torch.cat([part.memory.view(-1, self.in_features) for part in self.mapped_rows]).view(self.whole)
        return self.weight

    def slices(self, rows: int, expert: int | None = None) -> Iterator[Tensor]:
        """The matrix, or that of one expert, `rows` rows at a time, in any dtype: a form makes each when it is asked for it."""
        whole = self.dense()
        yield from (whole if expert is None else whole[expert]).split(rows)

    def drop(self) -> None:
        """Forget the numbers: what is left is of no further use."""
        for numbers in (self._parameters, self._buffers):
            numbers.update(dict.fromkeys(numbers))
        self.mapped_rows = ()


class FloatLinear(Linear):
    """x Wᵀ + b in float32, whatever the numbers are kept in."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())


class ExpertLinear(Linear):
    """One projection of all experts, or of `some`: the weights are one tensor [X, O, I], the biases one [X, O]."""

    ATTRIBUTES = (*SHAPE, "first")
    first = 0
    """The number of the first expert that is here."""

    def __init__(self, experts: int, size_in: int, size_out: int, *, bias: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = size_in, size_out
        self.weight = nn.Parameter(torch.empty(experts, size_out, size_in))
        self.register_parameter("bias", nn.Parameter(torch.empty(experts, size_out)) if bias else None)
        self._describe((experts, size_out, size_in), [size_out], None, 1)

    def some(self, mine: range) -> "ExpertLinear":
        """Some of the experts, without numbers."""
        rows = range(mine.start * self.out_features, mine.stop * self.out_features)
        return self.of(self, rows=[rows], first=mine.start)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """One expert's product with x [T, I]: [T, O]."""
        expert -= self.first
        return F.linear(x, self.weight[expert], None if self.bias is None else self.bias[expert])


def replace_linears(net: nn.Module, form: Callable[[str, Linear], Linear]) -> None:
    """Put `form(name, matrix)` in the place of every matrix of a decoder; it may be the matrix itself."""
    for path, module in list(net.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear) and not isinstance(module, Linear):
                setattr(module, name, form(f"{path}.{name}" if path else name, child))


def _product(sizes: Sequence[int]) -> int:
    return torch.Size(sizes).numel()
