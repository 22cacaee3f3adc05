"""GLM-4.5 and 4.6, dots.llm1 and K-EXAONE: DeepSeek-V3's router, and shared experts without a gate."""

from typing import Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import qwen_moe
from attend.model.net.families.family import (
    MTP,
    Family,
    Raw,
    count,
    decoder_sizes,
    flag,
    head_size,
    in_block,
    need,
    number,
    size,
    sliding_layers,
    windows,
    with_ends,
)
from attend.model.net.families.positions import rope


def read(raw: Raw) -> ModelConfig:
    """GLM. Half of each head is rotated, and some models norm queries and keys."""
    raw = {"n_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, **_without_nulls(raw)}
    raw = {"num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, **raw}
    return ModelConfig(
        **decoder_sizes(raw, eps=1e-5)
        | rope(raw, head_size(raw), partial=0.5)
        | router_fields(raw, 1408)
        | {"qkv_bias": flag(raw, "attention_bias"), "qk_norm": "head" if flag(raw, "use_qk_norm") else "none"}
    )


def read_dots1(raw: Raw) -> ModelConfig:
    """dots.llm1. Layers from `max_window_layers` on slide, or those that `layer_types` names."""
    border, window = count(raw, "max_window_layers", 62), raw.get("sliding_window", 4096)
    layers = sliding_layers(raw, lambda layer: window is not None and layer >= border)
    bias = flag(raw, "attention_bias")
    return ModelConfig(
        **decoder_sizes({"num_key_value_heads": 32, **raw})
        | rope(raw, head_size(raw))
        | windows(raw, need(raw, "sliding_window") if window is None and layers else window, layers)
        | router_fields(_without_nulls(raw), 1408)
        | {"qkv_bias": bias, "out_bias": bias, "qk_norm": "head"}
    )


def read_exaone(raw: Raw) -> ModelConfig:
    """K-EXAONE. Layers that do not slide do not rotate."""
    layers = sliding_layers(raw, lambda layer: (layer + 1) % size(raw, "sliding_window_pattern", 4) != 0)
    window = size({"sliding_window": raw.get("sliding_window", 4096)}, "sliding_window")
    raw = {"num_experts_per_tok": 8, "norm_topk_prob": True, "first_k_dense_replace": 1, **_without_nulls(raw)}
    raw = {"num_experts": 64, "num_shared_experts": 1, "routed_scaling_factor": 2.5, **raw}
    raw |= {"n_routed_experts": raw["num_experts"], "n_shared_experts": raw["num_shared_experts"]}
    return ModelConfig(
        **decoder_sizes({"num_key_value_heads": 32, **with_ends(raw, 1, 53)}, eps=1e-5)
        | rope(raw, head_size(raw))
        | windows(raw, window, layers)
        | router_fields(raw, 1024)
        | expert_layers(raw)
        | {"rope_layers": layers, "qk_norm": "head"}
    )


def expert_layers(raw: Raw) -> dict[str, Any]:
    """Fields for the layers that `mlp_layer_types` calls sparse, where it is there."""
    kinds, layers = raw.get("mlp_layer_types"), size(raw, "num_hidden_layers")
    if kinds is None:
        return {}
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in ("dense", "sparse") for kind in kinds):
        named = f"mlp_layer_types must name dense or sparse for each of {layers} layers"
        raise CheckpointError(f"config.json: {named}; got {kinds!r}")
    return {"expert_layers": tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")}


def _without_nulls(raw: Raw) -> dict[str, Any]:
    """The keys that say something; experts are counted under one name."""
    known = {key: value for key, value in raw.items() if value is not None}
    return {"n_routed_experts": known["num_local_experts"], **known} if "num_local_experts" in known else known


def router_fields(raw: Raw, width: int) -> dict[str, Any]:
    """Fields of a mixture with DeepSeek-V3's router; `width` is that of an expert, where no key says it."""
    layers, dense = size(raw, "num_hidden_layers"), count(raw, "first_k_dense_replace", 0)
    width = size(raw, "moe_intermediate_size", width)
    return {
        "num_experts": size(raw, "n_routed_experts"),
        "experts_per_token": size(raw, "num_experts_per_tok"),
        "expert_size": width,
        "expert_layers": tuple(range(dense, layers)) if dense else None,
        "shared_expert_size": width * size(raw, "n_shared_experts"),
        "shared_expert_gate": False,
        "scoring_func": "sigmoid",
        "score_correction": True,
        "expert_groups": size(raw, "n_group", 1),
        "groups_per_token": size(raw, "topk_group", 1),
        "routing": "chosen" if flag(raw, "norm_topk_prob") else "all",
        "routing_eps": 1e-20,
        "routed_scaling_factor": number(raw, "routed_scaling_factor", 1.0),
    }


SHARED = {
    "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared.down": ("mlp.shared_experts.down_proj",),
}
WEIGHTS = qwen_moe.WEIGHTS | in_block("model.layers", SHARED)
CORRECTION = {"blocks.{}.mlp.correction": ("model.layers.{}.mlp.gate.e_score_correction_bias",)}
EXAONE = {"blocks.{}.mlp.correction": ("model.layers.{}.mlp.e_score_correction_bias",)}
FAMILIES = {
    "dots1": Family(read_dots1, WEIGHTS | CORRECTION),
    "exaone_moe": Family(read_exaone, WEIGHTS | EXAONE, left_out={"mtp.": MTP}),
    "glm4_moe": Family(read, WEIGHTS | CORRECTION, left_out={"model.layers.{}.": MTP}),
}
