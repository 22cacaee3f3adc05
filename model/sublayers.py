"""What a layer is, and what it may have in place of attention or of an MLP, as frozen, torch-free records."""

import math
from dataclasses import dataclass
from typing import Literal

from attend.model.errors import CheckpointError
from attend.model.rope import Rope

KV_GROUP = 32
"""Numbers of a head that share a scale, in a KV cache of 8 bits."""
Routing = Literal["all", "chosen"]
"""What a token's experts are weighted by: their part of the softmax over all experts' scores, or of that over the chosen ones'.
The second is also the first, divided by its sum ("norm_topk_prob")."""


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """A mixture of experts in place of an MLP: each token goes to a few of them, and to a shared one where there is one."""

    num_experts: int
    experts_per_token: int
    expert_size: int
    """Width of one expert's MLP."""
    routing: Routing
    shared_expert_size: int | None
    """Width of the MLP that every token goes to, times a sigmoid of its own (Qwen2-MoE); None: there is none."""
    beside_mlp: bool = False
    """Beside an MLP, not in its place: both are normed before and after by themselves, the router has a norm of its own, and
    each expert's weight is multiplied by a learned number (Gemma 4)."""


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

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CheckpointError(f"config.json: delta: {name} must be a positive integer; got {value!r}")
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
class AttentionVariant:
    """How one layer's attention departs from the equation; without values it is softmax(Q Kᵀ / sqrt(d_k) + mask) V."""

    window: int | None = None
    """Keys that a query sees at most, itself included (Mistral's sliding window); None: all that came before."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before the mask (Gemma 2)."""
    scale: float | None = None
    """What Q Kᵀ is multiplied by; None: 1 / sqrt(head size)."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer of a model is, as far as layers of a model differ."""

    attention: AttentionVariant
    rope: Rope | None
    """None: queries and keys are not rotated."""
    experts: MixtureSpec | None = None
    """None: an MLP."""
    delta: DeltaSpec | None = None
    """What the layer has in place of attention; None: it attends."""
    num_heads: int = 1
    num_kv_heads: int = 1
    head_size: int = 1
    mlp_size: int = 1
    kv_layer: int | None = None
    """The layer whose keys and values it reads; None: it has its own."""
    keys_are_values: bool = False
    """Its values are what its keys are before their norm."""

    @property
    def state_bytes(self) -> int:
        """Of the state that it keeps for each sequence in place of keys and values; 0: it keeps keys and values."""
        return 0 if self.delta is None else self.delta.state_bytes

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
        keeps = self.delta is None and self.kv_layer is None
        return 2 * self.num_kv_heads * self.head_bytes(bytes_per_value) if keeps else 0
