"""The features that a model needs of a backend, as a set of names. Each backend lists what it computes: a model with any other
feature is refused, so that nothing new is left out in silence.

Every field of ModelConfig stands in one of the three tables.
"""

from dataclasses import fields

from attend.model.config import ModelConfig

SIZES = frozenset(
    {
        *("family", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "mlp_size"),
        *("max_positions", "default_positions", "norm_eps", "rope_theta", "tied_head", "bos_token_id", "eos_token_ids"),
        *("logit_scale", "logit_softcap"),
    }
)
"""Fields that everybody carries out, or that ask for nothing: a bound on a size is a check of its own.
`final_scores` scales and caps the scores of the next token, whoever multiplied."""

CHOICES = ("norm", "norm_place", "positions", "activation", "gated_mlp", "qk_norm")
"""Fields whose every value is a feature: `norm=rmsnorm`."""

SWITCHES = {
    "embedding_scale": "embedding_scale",
    "residual_scale": "residual_scale",
    "qkv_bias": "qkv_bias",
    "out_bias": "linear_bias",
    "mlp_bias": "linear_bias",
    "rope_size": "rope_size",
    "rope_scaling": "rope_scaling",
    "local_rope_theta": "rope_by_layer",
    "local_rope_scaling": "rope_by_layer",
    "rope_layers": "rope_by_layer",
    "rope_thetas": "rope_by_layer",
    "query_scale_beta": "query_scale",
    "query_scale_length": "query_scale",
    "qk_norm_after_rope": "qk_norm_after_rope",
    "post_norm_eps": "post_norm_eps",
    "sliding_window": "window",
    "window_layers": "window",
    "softcap": "softcap",
    "attention_scale": "attention_scale",
    "sinks": "sinks",
    "attention_gate": "attention_gate",
    "latent": "latent_attention",
    "global_head_size": "heads_by_layer",
    "global_kv_heads": "heads_by_layer",
    "keys_are_values": "keys_are_values",
    "value_norm": "value_norm",
    "kv_shared_layers": "kv_shared_layers",
    "kv_shared_mlp_size": "kv_shared_layers",
    "layer_scale": "layer_scale",
    "per_layer_input_size": "per_layer_inputs",
    "per_layer_vocab_size": "per_layer_inputs",
    "experts_beside_mlp": "experts_beside_mlp",
    "head_gate": "head_gate",
    "delta": "gated_delta",
    "delta_layers": "gated_delta",
    "delta_norm_place": "norm_by_layer",
    "conv_kernel": "short_conv",
    "conv_bias": "short_conv",
    "conv_layers": "short_conv",
    "swiglu_limit": "clamped_swiglu",
    "swiglu_slope": "clamped_swiglu",
    "num_experts": "experts",
    "experts_per_token": "experts",
    "expert_size": "experts",
    "expert_layers": "experts",
    "routing": "experts",
    "shared_expert_size": "shared_expert",
    "shared_expert_gate": "ungated_shared_expert",
    "scoring_func": "sigmoid_routing",
    "score_correction": "score_correction",
    "expert_groups": "expert_groups",
    "groups_per_token": "expert_groups",
    "group_top": "group_top",
    "routing_eps": "scaled_routing",
    "routing_floor": "scaled_routing",
    "routed_scaling_factor": "scaled_routing",
}
"""Fields that ask for a feature, and which, where they are not at their default."""

ATTENTION = frozenset({"window", "softcap", "attention_scale"})
"""What an `AttentionVariant` can say: all of today's backends compute it."""
KERNELS = ATTENTION | {
    *("norm=rmsnorm", "norm=layernorm", "norm=layernorm_without_bias", "qk_norm=none", "qk_norm=head", "qk_norm=all"),
    *("norm_place=pre", "norm_place=post", "norm_place=output", "norm_place=sandwich"),
    *("norm_place=parallel", "norm_place=shared"),
    *("qkv_bias", "linear_bias", "embedding_scale", "residual_scale"),
    *("positions=rotary", "positions=learned", "positions=sinusoidal", "rope_scaling", "rope_size", "rope_by_layer"),
    *("gated_mlp=True", "gated_mlp=False", "activation=silu", "activation=gelu", "activation=gelu_tanh", "activation=relu"),
    *("experts", "shared_expert", "sinks", "clamped_swiglu", "attention_gate", "gated_delta"),
    *("norm_by_layer", "short_conv", "head_gate"),
    *("ungated_shared_expert", "sigmoid_routing", "score_correction", "expert_groups", "scaled_routing"),
    *("activation=relu2", "qk_norm_after_rope", "query_scale", "post_norm_eps"),
    *("heads_by_layer", "keys_are_values", "value_norm", "kv_shared_layers", "layer_scale", "per_layer_inputs"),
    "experts_beside_mlp",
}
"""What the native decoder and the Triton decoder compute."""
NATIVE, TRITON = KERNELS, KERNELS
ALL = KERNELS | {"latent_attention", "group_top"}
"""What the decoder of transformer.py computes, with an attention backend that computes ATTENTION and sinks. A new feature
stands here first, and in KERNELS, or in NATIVE or TRITON alone, once they compute it.
"""


def features(config: ModelConfig) -> frozenset[str]:
    """The features that a backend must have to compute a model."""
    chosen = {f"{name}={getattr(config, name)}" for name in CHOICES}
    default = {field.name: field.default for field in fields(ModelConfig)}
    return frozenset(chosen | {feature for name, feature in SWITCHES.items() if getattr(config, name) != default[name]})
