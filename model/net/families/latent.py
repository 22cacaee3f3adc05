"""Multi-head latent attention in config.json and in names of tensors; and the families without experts that have it:
MiniCPM3 and Youtu-LLM.
"""

import math
from typing import TYPE_CHECKING, Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import llama
from attend.model.net.families.family import (
    Family,
    Raw,
    decoder_sizes,
    flag,
    head_size_of,
    in_block,
    need,
    number,
    optional_number,
    refuse,
    size,
    with_ends,
)
from attend.model.net.families.glm4 import halves
from attend.model.net.families.positions import rope, yarn_scale
from attend.model.sublayers import LatentSpec

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor

SIZES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def latent(
    raw: Raw, defaults: tuple[int, ...], ends: tuple[int, int], *, interleaved: bool, eps: float = 1e-6, tied_head: bool = False
) -> dict[str, Any]:
    """The fields of a decoder with latent attention. What absent keys mean: of SIZES, where a rank of null is none, and of the
    start and the end token.
    """
    raw = dict(zip(SIZES, defaults, strict=True)) | with_ends(raw, *ends)
    rank, key, turned, value = (size(raw, name) for name in SIZES if name != "q_lora_rank")
    query_rank = None if raw["q_lora_rank"] is None else size(raw, "q_lora_rank")
    spec = LatentSpec(rank, query_rank, key, turned, value, interleaved)
    refuse(raw, "num_key_value_heads", None, size(raw, "num_attention_heads"))
    refuse(raw, "head_dim", None, turned)
    bias = flag(raw, "attention_bias")
    sizes = decoder_sizes(raw | {"head_dim": spec.cached_size, "num_key_value_heads": 1}, eps=eps, tied_head=tied_head)
    return (
        sizes
        | rope(raw, turned)
        | {"latent": spec, "qkv_bias": bias, "out_bias": bias, "attention_scale": _scale(raw, spec.query_size)}
    )


def _scale(raw: Raw, columns: int) -> float:
    """1 / sqrt(columns of a query); `mscale_all_dim` of YaRN multiplies both sides of the product."""
    values = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind, weight = values.get("rope_type", values.get("type", "default")), number(values, "mscale_all_dim", 0.0)
    if kind == "default" or not weight:
        return columns**-0.5
    if kind != "yarn":
        raise CheckpointError(f"config.json: mscale_all_dim is not supported with rope_type {kind!r}")
    return columns**-0.5 * yarn_scale(number(values, "factor", need(values, "factor")), weight) ** 2


def adapt(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    """From neighbours to halves, in the rotated rows of queries, and of the key that all heads have; GGUF has its own names."""
    spec, module = config.latent, name.rpartition(".")[0]
    if spec is None or not spec.interleaved:
        return tensor
    if module.endswith(("self_attn.q_proj", "self_attn.q_b_proj", ".attn_q", ".attn_q_b")):
        return halves(tensor, spec.query_size, spec.rope_size, spec.key_size)
    if module.endswith(("self_attn.kv_a_proj_with_mqa", ".attn_kv_a_mqa")):
        return halves(tensor, spec.cached_size, spec.rope_size, spec.rank)
    return tensor


def read_youtu(raw: Raw) -> ModelConfig:
    """Youtu-LLM: DeepSeek-V3's attention beside Llama's MLP."""
    return ModelConfig(**latent(raw, (512, 1536, 128, 64, 128), (128000, 128001), interleaved=interleaves(raw), tied_head=True))


def interleaves(raw: Raw) -> bool:
    """True if rotary pairs are neighbours: `rope_interleave`."""
    refuse(raw, "rope_interleave", True, False)
    return flag(raw, "rope_interleave", True)


def read_minicpm(raw: Raw) -> ModelConfig:
    """MiniCPM3, with scales of the embedding, of sublayers and of the scores. Without `v_head_dim` heads share the width."""
    if raw.get("v_head_dim") is None:
        raw = raw | {"v_head_dim": head_size_of(raw, "hidden_size", "num_attention_heads")}
    fields = latent(raw, (256, 768, 64, 32, 0), (1, 2), interleaved=False, eps=1e-5, tied_head=True)
    depth, base = optional_number(raw, "scale_depth", 1.4), optional_number(raw, "dim_model_base", 256.0)
    return ModelConfig(
        **fields
        | {
            "mlp_bias": flag(raw, "mlp_bias"),
            "embedding_scale": number(raw, "scale_emb", 12.0),
            "residual_scale": 1.0 if depth is None else depth / math.sqrt(fields["num_layers"]),
            "logit_scale": 1.0 if base is None else base / fields["hidden_size"],
        }
    )


ATTENTION = {
    "attention.query": ("self_attn.q_proj",),
    "attention.query.q_down": ("self_attn.q_a_proj",),
    "attention.query.q_norm": ("self_attn.q_a_layernorm",),
    "attention.query.q_up": ("self_attn.q_b_proj",),
    "attention.kv_down": ("self_attn.kv_a_proj_with_mqa",),
    "attention.kv_norm": ("self_attn.kv_a_layernorm",),
    "attention.kv_up": ("self_attn.kv_b_proj",),
    "attention.out": ("self_attn.o_proj",),
}
WEIGHTS = llama.OUTSIDE | in_block("model.layers", llama.PRE_NORMS | ATTENTION | llama.MLP)
FAMILIES = {
    "minicpm3": Family(read_minicpm, WEIGHTS, adapt=adapt),
    "youtu": Family(read_youtu, WEIGHTS, adapt=adapt),
}
