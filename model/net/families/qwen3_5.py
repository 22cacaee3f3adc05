"""Qwen3.5 and Qwen3-Next: three layers of the gated delta rule, then one of gated attention, and so on; and their mixtures.

Qwen3.5's config.json holds the text model in `text_config`, beside a model of images, which is left out.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from attend.model.config import ModelConfig
from attend.model.net.families import llama, mixtures
from attend.model.net.families.family import (
    MTP,
    Family,
    Fields,
    Names,
    Raw,
    alone_in_block,
    biases,
    layer_kinds,
    layers_of,
    refuse,
    size,
)
from attend.model.net.families.multimodal import PREFIX, VISUAL, text_of
from attend.model.net.families.olmo import ALONE, DELTA_KINDS, FULL, LINEAR
from attend.model.net.families.positions import decoder
from attend.model.sublayers import DeltaSpec

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor


def qwen3_5(raw: Raw) -> Fields:
    """Qwen3.5, alone or in `text_config`."""
    return _common(text_of(raw), kv_heads=4)


def mixture(raw: Raw) -> Fields:
    """The mixture of Qwen3.5: every layer has experts."""
    text = text_of(raw)
    width = size(text, "moe_intermediate_size", 512)
    fields = mixtures.experts(text | {"mlp_only_layers": [], "decoder_sparse_step": 1}, 256, 8, width)
    return _common(text | {"intermediate_size": width}, kv_heads=2) | fields | {"routing": "chosen"} | _shared_expert(text)


def qwen3_next(raw: Raw) -> Fields:
    """Qwen3-Next, which is a mixture of experts too."""
    fields = _common(raw, kv_heads=2) | mixtures.experts(raw, 512, 10, 512)
    return fields | {"routing": mixtures.routing(raw, True)} | _shared_expert(raw)


def _shared_expert(raw: Raw) -> Fields:
    return {"shared_expert_size": size(raw, "shared_expert_intermediate_size", 512)}


def _common(raw: Raw, kv_heads: int) -> Fields:
    """Fields of all; `kv_heads` is what an absent key means."""
    refuse(raw, "attn_output_gate", None, True)
    refuse(raw, "output_gate_type", None, "swish", "silu")
    heads = {"num_key_value_heads": size(raw, "num_key_value_heads", kv_heads), "head_dim": size(raw, "head_dim", 256)}
    return decoder(raw | heads, partial=0.25) | _delta(raw) | {"qk_norm": "head", "attention_gate": True} | biases(raw)


def _delta(raw: Raw) -> Fields:
    """Which layers have the delta rule, all but every fourth where nothing is said, and its sizes."""
    every = size(raw, "full_attention_interval", 4)
    layers = layers_of(layer_kinds(raw, DELTA_KINDS, lambda layer: FULL if (layer + 1) % every == 0 else LINEAR), LINEAR)
    if not layers:
        return {}
    spec = DeltaSpec(
        key_heads=size(raw, "linear_num_key_heads", 16),
        value_heads=size(raw, "linear_num_value_heads", 32),
        key_size=size(raw, "linear_key_head_dim", 128),
        value_size=size(raw, "linear_value_head_dim", 128),
        kernel=size(raw, "linear_conv_kernel_dim", 4),
    )
    return {"delta": spec, "delta_layers": layers}


def adapt(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    """What lies head by head in their matrices lies part by part in ours."""
    if ".q_proj." in name:  # queries and the gate
        return by_parts(tensor, config.num_heads, [config.head_size] * 2)
    if ".in_proj_qkvz." not in name and ".in_proj_ba." not in name:
        return tensor
    assert config.delta is not None
    shared = config.delta.value_heads // config.delta.key_heads
    keys, values = [config.delta.key_size] * 2, [shared * config.delta.value_size] * 2
    return by_parts(tensor, config.delta.key_heads, keys + values if "qkvz" in name else [shared] * 2)


def by_parts(tensor: "Tensor", heads: int, sizes: list[int]) -> "Tensor":
    """Rows that lie head by head, with parts of these sizes in each: part by part, and head by head in a part."""
    from torch import cat

    return cat([part.flatten(0, 1) for part in tensor.unflatten(0, (heads, -1)).split(sizes, dim=1)])


def _weights(prefix: str, inputs: tuple[str, ...], gates: tuple[str, ...]) -> Names:
    """The names of all; `inputs` and `gates` are the first projections of the delta rule."""
    parts = {"inputs": inputs, "gates": gates, "merge": ("out_proj",)}
    delta = {f"attention.{ours}": tuple(f"linear_attn.{name}" for name in theirs) for ours, theirs in parts.items()}
    alone = {f"attention.{ours}": f"linear_attn.{name.removeprefix('o_')}" for ours, name in ALONE.items()}
    return llama.weights(llama.PRE_NORMS, delta, mixtures.QWEN, prefix=prefix) | alone_in_block(f"{prefix}layers", alone)


LEFT_OUT = VISUAL | {"mtp.": MTP}
DENSE = Family(
    qwen3_5,
    _weights(PREFIX, ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")),
    adapt=adapt,
    gain_offset=1.0,
    prefix=PREFIX,
    left_out=LEFT_OUT,
)
MIXTURE = replace(DENSE, fields=mixture, fused_tensors=llama.fused_experts(PREFIX))
NEXT = _weights("model.", ("in_proj_qkvz",), ("in_proj_ba",))
FAMILIES = {
    "qwen3_5": DENSE,
    "qwen3_5_text": DENSE,
    "qwen3_5_moe": MIXTURE,
    "qwen3_5_moe_text": MIXTURE,
    "qwen3_next": Family(qwen3_next, NEXT, adapt=adapt, gain_offset=1.0, left_out=LEFT_OUT),
}
