"""The small parts of a decoder: norms, sinusoidal positions, MLPs.

Shapes: T tokens · E model width · P positions.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attend.model.config import ModelConfig
from attend.model.net.linear import Linear


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * gain (Zhang & Sennrich 2019). A gain of more precision than x is applied before the result is rounded."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == x.dtype:
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return F.rms_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """(x - mean) / deviation * gain + bias (Ba et al. 2016). A gain of more precision than x is applied as in `RMSNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == x.dtype:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return F.layer_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, bias, self.eps).to(x.dtype)


def make_norm(config: ModelConfig, size: int, eps: float | None = None) -> nn.Module:
    """RMSNorm, or LayerNorm (Ba et al. 2016), over the last dimension. `eps` None: `config.norm_eps`."""
    eps = config.norm_eps if eps is None else eps
    if config.norm == "rmsnorm":
        return RMSNorm(size, eps=eps)
    return LayerNorm(size, eps=eps, bias=config.norm == "layernorm")


def empty_table(rows: int, width: int) -> nn.Embedding:
    """An embedding that draws no values: drawing on the meta device imports torch's compiler, a second or two for nothing."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def sinusoidal_table(num_positions: int, width: int) -> Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/E)), PE(p, 2i+1) = cos(same). float32 [P, E] (Vaswani et al. 2017, 3.5).

    Made on the CPU by name: a decoder is built on the `meta` device before its weights are read.
    """
    positions_P1 = torch.arange(num_positions, dtype=torch.float64, device="cpu")[:, None]
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    table_PE = torch.empty(num_positions, width, dtype=torch.float64, device="cpu")
    table_PE[:, 0::2] = torch.sin(positions_P1 * frequencies)
    table_PE[:, 1::2] = torch.cos(positions_P1 * frequencies[: width // 2])
    return table_PE.float()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def make_gated(config: ModelConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """act(gate) * up: SwiGLU when act is SiLU (Shazeer 2020). With `swiglu_limit` the clamped form of gpt-oss."""
    activation, limit, slope = ACTIVATIONS[config.activation], config.swiglu_limit, config.swiglu_slope

    def clamp_and_gate(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(slope * gate)

    return (lambda gate, up: activation(gate) * up) if limit is None else clamp_and_gate


class GatedMLP(nn.Module):
    """down(gated(gate(x), up(x))), see `make_gated`. Gate and up are one matrix."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        """Make an MLP of width `size`."""
        super().__init__()
        self.gate_up = Linear(config.hidden_size, [size, size], bias=config.mlp_bias, shard_dim="rows")
        self.down = Linear(size, [config.hidden_size], bias=config.mlp_bias, shard_dim="columns")
        self.gated = make_gated(config)

    def forward(self, x_TE: Tensor) -> Tensor:
        gate, up = self.gate_up(x_TE).chunk(2, dim=-1)
        return self.down(self.gated(gate, up))


class MLP(nn.Module):
    """down(act(up(x))): the position-wise feed-forward network (Vaswani et al. 2017, equation 2)."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        """Make an MLP of width `size`."""
        super().__init__()
        self.up = Linear(config.hidden_size, [size], bias=config.mlp_bias, shard_dim="rows")
        self.down = Linear(size, [config.hidden_size], bias=config.mlp_bias, shard_dim="columns")
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_TE)))
