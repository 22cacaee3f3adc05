"""The delta rule of Qwen3-Next and Qwen3.5 in GGUF files: names, and orders that converters make.

Source: llama.cpp's conversion/qwen.py. The value heads of one key head are neighbours in a checkpoint. In qwen35 and qwen35moe
they lie apart: value head r * K + k has key head k of K. So lie the rows of what makes values, gates and decays, and the
columns of what reads them.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.net.families.family import Raw, in_block
from attend.model.net.families.qwen3_5 import by_parts

ARCHITECTURES = ("qwen3next", "qwen35", "qwen35moe")
APART = ("qwen35", "qwen35moe")
"""Architectures whose value heads lie apart."""
MERGE = "ssm_out"
"""The matrix whose columns belong to value heads."""
_IN_BLOCK = {
    "mlp_norm": ("post_attention_norm",),
    "attention.inputs": ("attn_qkv", "attn_gate"),
    "attention.gates": ("ssm_beta", "ssm_alpha"),
    "attention.merge": (MERGE,),
}
_ALONE = {"convolution": "ssm_conv1d.weight", "log_speed": "ssm_a", "step_bias": "ssm_dt.bias", "gain": "ssm_norm.weight"}
_OF_VALUES = ("attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt")
"""Tensors all of whose rows belong to value heads."""
_OF_ALL = ("attn_qkv", "ssm_conv1d")
"""Tensors whose first rows belong to query and key heads, and the last ones to value heads."""


def weights(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The entries of `Family.weights` that differ; the first files of qwen3next have all inputs in one tensor."""
    joined = {}
    if any(name.endswith(".ssm_in.weight") for name in names):
        joined["attention.inputs"] = ("ssm_in",)
    if any(name.endswith(".ssm_ba.weight") for name in names):
        joined["attention.gates"] = ("ssm_ba",)
    alone = {f"blocks.{{}}.attention.{ours}": (f"blk.{{}}.{theirs}",) for ours, theirs in _ALONE.items()}
    return in_block("blk", _IN_BLOCK | joined) | alone


def adapt_value_heads(apart: bool, config: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """`Family.adapt`, where value heads lie apart or do not."""
    part = name.split(".")[2] if name.startswith("blk.") else ""
    if part == "attn_q":
        return by_parts(tensor, config.num_heads, [config.head_size] * 2)
    spec = config.delta
    if spec is None:
        return tensor
    shared = spec.value_heads // spec.key_heads
    if part == "ssm_in":
        return by_parts(tensor, spec.key_heads, [spec.key_size] * 2 + [shared * spec.value_size] * 2)
    if part == "ssm_ba":
        return by_parts(tensor, spec.key_heads, [shared] * 2)
    if part == "ssm_a":  # -exp(log_speed)
        tensor = tensor.neg().log()
    if apart and part in _OF_VALUES:
        return _neighbours(tensor, spec.key_heads, spec.value_heads)
    if apart and part in _OF_ALL:
        first = 2 * spec.query_width
        return torch.cat((tensor[:first], _neighbours(tensor[first:], spec.key_heads, spec.value_heads)))
    return tensor


def _neighbours(rows: Tensor, key_heads: int, value_heads: int) -> Tensor:
    """Rows of value heads, those of one key head side by side."""
    return rows.unflatten(0, (-1, key_heads, len(rows) // value_heads)).transpose(0, 1).flatten(0, 2)


def columns(arch: str, raw: Raw) -> Tensor | None:
    """Which column of MERGE stands in each place [I]; None: each stands in its own. `raw`: config.json."""
    if arch not in APART or raw["linear_num_value_heads"] == raw["linear_num_key_heads"]:
        return None
    columns_KRV = torch.arange(raw["linear_num_value_heads"] * raw["linear_value_head_dim"])
    return _neighbours(columns_KRV, raw["linear_num_key_heads"], raw["linear_num_value_heads"])
