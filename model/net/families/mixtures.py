"""Mixtures of experts: Mixtral, those of Qwen, gpt-oss, MiniMax-M2, GLM-4.5, dots.llm1, K-EXAONE and ERNIE 4.5.

gpt-oss' experts come in bfloat16, as [in, out], or in MXFP4, as [out, in]. Columns of its gates and ups alternate.
"""

import re
from typing import TYPE_CHECKING, Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import llama
from attend.model.net.families.family import (
    MTP,
    Family,
    Fields,
    Raw,
    biases,
    count,
    flag,
    head_size,
    in_block,
    layer_kinds,
    layers_of,
    need,
    number,
    refuse,
    size,
    sliding_layers,
    some_layers,
    windows,
    with_ends,
)
from attend.model.net.families.positions import decoder

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor

YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def mixtral(raw: Raw) -> Fields:
    """A softmax over the chosen experts; a sliding window, if given, holds in every layer."""
    return decoder(raw, eps=1e-5, theta=1e6) | windows(raw, raw.get("sliding_window"), None) | local_experts(raw, 8, 2)


def local_experts(raw: Raw, total: int, chosen: int) -> Fields:
    """Experts whose weights sum up to 1; numbers are what an absent key means."""
    counts = {
        "num_experts": size(raw, "num_local_experts", total),
        "experts_per_token": size(raw, "num_experts_per_tok", chosen),
    }
    return counts | {"routing": "chosen"}


def gpt_oss(raw: Raw) -> Fields:
    """A clamped SwiGLU, sinks, biases everywhere, a window in every other layer. Absent `rope_parameters` mean YaRN."""
    raw = raw | {"head_dim": raw.get("head_dim") or 64}
    if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
        raw = raw | {"rope_parameters": YARN}
    slides = windows(raw, raw.get("sliding_window", 128), sliding_layers(raw, lambda layer: layer % 2 == 0))
    clamped = {"swiglu_limit": number(raw, "swiglu_limit", 7.0), "swiglu_slope": number(raw, "swiglu_alpha", 1.702)}
    biased = dict.fromkeys(("qkv_bias", "out_bias"), flag(raw, "attention_bias", True)) | {"mlp_bias": True, "sinks": True}
    return decoder(raw, eps=1e-5, theta=150000.0) | slides | local_experts(raw, 128, 4) | clamped | biased


