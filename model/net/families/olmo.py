"""OLMo 2 and OLMo 3: norms of a sublayer's output alone, and of all queries or keys side by side. OLMoE has the latter.

OLMo 3 has windows in three of four layers, which are not scaled where the others are.
"""

from typing import Any

from attend.model.config import ModelConfig
from attend.model.net.families import llama, qwen_moe
from attend.model.net.families.gemma import local_windows
from attend.model.net.families.positions import rope, two_ropes
from attend.model.net.families.reading import (
    Family,
    Raw,
    decoder_sizes,
    flag,
    head_size,
    in_block,
    refuse,
    size,
    sliding_layers,
    with_ends,
)


def _common(raw: Raw) -> dict[str, Any]:
    bias = flag(raw, "attention_bias")
    return decoder_sizes(raw, eps=1e-5) | {"norm_place": "output", "qk_norm": "all", "qkv_bias": bias, "out_bias": bias}


def read2(raw: Raw) -> ModelConfig:
    """OLMo 2."""
    return ModelConfig(**_common(raw) | rope(raw, head_size(raw)))


def read3(raw: Raw) -> ModelConfig:
    """OLMo 3."""
    layers = sliding_layers(raw, lambda layer: (layer + 1) % 4 != 0)
    fields = _common(raw) | two_ropes(raw, head_size(raw), theta=500000.0, local_key="rope_theta", local_theta=500000.0)
    return ModelConfig(**fields | local_windows(raw, raw.get("sliding_window", 4096), layers))


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
FAMILIES = {"olmo2": Family(read2, WEIGHTS), "olmo3": Family(read3, WEIGHTS), "olmoe": Family(read_moe, qwen_moe.WEIGHTS)}
