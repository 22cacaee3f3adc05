"""A gated short convolution in place of attention (LFM2): a token is mixed with the few that came before it.

Each token x is projected to three vectors b, c and z of the model's width, and

    y_t = c_t * (bias + sum over w < W of weight_w * (b * z)_{t - W + 1 + w})

is projected back: products and sums are those of each column by itself. So a layer keeps the last W - 1 products b * z.

Shapes: T tokens · R sequences · L tokens of each · E model width · C columns of the convolution · W tokens that it sees.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attend.model.config import ModelConfig
from attend.model.net.attention import Attention
from attend.model.net.delta import causal_convolution
from attend.model.net.linear import Linear
from attend.model.net.rope import Rotation
from attend.model.net.states import State
from attend.model.sublayers import ConvSpec


class ShortConv(nn.Module):
    """Project to both gates and the inputs; gate, convolve, gate; project back."""

    def __init__(self, config: ModelConfig, spec: ConvSpec) -> None:
        super().__init__()
        self.spec = spec
        self.inputs = Linear(config.hidden_size, [spec.channels] * 3, bias=spec.bias)
        """What gates the inputs of the convolution, what gates its outputs, and the inputs."""
        self.convolution = nn.Parameter(torch.zeros(spec.channels, 1, spec.kernel))
        self.convolution_bias = nn.Parameter(torch.zeros(spec.channels)) if spec.bias else None
        self.merge = Linear(spec.channels, [config.hidden_size], bias=spec.bias)

    def forward(self, x_TE: Tensor, rotation: Rotation | None, layer: int, attention: Attention) -> Tensor:
        before_TC, after_TC, inputs_TC = self.inputs(x_TE).split(self.inputs.parts, dim=-1)
        return self.merge(after_TC * attention.recur(layer, self, before_TC * inputs_TC))

    def start(self, count: int) -> State:
        """See Recurrence: the last inputs of the convolution [R, C, W - 1]."""
        return tuple(self.convolution.new_zeros(count, *shape, dtype=torch.float32) for shape in self.spec.state_shapes)

    def advance(self, inputs: Sequence[Tensor], state: State) -> tuple[Tensor, State]:
        """See Recurrence. `inputs`: the input of the convolution, [R, L, C]; outputs have the same shape."""
        [inputs_RLC], [before_RCW] = inputs, state
        before_RCW = before_RCW.to(inputs_RLC.dtype)
        sums_RLC, before_RCW = causal_convolution(inputs_RLC, before_RCW, self.convolution, self.convolution_bias)
        return sums_RLC, (before_RCW.float(),)