def gates_first(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    """Gates first, then ups: of the rows of matrices [experts, out, in], and of biases [experts, out]."""
    return tensor.unflatten(1, (-1, 2)).transpose(1, 2) if ".gate_up_proj" in name else tensor


def minimax_m2(raw: Raw) -> Fields:
    """Norms over all queries and over all keys; `rotary_dim` is the width of what is rotated, where no key says its share."""
    refuse(raw, "scoring_func", None, "sigmoid")
    refuse(raw, "use_qk_norm", None, True)
    raw = {"num_key_value_heads": 8, "head_dim": 128, "num_experts": 256, **with_ends(raw, 200034, 200020)}
    partial = size(raw, "rotary_dim", head_size(raw)) / head_size(raw)
    corrected = {"scoring_func": "sigmoid", "score_correction": True, "qk_norm": "all"}
    return decoder(raw, theta=5e6, partial=partial) | local_experts(raw, raw["num_experts"], 8) | corrected


def experts(raw: Raw, total: int, chosen: int, width: int) -> Fields:
    """Fields of Qwen's mixtures; numbers are what an absent key means."""
    key = "num_local_experts" if raw.get("num_experts") is None else "num_experts"
    return {
        "num_experts": size(raw, key, total),
        "experts_per_token": size(raw, "num_experts_per_tok", chosen),
        "expert_size": size(raw, "moe_intermediate_size", width),
        "expert_layers": _sparse_layers(raw),
        "routing": routing(raw),
    }


def routing(raw: Raw, default: bool = False) -> str:
    """Whether the chosen experts' weights are made to sum up to 1: `norm_topk_prob`."""
    return "chosen" if flag(raw, "norm_topk_prob", default) else "all"


def _sparse_layers(raw: Raw) -> tuple[int, ...] | None:
    """Every `decoder_sparse_step`-th layer but those of `mlp_only_layers`; None: all of them."""
    step, without = size(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(without, list) or not all(type(layer) is int for layer in without):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list of layer indices; got {without!r}")
    layers = range(size(raw, "num_hidden_layers"))
    return some_layers(raw, tuple(layer for layer in layers if (layer + 1) % step == 0 and layer not in without))


def qwen2_moe(raw: Raw) -> Fields:
    """Qwen2-MoE. Once switched on, every other layer below `max_window_layers` slides, or those that `layer_types` names."""
    fields = decoder(raw) | experts(raw, 60, 4, 1408) | {"qkv_bias": flag(raw, "qkv_bias", True)}
    fields |= {"shared_expert_size": size(raw, "shared_expert_intermediate_size", 5632)}
    if flag(raw, "use_sliding_window"):
        layers = llama.qwen_layers(raw, lambda layer, border: layer % 2 == 0 and layer < border)
        fields |= windows(raw, raw.get("sliding_window", 4096), layers)
    return fields


def qwen3_moe(raw: Raw) -> Fields:
    """Qwen3-MoE. Once switched on, every layer slides."""
    fields = decoder(raw) | experts(raw, 128, 8, 768) | {"qk_norm": "head"} | biases(raw)
    if flag(raw, "use_sliding_window"):
        fields |= windows(raw, raw.get("sliding_window", 4096), None)
    return fields


def glm4_moe(raw: Raw) -> Fields:
    """GLM-4.5 and 4.6. Half of each head is rotated, and some models norm queries and keys."""
    raw = {"n_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, **_without_nulls(raw)}
    raw = {"num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, **raw}
    normed = {"qkv_bias": flag(raw, "attention_bias"), "qk_norm": "head" if flag(raw, "use_qk_norm") else "none"}
    return decoder(raw, eps=1e-5, partial=0.5) | router_fields(raw, 1408) | normed


def dots1(raw: Raw) -> Fields:
    """dots.llm1. Layers from `max_window_layers` on slide, or those that `layer_types` names."""
    border, window = count(raw, "max_window_layers", 62), raw.get("sliding_window", 4096)
    layers = sliding_layers(raw, lambda layer: window is not None and layer >= border)
    slides = windows(raw, need(raw, "sliding_window") if window is None and layers else window, layers)
    fields = decoder({"num_key_value_heads": 32, **raw}) | slides | router_fields(_without_nulls(raw), 1408)
    return fields | biases(raw) | {"qk_norm": "head"}


def exaone_moe(raw: Raw) -> Fields:
    """K-EXAONE. Layers that do not slide do not rotate."""
    layers = sliding_layers(raw, lambda layer: (layer + 1) % size(raw, "sliding_window_pattern", 4) != 0)
    window = size({"sliding_window": raw.get("sliding_window", 4096)}, "sliding_window")
    raw = {"num_experts_per_tok": 8, "norm_topk_prob": True, "first_k_dense_replace": 1, **_without_nulls(raw)}
    raw = {"num_experts": 64, "num_shared_experts": 1, "routed_scaling_factor": 2.5, **raw}
    raw |= {"n_routed_experts": raw["num_experts"], "n_shared_experts": raw["num_shared_experts"]}
    fields = decoder({"num_key_value_heads": 32, **with_ends(raw, 1, 53)}, eps=1e-5) | windows(raw, window, layers)
    return fields | router_fields(raw, 1024) | sparse(raw) | {"rope_layers": layers, "qk_norm": "head"}


def sparse(raw: Raw) -> Fields:
    """Fields for the layers that `mlp_layer_types` calls sparse, where it is there."""
    if raw.get("mlp_layer_types") is None:
        return {}
    kinds = layer_kinds(raw, ("dense", "sparse"), lambda layer: "", "mlp_layer_types")
    return {"expert_layers": layers_of(kinds, "sparse")}


def _without_nulls(raw: Raw) -> dict[str, Any]:
    """The keys that say something; experts are counted under one name."""
    known = {key: value for key, value in raw.items() if value is not None}
    return {"n_routed_experts": known["num_local_experts"], **known} if "num_local_experts" in known else known


def behind(raw: Raw, dense: int) -> tuple[int, ...] | None:
    """The layers behind the first dense ones; None: all of them."""
    return tuple(range(dense, size(raw, "num_hidden_layers"))) if dense else None


def router_fields(raw: Raw, width: int) -> Fields:
    """Fields of a mixture with DeepSeek-V3's router; `width` is that of an expert, where no key says it."""
    width = size(raw, "moe_intermediate_size", width)
    return {
        "num_experts": size(raw, "n_routed_experts"),
        "experts_per_token": size(raw, "num_experts_per_tok"),
        "expert_size": width,
        "expert_layers": behind(raw, count(raw, "first_k_dense_replace", 0)),
        "shared_expert_size": width * size(raw, "n_shared_experts"),
        "shared_expert_gate": False,
        "scoring_func": "sigmoid",
        "score_correction": True,
        "expert_groups": size(raw, "n_group", 1),
        "groups_per_token": size(raw, "topk_group", 1),
        "routing": routing(raw),
        "routing_eps": 1e-20,
        "routed_scaling_factor": number(raw, "routed_scaling_factor", 1.0),
    }


def ernie4_5_moe(raw: Raw) -> Fields:
    """A corrected softmax chooses experts, and shared ones have no gate. Biases, which experts lack, are refused."""
    refuse(raw, "use_bias", None, False)
    raw = {"num_experts": 64, "num_experts_per_tok": 6, "num_key_value_heads": 4, **with_ends(raw, 1, 2)}
    width, shared = size(raw, "moe_intermediate_size", 1536), count(raw, "moe_num_shared_experts", 2)
    return decoder(raw, eps=1e-5, tied_head=True, theta=500000.0) | {
        "num_experts": size(raw, "moe_num_experts", raw["num_experts"]),
        "experts_per_token": size(raw, "moe_k", raw["num_experts_per_tok"]),
        "expert_size": width,
        "expert_layers": _ernie_layers(raw),
        "shared_expert_size": width * shared or None,
        "shared_expert_gate": False,
        "score_correction": True,
        "routing": "chosen",
        "routing_floor": number(raw, "moe_norm_min", 1e-12) or None,
    }


def _ernie_layers(raw: Raw) -> tuple[int, ...]:
    """Every `moe_layer_interval`-th layer from the first on to the last; an end of -1 is the model's."""
    layers, every = size(raw, "num_hidden_layers"), size(raw, "moe_layer_interval", 1)
    first, last = count(raw, "moe_layer_start_index", 1), raw.get("moe_layer_end_index", -1)
    if not isinstance(last, int) or isinstance(last, bool):
        raise CheckpointError(f"config.json: moe_layer_end_index must be an integer; got {last!r}")
    last = layers - 1 if last == -1 else last
    return tuple(layer for layer in range(layers) if (layer + 1) % every == 0 and first <= layer <= last)


MIXTRAL = {
    "mlp.router": ("block_sparse_moe.gate",),
    "mlp.experts.gate_up": ("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
    "mlp.experts.down": ("block_sparse_moe.experts.{e}.w2",),
}
QWEN = {
    "mlp.router": ("mlp.gate",),
    "mlp.experts.gate_up": ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    "mlp.experts.down": ("mlp.experts.{e}.down_proj",),
    "mlp.shared.gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared.down": ("mlp.shared_expert.down_proj",),
    "mlp.shared_gate": ("mlp.shared_expert_gate",),
}
SHARED = {
    "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared.down": ("mlp.shared_experts.down_proj",),
}
OSS_BIASES = {
    f"blocks.{{}}.mlp.experts.{ours}.bias": (f"model.layers.{{}}.mlp.experts.{ours}_proj_bias",) for ours in ("gate_up", "down")
}
MIXTRAL_WEIGHTS = llama.weights(llama.PRE_NORMS, MIXTRAL)
QWEN_WEIGHTS = llama.weights(llama.PRE_NORMS, QWEN)
WEIGHTS = QWEN_WEIGHTS | in_block("model.layers", SHARED)
OSS_WEIGHTS = llama.weights(llama.PRE_NORMS, {"mlp.router": ("mlp.router",)}) | llama.fused_experts("model.") | OSS_BIASES


def correction(name: str) -> dict[str, tuple[str, ...]]:
    """The name of what corrects the scores of a router."""
    return {"blocks.{}.mlp.correction": (f"model.layers.{{}}.{name}",)}


CORRECTED = WEIGHTS | correction("mlp.gate.e_score_correction_bias")
FAMILIES = {
    "dots1": Family(dots1, CORRECTED),
    "ernie4_5_moe": Family(
        ernie4_5_moe,
        WEIGHTS | correction("mlp.moe_statics.e_score_correction_bias"),
        adapt=llama.from_neighbours,
        rows=re.compile(r"\.correction$"),
        left_out=dict.fromkeys(("model.mtp_", "mtp_"), MTP),
    ),
    "exaone_moe": Family(exaone_moe, WEIGHTS | correction("mlp.e_score_correction_bias"), left_out={"mtp.": MTP}),
    "glm4_moe": Family(glm4_moe, CORRECTED, left_out={"model.layers.{}.": MTP}),
    "gpt_oss": Family(
        gpt_oss,
        OSS_WEIGHTS | llama.SINKS,
        adapt=gates_first,
        transposed_weights=re.compile(r"\.experts\.\w+\.weight$"),
    ),
    "minimax_m2": Family(minimax_m2, MIXTRAL_WEIGHTS | correction("block_sparse_moe.e_score_correction_bias")),
    "mixtral": Family(mixtral, MIXTRAL_WEIGHTS),
    "qwen2_moe": Family(qwen2_moe, QWEN_WEIGHTS),
    "qwen3_moe": Family(qwen3_moe, QWEN_WEIGHTS),
}
