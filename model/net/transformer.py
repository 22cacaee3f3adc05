"""One decoder. Families differ by the values of their `ModelConfig`, never by a branch in `forward`.

Tokens of all requests lie side by side: there is no batch dimension and no padding. What a token may
see is the business of the `attention` argument (dense and causal in training, a paged cache in serving).

Shapes: T tokens · E model width · V vocabulary · P positions.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from attend.model.config import ModelConfig
from attend.model.net.attention import Attention, MultiHeadAttention, SharedKeys
from attend.model.net.delta import GatedDelta
from attend.model.net.experts import ExpertsBesideMLP, Mixture
from attend.model.net.formats.blocks import MappedFiles
from attend.model.net.latent import LatentAttention
from attend.model.net.layers import MLP, GatedMLP, empty_table, make_norm, sinusoidal_table
from attend.model.net.linear import Linear
from attend.model.net.per_layer import PerLayerInput, per_layer_embedding
from attend.model.net.rope import Rotation, query_scale, rotary_table
from attend.model.net.short_conv import ShortConv
from attend.model.sublayers import DeltaSpec, LayerSpec


class Block(nn.Module):
    """x + f(x) for attention or what replaces it, then for the MLP or the experts, with norms before f, after f, or both."""

    def __init__(self, config: ModelConfig, layer: LayerSpec) -> None:
        super().__init__()
        self.scale = config.residual_scale
        before, after = layer.norm_place != "output", layer.norm_place in ("output", "sandwich")
        mixture, size = layer.experts, config.per_layer_input_size
        beside = mixture is not None and mixture.experts_beside_mlp  # which has its own norms before it
        between = before and layer.norm_place != "shared" and not beside
        self.attention_norm = make_norm(config, config.hidden_size) if before else nn.Identity()
        self.attention = _mixer(config, layer)
        self.attention_post_norm = make_norm(config, config.hidden_size, config.post_norm_eps) if after else nn.Identity()
        self.mlp_norm = make_norm(config, config.hidden_size) if between else nn.Identity()
        self.mlp = _mlp(config, layer)
        self.mlp_post_norm = make_norm(config, config.hidden_size, config.post_norm_eps) if after else nn.Identity()
        self.per_layer = None if size is None else PerLayerInput(config, size)
        self.layer_scale = nn.Parameter(torch.ones(1)) if config.layer_scale else None

    def forward(
        self, x_TE: Tensor, rotation: Rotation | None, layer: int, attention: Attention, input_TP: Tensor | None = None
    ) -> Tensor:
        x_TE = self.sublayers(x_TE, rotation, layer, attention)
        if self.per_layer is not None and input_TP is not None:
            x_TE = x_TE + self.per_layer(x_TE, input_TP) * self.scale
        return x_TE if self.layer_scale is None else x_TE * self.layer_scale

    def sublayers(self, x_TE: Tensor, rotation: Rotation | None, layer: int, attention: Attention) -> Tensor:
        """The residual stream after attention and MLP, [T, E]."""
        update_TE = self.attention(self.attention_norm(x_TE), rotation, layer, attention)
        x_TE = x_TE + self.attention_post_norm(update_TE) * self.scale
        return x_TE + self.mlp_post_norm(self.mlp(self.mlp_norm(x_TE))) * self.scale


def _mixer(config: ModelConfig, layer: LayerSpec) -> MultiHeadAttention | LatentAttention | GatedDelta | ShortConv:
    if layer.recurrence is None:
        return MultiHeadAttention(config, layer) if config.latent is None else LatentAttention(config, config.latent)
    if isinstance(layer.recurrence, DeltaSpec):
        return GatedDelta(config, layer.recurrence)
    return ShortConv(config, layer.recurrence)


def _mlp(config: ModelConfig, layer: LayerSpec) -> nn.Module:
    if layer.experts is not None:
        beside = layer.experts.experts_beside_mlp
        return ExpertsBesideMLP(config, layer.experts, layer.mlp_size) if beside else Mixture(config, layer.experts)
    return GatedMLP(config, layer.mlp_size) if config.gated_mlp else MLP(config, layer.mlp_size)


class PostNormBlock(Block):
    """norm(x + f(x)): Add & Norm as first published (Vaswani et al. 2017, section 3.1)."""

    def sublayers(self, x_TE: Tensor, rotation: Rotation | None, layer: int, attention: Attention) -> Tensor:
        """See Block: the norms come after the sums."""
        x_TE = self.attention_norm(x_TE + self.attention(x_TE, rotation, layer, attention) * self.scale)
        return self.mlp_norm(x_TE + self.mlp(x_TE) * self.scale)


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm'(x)): both sublayers read the same x (Black et al. 2022), or the same norm of it."""

    def __init__(self, config: ModelConfig, layer: LayerSpec) -> None:
        super().__init__(config, layer)
        self.shared = config.norm_place == "shared"

    def sublayers(self, x_TE: Tensor, rotation: Rotation | None, layer: int, attention: Attention) -> Tensor:
        """See Block: attention and MLP read the same input."""
        normed_TE = self.attention_norm(x_TE)
        update_TE = self.mlp(normed_TE if self.shared else self.mlp_norm(x_TE))
        return x_TE + (self.attention(normed_TE, rotation, layer, attention) + update_TE) * self.scale


BLOCKS: dict[str, type[Block]] = {"post": PostNormBlock, "parallel": ParallelBlock, "shared": ParallelBlock}


