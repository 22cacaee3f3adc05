"""LFM2: gated short convolutions, and every few layers attention with a norm of each query and key."""

from typing import Any

from attend.model.config import ModelConfig
from attend.model.net.families import llama
from attend.model.net.families.positions import rope
from attend.model.net.families.reading import (
    Family,
    Raw,
    decoder_sizes,
    flag,
    head_size,
    in_block,
    layer_kinds,
    number,
    pairs,
    size,
)

KINDS = ("conv", "full_attention")


def read(raw: Raw) -> ModelConfig:
    """Layers that nobody names attend."""
    width = size(raw, "block_ff_dim", size(raw, "intermediate_size", 12288))
    attending = raw.get("full_attn_idxs")
    kinds = layer_kinds(raw, KINDS, lambda layer: KINDS[attending is None or layer in attending])
    return ModelConfig(**_common(raw | {"intermediate_size": _adjusted(raw, width)}, kinds))


def _adjusted(raw: Raw, width: int) -> int:
    """Two thirds of the width that is said, times a factor, rounded up; or that width."""
    if not flag(raw, "block_auto_adjust_ff_dim", True):
        return width
    multiple = size(raw, "block_multiple_of", 256)
    return -(-int(number(raw, "block_ffn_dim_multiplier", 1.0) * int(2 * width / 3)) // multiple) * multiple


def _common(raw: Raw, kinds: list[str]) -> dict[str, Any]:
    tied = "tie_embedding" if raw.get("tie_embedding") is not None else "tie_word_embeddings"
    raw = raw | {
        "num_key_value_heads": size(raw, "num_key_value_heads", 8),
        "rms_norm_eps": number(raw, "norm_eps", 1e-5),
        "hidden_act": "silu",
        "tie_word_embeddings": flag(raw, tied, True),
    }
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "conv")
    conv = {"conv_kernel": size(raw, "conv_L_cache", 3), "conv_bias": flag(raw, "conv_bias"), "conv_layers": layers}
    return decoder_sizes(raw) | rope(raw, head_size(raw), theta=1e6) | {"qk_norm": "head"} | (conv if layers else {})


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
CONVOLUTION = {
    "blocks.{}.attention.convolution": ("model.layers.{}.conv.conv.weight",),
    "blocks.{}.attention.convolution_bias": ("model.layers.{}.conv.conv.bias",),
}
WEIGHTS = llama.OUTSIDE | pairs("norm", "model.embedding_norm") | in_block("model.layers", BLOCK) | CONVOLUTION
FAMILIES = {"lfm2": Family(read, WEIGHTS)}
