"""The mixtures of Qwen2 and Qwen3. Qwen2's have an expert that every token goes to."""

from typing import Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import llama
from attend.model.net.families.family import Family, Raw, decoder_sizes, flag, head_size, in_block, size, windows
from attend.model.net.families.positions import rope


def _common(raw: Raw) -> dict[str, Any]:
    return decoder_sizes(raw) | rope(raw, head_size(raw))


def experts(raw: Raw, total: int, chosen: int, width: int) -> dict[str, Any]:
    """Fields of a mixture; numbers are what an absent key means."""
    count = "num_local_experts" if raw.get("num_experts") is None else "num_experts"
    return {
        "num_experts": size(raw, count, total),
        "experts_per_token": size(raw, "num_experts_per_tok", chosen),
        "expert_size": size(raw, "moe_intermediate_size", width),
        "expert_layers": expert_layers(raw),
        "routing": "chosen" if flag(raw, "norm_topk_prob") else "all",
    }


def expert_layers(raw: Raw) -> tuple[int, ...] | None:
    """Every `decoder_sparse_step`-th layer but those of `mlp_only_layers`; None: all of them."""
    count, step, without = size(raw, "num_hidden_layers"), size(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(without, list) or not all(type(layer) is int for layer in without):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list of layer indices; got {without!r}")
    layers = tuple(layer for layer in range(count) if (layer + 1) % step == 0 and layer not in without)
    return None if len(layers) == count else layers


def read2(raw: Raw) -> ModelConfig:
    """Qwen2-MoE. Once switched on, every other layer below `max_window_layers` slides, or those that `layer_types` names."""
    fields = _common(raw) | experts(raw, 60, 4, 1408) | {"qkv_bias": flag(raw, "qkv_bias", True)}
    fields |= {"shared_expert_size": size(raw, "shared_expert_intermediate_size", 5632)}
    if flag(raw, "use_sliding_window"):
        layers = llama.qwen_layers(raw, lambda layer, border: layer % 2 == 0 and layer < border)
        fields |= windows(raw, raw.get("sliding_window", 4096), layers)
    return ModelConfig(**fields)


def read3(raw: Raw) -> ModelConfig:
    """Qwen3-MoE. Once switched on, every layer slides."""
    bias = flag(raw, "attention_bias")
    fields = _common(raw) | experts(raw, 128, 8, 768) | {"qk_norm": "head", "qkv_bias": bias, "out_bias": bias}
    if flag(raw, "use_sliding_window"):
        fields |= windows(raw, raw.get("sliding_window", 4096), None)
    return ModelConfig(**fields)


EXPERTS = {
    "mlp.router": ("mlp.gate",),
    "mlp.experts.gate_up": ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    "mlp.experts.down": ("mlp.experts.{e}.down_proj",),
    "mlp.shared.gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared.down": ("mlp.shared_expert.down_proj",),
    "mlp.shared_gate": ("mlp.shared_expert_gate",),
}
WEIGHTS = llama.WEIGHTS | in_block("model.layers", EXPERTS)
FAMILIES = {"qwen2_moe": Family(read2, WEIGHTS), "qwen3_moe": Family(read3, WEIGHTS)}
