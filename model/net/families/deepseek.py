"""DeepSeek-V2 and V3, and GLM-4.7-Flash: latent attention, and experts that are chosen by groups."""

from typing import Any

from attend.model.config import ModelConfig
from attend.model.net.families import glm4_moe
from attend.model.net.families.family import MTP, Family, Raw, in_block, refuse, size
from attend.model.net.families.latent import ATTENTION, adapt, interleaves, latent

SIZES = (512, 1536, 128, 64, 128)
EXPERTS3 = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048}
EXPERTS3 |= {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 3}
FLASH = {"n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 1536}
FLASH |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True, "first_k_dense_replace": 1}
EXPERTS2 = {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "first_k_dense_replace": 0}
"""What absent keys of a DeepSeek-V2 config.json mean."""


def read2(raw: Raw) -> ModelConfig:
    """DeepSeek-V2: a softmax, and groups that are as good as their best expert, or none."""
    raw = EXPERTS2 | {"topk_method": "greedy"} | raw
    refuse(raw, "topk_method", "greedy", "group_limited_greedy")
    refuse(raw, "norm_topk_prob", None, False)
    refuse(raw, "mlp_bias", None, False)
    _refuse_others(raw, "softmax", "num_experts")
    limited = raw["topk_method"] == "group_limited_greedy"
    softmax = {
        "scoring_func": "softmax",
        "score_correction": False,
        "routing_eps": None,
        "group_top": 1,
        "expert_groups": size(raw, "n_group") if limited else 1,
        "groups_per_token": size(raw, "topk_group") if limited else 1,
    }
    return ModelConfig(**latent(raw, SIZES, (1, 2), interleaved=True) | glm4_moe.router_fields(raw, 0) | softmax)


def read_flash(raw: Raw) -> ModelConfig:
    """GLM-4.7-Flash: `mlp_layer_types` names the layers with experts, all but the first one where it is not there."""
    if raw.get("mlp_layer_types") is None:
        refuse(raw, "first_k_dense_replace", None, 1)
    fields = _as_v3(FLASH | raw, (512, 768, 192, 64, 256), 1e-5)
    return ModelConfig(**fields | glm4_moe.expert_layers(raw))


def _as_v3(raw: dict[str, Any], sizes: tuple[int, ...], eps: float) -> dict[str, Any]:
    refuse(raw, "topk_method", None, "noaux_tc")
    _refuse_others(raw, "sigmoid", "num_local_experts")
    return latent(raw, sizes, (0, 1), interleaved=interleaves(raw), eps=eps) | glm4_moe.router_fields(raw, 0)


def _refuse_others(raw: Raw, scoring: str, alias: str) -> None:
    """Keys of the published code that `transformers` does not read, where they ask for another arithmetic."""
    refuse(raw, "scoring_func", None, scoring)
    refuse(raw, "moe_layer_freq", None, 1)
    refuse(raw, alias, None, raw["n_routed_experts"])


WEIGHTS = glm4_moe.WEIGHTS | glm4_moe.CORRECTION | in_block("model.layers", ATTENTION)
LEFT_OUT = {"model.layers.{}.": MTP}
FAMILIES = {
    "deepseek_v2": Family(read2, WEIGHTS, adapt=adapt),
    "deepseek_v3": Family(
        lambda raw: ModelConfig(**_as_v3(EXPERTS3 | raw, SIZES, 1e-6)), WEIGHTS, adapt=adapt, left_out=LEFT_OUT
    ),
    "glm4_moe_lite": Family(read_flash, WEIGHTS, adapt=adapt, left_out=LEFT_OUT),
}
