"""GGUF metadata of mixtures whose routers have corrections, as `config.py` has that of the others."""

from attend.model.gguf.common import shared_experts
from attend.model.gguf.keys import Keys, Raw


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
