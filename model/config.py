"""What a model is and how its engine runs, as frozen, validated, torch-free records."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from model.errors import CheckpointError, SettingError

DEFAULT_MODEL = Path(__file__).parent / "default"
"""The shipped checkpoint."""
Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rotary", "learned", "sinusoidal"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of the rotary wavelengths (Llama 3.1 model card; `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def __post_init__(self) -> None:
        values = (self.factor, self.low_freq_factor, self.high_freq_factor, self.original_positions)
        sound = all(type(value) in (int, float) and 0 < value < math.inf for value in values)
        if not (sound and self.factor >= 1 and self.low_freq_factor < self.high_freq_factor):
            raise CheckpointError(
                "config.json: rope scaling needs a factor of 1 or more, and low_freq_factor below high_freq_factor, "
                f"and all of them above 0; got {self}"
            )


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
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    post_norm: bool = False
    """Norm after each residual sum (Vaswani et al. 2017) instead of before each sublayer."""
    positions: Positions = "rotary"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    activation: Activation = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    linear_bias: bool = False
    """Bias on the attention output and on both MLP projections."""
    qk_norm: bool = False
    tied_head: bool = True
    scale_embedding: bool = False
    """Multiply embeddings by sqrt(hidden_size) (Vaswani et al. 2017, section 3.4)."""
    sliding_window: int | None = None
    """Keys that a query of a layer with a window sees at most, itself included."""
    window_layers: tuple[int, ...] | None = None
    """The layers, counted from 0, that `sliding_window` holds for; None: all of them."""
    softcap: float | None = None
    """Bound of the attention scores; see AttentionVariant."""
    attention_scale: float | None = None
    """What the scores are multiplied by; None: 1 / sqrt(head_size)."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "mlp_size",
            "max_positions",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CheckpointError(f"config.json: {name} must be a positive integer; got {value!r}")
        for name, known in (("norm", Norm), ("positions", Positions), ("activation", Activation)):
            if getattr(self, name) not in get_args(known):
                raise CheckpointError(
                    f"config.json: {name} {getattr(self, name)!r} is not supported; known: {', '.join(get_args(known))}"
                )
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise CheckpointError(f"config.json: {name} must be a positive number; got {value!r}")
        for name in ("post_norm", "gated_mlp", "qkv_bias", "linear_bias", "qk_norm", "tied_head", "scale_embedding"):
            if not isinstance(getattr(self, name), bool):
                raise CheckpointError(f"config.json: {name} must be true or false; got {getattr(self, name)!r}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: {self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise CheckpointError(f"config.json: rotary positions need an even head size; got {self.head_size}")
        self._check_attention()
        starts = () if self.bos_token_id is None else (self.bos_token_id,)
        for name, tokens in (("bos_token_id", starts), ("eos_token_id", self.eos_token_ids)):
            for token in tokens:
                if not isinstance(token, int) or not 0 <= token < self.vocab_size:
                    raise CheckpointError(f"config.json: {name} {token!r} is not a token of a vocabulary of {self.vocab_size}")

    def _check_attention(self) -> None:
        window, layers = self.sliding_window, self.window_layers
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise CheckpointError(f"config.json: sliding_window must be a positive integer; got {window!r}")
        known = range(self.num_layers)
        if layers is not None and not (isinstance(layers, tuple) and all(type(at) is int and at in known for at in layers)):
            raise CheckpointError(
                f"config.json: window_layers must be some of {self.num_layers} layers, from 0; got {layers!r}"
            )
        for name in ("softcap", "attention_scale"):
            value = getattr(self, name)
            if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
                raise CheckpointError(f"config.json: {name} must be a positive number; got {value!r}")

    @property
    def attention_variants(self) -> tuple[AttentionVariant, ...]:
        """How each layer attends, the first layer first."""
        slide = range(self.num_layers) if self.window_layers is None else self.window_layers
        windows = [self.sliding_window if layer in slide else None for layer in range(self.num_layers)]
        return tuple(AttentionVariant(window, self.softcap, self.attention_scale) for window in windows)

    @property
    def query_size(self) -> int:
        """Columns of Q: all query heads side by side."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Columns of K, and of V: all key/value heads side by side."""
        return self.num_kv_heads * self.head_size

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes that one token holds in the KV cache, over all layers."""
        return 2 * self.num_layers * self.kv_size * bytes_per_value


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine. Tokens are counted per step, blocks per KV cache."""

    max_model_len: int
    """Prompt plus output tokens that one request may hold."""
    num_blocks: int
    """KV blocks of the pool, without the reserved block 0."""
    block_size: int = 16
    max_batch_requests: int = 64
    max_batch_tokens: int = 1024
    chunk_size: int = 32
    """A part of a prompt ends at a multiple of so many tokens, counted from the prompt's beginning, where the budget allows."""
    step_goal: float = 0.01
    """Seconds: parts of prompts may fill a step beside running streams up to here, however short it is without them."""
    prefix_caching: bool = True
    """Whether a prompt may begin with blocks that an earlier request has computed."""
    draft_tokens: int = 0
    """Guessed tokens of a step: the streams share them, and where there are more streams there are none."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "num_blocks", "block_size", "max_batch_requests", "max_batch_tokens", "chunk_size"):
            value = getattr(self, name)
            if value < 1:
                raise SettingError(f"{name} must be at least 1; got {value}")
        if self.draft_tokens < 0:
            raise SettingError(f"draft_tokens must be 0 or more; got {self.draft_tokens}")
        if not 0 <= self.step_goal < math.inf:
            raise SettingError(f"step_goal must be 0 or more seconds; got {self.step_goal}")
        if self.max_model_len > self.num_blocks * self.block_size:
            raise SettingError(
                f"max_model_len is {self.max_model_len} tokens, but the KV cache holds {self.num_blocks * self.block_size}: "
                "raise kv_cache_memory or lower max_model_len"
            )
