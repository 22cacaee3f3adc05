"""HunYuan without experts: Llama with norms of each head of queries and keys, after they were rotated."""

from typing import Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import llama
from attend.model.net.families.family import Family, Raw, decoder_sizes, flag, in_block, number, size
from attend.model.net.families.positions import rope


def read(raw: Raw) -> ModelConfig:
    """`transformers` has no size of a head where `head_dim` is missing."""
    head, bias = size(raw, "head_dim"), flag(raw, "attention_bias")
    return ModelConfig(
        **decoder_sizes(raw, eps=1e-5)
        | rope(_scale_theta(raw, head), head)
        | {"qk_norm": "head", "qk_norm_after_rope": True, "qkv_bias": bias, "out_bias": bias}
    )


def _scale_theta(raw: Raw, head: int) -> Raw:
    """A "dynamic" RoPE with an `alpha` has a larger theta, whatever the length (NTK-aware scaling)."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    values: Any = raw.get(key)
    if not isinstance(values, dict) or values.get("rope_type", values.get("type")) != "dynamic" or not values.get("alpha"):
        return raw
    alpha, theta = number(values, "alpha", 1.0), number({**raw, **values}, "rope_theta", 10000.0)
    if alpha < 0 or head < 4:
        raise CheckpointError(f"config.json: {key}: alpha must be above 0, and need 4 rotated columns; got {alpha}, {head}")
    return {**raw, key: {"rope_type": "default", "rope_theta": theta * alpha ** (head / (head - 2))}}


NORMS = {"attention.q_norm": ("self_attn.query_layernorm",), "attention.k_norm": ("self_attn.key_layernorm",)}
WEIGHTS = llama.OUTSIDE | in_block("model.layers", llama.PRE_NORMS | llama.ATTENTION | llama.MLP | NORMS)
FAMILIES = {"hunyuan_v1_dense": Family(read, WEIGHTS)}
