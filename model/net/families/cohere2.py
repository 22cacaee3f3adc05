"""Cohere's Command R7B (model_type cohere2): attention and MLP side by side after one LayerNorm without bias.

Layers with a window rotate, neighbour with neighbour; the others have no positions.
"""

from attend.model.config import ModelConfig
from attend.model.net.families import glm4, llama
from attend.model.net.families.positions import rope
from attend.model.net.families.reading import (
    Family,
    Raw,
    decoder_sizes,
    flag,
    head_size_of,
    in_block,
    number,
    size,
    sliding_layers,
    windows,
)


def read(raw: Raw) -> ModelConfig:
    """Without `layer_types`, all layers but every fourth have a window."""
    head, bias = head_size_of(raw, "hidden_size", "num_attention_heads"), flag(raw, "attention_bias")
    pattern, window = size(raw, "sliding_window_pattern", 4), raw.get("sliding_window", 4096)
    layers = sliding_layers(raw, lambda layer: (layer + 1) % pattern != 0)
    whole = len(layers) == size(raw, "num_hidden_layers")
    return ModelConfig(
        **decoder_sizes(raw | {"head_dim": head}, tied=True)
        | rope(raw, head)
        | windows(raw, window, layers)
        | {
            "rope_layers": () if window is None else None if whole else layers,
            "norm": "layernorm_without_bias",
            "norm_eps": number(raw, "layer_norm_eps", 1e-5),
            "norm_place": "shared",
            "qkv_bias": bias,
            "out_bias": bias,
            "logit_scale": number(raw, "logit_scale", 0.0625),
        }
    )


NORM = {"attention_norm": ("input_layernorm",)}
WEIGHTS = llama.OUTSIDE | in_block("model.layers", NORM | llama.ATTENTION | llama.MLP)
FAMILIES = {"cohere2": Family(read, WEIGHTS, adapt=glm4.adapt)}
