"""Per-layer embeddings: each layer has a vector of its own for each token, which gates what the layer ends with (Gemma 3n, 4).

Shapes: T tokens · E model width · L layers · P columns of such a vector.
"""

import math

from torch import Tensor, nn

from attend.model.config import ModelConfig
from attend.model.net.layers import ACTIVATIONS, RMSNorm, empty_table, make_norm
from attend.model.net.linear import Linear


class PerLayerEmbedding(nn.Module):
    """The vectors of all layers: those of the token, plus the norm of a projection of its embedding."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        self.shape = (config.num_layers, size)
        self.scale = math.sqrt(size)
        self.tokens: nn.Module = empty_table(config.per_layer_vocab_size or config.vocab_size, config.num_layers * size)
        self.projection = Linear(config.hidden_size, [config.num_layers * size], bias=False)
        # the projection is to be divided by sqrt(E): under the norm that is a larger epsilon
        self.norm = RMSNorm(size, eps=config.norm_eps * config.hidden_size)

    def forward(self, tokens_T: Tensor, x_TE: Tensor) -> Tensor:
        """[T, L, P] of tokens and their embeddings."""
        projected_TLP = self.norm(self.projection(x_TE).unflatten(-1, self.shape))
        return (projected_TLP + self.tokens(tokens_T).unflatten(-1, self.shape) * self.scale) * math.sqrt(0.5)


class PerLayerInput(nn.Module):
    """norm(projection(act(gate(x)) * input)): what a layer adds last."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, [size], bias=False)
        self.projection = Linear(size, [config.hidden_size], bias=False)
        self.post_norm = make_norm(config, config.hidden_size)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_TE: Tensor, input_TP: Tensor) -> Tensor:
        """The layer's share of the residual stream, [T, E]."""
        return self.post_norm(self.product(x_TE, input_TP))

    def product(self, x_TE: Tensor, input_TP: Tensor) -> Tensor:
        """The product before its norm, [T, E]."""
        return self.projection(self.activation(self.gate(x_TE)) * input_TP)


def per_layer_embedding(config: ModelConfig) -> PerLayerEmbedding | None:
    """The per-layer embedding of a model; None where it has none."""
    return None if config.per_layer_input_size is None else PerLayerEmbedding(config, config.per_layer_input_size)
