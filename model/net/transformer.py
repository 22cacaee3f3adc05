"""One decoder. Families differ by the values of their `ModelConfig`, never by a branch in `forward`.

Tokens of all requests lie side by side: there is no batch dimension and no padding. What a token may
see is the business of the `attention` argument (dense and causal in training, a paged cache in serving).

Shapes: T tokens · E model width · V vocabulary · P positions.
"""

import math

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.net.attention import Attention, MultiHeadAttention
from model.net.layers import MLP, GatedMLP, Rotation, make_norm, rotary_table, sinusoidal_table


class PreNormBlock(nn.Module):
    """x + f(norm(x)) for attention, then for the MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, config.hidden_size)
        self.attention = MultiHeadAttention(config)
        self.mlp_norm = make_norm(config, config.hidden_size)
        self.mlp = GatedMLP(config) if config.gated_mlp else MLP(config)

    def forward(self, x_TE: Tensor, rotation: Rotation | None, layer: int, attention: Attention) -> Tensor:
        x_TE = x_TE + self.attention(self.attention_norm(x_TE), rotation, layer, attention)
        return x_TE + self.mlp(self.mlp_norm(x_TE))


class PostNormBlock(PreNormBlock):
    """norm(x + f(x)): Add & Norm as first published (Vaswani et al. 2017, section 3.1)."""

    def forward(self, x_TE: Tensor, rotation: Rotation | None, layer: int, attention: Attention) -> Tensor:
        x_TE = self.attention_norm(x_TE + self.attention(x_TE, rotation, layer, attention))
        return self.mlp_norm(x_TE + self.mlp(x_TE))


class Embedding(nn.Module):
    """Token vectors, plus position vectors where positions are added rather than rotated in."""

    def __init__(self, config: ModelConfig, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.positions: nn.Embedding | None = None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.max_positions, config.hidden_size)
        elif config.positions == "sinusoidal":
            table = sinusoidal_table(context, config.hidden_size)
            self.register_buffer("sinusoids", table, persistent=False)
        self.added = {"rotary": self._nothing, "learned": self._learned, "sinusoidal": self._sinusoidal}[config.positions]

    def _nothing(self, positions_T: Tensor) -> float:
        return 0.0

    def _learned(self, positions_T: Tensor) -> Tensor:
        assert self.positions is not None
        return self.positions(positions_T)

    def _sinusoidal(self, positions_T: Tensor) -> Tensor:
        return self.sinusoids[positions_T].to(self.tokens.weight.dtype)

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        return self.tokens(tokens_T) * self.scale + self.added(positions_T)


class Decoder(nn.Module):
    """Token ids and positions in, hidden states out; `logits` turns chosen hidden states into scores.

    Tables of positions are made for `context` positions, or for all that the model knows: a million of them take 1 GB.
    """

    def __init__(self, config: ModelConfig, context: int | None = None) -> None:
        super().__init__()
        context = config.max_positions if context is None else context
        block = PostNormBlock if config.post_norm else PreNormBlock
        self.config = config
        self.embedding = Embedding(config, context)
        self.blocks = nn.ModuleList(block(config) for _ in range(config.num_layers))
        self.norm = nn.Identity() if config.post_norm else make_norm(config, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embedding.tokens.weight
        self.rotate = self._rotation if config.positions == "rotary" else self._no_rotation
        if config.positions == "rotary":
            cos, sin = rotary_table(config, context)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    def reach(self, context: int) -> None:
        """Make the tables of positions anew, for so many positions."""
        if self.config.positions == "rotary":
            self.cos, self.sin = (table.to(self.cos.device) for table in rotary_table(self.config, context))
        elif self.config.positions == "sinusoidal":
            table = sinusoidal_table(context, self.config.hidden_size)
            self.embedding.sinusoids = table.to(self.embedding.sinusoids.device)

    def _rotation(self, positions_T: Tensor) -> Rotation:
        dtype = self.embedding.tokens.weight.dtype  # cast once here, not again in each layer
        return self.cos[positions_T].to(dtype)[:, None], self.sin[positions_T].to(dtype)[:, None]

    def _no_rotation(self, positions_T: Tensor) -> None:
        return None

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, E] of `tokens_T` (int64) standing at `positions_T` (int64, below `context`)."""
        x_TE = self.embedding(tokens_T, positions_T)
        rotation = self.rotate(positions_T)
        for layer, block in enumerate(self.blocks):
            x_TE = block(x_TE, rotation, layer, attention)
        return self.norm(x_TE)

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Unnormalised log probabilities of the next token, [T, V]."""
        return self.head(hidden_TE)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Normal(0, 0.02) weights, with projections into the residual stream scaled by 1/sqrt(2 layers) (GPT-2)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                depth = math.sqrt(2 * self.config.num_layers) if into_residual else 1.0
                parameter.normal_(0.0, 0.02 / depth, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
