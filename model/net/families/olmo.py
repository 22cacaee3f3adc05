"""OLMo: Llama with LayerNorms without gain. OLMo 2, OLMo 3 and OLMo Hybrid: norms of a sublayer's output alone, and of all
queries or keys side by side. OLMoE has the latter.

OLMo 3 has windows in three of four layers, which are not scaled where the others are. OLMo Hybrid has the gated delta rule
there, with norms before the sublayers.
"""

import re
from typing import Any

from attend.model.config import ModelConfig
from attend.model.net.families import llama, qwen_moe
from attend.model.net.families.family import (
    Family,
    Raw,
    decoder_sizes,
    flag,
    head_size,
    in_block,
    layer_kinds,
    refuse,
    size,
    sliding_layers,
    with_ends,
)
from attend.model.net.families.gemma import local_windows
from attend.model.net.families.positions import rope, two_ropes
from attend.model.sublayers import DeltaSpec

KINDS = ("linear_attention", "full_attention")


def _common(raw: Raw, eps: float = 1e-5) -> dict[str, Any]:
    bias = flag(raw, "attention_bias")
    return decoder_sizes(raw, eps=eps) | {"norm_place": "output", "qk_norm": "all", "qkv_bias": bias, "out_bias": bias}


def read(raw: Raw) -> ModelConfig:
    """Read an OLMo config.json; `clip_qkv` is refused."""
    refuse(raw, "clip_qkv", None)
    bias = flag(raw, "attention_bias")
    norms = {"norm": "layernorm_without_bias", "norm_eps": 1e-5}
    return ModelConfig(**decoder_sizes(raw) | rope(raw, head_size(raw)) | norms | {"qkv_bias": bias, "out_bias": bias})


def read3(raw: Raw) -> ModelConfig:
    """Read an OLMo 3 config.json: three layers of four have a sliding window, and a RoPE of their own."""
    layers = sliding_layers(raw, lambda layer: (layer + 1) % 4 != 0)
    fields = _common(raw) | two_ropes(raw, head_size(raw), theta=500000.0, local_key="rope_theta", local_theta=500000.0)
    return ModelConfig(**fields | local_windows(raw, raw.get("sliding_window", 4096), layers))


def read_hybrid(raw: Raw) -> ModelConfig:
    """OLMo Hybrid. A theta that is null means that nothing is rotated; an absent one is not null."""
    values = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rotates = values.get("rope_theta", raw.get("rope_theta", 10000.0)) is not None
    raw = with_ends(raw, None, 100257)
    return ModelConfig(**_common(raw, eps=1e-6) | (rope(raw, head_size(raw)) if rotates else {"rope_layers": ()}) | _delta(raw))


def _delta(raw: Raw) -> dict[str, Any]:
    """Which layers have the delta rule, all but every fourth and one of few where nothing is said, and its sizes."""
    last = size(raw, "num_hidden_layers") - 1
    kinds = layer_kinds(raw, KINDS, lambda layer: KINDS[layer % 4 == 3 or layer == last < 3])
    heads = size(raw, "num_attention_heads")
    key_heads = size(raw, "linear_num_key_heads", heads)
    key_size = size(raw, "linear_key_head_dim", int(0.75 * size(raw, "hidden_size") / key_heads))
    spec = DeltaSpec(
        key_heads=key_heads,
        value_heads=size(raw, "linear_num_value_heads", heads),
        key_size=key_size,
        value_size=size(raw, "linear_value_head_dim", 2 * key_size),
        kernel=size(raw, "linear_conv_kernel_dim", 4),
        negative_eigenvalues=flag(raw, "linear_allow_neg_eigval", True),
        norm_eps=1e-5,
    )
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == KINDS[0])
    return {"delta": spec, "delta_layers": layers, "delta_norm_place": "pre"} if layers else {}


def read_moe(raw: Raw) -> ModelConfig:
    """OLMoE, whose queries, keys and values are not clipped in any published model."""
    refuse(raw, "clip_qkv", None)
    raw = {"num_local_experts": 64, **with_ends(raw, None, 50279)}
    return ModelConfig(
        **_common(raw)
        | rope(raw, head_size(raw))
        | {
            "norm_place": "pre",
            "num_experts": size(raw, "num_experts", raw["num_local_experts"]),
            "experts_per_token": size(raw, "num_experts_per_tok", 8),
            "routing": "chosen" if flag(raw, "norm_topk_prob") else "all",
        }
    )


OUTPUT = {"attention_post_norm": ("post_attention_layernorm",), "mlp_post_norm": ("post_feedforward_layernorm",)}
WEIGHTS = llama.OUTSIDE | in_block("model.layers", OUTPUT | llama.ATTENTION | llama.MLP)
DELTA = {
    "attention.inputs": tuple(f"linear_attn.{x}_proj" for x in "qkvg"),
    "attention.gates": ("linear_attn.b_proj", "linear_attn.a_proj"),
    "attention.merge": ("linear_attn.o_proj",),
}
ALONE = {"convolution": "conv1d.weight", "log_speed": "A_log", "step_bias": "dt_bias", "gain": "o_norm.weight"}
PUBLISHED = {
    "blocks.{}.attention.convolution": tuple(f"model.layers.{{}}.linear_attn.{x}_conv1d.weight" for x in "qkv"),
    "blocks.{}.attention_norm.weight": ("model.layers.{}.attention_layer_norm.weight",),
    **dict.fromkeys(
        ("blocks.{}.mlp_norm.weight", "blocks.{}.attention_post_norm.weight"),
        ("model.layers.{}.feedforward_layer_norm.weight",),
    ),
}
"""As files have them, beside the names of the model in memory. `transformers` writes the second norm of every layer so."""
HYBRID = WEIGHTS | in_block("model.layers", llama.PRE_NORMS | DELTA)
HYBRID |= {f"blocks.{{}}.attention.{ours}": (f"model.layers.{{}}.linear_attn.{name}",) for ours, name in ALONE.items()}
FAMILIES = {
    "olmo": Family(read, llama.WEIGHTS, gainless=re.compile(r"norm\.weight$")),
    "olmo2": Family(lambda raw: ModelConfig(**_common(raw) | rope(raw, head_size(raw))), WEIGHTS),
    "olmo3": Family(read3, WEIGHTS),
    "olmo_hybrid": Family(read_hybrid, HYBRID, fused_tensors=PUBLISHED),
    "olmoe": Family(read_moe, qwen_moe.WEIGHTS),
}
