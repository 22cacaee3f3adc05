"""What a model asks of those who compute it, as a set of names. Each of them lists what it computes: what it does not
list it refuses, so that nothing new is left out in silence.

Every field of ModelConfig stands in one of the three tables.
"""

from model.config import ModelConfig

SIZES = frozenset(
    {
        *("family", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "mlp_size"),
        *("max_positions", "norm_eps", "rope_theta", "tied_head", "bos_token_id", "eos_token_ids"),
    }
)
"""Fields that everybody carries out, or that ask for nothing: a bound on a size is a check of its own."""

CHOICES = ("norm", "positions", "activation", "gated_mlp")
"""Fields whose every value is a feature: `norm=rmsnorm`."""

SWITCHES = {
    "post_norm": "post_norm",
    "scale_embedding": "scale_embedding",
    "qkv_bias": "qkv_bias",
    "linear_bias": "linear_bias",
    "qk_norm": "qk_norm",
    "rope_scaling": "rope_scaling",
    "sliding_window": "window",
    "window_layers": "window",
    "softcap": "softcap",
    "attention_scale": "attention_scale",
}
"""Fields that ask for a feature, and which, where they are neither None nor false."""

ATTENTION = frozenset({"window", "softcap", "attention_scale"})
"""What an `AttentionVariant` can say: all of today's backends compute it."""
LLAMA = ATTENTION | {
    *("norm=rmsnorm", "positions=rotary", "activation=silu", "gated_mlp=True"),
    *("qkv_bias", "linear_bias", "qk_norm", "rope_scaling"),
}
"""What the native and the Triton decoder compute: Llama, Mistral, Qwen2 and Qwen3."""
ALL = LLAMA | {
    *("norm=layernorm", "positions=learned", "positions=sinusoidal", "gated_mlp=False", "post_norm", "scale_embedding"),
    *("activation=gelu", "activation=gelu_tanh", "activation=relu"),
}
"""What the decoder of transformer.py computes, with any attention backend that computes ATTENTION."""


def features(config: ModelConfig) -> frozenset[str]:
    """What a model asks for."""
    chosen = {f"{name}={getattr(config, name)}" for name in CHOICES}
    return frozenset(chosen | {feature for name, feature in SWITCHES.items() if getattr(config, name)})
