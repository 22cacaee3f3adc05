"""LFM2 and its mixtures: gated short convolutions, and every few layers attention with a norm of each query and key. LFM3 has
layers with a window between them, and a gate for each head's output.
"""

from typing import Any

from attend.model.errors import CheckpointError
from attend.model.net.families import llama
from attend.model.net.families.family import (
    KINDS,
    Family,
    Fields,
    Raw,
    alone_in_block,
    biases,
    count,
    decoder_sizes,
    flag,
    in_block,
    kept_windows,
    layer_kinds,
    layers_of,
    need,
    number,
    pairs,
    refuse,
    size,
    with_ends,
)
from attend.model.net.families.mixtures import behind, routing
from attend.model.net.families.positions import by_window, decoder, rope_of_kind

CONV, (FULL, SLIDING) = "conv", KINDS
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
"""RoPE of an LFM3 config.json without `rope_parameters`."""


def lfm2(raw: Raw) -> Fields:
    """Layers that nobody names attend."""
    width = size(raw, "block_ff_dim", size(raw, "intermediate_size", 12288))
    attending = raw.get("full_attn_idxs")
    kinds = layer_kinds(raw, (CONV, FULL), lambda layer: FULL if attending is None or layer in attending else CONV)
    return _common(raw | {"intermediate_size": _adjust_width(raw, width)}, kinds)


def lfm2_moe(raw: Raw) -> Fields:
    """Behind the first dense layers, a sigmoid and a correction choose experts."""
    need(raw, "layer_types")
    dense = count(raw, "num_dense_layers", 2)
    experts = {
        "num_experts": size(raw, "num_experts", 32),
        "experts_per_token": size(raw, "num_experts_per_tok", 4),
        "expert_size": size(raw, "moe_intermediate_size", 1792),
        "expert_layers": behind(raw, dense),
        "scoring_func": "sigmoid",
        "score_correction": flag(raw, "use_expert_bias", True),
        "routing": routing(raw, True),
        "routing_eps": 1e-6,
        "routed_scaling_factor": number(raw, "routed_scaling_factor", 1.0),
    }
    raw = raw | {"intermediate_size": size(raw, "intermediate_size", 7168)}
    fields = _common(raw, layer_kinds(raw, (CONV, FULL), lambda layer: CONV))
    return fields | (experts if dense < fields["num_layers"] else {})


def _adjust_width(raw: Raw, width: int) -> int:
    """Width of the MLP: with `block_auto_adjust_ff_dim` two thirds of what is given, times a factor, rounded up."""
    if not flag(raw, "block_auto_adjust_ff_dim", True):
        return width
    multiple = size(raw, "block_multiple_of", 256)
    return -(-int(number(raw, "block_ffn_dim_multiplier", 1.0) * int(2 * width / 3)) // multiple) * multiple


def _common(raw: Raw, kinds: list[str]) -> Fields:
    tied = "tie_embedding" if raw.get("tie_embedding") is not None else "tie_word_embeddings"
    raw = with_ends(raw, 1, 2) | {
        "num_key_value_heads": size(raw, "num_key_value_heads", 8),
        "rms_norm_eps": number(raw, "norm_eps", 1e-5),
        "hidden_act": "silu",
        "tie_word_embeddings": flag(raw, tied, True),
    }
    return decoder(raw, theta=1e6) | {"qk_norm": "head"} | _convolutions(raw, kinds, 3)


def _convolutions(raw: Raw, kinds: list[str], kernel: int) -> Fields:
    """The fields on the layers that are short convolutions; `kernel` is what an absent key means."""
    layers = layers_of(kinds, CONV)
    fields = {"conv_kernel": size(raw, "conv_L_cache", kernel), "conv_bias": flag(raw, "conv_bias"), "conv_layers": layers}
    return fields if layers else {}


def lfm3(raw: Raw) -> Fields:
    """Without `layer_types`, two layers of four are convolutions, the first layer too."""
    known = (CONV, SLIDING, FULL)
    kinds = layer_kinds(raw, known, lambda at: FULL if at % 4 == 2 else SLIDING if at % 4 == 0 and at > 0 else CONV)
    raw = with_ends(raw, 124894, 124900) | {
        "num_key_value_heads": size(raw, "num_key_value_heads", 4),
        "head_dim": size(raw, "head_dim", 128),
        "rms_norm_eps": number(raw, "rms_norm_eps", number(raw, "norm_eps", 1e-5)),
        "hidden_act": "silu",
    }
    place = {"norm_place": "sandwich" if flag(raw, "use_sandwich_norm", True) else "pre"}
    gated = {"head_gate": flag(raw, "use_attention_gate", True), "qk_norm": "head"}
    fields = decoder_sizes(raw, tied_head=True) | _ropes(raw, kinds) | _convolutions(raw, kinds, 7)
    slides = kept_windows(raw, raw.get("sliding_window", 256), layers_of(kinds, SLIDING))
    return fields | slides | place | gated | biases(raw)


def _ropes(raw: Raw, kinds: list[str]) -> Fields:
    """An object for each kind of layer with attention: that of a kind which no layer is of is not looked at."""
    refuse(raw, "partial_rotary_factor", None)
    values: Any = raw.get("rope_scaling") or raw.get("rope_parameters") or ROPES
    wanted = [kind for kind in ROPES if kind in kinds]
    if not isinstance(values, dict) or not all(isinstance(values.get(kind), dict) for kind in wanted):
        raise CheckpointError(f"config.json: rope_parameters must have {' and '.join(wanted)}; got {values!r}")
    theta = {"rope_theta": number(raw, "rope_theta", 1e6)}
    found = {kind: rope_of_kind(raw, theta | values[kind], raw["head_dim"]) for kind in wanted}
    return by_window(found[FULL], found[SLIDING]) if len(found) == 2 else next(iter(found.values()), {})


BLOCK = {
    "attention_norm": ("operator_norm",),
    "mlp_norm": ("ffn_norm",),
    "attention.q_norm": ("self_attn.q_layernorm",),
    "attention.k_norm": ("self_attn.k_layernorm",),
    "attention.out": ("self_attn.out_proj",),
    "attention.inputs": ("conv.in_proj",),
    "attention.merge": ("conv.out_proj",),
    "mlp.gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "mlp.down": ("feed_forward.w2",),
    "mlp.router": ("feed_forward.gate",),
    "mlp.experts.gate_up": ("feed_forward.experts.{e}.w1", "feed_forward.experts.{e}.w3"),
    "mlp.experts.down": ("feed_forward.experts.{e}.w2",),
}
ALONE = {
    "attention.convolution": "conv.conv.weight",
    "attention.convolution_bias": "conv.conv.bias",
    "mlp.correction": "feed_forward.expert_bias",
}
LFM2 = llama.weights(BLOCK) | pairs("norm", "model.embedding_norm") | alone_in_block("model.layers", ALONE)
LFM3 = {
    "attention_post_norm": ("post_operator_norm",),
    "mlp_post_norm": ("post_ffn_norm",),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.out": ("self_attn.o_proj",),
    "attention.gates": ("self_attn.g_proj",),
}
PUBLISHED = alone_in_block("model.layers", {"attention.gates.weight": "self_attn.gate_proj.weight"})
FAMILIES = {
    "lfm2": Family(lfm2, LFM2),
    "lfm2_moe": Family(lfm2_moe, LFM2),
    "lfm3": Family(lfm3, LFM2 | in_block("model.layers", LFM3), fused_tensors=PUBLISHED),
}
