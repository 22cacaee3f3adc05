"""Cohere's Command R (model_type cohere) and R7B (cohere2): attention and MLP side by side after one LayerNorm without bias.

Queries and keys rotate neighbour with neighbour; in R7B those of layers with a window alone.
"""

from typing import Any

from attend.model.config import ModelConfig
from attend.model.net.families import glm4, llama
from attend.model.net.families.family import (
    Family,
    Raw,
    decoder_sizes,
    flag,
    head_size,
    head_size_of,
    in_block,
    number,
    refuse,
    size,
    sliding_layers,
    windows,
)
from attend.model.net.families.positions import rope


def _common(raw: Raw) -> dict[str, Any]:
    bias = flag(raw, "attention_bias")
    return decoder_sizes(raw, tied_head=True) | {
        "norm": "layernorm_without_bias",
        "norm_eps": number(raw, "layer_norm_eps", 1e-5),
        "norm_place": "shared",
        "qkv_bias": bias,
        "out_bias": bias,
        "logit_scale": number(raw, "logit_scale", 0.0625),
    }


def read(raw: Raw) -> ModelConfig:
    """Command R. Norms of queries and keys with a gain for each head are not built."""
    refuse(raw, "use_qk_norm", None, False)
    return ModelConfig(**_common(raw) | rope(raw, head_size(raw), theta=500000.0))


def read2(raw: Raw) -> ModelConfig:
    """Command R7B. Without `layer_types`, all layers but every fourth have a window."""
    head = head_size_of(raw, "hidden_size", "num_attention_heads")
    pattern, window = size(raw, "sliding_window_pattern", 4), raw.get("sliding_window", 4096)
    layers = sliding_layers(raw, lambda layer: (layer + 1) % pattern != 0)
    whole = len(layers) == size(raw, "num_hidden_layers")
    fields = _common({**raw, "head_dim": head}) | rope(raw, head) | windows(raw, window, layers)
    return ModelConfig(**fields | {"rope_layers": () if window is None else None if whole else layers})


NORM = {"attention_norm": ("input_layernorm",)}
WEIGHTS = llama.OUTSIDE | in_block("model.layers", NORM | llama.ATTENTION | llama.MLP)
FAMILIES = {"cohere": Family(read, WEIGHTS, adapt=glm4.adapt), "cohere2": Family(read2, WEIGHTS, adapt=glm4.adapt)}
