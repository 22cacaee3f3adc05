"""Granite: Llama with multipliers of the embedding, the residuals, the attention scores and the scores of the next token.

Granite SWA has windows, sinks, and a theta for each layer besides.
"""

from typing import Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import llama
from attend.model.net.families.positions import rope
from attend.model.net.families.reading import Family, Raw, decoder_sizes, flag, head_size, number, size, windows_of_types


def _common(raw: Raw, **absent: Any) -> dict[str, Any]:
    """`logits_scaling` divides; keywords are what absent keys mean."""
    bias, scaling = flag(raw, "attention_bias"), number(raw, "logits_scaling", 1.0)
    if scaling <= 0:
        raise CheckpointError(f"config.json: logits_scaling must be a number above 0; got {scaling}")
    return decoder_sizes(raw, **absent) | {
        **rope(raw, head_size(raw)),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": flag(raw, "mlp_bias"),
        "embedding_scale": number(raw, "embedding_multiplier", 1.0),
        "attention_scale": number(raw, "attention_multiplier", 1.0),
        "residual_scale": number(raw, "residual_multiplier", 1.0),
        "logit_scale": 1 / scaling,
    }


def read(raw: Raw) -> ModelConfig:
    """Granite 3."""
    return ModelConfig(**_common(raw))


def read_swa(raw: Raw) -> ModelConfig:
    """Granite SWA. Without `layer_types`, all layers but every fourth have the window, from the second on."""
    raw = {"num_key_value_heads": 4, **raw}
    slides = windows_of_types(raw, raw.get("sliding_window", 128), lambda layer: layer % 4 != 0)
    return ModelConfig(**_common(raw, eps=1e-5, tied=True) | slides | _thetas(raw) | {"sinks": True})


def _thetas(raw: Raw) -> dict[str, Any]:
    """`layer_rope_theta` has a theta for each layer, 0 or null for one that does not rotate."""
    thetas, count = raw.get("layer_rope_theta"), size(raw, "num_hidden_layers")
    if thetas is None:
        return {}
    if not isinstance(thetas, list) or len(thetas) != count:
        raise CheckpointError(f"config.json: layer_rope_theta must have a number for each of {count} layers; got {thetas!r}")
    return {"rope_thetas": tuple(number({"layer_rope_theta": theta}, "layer_rope_theta", 0.0) for theta in thetas)}


SINKS = {"blocks.{}.attention.sinks": ("model.layers.{}.self_attn.sinks",)}
FAMILIES = {"granite": Family(read, llama.WEIGHTS), "granite_swa": Family(read_swa, llama.WEIGHTS | SINKS)}
