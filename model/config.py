"""The architecture of a model, as frozen, validated, torch-free records."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attend.model.consistency import check_config
from attend.model.fields import check_fields
from attend.model.rope import DynamicScaling, Rope, RopeScaling
from attend.model.sublayers import (
    AttentionVariant,
    ConvSpec,
    DeltaSpec,
    LatentSpec,
    LayerSpec,
    MixtureSpec,
    NormPlace,
    Routing,
    Scoring,
)

DEFAULT_MODEL = Path(__file__).parent / "default"
"""Folder of the shipped checkpoint."""
Norm = Literal["rmsnorm", "layernorm", "layernorm_without_bias"]
QKNorm = Literal["none", "head", "all"]
"""What queries and keys are normed over: nothing, each head by itself (Qwen3), or all heads side by side (OLMo 2)."""
Positions = Literal["rotary", "learned", "sinusoidal"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""relu2: the square of relu (So et al. 2021)."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """Layers that keep the same kind of memory: a request has one block table for all of them."""

    layers: tuple[int, ...]
    """Numbers of the layers of this KV cache group, from 0."""
    window: int | None = None
    """Tokens that a query sees at most, itself included: older ones need not be kept. None: all are kept."""
    has_state: bool = False
    """Layers that keep one recurrent state for each sequence, in place of keys and values."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The switches of the one decoder. A family is a set of values, never a branch in `forward`."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    max_positions: int
    """The longest context that may be asked for."""
    default_positions: int | None = None
    """The context where nobody asks for one (YaRN that is switched on by hand); None: as long as it may be."""
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    norm_place: NormPlace = "pre"
    post_norm_eps: float | None = None
    """The eps of the norms of sublayers' outputs (Muse Glimmer); None: norm_eps."""
    positions: Positions = "rotary"
    rope_theta: float = 10000.0
    rope_size: int | None = None
    """Columns of a head that are rotated, the first ones; None: all of them."""
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    """The theta of layers with a window, which have `local_rope_scaling` then (Gemma 3, OLMo 3); None: they turn as the others
    do."""
    local_rope_scaling: RopeScaling | None = None
    rope_layers: tuple[int, ...] | None = None
    """The layers, counted from 0, that rotate (SmolLM3); None: all of them."""
    rope_thetas: tuple[float, ...] | None = None
    """The theta of each layer, 0 where it does not rotate (Granite SWA); None: the fields above say it."""
    query_scale_beta: float | None = None
    """A rotated query at position p is multiplied by 1 + beta * log(1 + floor(p / length)) (Ministral 3); None: by 1."""
    query_scale_length: int = 16384
    """Positions of a query's step in that."""
    activation: Activation = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    """True if the output projection of attention has a bias."""
    mlp_bias: bool = False
    """Bias on the projections of the MLP, or of the experts and their router."""
    swiglu_limit: float | None = None
    """Gates are cut to it from above and ups from both sides, and 1 is added to ups (gpt-oss); None: none of that."""
    swiglu_slope: float = 1.702
    """With `swiglu_limit`, the activation is gate * sigmoid(slope * gate)."""
    num_experts: int | None = None
    """None: every layer has an MLP; or else see MixtureSpec."""
    experts_per_token: int = 1
    expert_size: int | None = None
    """Width of one expert's MLP; None: mlp_size."""
    expert_layers: tuple[int, ...] | None = None
    """The layers, counted from 0, that have experts in place of an MLP, where there are any; None: all of them."""
    routing: Routing = "all"
    shared_expert_size: int | None = None
    shared_expert_gate: bool = True
    scoring_func: Scoring = "softmax"
    score_correction: bool = False
    expert_groups: int = 1
    groups_per_token: int = 1
    group_top: int = 2
    routing_eps: float | None = None
    routing_floor: float | None = None
    routed_scaling_factor: float = 1.0
    experts_beside_mlp: bool = False
    """True if layers with experts have their MLP too; see MixtureSpec."""
    qk_norm: QKNorm = "none"
    qk_norm_after_rope: bool = False
    """True if queries and keys are normed after they were rotated (HunYuan)."""
    tied_head: bool = True
    embedding_scale: float = 1.0
    """What token vectors are multiplied by: sqrt(hidden_size) in Vaswani et al. 2017, section 3.4, and in Gemma."""
    residual_scale: float = 1.0
    """What a sublayer's output is multiplied by before it is added (Granite)."""
    logit_scale: float = 1.0
    """What the scores of the next token are multiplied by (Granite)."""
    logit_softcap: float | None = None
    """The scores of the next token s become softcap * tanh(s / softcap), after their scale (Gemma 2)."""
    sliding_window: int | None = None
    """Keys that a query of a layer with a window sees at most, itself included."""
    window_layers: tuple[int, ...] | None = None
    """The layers, counted from 0, that `sliding_window` holds for; None: all of them."""
    softcap: float | None = None
    """Bound of the attention scores; see AttentionVariant."""
    sinks: bool = False
    """True if each head has one more score, learned, in the sum of its softmax, with no value to it (gpt-oss)."""
    attention_scale: float | None = None
    """What the attention scores are multiplied by; None: 1 / sqrt(head_size)."""
    attention_gate: bool = False
    """True if the heads' outputs are multiplied by the sigmoid of a projection of their own (Qwen3.5)."""
    latent: LatentSpec | None = None
    """How queries, keys and values are made of latent vectors (MLA); None: each of the token itself. With it there is one
    key/value head, whose size is that of what is cached."""
    global_head_size: int | None = None
    """Columns of a head in layers without a window (Gemma 4); None: head_size."""
    global_kv_heads: int | None = None
    """Key/value heads of layers without a window (Gemma 4); None: num_kv_heads."""
    keys_are_values: bool = False
    """True if layers without a window take for values what their keys are before their norm (Gemma 4)."""
    value_norm: bool = False
    """True if each head's values are normed, without a gain (Gemma 4)."""
    kv_shared_layers: int = 0
    """So many of the last layers have no keys and values of their own: they read those of the last layer before them that has
    a window as they have, or none as they (Gemma 4)."""
    kv_shared_mlp_size: int | None = None
    """Width of the MLP in these layers; None: mlp_size."""
    layer_scale: bool = False
    """True if what a layer ends with is multiplied by a learned number (Gemma 4)."""
    per_layer_input_size: int | None = None
    """Columns of a vector that each token has for each layer beside its embedding (Gemma 4); None: there is none."""
    per_layer_vocab_size: int | None = None
    """Tokens that have such vectors; None: vocab_size."""
    head_gate: bool = False
    """True if each head's output is multiplied by the sigmoid of one number of its own (LFM3)."""
    delta: DeltaSpec | None = None
    """What `delta_layers` have in place of attention."""
    delta_layers: tuple[int, ...] = ()
    """The layers, counted from 0, that keep a state in place of keys and values."""
    delta_norm_place: NormPlace | None = None
    """Place of the norms in `delta_layers` (OLMo Hybrid); None: as in the other layers."""
    conv_kernel: int | None = None
    """Tokens that the short convolution of `conv_layers` sees, the token itself included; at least 2."""
    conv_bias: bool = False
    """Bias on the short convolution, and on the projections around it."""
    conv_layers: tuple[int, ...] = ()
    """The layers, counted from 0, that have a gated short convolution in place of attention (LFM2)."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, but=("kv_shared_layers", "bos_token_id"))
        check_config(self)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer is, the first layer first."""
        return tuple(self.layer(number) for number in range(self.num_layers))

    def layer(self, number: int) -> LayerSpec:
        """What one layer is, counted from 0."""
        experts = self._experts(number)
        if number in self.delta_layers:
            place = self.norm_place if self.delta_norm_place is None else self.delta_norm_place
            return LayerSpec(AttentionVariant(), None, place, experts, self.delta, mlp_size=self.mlp_size)
        if number in self.conv_layers:
            assert self.conv_kernel is not None
            conv = ConvSpec(self.hidden_size, self.conv_kernel, self.conv_bias)
            return LayerSpec(AttentionVariant(), None, self.norm_place, experts, conv, mlp_size=self.mlp_size)
        slides, kv_layer = self.slides(number), self._kv_layer(number)
        size = self.head_size if slides else self.global_head_size or self.head_size
        return LayerSpec(
            AttentionVariant(self.sliding_window if slides else None, self.softcap, self.attention_scale),
            self._rope(number, size, slides),
            self.norm_place,
            experts,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads if slides else self.global_kv_heads or self.num_kv_heads,
            head_size=size,
            mlp_size=self.mlp_size if kv_layer is None else self.kv_shared_mlp_size or self.mlp_size,
            kv_layer=kv_layer,
            keys_are_values=self.keys_are_values and not slides,
            cached_parts=2 if self.latent is None else 1,
        )

    def slides(self, number: int) -> bool:
        """True if a layer has the window."""
        return self.sliding_window is not None and (self.window_layers is None or number in self.window_layers)

    def _kv_layer(self, number: int) -> int | None:
        owners = range(self.num_layers - self.kv_shared_layers)
        if number in owners:
            return None
        return next(owner for owner in reversed(owners) if self.slides(owner) == self.slides(number))

    def _rope(self, number: int, head_size: int, slides: bool) -> Rope | None:
        if self.positions != "rotary" or (self.rope_layers is not None and number not in self.rope_layers):
            return None
        size = self.rotary_columns(head_size)
        if self.rope_thetas is not None:
            return Rope(self.rope_thetas[number], size, self.rope_scaling) if self.rope_thetas[number] else None
        if slides and self.local_rope_theta is not None:
            return Rope(self.local_rope_theta, size, self.local_rope_scaling)
        return Rope(self.rope_theta, size, self.rope_scaling)

    def rotary_columns(self, head_size: int) -> int:
        """Columns of a head that are rotated."""
        if self.latent is not None:
            return self.latent.rope_size
        return head_size if self.rope_size is None else self.rope_size

    def _experts(self, number: int) -> MixtureSpec | None:
        if self.num_experts is None or (self.expert_layers is not None and number not in self.expert_layers):
            return None
        size = self.mlp_size if self.expert_size is None else self.expert_size
        same = {name: getattr(self, name) for name in ROUTER}
        shared = self.shared_expert_size
        return MixtureSpec(self.num_experts, self.experts_per_token, size, self.routing, shared, **same)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that one sequence holds, over all layers."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def attention_variants(self) -> tuple[AttentionVariant, ...]:
        """How each layer attends, the first layer first."""
        return tuple(layer.attention for layer in self.layers)

    @property
    def memory_groups(self) -> tuple[MemoryGroup, ...]:
        """The layers by the memory that they keep: full attention, then each window, then the states."""
        kinds: dict[tuple[bool, int], list[int]] = {}
        for number, layer in enumerate(self.layers):
            kind = (True, 0) if layer.recurrence is not None else (False, layer.attention.window or 0)
            kinds.setdefault(kind, []).append(number)
        return tuple(MemoryGroup(tuple(kinds[kind]), kind[1] or None, kind[0]) for kind in sorted(kinds))

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """The place of each layer's group in `memory_groups`."""
        groups = self.memory_groups
        return tuple(next(at for at, group in enumerate(groups) if number in group.layers) for number in range(self.num_layers))

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different ways in which layers rotate, each once."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def default_context(self) -> int:
        """Positions that are served where nobody asks for more: with more of them a dynamic scaling turns all otherwise."""
        scaling = self.rope_scaling
        usual = scaling.original_positions if isinstance(scaling, DynamicScaling) else self.default_positions
        return usual or self.max_positions

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes that one token holds in the KV cache, over all layers, while every layer keeps it."""
        return sum(self.block_bytes(group, 1, bytes_per_value) for group in self.memory_groups if not group.has_state)

    def block_bytes(self, group: MemoryGroup, block_size: int, bytes_per_value: int) -> int:
        """Bytes of a block of a group, over all of its layers: of `block_size` tokens, or of one state."""
        if group.has_state:
            return sum(self.layer(number).state_bytes for number in group.layers)
        return block_size * sum(self.layer(number).kv_bytes(bytes_per_value) for number in group.layers)


ROUTER = (
    *("shared_expert_gate", "scoring_func", "score_correction", "expert_groups", "groups_per_token", "group_top"),
    *("routing_eps", "routing_floor", "routed_scaling_factor", "experts_beside_mlp"),
)
"""Fields that a MixtureSpec has under the same names."""
