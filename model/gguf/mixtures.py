"""GGUF metadata of DeepSeek and of mixtures whose routers have corrections, as `config.py` has that of the others."""

from attend.model.gguf.common import shared_experts
from attend.model.gguf.keys import Keys, Raw

FLASH = (47, 154880)
"""Layers and vocabulary of GLM-4.7-Flash: llama.cpp knows its sigmoid by them where no key says it."""
SOFTMAX, SIGMOID = 1, 2


def glm4moe(keys: Keys, raw: Raw) -> Raw:
    """Read the mixtures of GLM-4.5 from GGUF metadata."""
    keys.refuse("expert_gating_func", 0, 2)  # a sigmoid
    return shared_experts(keys) | {
        "model_type": "glm4_moe",
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
    }


def ernie4_5_moe(keys: Keys, raw: Raw) -> Raw:
    """The width that the file gives for shared experts is the MLP's divided by the key/value heads: it is not used."""
    keys.refuse("expert_gating_func", 0, 1)  # softmax
    keys.get("expert_shared_feed_forward_length")
    return {
        "model_type": "ernie4_5_moe",
        "use_bias": keys.has("blk.0.attn_q.bias"),
        "moe_num_experts": keys.size("expert_count"),
        "moe_k": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.get("expert_shared_count") or 0,
        "moe_layer_start_index": keys.get("leading_dense_block_count") or 0,
        "moe_layer_interval": keys.size("interleave_moe_layer_step", 1),
    }


def minimax_m2(keys: Keys, raw: Raw) -> Raw:
    """Read MiniMax-M2 from GGUF metadata."""
    keys.refuse("expert_gating_func", 2)  # a sigmoid
    keys.refuse("expert_weights_scale", 0.0, 1.0)
    keys.refuse("expert_group_count", 0, 1)
    return {
        "model_type": "minimax_m2",
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
    }


def lfm2moe(keys: Keys) -> Raw:
    """LFM2's mixtures. Files do not say what weights are divided and multiplied by: llama.cpp has it in its code."""
    keys.refuse("expert_gating_func", 2)  # a sigmoid
    keys.refuse("expert_weights_norm", True)
    keys.refuse("expert_weights_scale", 0.0, 1.0)
    dense = keys.get("leading_dense_block_count") or 0
    return {
        "model_type": "lfm2_moe",
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "num_dense_layers": dense,
        "use_expert_bias": keys.has(f"blk.{dense}.exp_probs_b.bias"),
    }


def deepseek2(keys: Keys, raw: Raw) -> Raw:
    """`key_length` is that of the one vector that is cached, `key_length_mla` that of a head.

    Whether groups of V2 are used is not said: it has them where there are several.
    """
    if keys.get("attention.key_length_mla") is None:
        raise keys.wrong(f"{keys.arch}.attention.key_length_mla is missing: convert the model with a newer llama.cpp")
    flash = (raw["num_hidden_layers"], raw["vocab_size"]) == FLASH
    scoring = keys.get("expert_gating_func") or (SIGMOID if flash else SOFTMAX)
    if scoring not in (SOFTMAX, SIGMOID):
        raise keys.wrong(f"{keys.arch}.expert_gating_func = {scoring!r} is not supported")
    turned, mixture = keys.size("rope.dimension_count"), shared_experts(keys)
    return {
        **_scaling(keys, raw),
        **mixture,
        "model_type": "deepseek_v3" if scoring == SIGMOID else "deepseek_v2",
        "num_key_value_heads": raw["num_attention_heads"],
        "head_dim": turned,
        "partial_rotary_factor": 1.0,
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "qk_nope_head_dim": keys.size("attention.key_length_mla") - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": keys.size("attention.value_length_mla"),
        "topk_method": "noaux_tc" if scoring == SIGMOID else "group_limited_greedy" if mixture["n_group"] > 1 else "greedy",
    }


def _scaling(keys: Keys, raw: Raw) -> Raw:
    """YaRN with `mscale` as large as `mscale_all_dim`, a tenth of which is the file's multiplier."""
    scaling = raw.get("rope_scaling")
    if scaling is None or scaling["rope_type"] != "yarn":
        return {}
    scale = round(10 * keys.number("rope.scaling.yarn_log_multiplier"), 7)
    return {"rope_scaling": scaling | {"mscale": scale, "mscale_all_dim": scale}}
