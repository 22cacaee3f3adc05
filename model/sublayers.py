"""What a layer may have in place of attention or of an MLP, as frozen, torch-free records."""

import math
from dataclasses import dataclass
from typing import Literal

from attend.model.errors import CheckpointError

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
    """Whether that MLP is multiplied by a sigmoid of its own (Qwen2-MoE)."""
    scoring_func: Scoring = "softmax"
    score_correction: bool = False
    """Whether each expert has a bias that is added where experts are chosen, and not to their weights (DeepSeek-V3)."""
    expert_groups: int = 1
    """Groups of as many experts next to each other (DeepSeek-V2 and V3)."""
    groups_per_token: int = 1
    """The best groups, from which a token's experts are."""
    group_top: int = 2
    """A group counts what so many of its best experts sum up to: two in DeepSeek-V3, one in V2."""
    routing_eps: float | None = None
    """What is added to the sum that weights are divided by."""
    routing_floor: float | None = None
    """The least that they are divided by (ERNIE 4.5)."""
    routed_scaling_factor: float = 1.0
    """What the weights are multiplied by in the end."""

    @property
    def softmax_of_chosen(self) -> bool:
        """Whether weights are the softmax over the chosen experts' scores, which chose them: the other scores do not count."""
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
    """Whether pairs that turn together are neighbours in the rows of a checkpoint, (2i, 2i + 1), and not (i, i + R / 2)."""

    def __post_init__(self) -> None:
        for name in ("rank", "query_rank", "key_size", "rope_size", "value_size"):
            value = getattr(self, name)
            if not (name == "query_rank" and value is None) and (type(value) is not int or value < 1):
                raise CheckpointError(f"config.json: latent: {name} must be a positive integer; got {value!r}")
        if type(self.interleaved) is not bool:
            raise CheckpointError(f"config.json: latent: interleaved must be true or false; got {self.interleaved!r}")

    @property
    def query_size(self) -> int:
        """Columns of a head's query."""
        return self.key_size + self.rope_size

    @property
    def cached_size(self) -> int:
        """Columns that a layer keeps of a token: the latent vector, and the rotated part of its key."""
        return self.rank + self.rope_size
