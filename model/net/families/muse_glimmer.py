"""Muse Glimmer, text alone: norms before and after each sublayer, gated attention, and norms without gain of queries and keys.

Gains in blocks are 1 + w. The vectors of tokens are normed, which is done once, as they are read. Some layers have a window,
and some have no positions.
"""

import re
from typing import TYPE_CHECKING, Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import gemma, llama
from attend.model.net.families.family import (
    POSITIONS,
    Family,
    Raw,
    decoder_sizes,
    head_size,
    in_block,
    number,
    refuse,
    windows_of_types,
)
from attend.model.net.families.multimodal import IMAGES, PREFIX, text_of
from attend.model.net.families.positions import rope

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor


def read(raw: Raw) -> ModelConfig:
    """The text model in `text_config`. Counted from the last layer, every fourth has neither a window nor positions."""
    text = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": POSITIONS["muse_glimmer"], **text_of(raw)}
    text["tie_word_embeddings"] = raw.get("tie_word_embeddings")
    for key in ("attention_bias", "tie_word_embeddings"):
        refuse(text, key, None, False)
    activation = {"hidden_act": text.get("hidden_activation", "silu")}
    fields = decoder_sizes(text | activation, eps=1e-5) | rope(text, head_size(text))
    count = fields["num_layers"]
    slides = windows_of_types(text, text.get("sliding_window", 2048), lambda layer: (count - 1 - layer) % 4 != 0)
    return ModelConfig(
        **fields
        | slides
        | {
            "rope_layers": _rotated_layers(text, count),
            "norm_place": "sandwich",
            "post_norm_eps": number(text, "post_norm_eps", 1e-8),
            "qk_norm": "head",
            "attention_gate": True,
            "attention_scale": number(text, "qk_scale_factor", 3.87) * fields["head_size"] ** -0.5,
            "logit_scale": number(text, "output_multiplier", 0.19611613513818404),
            "logit_softcap": number(text, "final_logit_softcapping", 20.0),
        }
    )


def _rotated_layers(text: dict[str, Any], count: int) -> tuple[int, ...]:
    """The layers that `layer_rope_theta` gives a theta other than 0: its value changes nothing."""
    thetas = text.get("layer_rope_theta")
    if thetas is None:
        return tuple(layer for layer in range(count) if (count - 1 - layer) % 4 != 0)
    if not isinstance(thetas, list) or len(thetas) != count:
        raise CheckpointError(f"config.json: layer_rope_theta must have a number for each of {count} layers; got {thetas!r}")
    return tuple(layer for layer in range(count) if number({"layer_rope_theta": thetas[layer]}, "layer_rope_theta", 0.0))


def normed_vectors(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    """The vectors of tokens, normed in float32."""
    if not name.endswith("embed_tokens.weight"):
        return tensor
    if not tensor.is_floating_point() or tensor.shape[-1] != config.hidden_size:
        raise CheckpointError(f"tensor {name} is quantised, which is not supported: it is normed as it is read")
    vectors = tensor.float()
    return (vectors * (vectors.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt()).to(tensor.dtype)


QKV = {"attention.qkv": tuple(f"self_attn.{name}_proj" for name in ("q", "gate", "k", "v"))}
OUTSIDE = {ours: tuple(name.replace("model.", PREFIX) for name in names) for ours, names in llama.OUTSIDE.items()}
IN_BLOCK = in_block(f"{PREFIX}layers", gemma.SANDWICH | llama.ATTENTION | llama.MLP | QKV)
TOWERS = ("vision_tower.", "vision_adapter.", "vision_projection.", "perception_emb_norm.")
FAMILIES = {
    "muse_glimmer": Family(
        read,
        OUTSIDE | IN_BLOCK,
        adapt=normed_vectors,
        gain_offset=1.0,
        offset_gains=re.compile(r"^blocks\..*norm\.weight$"),
        gainless=re.compile(r"\.[qk]_norm\.weight$"),
        prefix=PREFIX,
        left_out={start + name: IMAGES for name in TOWERS for start in ("model.", "")},
    )
}
