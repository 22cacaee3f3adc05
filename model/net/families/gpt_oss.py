"""gpt-oss: experts with a clamped SwiGLU, attention sinks, biases everywhere, and a window in every other layer.

Its experts come in bfloat16, as [in, out], or in MXFP4, as [out, in]. Columns of gates and ups alternate.
"""

import re
from typing import TYPE_CHECKING

from attend.model.config import ModelConfig
from attend.model.net.families import llama
from attend.model.net.families.family import (
    Family,
    Raw,
    decoder_sizes,
    flag,
    head_size,
    in_block,
    number,
    size,
    sliding_layers,
    windows,
)
from attend.model.net.families.positions import rope

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor

YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def read(raw: Raw) -> ModelConfig:
    """Read a gpt-oss config.json. An absent `rope_parameters` means the released models' YaRN."""
    raw = raw | {"head_dim": raw.get("head_dim") or 64}
    if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
        raw = raw | {"rope_parameters": YARN}
    bias = flag(raw, "attention_bias", True)
    layers = sliding_layers(raw, lambda layer: layer % 2 == 0)
    return ModelConfig(
        **decoder_sizes(raw, eps=1e-5)
        | rope(raw, head_size(raw), theta=150000.0)
        | windows(raw, raw.get("sliding_window", 128), layers)
        | {
            "num_experts": size(raw, "num_local_experts", 128),
            "experts_per_token": size(raw, "num_experts_per_tok", 4),
            "routing": "chosen",
            "swiglu_limit": number(raw, "swiglu_limit", 7.0),
            "swiglu_slope": number(raw, "swiglu_alpha", 1.702),
            "sinks": True,
            "qkv_bias": bias,
            "out_bias": bias,
            "mlp_bias": True,
        }
    )


def adapt(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    """Gates first, then ups: of the rows of matrices [experts, out, in], and of biases [experts, out]."""
    return tensor.unflatten(1, (-1, 2)).transpose(1, 2) if ".gate_up_proj" in name else tensor


EXPERTS = {
    f"blocks.{{}}.mlp.experts.{ours}.{part}": (f"model.layers.{{}}.mlp.experts.{theirs}{ending}",)
    for ours, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj"))
    for part, ending in (("weight", ""), ("bias", "_bias"))
}
SINKS = {"blocks.{}.attention.sinks": ("model.layers.{}.self_attn.sinks",)}
IN_BLOCK = llama.PRE_NORMS | llama.ATTENTION | {"mlp.router": ("mlp.router",)}
WEIGHTS = llama.OUTSIDE | in_block("model.layers", IN_BLOCK) | SINKS | EXPERTS
FAMILIES = {"gpt_oss": Family(read, WEIGHTS, adapt=adapt, transposed_weights=re.compile(r"\.experts\.\w+\.weight$"))}
