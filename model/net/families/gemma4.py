"""Gemma 4: heads of two sizes, values without a gain, layers that share keys and values, embeddings for each layer, and experts
beside the MLP.

A config.json with images or sound holds the text model in `text_config`; the other models are left out.
"""

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import llama
from attend.model.net.families.family import (
    KINDS,
    Family,
    Fields,
    Raw,
    alone_in_block,
    biases,
    decoder_sizes,
    flag,
    need,
    optional_number,
    pairs,
    refuse,
    size,
    sliding_layers,
)
from attend.model.net.families.positions import rope_of_kind, rope_type

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor

FULL, SLIDING = KINDS
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""RoPE of a config.json without `rope_parameters`."""
ABSENT: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
}
"""What absent keys of a Gemma 4 config.json mean."""
UNIFIED = {"sliding_window": 1024}
WITHOUT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
"""What the unified models do not have, whatever their config.json says."""


def read(raw: Raw) -> Fields:
    """Read a Gemma 4 config.json; the text model may be in `text_config`."""
    return _read(ABSENT | _text(raw))


def read_unified(raw: Raw) -> Fields:
    """Read a Gemma 4 Unified config.json: a dense model whose images and sound need no encoders of their own."""
    return _read(ABSENT | UNIFIED | _text(raw) | WITHOUT)


def _text(raw: Raw) -> dict[str, Any]:
    """The text model's keys. Beside others, its `tie_word_embeddings` does not hold."""
    text = raw.get("text_config")
    if text is None:
        return dict(raw)
    if not isinstance(text, dict):
        raise CheckpointError(f"config.json: text_config must be an object; got {text!r}")
    text = text | {key: raw[key] for key in ("model_type", "eos_token_id") if raw.get(key) is not None}
    return text | {"tie_word_embeddings": flag(raw, "tie_word_embeddings", True)}


def _read(raw: Raw) -> Fields:
    refuse(raw, "rope_scaling", None)
    count = size(raw, "num_hidden_layers")
    slides = [layer for layer in sliding_layers(raw, lambda layer: (layer + 1) % 6 != 0) if layer != count - 1]
    fields = decoder_sizes(raw, tied_head=True, activation_key="hidden_activation") | _heads(raw, slides) | _experts(raw)
    fields |= _ropes(raw, fields, slides) | _inputs(raw) | _kv_sharing(raw) | biases(raw)
    if slides:
        fields |= {"sliding_window": size(raw, "sliding_window"), "window_layers": tuple(slides)}
    return fields | {
        "norm_place": "sandwich",
        "qk_norm": "head",
        "value_norm": True,
        "attention_scale": 1.0,
        "layer_scale": True,
        "keys_are_values": flag(raw, "attention_k_eq_v"),
        "embedding_scale": math.sqrt(fields["hidden_size"]),
        "logit_softcap": optional_number(raw, "final_logit_softcapping", None),
    }


def _heads(raw: Raw, slides: list[int]) -> Fields:
    """The heads of layers with a window, and those of the others."""
    kinds = {layer: SLIDING if layer in slides else FULL for layer in range(size(raw, "num_hidden_layers"))}
    usual = {"head_dim": size(raw, "head_dim"), "num_key_value_heads": size(raw, "num_key_value_heads")}
    found: dict[str, dict[str, Any]] = {}
    given = _given_heads(raw, kinds)
    for layer, kind in kinds.items():
        heads = {key: size(usual | given.get(layer, {}), key) for key in usual}
        if found.setdefault(kind, heads) != heads:
            raise CheckpointError(f"config.json: per_layer_config: heads of layers with {kind} differ, which is not supported")
    whole = found[FULL]
    local = found.get(SLIDING, whole)
    return {
        "head_size": local["head_dim"],
        "num_kv_heads": local["num_key_value_heads"],
        "global_head_size": None if whole["head_dim"] == local["head_dim"] else whole["head_dim"],
        "global_kv_heads": None if whole == local | {"head_dim": whole["head_dim"]} else whole["num_key_value_heads"],
    }


def _given_heads(raw: Raw, kinds: dict[int, str]) -> dict[int, dict[str, Any]]:
    """What layers have in place of `head_dim` and `num_key_value_heads`: as `transformers` writes it, or as it is published."""
    if "per_layer_config" not in raw:
        whole = {"head_dim": size(raw, "global_head_dim", 512)}
        if flag(raw, "attention_k_eq_v") and raw.get("num_global_key_value_heads") is not None:
            whole["num_key_value_heads"] = size(raw, "num_global_key_value_heads")
        return {layer: whole for layer, kind in kinds.items() if kind == FULL}
    given = {int(layer): dict(values) for layer, values in (raw["per_layer_config"] or {}).items()}
    for layer, values in given.items():
        for key in values.keys() - {"head_dim", "num_key_value_heads"}:
            if key not in raw or values[key] != raw[key] or layer not in kinds:
                raise CheckpointError(f"config.json: per_layer_config: {key} of layer {layer} is not supported")
    return given


