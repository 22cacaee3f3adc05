"""The decoder that serves, computed in float32 by the reference equations, whatever form its matrices are kept in.

A matrix is unpacked slice by slice, and a slice is freed after its product: there is never a second copy of the weights.

Shapes: T tokens · I numbers of a token that go into a matrix · O that come out · E model width.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attend.model.net.linear import Linear, replace_linears
from attend.model.net.transformer import Decoder

NUMBERS = 1 << 18
"""Numbers of a matrix that are unpacked at a time: 1 MiB in float32, about a millisecond of one core."""


class SlicedLinear(Linear):
    """x Wᵀ + b in float32, for W as another matrix keeps it. `between` is called before each slice: it may raise."""

    source: tuple[Linear]
    """The matrix that is read, in a tuple: torch would register a bare module, and count its parameters twice."""
    between: Callable[[], None]

    @classmethod
    def over(cls, linear: Linear, between: Callable[[], None]) -> "SlicedLinear":
        """A float32 form of `linear`, which unpacks it slice by slice and calls `between` before each."""
        form = cls.of(linear)
        form.source, form.between = (linear,), between
        return form

    def make_room(self, kind: str, dtype: torch.dtype, device: str | torch.device) -> None:
        """Nothing: it has no numbers of its own."""

    def slices(self, rows: int, expert: int | None = None) -> Iterator[Tensor]:
        """See Linear. The slices are float32, on the CPU."""
        for some_OI in self.source[0].slices(rows, expert):
            self.between()
            yield some_OI.to("cpu", torch.float32)

    def forward(self, x_TI: Tensor, expert: int | None = None) -> Tensor:
        """The product of [T, I] with the matrix, or with that of one expert: [T, O]."""
        rows = max(1, NUMBERS // self.in_features)
        y_TO = torch.cat([F.linear(x_TI, some_OI) for some_OI in self.slices(rows, expert)], dim=-1)
        bias = self.source[0].bias
        if bias is None:
            return y_TO
        return y_TO + (bias if expert is None else bias[expert]).to("cpu", torch.float32)


class SlicedEmbedding(nn.Module):
    """The vectors of tokens in float32: the rows of a table that serves."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.kept = (table,)

    def forward(self, tokens_T: Tensor) -> Tensor:
        """The vectors of tokens in float32, [T, E]."""
        [table] = self.kept
        rows_T = tokens_T if not isinstance(table, nn.Embedding) else tokens_T.to(table.weight.device)
        vectors_TE = table.weight[rows_T] if isinstance(table, nn.Embedding) else table.select(rows_T)
        return vectors_TE.to("cpu", torch.float32)


def reference(decoder: Decoder, between: Callable[[], None] = lambda: None) -> Decoder:
    """`decoder` in float32 on the CPU: its matrices are read where they are, its norms and tables are copied."""
    with torch.device("meta"):
        net = Decoder(decoder.config, context=0)
    matrices = {name: module for name, module in decoder.named_modules() if isinstance(module, Linear)}
    replace_linears(net, lambda name, _: SlicedLinear.over(matrices[name], between))
    tokens = decoder.embedding.tokens
    net.embedding.tokens = SlicedEmbedding(decoder.head if tokens is None else tokens)  # which may be the head too
    if net.per_layer is not None and decoder.per_layer is not None:
        net.per_layer.tokens = SlicedEmbedding(decoder.per_layer.tokens)
    for name in dict(net.named_parameters()):
        module, _, kind = name.rpartition(".")
        copied = decoder.get_parameter(name).detach().to("cpu", torch.float32)
        setattr(net.get_submodule(module), kind, nn.Parameter(copied, requires_grad=False))
    net.rope_tables = [(cos.cpu(), sin.cpu()) for cos, sin in decoder.rope_tables]
    if decoder.config.positions == "sinusoidal":
        net.embedding.sinusoids = decoder.embedding.sinusoids.cpu()
    return net.eval()
