"""The architecture of a layer: attention or a recurrence, an MLP or experts, as frozen, torch-free records."""

import math
from dataclasses import dataclass
from typing import Literal

from attend.model.errors import CheckpointError
from attend.model.fields import check_fields
from attend.model.rope import Rope

KV_GROUP = 32
"""Numbers of a head that share a scale, in a KV cache of 8 bits."""
NormPlace = Literal["pre", "post", "sandwich", "output", "parallel", "shared"]
"""Where a block norms: "pre": x + f(norm(x)) · "output": x + norm(f(x)) (OLMo 2) · "sandwich": x + norm(f(norm(x))) (Gemma 2) ·
"post": norm(x + f(x)) (Vaswani et al. 2017) · "parallel": x + attention(norm(x)) + mlp(norm'(x)) (GPT-NeoX) ·
"shared": the same with one norm for both (Cohere)."""
Routing = Literal["all", "chosen"]
"""What a token's experts are weighted by: what `Scoring` makes of their scores, or its share of the sum over the chosen ones
("norm_topk_prob"). With a softmax the second is the softmax over the chosen experts' scores."""
Scoring = Literal["softmax", "sigmoid"]
"""What is made of a router's scores: each expert's part of the softmax over all of them, or the sigmoid of each."""


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """A mixture of experts in place of an MLP: each token goes to a few of them, and to a shared one where there is one."""

    num_experts: int
    experts_per_token: int
    expert_size: int
    """Width of one expert's MLP."""
    routing: Routing
    shared_expert_size: int | None
    """Width of the MLP that every token goes to; None: there is none."""
    shared_expert_gate: bool = True
    """True if that MLP is multiplied by a sigmoid of its own (Qwen2-MoE)."""
    scoring_func: Scoring = "softmax"
    score_correction: bool = False
    """True if each expert has a bias that is added where experts are chosen, and not to their weights (DeepSeek-V3)."""
    expert_groups: int = 1
    """Groups of as many experts next to each other (DeepSeek-V2 and V3)."""
    groups_per_token: int = 1
    """The best groups, from which a token's experts are."""
    group_top: int = 2
    """A group counts what so many of its best experts sum up to: two in DeepSeek-V3, one in V2."""
    routing_eps: float | None = None
    """Added to the sum by which weights are divided; None: nothing is."""
    routing_floor: float | None = None
    """The least that they are divided by (ERNIE 4.5)."""
    routed_scaling_factor: float = 1.0
    """A factor of the routing weights."""
    experts_beside_mlp: bool = False
    """Beside an MLP, not in its place: both are normed before and after by themselves, the router has a norm of its own, and
    each expert's weight is multiplied by a learned number (Gemma 4)."""

    @property
    def softmax_of_chosen(self) -> bool:
        """True if weights are the softmax over the chosen experts' scores, which chose them: the other scores do not count."""
        divided = self.routing_eps is not None or self.routing_floor is not None
        others = self.score_correction or self.expert_groups > 1 or divided
        return self.scoring_func == "softmax" and self.routing == "chosen" and not others


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """A gated delta rule in place of attention: a layer keeps a state of a fixed size for each sequence (`net/delta.py`)."""

    key_heads: int
    """Heads of queries and of keys; each serves value_heads / key_heads value heads next to each other."""
    value_heads: int
    key_size: int
    """Columns of a query and of a key."""
    value_size: int
    kernel: int
    """Tokens that the convolution before the rule sees, the token itself included."""
    negative_eigenvalues: bool = False
    """Rates lie in (0, 2) in place of (0, 1): along its key a state may change its sign (Grazzi et al. 2024)."""
    norm_eps: float | None = None
    """The eps of the norm of the heads' outputs; None: that of the model's norms."""

    def __post_init__(self) -> None:
        check_fields(self, "delta: ")
        if self.value_heads % self.key_heads:
            raise CheckpointError(
                f"config.json: delta: {self.value_heads} value heads are not divisible by {self.key_heads} key heads"
            )

    @property
    def query_width(self) -> int:
        """Columns of all queries side by side, and of all keys."""
        return self.key_heads * self.key_size

    @property
    def value_width(self) -> int:
        """Columns of all values side by side."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Columns that pass the convolution: queries, keys and values."""
        return 2 * self.query_width + self.value_width

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """What a layer keeps of a sequence, in float32: the last inputs of the convolution, and the rule's states."""
        return (self.channels, self.kernel - 1), (self.value_heads, self.key_size, self.value_size)

    @property
    def state_bytes(self) -> int:
        """Bytes that a layer keeps of a sequence."""
        return 4 * sum(math.prod(shape) for shape in self.state_shapes)


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """A gated short convolution in place of attention: a layer keeps its last inputs of each sequence (`net/short_conv.py`)."""

    channels: int
    kernel: int
    """Tokens that it sees, the token itself included."""
    bias: bool

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the state that a layer keeps of a sequence, in float32."""
        return ((self.channels, self.kernel - 1),)

    @property
    def state_bytes(self) -> int:
        """Bytes that a layer keeps of a sequence."""
        return 4 * self.channels * (self.kernel - 1)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (MLA): keys and values of all heads are made of one vector a token (`net/latent.py`)."""

    rank: int
    """Columns of the latent vector that keys and values are made of (`kv_lora_rank`)."""
    query_rank: int | None
    """Columns of the latent vector that queries are made of (`q_lora_rank`); None: there is none."""
    key_size: int
    """Columns of a head's query and key that are not rotated (`qk_nope_head_dim`)."""
    rope_size: int
    """Columns that are rotated, after those; of a key all heads have the same (`qk_rope_head_dim`)."""
    value_size: int
    """Columns of a head's value (`v_head_dim`)."""
    interleaved: bool = False
    """True if pairs that turn together are neighbours in the rows of a checkpoint, (2i, 2i + 1), and not (i, i + R / 2)."""

    def __post_init__(self) -> None:
        check_fields(self, "latent: ")

    @property
    def query_size(self) -> int:
        """Size of a head's query."""
        return self.key_size + self.rope_size

    @property
    def cached_size(self) -> int:
        """Columns that a layer keeps of a token: the latent vector, and the rotated part of its key."""
        return self.rank + self.rope_size


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """How one layer's attention departs from the equation; without values it is softmax(Q Kᵀ / sqrt(d_k) + mask) V."""

    window: int | None = None
    """Keys that a query sees at most, itself included (Mistral's sliding window); None: all that came before."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before the mask (Gemma 2)."""
    scale: float | None = None
    """The factor of Q Kᵀ; None: 1 / sqrt(head size)."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer of a model is, as far as layers of a model differ."""

    attention: AttentionVariant
    rope: Rope | None
    """None: queries and keys are not rotated."""
    norm_place: NormPlace = "pre"
    experts: MixtureSpec | None = None
    """The experts; None: a single MLP."""
    recurrence: DeltaSpec | ConvSpec | None = None
    """The recurrence in place of attention; None: the layer has attention."""
    num_heads: int = 1
    num_kv_heads: int = 1
    head_size: int = 1
    mlp_size: int = 1
    kv_layer: int | None = None
    """The layer whose keys and values it reads; None: it has its own."""
    keys_are_values: bool = False
    """True if its values are its keys before their norm."""
    cached_parts: int = 2
    """What the KV cache holds of a token in each head: its key and its value, or the latent vector that is both."""

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state per sequence; 0 for a layer with keys and values."""
        return 0 if self.recurrence is None else self.recurrence.state_bytes

    @property
    def query_size(self) -> int:
        """Columns of Q: all query heads side by side."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Columns of K, and of V: all key/value heads side by side."""
        return self.num_kv_heads * self.head_size

    @property
    def kv_projections(self) -> tuple[int, ...]:
        """Columns of what its own keys and values are made of."""
        return () if self.kv_layer is not None else (self.kv_size,) * (1 if self.keys_are_values else 2)

    def head_bytes(self, bytes_per_value: int) -> int:
        """Bytes of a token's keys in one head, or of its values; with one byte a value there is a scale for each group, too."""
        scales = 2 * -(-self.head_size // KV_GROUP) if bytes_per_value == 1 else 0
        return self.head_size * bytes_per_value + scales

    def kv_bytes(self, bytes_per_value: int) -> int:
        """Bytes of a token's keys and values that it keeps."""
        keeps = self.recurrence is None and self.kv_layer is None
        return self.cached_parts * self.num_kv_heads * self.head_bytes(bytes_per_value) if keeps else 0
