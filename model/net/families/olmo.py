"""OLMo: Llama with LayerNorms without gain. OLMo 2 and 3: norms of a sublayer's output alone, and of all queries or keys.

OLMo 3 has windows in three of four layers, which are not scaled where the others are.
"""

import re
from typing import Any

from attend.model.config import ModelConfig
from attend.model.net.families import llama
from attend.model.net.families.gemma import local_windows
from attend.model.net.families.positions import rope, two_ropes
from attend.model.net.families.reading import Family, Raw, decoder_sizes, flag, head_size, in_block, refuse, sliding_layers


def _common(raw: Raw) -> dict[str, Any]:
    bias = flag(raw, "attention_bias")
    return decoder_sizes(raw, eps=1e-5) | {"norm_place": "output", "qk_norm": "all", "qkv_bias": bias, "out_bias": bias}


def read(raw: Raw) -> ModelConfig:
    """OLMo."""
    refuse(raw, "clip_qkv", None)
    bias = flag(raw, "attention_bias")
    norms = {"norm": "layernorm_without_bias", "norm_eps": 1e-5}
    return ModelConfig(**decoder_sizes(raw) | rope(raw, head_size(raw)) | norms | {"qkv_bias": bias, "out_bias": bias})


def read2(raw: Raw) -> ModelConfig:
    """OLMo 2."""
    return ModelConfig(**_common(raw) | rope(raw, head_size(raw)))


def read3(raw: Raw) -> ModelConfig:
    """OLMo 3."""
    layers = sliding_layers(raw, lambda layer: (layer + 1) % 4 != 0)
    fields = _common(raw) | two_ropes(raw, head_size(raw), theta=500000.0, local_key="rope_theta", local_theta=500000.0)
    return ModelConfig(**fields | local_windows(raw, raw.get("sliding_window", 4096), layers))


OUTPUT = {"attention_post_norm": ("post_attention_layernorm",), "mlp_post_norm": ("post_feedforward_layernorm",)}
WEIGHTS = llama.OUTSIDE | in_block("model.layers", OUTPUT | llama.ATTENTION | llama.MLP)
FAMILIES = {
    "olmo": Family(read, llama.WEIGHTS, gainless=re.compile(r"norm\.weight$")),
    "olmo2": Family(read2, WEIGHTS),
    "olmo3": Family(read3, WEIGHTS),
}
