"""LFM2: gated short convolutions, and every few layers attention with a norm of each query and key; and its mixtures."""

from typing import Any

from attend.model.config import ModelConfig
from attend.model.net.families import llama
from attend.model.net.families.family import (
    Family,
    Raw,
    count,
    decoder_sizes,
    flag,
    head_size,
    in_block,
    layer_kinds,
    need,
    number,
    pairs,
    size,
    with_ends,
)
from attend.model.net.families.positions import rope

KINDS = ("conv", "full_attention")


def read(raw: Raw) -> ModelConfig:
    """Layers that nobody names attend."""
    width = size(raw, "block_ff_dim", size(raw, "intermediate_size", 12288))
    attending = raw.get("full_attn_idxs")
    kinds = layer_kinds(raw, KINDS, lambda layer: KINDS[attending is None or layer in attending])
    return ModelConfig(**_common(raw | {"intermediate_size": _adjust_width(raw, width)}, kinds))


def read_mixture(raw: Raw) -> ModelConfig:
    """Read an LFM2-MoE config.json: behind the first dense layers, a sigmoid and a correction choose experts."""
    need(raw, "layer_types")
    dense, layers = count(raw, "num_dense_layers", 2), size(raw, "num_hidden_layers")
    experts = {
        "num_experts": size(raw, "num_experts", 32),
        "experts_per_token": size(raw, "num_experts_per_tok", 4),
        "expert_size": size(raw, "moe_intermediate_size", 1792),
        "expert_layers": tuple(range(dense, layers)) if dense else None,
        "scoring_func": "sigmoid",
        "score_correction": flag(raw, "use_expert_bias", True),
        "routing": "chosen" if flag(raw, "norm_topk_prob", True) else "all",
        "routing_eps": 1e-6,
        "routed_scaling_factor": number(raw, "routed_scaling_factor", 1.0),
    }
    raw = raw | {"intermediate_size": size(raw, "intermediate_size", 7168)}
    fields = _common(raw, layer_kinds(raw, KINDS, lambda layer: KINDS[0]))
    return ModelConfig(**fields | (experts if dense < layers else {}))


def _adjust_width(raw: Raw, width: int) -> int:
    """Width of the MLP: with `block_auto_adjust_ff_dim` two thirds of what is given, times a factor, rounded up."""
    if not flag(raw, "block_auto_adjust_ff_dim", True):
        return width
    multiple = size(raw, "block_multiple_of", 256)
    return -(-int(number(raw, "block_ffn_dim_multiplier", 1.0) * int(2 * width / 3)) // multiple) * multiple


def _common(raw: Raw, kinds: list[str]) -> dict[str, Any]:
    tied = "tie_embedding" if raw.get("tie_embedding") is not None else "tie_word_embeddings"
    raw = with_ends(raw, 1, 2) | {
        "num_key_value_heads": size(raw, "num_key_value_heads", 8),
        "rms_norm_eps": number(raw, "norm_eps", 1e-5),
        "hidden_act": "silu",
        "tie_word_embeddings": flag(raw, tied, True),
    }
    fields = decoder_sizes(raw) | rope(raw, head_size(raw), theta=1e6) | {"qk_norm": "head"}
    return fields | convolutions(raw, kinds, 3)


def convolutions(raw: Raw, kinds: list[str], kernel: int) -> dict[str, Any]:
    """The fields on the layers that are short convolutions; `kernel` is what an absent key means."""
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "conv")
    fields = {"conv_kernel": size(raw, "conv_L_cache", kernel), "conv_bias": flag(raw, "conv_bias"), "conv_layers": layers}
    return fields if layers else {}


BLOCK = llama.ATTENTION | {
    "attention_norm": ("operator_norm",),
    "mlp_norm": ("ffn_norm",),
    "attention.q_norm": ("self_attn.q_layernorm",),
    "attention.k_norm": ("self_attn.k_layernorm",),
    "attention.out": ("self_attn.out_proj",),
    "attention.inputs": ("conv.in_proj",),
    "attention.merge": ("conv.out_proj",),
    "mlp.gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "mlp.down": ("feed_forward.w2",),
}
EXPERTS = {
    "mlp.router": ("feed_forward.gate",),
    "mlp.experts.gate_up": ("feed_forward.experts.{e}.w1", "feed_forward.experts.{e}.w3"),
    "mlp.experts.down": ("feed_forward.experts.{e}.w2",),
}
ALONE = {
    "attention.convolution": "conv.conv.weight",
    "attention.convolution_bias": "conv.conv.bias",
    "mlp.correction": "feed_forward.expert_bias",
}
WEIGHTS = llama.OUTSIDE | pairs("norm", "model.embedding_norm") | in_block("model.layers", BLOCK | EXPERTS)
WEIGHTS |= {f"blocks.{{}}.{ours}": (f"model.layers.{{}}.{name}",) for ours, name in ALONE.items()}
FAMILIES = {"lfm2": Family(read, WEIGHTS), "lfm2_moe": Family(read_mixture, WEIGHTS)}
