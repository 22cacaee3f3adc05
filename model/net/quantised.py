"""Weight-only quantisation to 8 or 4 bits: about a half or a quarter of bfloat16's memory.

Scales are float16. A row has a power of two beside them, so that its largest scale is near the top of float16's range.
Shapes: T tokens · O rows · I columns, in whole groups · G groups of 32 columns.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attend.model.net.formats.blocks import Blocks, MappedRows
from attend.model.net.formats.codes import GROUP, INT8, CodeLayout, Codes, Kind, quantise, values_of
from attend.model.net.linear import ABSORBED, SHAPE, ExpertLinear, Linear, replace_linears
from attend.model.net.transformer import Decoder

LARGEST = 15
"""Scales and minima of a row are below 2^15 in float16, after the row's power of two is taken out."""
PLAIN = ("router", "shared_gate", "gates", ABSORBED)
"""Matrices that stay as they are: a few rows that decide much, and what is read whole at each step."""


class QuantisedLinear(Linear):
    """x Wᵀ + b for a quantised W. Here W is dequantised for each product; the native decoder multiplies the codes."""

    ATTRIBUTES = (*SHAPE, "kind", "has_minima")
    kind: Kind
    """Which numbers the codes stand for."""
    has_minima: bool
    """True if a group has a minimum beside its scale."""
    dtype = torch.float32
    """Dtype of the bias, and of the activations."""
    codes: Tensor
    """Signed bytes [O, I], or [O, I / 2] with two codes of 4 bits in a byte, that of the even column in the low half."""
    scales: Tensor
    """float16 [O, G]: one for each group of a row, times the row's unit."""
    minima: Tensor | None
    """float16 [O, G]: one for each group of a row, times the row's unit."""
    units: Tensor
    """float32 [O]: what scales and minima of a row are to be multiplied by."""

    @classmethod
    def form(cls, linear: Linear, kind: Kind, *, has_minima: bool = False) -> "QuantisedLinear":
        """An empty matrix of this form, in the shape of `linear`."""
        shape = QuantisedExperts if isinstance(linear, ExpertLinear) else cls
        return shape.of(linear, kind=kind, has_minima=has_minima)

    def make_room(self, kind: str, dtype: torch.dtype, device: str | torch.device) -> None:
        """Take the memory of codes and scales, or of a bias."""
        if kind == "bias":
            return super().make_room(kind, dtype, device)
        self.dtype = dtype
        rows, groups = (*self.whole[:-2], self.out_features), -(-self.in_features // GROUP)
        self.register_buffer(
            "codes", torch.zeros(*rows, groups * GROUP * self.kind.bits // 8, dtype=torch.uint8, device=device)
        )
        # not zeros_like: on the meta device it imports torch's compiler, a second for nothing
        scales, minima = (torch.zeros(*rows, groups, dtype=torch.float16, device=device) for _ in range(2))
        self.register_buffer("scales", scales)
        self.register_buffer("minima", minima if self.has_minima else None)
        self.register_buffer("units", torch.zeros(rows, device=device))

    @torch.no_grad()
    def store(self, kind: str, first: int, tensor: Tensor | Codes) -> None:
        """Take over codes as they are, or quantise numbers, to rows from `first` on."""
        if kind == "bias":
            assert isinstance(tensor, Tensor)
            return super().store(kind, first, tensor)
        codes = self._codes_of(tensor).each(lambda part: part.flatten(0, -2))
        units = _unit(codes)
        rows = slice(first, first + len(units))
        self.units.flatten()[rows] = units
        self.scales.flatten(0, -2)[rows] = (codes.scales_OG / units[:, None]).half()
        if self.minima is not None:
            self.minima.flatten(0, -2)[rows] = 0 if codes.minima_OG is None else (codes.minima_OG / units[:, None]).half()
        bytes_OI = F.pad(codes.codes_OI, (0, -self.in_features % GROUP)).view(torch.uint8)
        if self.kind.bits == 4:
            bytes_OI = bytes_OI[:, ::2] | bytes_OI[:, 1::2] << 4
        self.codes.flatten(0, -2)[rows] = bytes_OI

    def _codes_of(self, tensor: Tensor | Codes) -> Codes:
        """Codes of this form's kind, which hold the same numbers where that is possible."""
        if not isinstance(tensor, Codes):
            return quantise(tensor.reshape(-1, self.in_features), self.kind)
        if tensor.minima_OG is None or self.has_minima:
            if tensor.kind == self.kind:
                return tensor
            if self.kind == INT8 and tensor.kind.values:
                values_OI = values_of(tensor.kind, tensor.codes_OI).to(torch.int8)
                return Codes(INT8, values_OI, tensor.scales_OG, tensor.minima_OG)
        return quantise(tensor.dense(), self.kind)

    def dense(self) -> Tensor:
        """The dequantised matrix [O, I], float32."""
        return self.select(torch.arange(self.units.numel())).view(*self.units.shape, self.in_features)

    def select(self, rows_N: Tensor) -> Tensor:
        """Some rows of the matrix [N, I], float32; those of experts lie under each other."""
        codes_NI = self.codes.flatten(0, -2)[rows_N]
        if self.kind.bits == 4:
            codes_NI = torch.stack((codes_NI & 15, codes_NI >> 4), dim=-1).flatten(-2)
        else:
            codes_NI = codes_NI.view(torch.int8)
        units_N1 = self.units.flatten()[rows_N, None]
        scales, minima = (
            None if part is None else part.flatten(0, -2)[rows_N].float() * units_N1 for part in (self.scales, self.minima)
        )
        assert scales is not None
        return Codes(self.kind, codes_NI, scales, minima).dense()[:, : self.in_features]

    def slices(self, rows: int, expert: int | None = None) -> Iterator[Tensor]:
        """See Linear. The slices are float32."""
        first = 0 if expert is None else expert * self.out_features
        for some in torch.arange(first, first + self.out_features).split(rows):
            yield self.select(some)

    def leave(self, mapped_rows: MappedRows) -> bool:
        """See Linear: of a file of blocks that native code unpacks."""
        if not isinstance(mapped_rows.rows, Blocks) or mapped_rows.rows.number is None:
            return False
        self.mapped_rows += (mapped_rows,)
        for name in ("codes", "scales", "minima", "units"):
            self.register_buffer(name, None)
        return True

    def share(self, other: nn.Module) -> None:
        """Have the numbers of another matrix of this form, without a copy."""
        assert isinstance(other, QuantisedLinear)
        self.mapped_rows = other.mapped_rows
        self.codes, self.scales, self.minima, self.units = other.codes, other.scales, other.minima, other.units

    def forward(self, x_TI: Tensor) -> Tensor:
        """x Wᵀ + b, [T, O], in x's dtype."""
        return F.linear(x_TI, self.dense().to(x_TI.dtype), self.bias)


class QuantisedExperts(QuantisedLinear, ExpertLinear):
    """One projection of all experts: [X, O, I]."""

    def forward(self, x_TI: Tensor, expert: int) -> Tensor:
        """One expert's product with x [T, I]: [T, O]."""
        first = expert * self.out_features
        weight_OI = self.select(torch.arange(first, first + self.out_features))
        return F.linear(x_TI, weight_OI.to(x_TI.dtype), None if self.bias is None else self.bias[expert])


class QuantisedEmbedding(QuantisedLinear):
    """The vectors of tokens as the rows of a matrix."""

    def forward(self, tokens_T: Tensor) -> Tensor:
        """Dequantised rows of tokens, [T, I]."""
        return self.select(tokens_T).to(self.dtype)


def quantise_matrices(net: Decoder, kind: Kind) -> None:
    """Give the matrices of a decoder without numbers this form; the embedding and the head have 8 bits."""
    replace_linears(net, lambda name, linear: _form_of(name, linear, kind))
    for holder in (net.embedding, net.per_layer):
        if holder is not None:
            holder.tokens = quantised_embedding(holder.tokens, CodeLayout(INT8))


def quantised_embedding(table: nn.Embedding, form: CodeLayout) -> QuantisedLinear:
    """The vectors of tokens in a form, without numbers."""
    with torch.device("meta"):
        linear = Linear(table.embedding_dim, [table.num_embeddings], bias=False)
    return QuantisedEmbedding.form(linear, form.kind, has_minima=form.has_minima)


def _form_of(name: str, linear: Linear, kind: Kind) -> Linear:
    if name.endswith(PLAIN):
        return linear
    return QuantisedLinear.form(linear, INT8 if name == "head" else kind)


def _unit(codes: Codes) -> Tensor:
    """The power of two of each row, for which its largest scale is below 2^LARGEST."""
    largest_O = codes.scales_OG.abs().amax(-1)
    if codes.minima_OG is not None:
        largest_O = torch.maximum(largest_O, codes.minima_OG.abs().amax(-1))
    return torch.ldexp(torch.ones_like(largest_O), torch.frexp(largest_O).exponent - LARGEST)


def names_of_kinds(net: Decoder) -> str:
    """How the matrices of the blocks are kept, as `int4` or `int4+int8`; empty where all are plain."""
    kinds = {module.kind.name for module in net.blocks.modules() if isinstance(module, QuantisedLinear)}
    return "+".join(sorted(kinds))


def count_bytes(net: Decoder, dtype: torch.dtype) -> int:
    """What the weights of a decoder take whose plain numbers are of this dtype; codes take what they take."""
    plain = sum(parameter.numel() for parameter in net.parameters()) * dtype.itemsize
    forms = (module for module in net.modules() if isinstance(module, QuantisedLinear))
    held = {None if net.config.tied_head and form is net.head else form for form in forms}
    return plain + sum(part.nbytes for form in held if form is not None for part in form.buffers(recurse=False))
