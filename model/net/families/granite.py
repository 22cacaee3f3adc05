"""Granite: Llama with multipliers of the embedding, the residuals, the attention scores and the scores of the next token.

Its mixtures keep all experts in one tensor of each projection, and a shared expert has no gate. Granite 4 is served where every
layer has attention. Granite SWA has windows, sinks, and a theta for each layer besides.
"""

from typing import Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import llama
from attend.model.net.families.family import (
    Family,
    Raw,
    count,
    decoder_sizes,
    flag,
    head_size,
    in_block,
    number,
    refuse,
    size,
    windows_of_types,
)
from attend.model.net.families.positions import rope


def _common(raw: Raw, **absent: Any) -> dict[str, Any]:
    """`logits_scaling` divides; keywords are what absent keys mean."""
    bias, scaling = flag(raw, "attention_bias"), number(raw, "logits_scaling", 1.0)
    if scaling <= 0:
        raise CheckpointError(f"config.json: logits_scaling must be a number above 0; got {scaling}")
    return (
        decoder_sizes(raw, **absent)
        | rope(raw, head_size(raw))
        | {
            "qkv_bias": bias,
            "out_bias": bias,
            "embedding_scale": number(raw, "embedding_multiplier", 1.0),
            "attention_scale": number(raw, "attention_multiplier", 1.0),
            "residual_scale": number(raw, "residual_multiplier", 1.0),
            "logit_scale": 1 / scaling,
        }
    )


def _experts(raw: Raw, shared: int) -> dict[str, Any]:
    """Fields of a mixture; `shared` is the width of its shared expert, 0 where there is none."""
    return {
        "num_experts": size(raw, "num_local_experts", 8),
        "experts_per_token": size(raw, "num_experts_per_tok", 2),
        "routing": "chosen",
    } | ({"shared_expert_size": shared, "shared_expert_gate": False} if shared else {})


def read_shared(raw: Raw) -> ModelConfig:
    """Read a GraniteMoeShared config.json: experts, and a shared one where it has a width."""
    return ModelConfig(**_common(raw) | _experts(raw, count(raw, "shared_intermediate_size", 0)))


def read_hybrid(raw: Raw) -> ModelConfig:
    """Granite 4. Without experts the shared one is the MLP. Most models do not rotate."""
    kinds, layers = raw.get("layer_types", raw.get("layers_block_type")), size(raw, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in ATTENTION for kind in kinds):
        named = f"layer_types must name attention for each of {layers} layers: Mamba layers are not supported"
        raise CheckpointError(f"config.json: {named}; got {kinds!r}")
    refuse(raw, "position_embedding_type", None, "nope", "rope")
    shared, mixed = size(raw, "shared_intermediate_size", 1024), count(raw, "num_local_experts", 8) > 0
    rotates = raw.get("position_embedding_type") == "rope"
    mlp = _experts(raw, shared) if mixed else {"mlp_size": shared}
    return ModelConfig(**_common(raw) | mlp | {"rope_layers": None if rotates else ()})


def read_swa(raw: Raw) -> ModelConfig:
    """Granite SWA. Without `layer_types`, all layers but every fourth have the window, from the second on."""
    raw = {"num_key_value_heads": 4, **raw}
    slides = windows_of_types(raw, raw.get("sliding_window", 128), lambda layer: layer % 4 != 0)
    fields = _common(raw, eps=1e-5, tied_head=True) | {"mlp_bias": flag(raw, "mlp_bias"), "sinks": True}
    return ModelConfig(**fields | slides | _thetas(raw))


def _thetas(raw: Raw) -> dict[str, Any]:
    """`layer_rope_theta` has a theta for each layer, 0 or null for one that does not rotate."""
    thetas, layers = raw.get("layer_rope_theta"), size(raw, "num_hidden_layers")
    if thetas is None:
        return {}
    if not isinstance(thetas, list) or len(thetas) != layers:
        raise CheckpointError(f"config.json: layer_rope_theta must have a number for each of {layers} layers; got {thetas!r}")
    return {"rope_thetas": tuple(number({"layer_rope_theta": theta}, "layer_rope_theta", 0.0) for theta in thetas)}


ATTENTION = ("attention", "full_attention")
IN_BLOCK = {
    "mlp.router": ("block_sparse_moe.router.layer",),
    "mlp.experts.gate_up": ("block_sparse_moe.input_linear",),
    "mlp.experts.down": ("block_sparse_moe.output_linear",),
    "mlp.shared.gate_up": ("shared_mlp.input_linear",),
    "mlp.shared.down": ("shared_mlp.output_linear",),
    "mlp.gate_up": ("shared_mlp.input_linear",),
    "mlp.down": ("shared_mlp.output_linear",),
}
WEIGHTS = llama.WEIGHTS | in_block("model.layers", IN_BLOCK)
SINKS = {"blocks.{}.attention.sinks": ("model.layers.{}.self_attn.sinks",)}
FAMILIES = {
    "granite": Family(lambda raw: ModelConfig(**_common(raw) | {"mlp_bias": flag(raw, "mlp_bias")}), llama.WEIGHTS),
    "granite_swa": Family(read_swa, llama.WEIGHTS | SINKS),
    "granitemoe": Family(lambda raw: ModelConfig(**_common(raw) | _experts(raw, 0)), WEIGHTS),
    "granitemoehybrid": Family(read_hybrid, WEIGHTS),
    "granitemoeshared": Family(read_shared, WEIGHTS),
}
