"""bfloat16 matrices laid out once for the CPU's matrix units (oneDNN), instead of at every call.

One decode step reads every weight once, so the time goes into moving them: packed, the same bytes take about
a fifth less time on a CPU with AMX, and far less where a step has a few rows.
"""

import logging
from functools import cache

import torch
from torch import Tensor, nn

from attend.model.net.linear import ABSORBED, Linear, replace_linears

OPERATIONS = ("_is_mkldnn_bf16_supported", "_linear_pointwise", "_reorder_linear_weight")
"""Private ones of torch, which another version may lack."""

log = logging.getLogger("attend.engine")


class PackedLinear(Linear):
    """x Wᵀ + b with W in oneDNN's own layout. The plain weight that it is made from can then be forgotten."""

    @classmethod
    def pack(cls, linear: Linear) -> "PackedLinear":
        """The packed form of a plain matrix that is filled."""
        form = cls.of(linear)
        del form.weight  # a tensor of this layout is no parameter
        form.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        form.bias = linear.bias
        form._multiply = torch.ops.mkldnn._linear_pointwise.default  # without the choice among overloads at every call
        return form

    def forward(self, x_TE: Tensor) -> Tensor:
        """The product x Wᵀ + b, [T, O]."""
        return self._multiply(x_TE, self.weight, self.bias, "none", [], "")

    def dense(self) -> Tensor:
        """The matrix [O, I], laid out plainly again."""
        return self.weight.to_dense()


def multiplies_bfloat16() -> bool:
    """True if this torch comes with oneDNN and the operations that are used here, and this CPU has units for bfloat16."""
    return torch.backends.mkldnn.is_available() and _has_operations() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def _has_operations() -> bool:
    """Says once what another version of torch lacks."""
    gone = [name for name in OPERATIONS if not hasattr(torch.ops.mkldnn, name)]
    if gone:
        words = "torch %s has no mkldnn %s: the torch backend computes more slowly"
        log.warning(words, torch.__version__, ", ".join(gone))
    return not gone


def pack_linears(net: nn.Module) -> None:
    """Give every plain bfloat16 matrix of a CPU model its packed form, in place; experts and other forms stay as they are."""
    if multiplies_bfloat16():
        replace_linears(net, lambda name, linear: PackedLinear.pack(linear) if _is_packable(name, linear) else linear)


def _is_packable(name: str, linear: Linear) -> bool:
    plain = type(linear) is Linear and not name.endswith(ABSORBED)
    return plain and linear.weight.dtype == torch.bfloat16 and linear.weight.device.type == "cpu"
