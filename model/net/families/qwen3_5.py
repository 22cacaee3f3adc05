"""Qwen3.5 and Qwen3-Next: three layers of the gated delta rule, then one of gated attention, and so on; and their mixtures.

Qwen3.5's config.json holds the text model in `text_config`, beside a model of images, which is left out.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attend.model.config import ModelConfig
from attend.model.net.families import llama, qwen_moe
from attend.model.net.families.family import (
    MTP,
    Family,
    Raw,
    decoder_sizes,
    flag,
    head_size,
    in_block,
    layer_kinds,
    refuse,
    size,
)
from attend.model.net.families.multimodal import PREFIX, VISUAL, text_of
from attend.model.net.families.positions import rope
from attend.model.sublayers import DeltaSpec

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor

KINDS = ("linear_attention", "full_attention")


def read(raw: Raw) -> ModelConfig:
    """Qwen3.5, alone or in `text_config`."""
    return ModelConfig(**_common(text_of(raw), kv_heads=4))


def read_mixture(raw: Raw) -> ModelConfig:
    """The mixture of Qwen3.5: every layer has experts."""
    text = text_of(raw)
    width = size(text, "moe_intermediate_size", 512)
    fields = qwen_moe.experts(text | {"mlp_only_layers": [], "decoder_sparse_step": 1}, 256, 8, width)
    return ModelConfig(
        **_common(text | {"intermediate_size": width}, kv_heads=2)
        | fields
        | {"routing": "chosen", "shared_expert_size": size(text, "shared_expert_intermediate_size", 512)}
    )


def read_next(raw: Raw) -> ModelConfig:
    """Read Qwen3-Next, which is a mixture of experts too."""
    return ModelConfig(
        **_common(raw, kv_heads=2)
        | qwen_moe.experts(raw, 512, 10, 512)
        | {
            "routing": "chosen" if flag(raw, "norm_topk_prob", True) else "all",
            "shared_expert_size": size(raw, "shared_expert_intermediate_size", 512),
        }
    )


def _common(raw: Raw, kv_heads: int) -> dict[str, Any]:
    """Fields of all; `kv_heads` is what an absent key means."""
    refuse(raw, "attn_output_gate", None, True)
    refuse(raw, "output_gate_type", None, "swish", "silu")
    raw = raw | {"num_key_value_heads": size(raw, "num_key_value_heads", kv_heads), "head_dim": size(raw, "head_dim", 256)}
    bias = flag(raw, "attention_bias")
    fields = decoder_sizes(raw) | rope(raw, head_size(raw), partial=0.25) | _delta(raw)
    return fields | {"qk_norm": "head", "attention_gate": True, "qkv_bias": bias, "out_bias": bias}


def _delta(raw: Raw) -> dict[str, Any]:
    """Which layers have the delta rule, all but every fourth where nothing is said, and its sizes."""
    kinds = layer_kinds(raw, KINDS, lambda layer: KINDS[(layer + 1) % size(raw, "full_attention_interval", 4) == 0])
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == KINDS[0])
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


def _weights(prefix: str, projections: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The names of all; `projections` are the first ones of the delta rule."""
    names = projections | {"attention.merge": ("linear_attn.out_proj",)}
    alone = {"convolution": "conv1d.weight", "log_speed": "A_log", "step_bias": "dt_bias", "gain": "norm.weight"}
    mine = {f"blocks.{{}}.attention.{ours}": (f"{prefix}layers.{{}}.linear_attn.{theirs}",) for ours, theirs in alone.items()}
    blocks = llama.PRE_NORMS | llama.ATTENTION | llama.MLP | names
    outside = {ours: tuple(name.replace("model.", prefix) for name in names) for ours, names in llama.OUTSIDE.items()}
    return outside | in_block(f"{prefix}layers", blocks | qwen_moe.EXPERTS) | mine


PARTS = {
    "attention.inputs": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "attention.gates": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
}
JOINED = {"attention.inputs": ("linear_attn.in_proj_qkvz",), "attention.gates": ("linear_attn.in_proj_ba",)}
FUSED = {
    f"blocks.{{}}.mlp.experts.{ours}.weight": (f"model.language_model.layers.{{}}.mlp.experts.{theirs}",)
    for ours, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj"))
}
LEFT_OUT = VISUAL | {"mtp.": MTP}
QWEN3_5 = Family(
    read,
    _weights(PREFIX, PARTS),
    adapt=adapt,
    gain_offset=1.0,
    prefix=PREFIX,
    left_out=LEFT_OUT,
)
MIXTURE = replace(QWEN3_5, read=read_mixture, fused_tensors=FUSED)
FAMILIES = {
    "qwen3_5": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe": MIXTURE,
    "qwen3_5_moe_text": MIXTURE,
    "qwen3_next": Family(read_next, _weights("model.", JOINED), adapt=adapt, gain_offset=1.0, left_out=LEFT_OUT),
}
