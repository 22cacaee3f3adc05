"""Families with multi-head latent attention: DeepSeek-V2 and V3, GLM-4.7-Flash, MiniCPM3 and Youtu-LLM."""

import math
from typing import TYPE_CHECKING, Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import llama, mixtures
from attend.model.net.families.family import (
    MTP,
    Family,
    Fields,
    Raw,
    biases,
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
from attend.model.net.families.positions import rope, rope_type, yarn_scale
from attend.model.sublayers import LatentSpec

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor

SIZES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DEEPSEEK = (512, 1536, 128, 64, 128)
EXPERTS3 = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048}
EXPERTS3 |= {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 3}
FLASH = {"n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 1536}
FLASH |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True, "first_k_dense_replace": 1}
EXPERTS2 = {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "first_k_dense_replace": 0}
"""What absent keys of a DeepSeek-V2 config.json mean."""


def latent(
    raw: Raw, defaults: tuple[int, ...], ends: tuple[int, int], *, interleaved: bool, eps: float = 1e-6, tied_head: bool = False
) -> Fields:
    """The fields of a decoder with latent attention. What absent keys mean: of SIZES, where a rank of null is none, and of the
    start and the end token.
    """
    raw = dict(zip(SIZES, defaults, strict=True)) | with_ends(raw, *ends)
    rank, key, turned, value = (size(raw, name) for name in SIZES if name != "q_lora_rank")
    query_rank = None if raw["q_lora_rank"] is None else size(raw, "q_lora_rank")
    spec = LatentSpec(rank, query_rank, key, turned, value, interleaved)
    refuse(raw, "num_key_value_heads", None, size(raw, "num_attention_heads"))
    refuse(raw, "head_dim", None, turned)
    sizes = decoder_sizes(raw | {"head_dim": spec.cached_size, "num_key_value_heads": 1}, eps=eps, tied_head=tied_head)
    return sizes | rope(raw, turned) | biases(raw) | {"latent": spec, "attention_scale": _scale(raw, spec.query_size)}


def _scale(raw: Raw, columns: int) -> float:
    """1 / sqrt(columns of a query); `mscale_all_dim` of YaRN multiplies both sides of the product."""
    values = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind, weight = rope_type(values), number(values, "mscale_all_dim", 0.0)
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
        return llama.halves(tensor, spec.query_size, spec.rope_size, spec.key_size)
    if module.endswith(("self_attn.kv_a_proj_with_mqa", ".attn_kv_a_mqa")):
        return llama.halves(tensor, spec.cached_size, spec.rope_size, spec.rank)
    return tensor


def interleaves(raw: Raw) -> bool:
    """True if rotary pairs are neighbours: `rope_interleave`."""
    refuse(raw, "rope_interleave", True, False)
    return flag(raw, "rope_interleave", True)


def youtu(raw: Raw) -> Fields:
    """Youtu-LLM: DeepSeek-V3's attention beside Llama's MLP."""
    return latent(raw, DEEPSEEK, (128000, 128001), interleaved=interleaves(raw), tied_head=True)


def minicpm3(raw: Raw) -> Fields:
    """MiniCPM3, with scales of the embedding, of sublayers and of the scores. Without `v_head_dim` heads share the width."""
    if raw.get("v_head_dim") is None:
        raw = raw | {"v_head_dim": head_size_of(raw, "hidden_size", "num_attention_heads")}
    fields = latent(raw, (256, 768, 64, 32, 0), (1, 2), interleaved=False, eps=1e-5, tied_head=True)
    depth, base = optional_number(raw, "scale_depth", 1.4), optional_number(raw, "dim_model_base", 256.0)
    return fields | {
        "mlp_bias": flag(raw, "mlp_bias"),
        "embedding_scale": number(raw, "scale_emb", 12.0),
        "residual_scale": 1.0 if depth is None else depth / math.sqrt(fields["num_layers"]),
        "logit_scale": 1.0 if base is None else base / fields["hidden_size"],
    }


def deepseek_v2(raw: Raw) -> Fields:
    """DeepSeek-V2: a softmax, and groups that are as good as their best expert, or none."""
    raw = EXPERTS2 | {"topk_method": "greedy"} | raw
    refuse(raw, "topk_method", "greedy", "group_limited_greedy")
    refuse(raw, "norm_topk_prob", None, False)
    refuse(raw, "mlp_bias", None, False)
    _refuse_others(raw, "softmax", "num_experts")
    limited = raw["topk_method"] == "group_limited_greedy"
    softmax = {"scoring_func": "softmax", "score_correction": False, "routing_eps": None, "group_top": 1}
    softmax |= {"expert_groups": size(raw, "n_group") if limited else 1}
    softmax |= {"groups_per_token": size(raw, "topk_group") if limited else 1}
    return latent(raw, DEEPSEEK, (1, 2), interleaved=True) | mixtures.router_fields(raw, 0) | softmax


def flash(raw: Raw) -> Fields:
    """GLM-4.7-Flash: `mlp_layer_types` names the layers with experts, all but the first one where it is not there."""
    if raw.get("mlp_layer_types") is None:
        refuse(raw, "first_k_dense_replace", None, 1)
    return _as_v3(FLASH | raw, (512, 768, 192, 64, 256), 1e-5) | mixtures.sparse(raw)


def _as_v3(raw: dict[str, Any], sizes: tuple[int, ...], eps: float) -> Fields:
    refuse(raw, "topk_method", None, "noaux_tc")
    _refuse_others(raw, "sigmoid", "num_local_experts")
    return latent(raw, sizes, (0, 1), interleaved=interleaves(raw), eps=eps) | mixtures.router_fields(raw, 0)


def _refuse_others(raw: Raw, scoring: str, alias: str) -> None:
    """Keys of the published code that `transformers` does not read, where they ask for another arithmetic."""
    refuse(raw, "scoring_func", None, scoring)
    refuse(raw, "moe_layer_freq", None, 1)
    refuse(raw, alias, None, raw["n_routed_experts"])


ATTENTION = {
    "attention.query": ("self_attn.q_proj",),
    "attention.query.q_down": ("self_attn.q_a_proj",),
    "attention.query.q_norm": ("self_attn.q_a_layernorm",),
    "attention.query.q_up": ("self_attn.q_b_proj",),
    "attention.kv_down": ("self_attn.kv_a_proj_with_mqa",),
    "attention.kv_norm": ("self_attn.kv_a_layernorm",),
    "attention.kv_up": ("self_attn.kv_b_proj",),
}
WEIGHTS = llama.weights(llama.PRE_NORMS, ATTENTION)
MIXTURE = mixtures.CORRECTED | in_block("model.layers", ATTENTION)
LEFT_OUT = {"model.layers.{}.": MTP}
FAMILIES = {
    "deepseek_v2": Family(deepseek_v2, MIXTURE, adapt=adapt),
    "deepseek_v3": Family(lambda raw: _as_v3(EXPERTS3 | raw, DEEPSEEK, 1e-6), MIXTURE, adapt=adapt, left_out=LEFT_OUT),
    "glm4_moe_lite": Family(flash, MIXTURE, adapt=adapt, left_out=LEFT_OUT),
    "minicpm3": Family(minicpm3, WEIGHTS, adapt=adapt),
    "youtu": Family(youtu, WEIGHTS, adapt=adapt),
}