def _ropes(raw: Raw, fields: Fields, slides: list[int]) -> Fields:
    whole = _rope(raw, FULL, fields["global_head_size"] or fields["head_size"])
    local = _rope(raw, SLIDING, fields["head_size"]) if slides else {}
    return whole | {f"local_{key}": value for key, value in local.items()}


def _rope(raw: Raw, kind: str, head_size: int) -> Fields:
    ropes = ROPES if raw.get("rope_parameters") is None else raw["rope_parameters"]
    if not isinstance(ropes, dict) or not isinstance(ropes.get(kind), dict):
        raise CheckpointError(f"config.json: rope_parameters must have an object {kind}; got {ropes!r}")
    need(ropes[kind], "rope_theta")
    if (named := rope_type(ropes[kind])) in ("dynamic", "longrope"):
        raise CheckpointError(f"config.json: rope_parameters: rope_type {named!r} of layers with {kind} is not supported")
    found = rope_of_kind(raw, ropes[kind], head_size)
    return {key: found[key] for key in ("rope_theta", "rope_scaling")}


def _experts(raw: Raw) -> Fields:
    if not flag(raw, "enable_moe_block"):
        return {}
    return {
        "num_experts": size(raw, "num_experts"),
        "experts_per_token": size(raw, "top_k_experts"),
        "expert_size": size(raw, "moe_intermediate_size"),
        "routing": "chosen",
        "experts_beside_mlp": True,
    }


def _inputs(raw: Raw) -> Fields:
    """The embeddings of each layer; a size of 0 is none."""
    if not raw.get("hidden_size_per_layer_input"):
        return {}
    known, vocabulary = size(raw, "vocab_size_per_layer_input"), size(raw, "vocab_size")
    if known < vocabulary:
        raise CheckpointError(
            f"config.json: vocab_size_per_layer_input {known} is below vocab_size {vocabulary}: not supported"
        )
    found = {"per_layer_input_size": size(raw, "hidden_size_per_layer_input")}
    return found | {"per_layer_vocab_size": None if known == vocabulary else known}


def _kv_sharing(raw: Raw) -> Fields:
    """The layers that read the keys and values of earlier ones, and whose MLP may be twice as wide."""
    if not raw.get("num_kv_shared_layers"):
        return {}
    shared, wide = size(raw, "num_kv_shared_layers"), flag(raw, "use_double_wide_mlp")
    return {"kv_shared_layers": shared, "kv_shared_mlp_size": 2 * size(raw, "intermediate_size") if wide else None}


def adapt(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    """What the router reads is to be divided by the square root of the model's width: so its gain is."""
    return tensor.float() * config.hidden_size**-0.5 if name.endswith(ROUTER_SCALES) else tensor


ROUTER_SCALES = ("router.scale", "ffn_gate_inp.scale")
"""The router's scale of each input column: its name in safetensors files, and in GGUF."""
PREFIX = "model.language_model."
BLOCK = {
    "mlp.shared_norm": ("pre_feedforward_layernorm",),
    "mlp.shared_post_norm": ("post_feedforward_layernorm_1",),
    "mlp.experts_norm": ("pre_feedforward_layernorm_2",),
    "mlp.experts_post_norm": ("post_feedforward_layernorm_2",),
    "mlp.shared.gate_up": llama.MLP["mlp.gate_up"],
    "mlp.shared.down": llama.MLP["mlp.down"],
    "mlp.router": ("router.proj",),
    "per_layer.gate": ("per_layer_input_gate",),
    "per_layer.projection": ("per_layer_projection",),
    "per_layer.post_norm": ("post_per_layer_input_norm",),
}
ALONE = {
    "layer_scale": "layer_scalar",
    "mlp.router_norm.weight": "router.scale",
    "mlp.expert_scale": "router.per_expert_scale",
    "mlp.experts.gate_up.weight": "experts.gate_up_proj",
    "mlp.experts.down.weight": "experts.down_proj",
}
PER_LAYER = {
    "tokens": "embed_tokens_per_layer",
    "projection": "per_layer_model_projection",
    "norm": "per_layer_projection_norm",
}
WEIGHTS = llama.weights(llama.SANDWICH, BLOCK, prefix=PREFIX) | alone_in_block(f"{PREFIX}layers", ALONE)
for ours, theirs in PER_LAYER.items():
    WEIGHTS |= pairs(f"per_layer.{ours}", PREFIX + theirs)
NOT_SERVED = "images, videos and sound are not served"
LEFT_OUT = {
    f"{start}{name}.": NOT_SERVED
    for name in ("vision_tower", "vision_embedder", "embed_vision", "audio_tower", "embed_audio")
    for start in ("model.", "")
}
TEXT = Family(
    read,
    WEIGHTS,
    adapt=adapt,
    gain_offset=0.0,
    prefix=PREFIX,
    left_out=LEFT_OUT,
    # layers that share keys and values need none of these, but published files have them
    ignored_tensors=re.compile(r"rotary_emb\.inv_freq$|\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\."),
)
DENSE = replace(TEXT, fields=read_unified)
FAMILIES = {"gemma4": TEXT, "gemma4_text": TEXT, "gemma4_unified": DENSE, "gemma4_unified_text": DENSE}
