"""The small parts of a decoder: norms, positions, MLPs.

Tables are made on the CPU by name: a decoder is built on the `meta` device before its weights are read.

Shapes: T tokens · E model width · P positions · H heads · D head size.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig, RopeScaling

Rotation = tuple[Tensor, Tensor]
"""(cos, sin) of each token's angles, each [T, 1, D]."""


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * gain (Zhang & Sennrich 2019), with the gain in x's dtype: torch fuses nothing where they differ."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: ModelConfig, size: int) -> nn.Module:
    """RMSNorm, or LayerNorm (Ba et al. 2016), over the last dimension."""
    kind = {"rmsnorm": RMSNorm, "layernorm": nn.LayerNorm}[config.norm]
    return kind(size, eps=config.norm_eps)


def sinusoidal_table(num_positions: int, width: int) -> Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/E)), PE(p, 2i+1) = cos(same). float32 [P, E] (Vaswani et al. 2017, 3.5)."""
    positions_P1 = torch.arange(num_positions, dtype=torch.float64, device="cpu")[:, None]
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    table_PE = torch.empty(num_positions, width, dtype=torch.float64, device="cpu")
    table_PE[:, 0::2] = torch.sin(positions_P1 * frequencies)
    table_PE[:, 1::2] = torch.cos(positions_P1 * frequencies[: width // 2])
    return table_PE.float()


def rotary_frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position for each pair of dimensions, float32 [D/2] (Su et al. 2021; Llama 3.1 scaling)."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size)
    if scaling is None:
        return frequencies
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)  # 1: short wavelengths stay; 0: long ones stretch by the factor; between: a blend
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotary_table(config: ModelConfig, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin for the first positions, float32 [P, D], each angle twice (once for each half of a head)."""
    frequencies = rotary_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
    positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
    angles_PD = torch.outer(positions, frequencies).repeat(1, 2)
    return angles_PD.cos(), angles_PD.sin()


def apply_rotary(x_THD: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotate each pair (x_i, x_{i + D/2}) by its position's angle; None means positions live elsewhere."""
    if rotation is None:
        return x_THD
    cos, sin = (table.to(x_THD.dtype) for table in rotation)
    a, b = x_THD.chunk(2, dim=-1)
    return x_THD * cos + torch.cat((-b, a), dim=-1) * sin


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): SwiGLU when act is SiLU (Shazeer 2020). Gate and up are one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.mlp_size, bias=config.linear_bias)
        self.down = nn.Linear(config.mlp_size, config.hidden_size, bias=config.linear_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_TE: Tensor) -> Tensor:
        gate, up = self.gate_up(x_TE).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


class MLP(nn.Module):
    """down(act(up(x))): the position-wise feed-forward network (Vaswani et al. 2017, equation 2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.mlp_size, bias=config.linear_bias)
        self.down = nn.Linear(config.mlp_size, config.hidden_size, bias=config.linear_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_TE)))