class Embedding(nn.Module):
    """Token vectors, plus position vectors where positions are added rather than rotated in."""

    def __init__(self, config: ModelConfig, context: int) -> None:
        super().__init__()
        self.tokens: nn.Module = empty_table(config.vocab_size, config.hidden_size)
        self.scale = config.embedding_scale
        learned, sinusoidal = config.positions == "learned", config.positions == "sinusoidal"
        self.positions = empty_table(config.max_positions, config.hidden_size) if learned else None
        table = sinusoidal_table(context, config.hidden_size) if sinusoidal else None
        self.register_buffer("sinusoids", table, persistent=False)

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        vectors_TE: Tensor = self.tokens(tokens_T)
        if self.scale != 1:
            vectors_TE = vectors_TE * self.scale
        if self.positions is not None:
            return vectors_TE + self.positions(positions_T)
        return vectors_TE if self.sinusoids is None else vectors_TE + self.sinusoids[positions_T].to(vectors_TE.dtype)


class Decoder(nn.Module):
    """Token ids and positions in, hidden states out; `logits` turns chosen hidden states into scores.

    Tables of positions are made for `context` positions, or for all that the model knows: a million of them take 1 GB.
    """

    mapped_files: MappedFiles | None = None
    """Set where matrices lie in a mapped file: whoever serves from them copies them first."""

    def __init__(self, config: ModelConfig, context: int | None = None) -> None:
        super().__init__()
        context = config.default_context if context is None else context
        block = BLOCKS.get(config.norm_place, Block)
        self.config = config
        self.embedding = Embedding(config, context)
        self.per_layer = per_layer_embedding(config)
        self.kv_layers = [layer.kv_layer for layer in config.layers]
        """The layer whose keys and values each reads; None: its own."""
        self.blocks = nn.ModuleList(block(config, layer) for layer in config.layers)
        self.norm = nn.Identity() if config.norm_place == "post" else make_norm(config, config.hidden_size)
        self.head = Linear(config.hidden_size, [config.vocab_size], bias=False)
        if config.tied_head:
            self.head.share(self.embedding.tokens)
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        """Numbers, whatever form they are kept in."""
        self.rope_of_layer = [None if layer.rope is None else config.ropes.index(layer.rope) for layer in config.layers]
        self.rope_tables: list[tuple[Tensor, Tensor]] = []
        """(cos, sin) [P, R] of each of `config.ropes`, float32: angles are not rounded."""
        self.reach(context)

    def reach(self, context: int) -> None:
        """Make the tables of positions for so many positions."""
        device = next(self.parameters()).device
        device = torch.device("cpu") if device.type == "meta" else device
        self.rope_tables = [
            (cos.to(device), sin.to(device)) for cos, sin in (rotary_table(rope, context) for rope in self.config.ropes)
        ]
        if self.config.positions == "sinusoidal":
            self.embedding.sinusoids = sinusoidal_table(context, self.config.hidden_size).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Decoder":
        super()._apply(fn, recurse)
        device = next(self.parameters()).device
        if device.type != "meta":
            self.rope_tables = [(cos.to(device), sin.to(device)) for cos, sin in self.rope_tables]
        return self

    def _rotations(self, positions_T: Tensor, dtype: torch.dtype) -> list[Rotation]:
        # cast once here, not again in each layer
        scale = query_scale(self.config, positions_T, dtype)
        tables = [(cos[positions_T].to(dtype)[:, None], sin[positions_T].to(dtype)[:, None]) for cos, sin in self.rope_tables]
        return [Rotation(cos, sin, scale) for cos, sin in tables]

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, E] of `tokens_T` (int64) standing at `positions_T` (int64, below `context`)."""
        [x_TE] = deque(self.outputs(tokens_T, positions_T, attention), maxlen=1)
        return self.norm(x_TE)

    def outputs(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> Iterator[Tensor]:
        """The output of each layer, [T, E], before the last norm."""
        x_TE = self.embedding(tokens_T, positions_T)
        rotations = self._rotations(positions_T, x_TE.dtype)
        inputs = [None] * len(self.blocks) if self.per_layer is None else self.per_layer(tokens_T, x_TE).unbind(1)
        if any(layer is not None for layer in self.kv_layers):
            attention = SharedKeys(attention, self.kv_layers)
        for layer, (block, rope) in enumerate(zip(self.blocks, self.rope_of_layer, strict=True)):
            x_TE = block(x_TE, None if rope is None else rotations[rope], layer, attention, inputs[layer])
            yield x_TE

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Unnormalised log probabilities of the next token, [T, V]."""
        return final_scores(self.head(hidden_TE), self.config)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Normal(0, 0.02) weights, with projections into the residual stream scaled by 1/sqrt(2 layers) (GPT-2)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() > 1:
                into_residual = name.endswith(("attention.out.weight", "down.weight"))
                depth = math.sqrt(2 * self.config.num_layers) if into_residual else 1.0
                parameter.normal_(0.0, 0.02 / depth, generator=generator)


def final_scores(scores_TV: Tensor, config: ModelConfig) -> Tensor:
    """The head's products with the model's scale and soft cap; the same tensor where it has neither."""
    if config.logit_scale != 1.0:
        scores_TV = scores_TV * config.logit_scale
    return scores_TV if config.logit_softcap is None else config.logit_softcap * torch.tanh(scores_TV / config.logit_softcap)
