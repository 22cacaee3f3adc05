"""Values of config.json that are not built, or not understood, are refused by their key."""

import json
from typing import Any

import pytest
import torch

from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import read_config
from tests.model.checkpoints import KINDS, edit_config

SLIDES = ["sliding_attention"] * 4
ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
DEFAULT = {"rope_type": "default", "rope_theta": 100.0}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("exaone4", {"sliding_window": None, "layer_types": SLIDES}, "layer_types name sliding layers, but there is no"),
    ("exaone4", {"layer_types": ..., "sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
    ("ministral", {"sliding_window": None, "layer_types": SLIDES}, "layer_types name sliding layers, but there is no"),
    ("granite_swa", {"layer_rope_theta": [0.0]}, "layer_rope_theta must have a number for each of 4 layers"),
    ("granite_swa", {"layer_rope_theta": ["x"] * 4}, "layer_rope_theta must be a number"),
    ("granite_swa", {"layer_rope_theta": [-1.0] * 4}, "rope_thetas must be 4 numbers from 0"),
    ("ministral3", {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "original_max_position"),
    ("hunyuan_v1_dense", {"head_dim": ...}, "head_dim"),
    ("hunyuan_v1_dense-alpha", {"rope_parameters": {"rope_type": "dynamic", "alpha": -2.0, "factor": 1.0}}, "alpha"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
    ("stablelm", {"head_dim": 16}, "head_dim"),
    ("olmo", {"clip_qkv": 8.0}, "clip_qkv"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("deepseek_v2-groups", {"n_group": None}, "n_group"),
    ("deepseek_v2-groups", {"n_group": 3}, "8 experts cannot be divided into 3 groups of at least 1"),
    ("deepseek_v2-groups", {"topk_group": 1}, "3 experts of a token cannot be chosen from 1 of 4 groups"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v3", {"n_group": 8}, "8 experts cannot be divided into 8 groups of at least 2"),
    ("glm4_moe_lite", {"mlp_layer_types": None, "first_k_dense_replace": 2}, "first_k_dense_replace"),
    ("minicpm3", {"scale_depth": "deep"}, "scale_depth"),
    ("glm4_moe", {"n_group": 3}, "8 experts cannot be divided into 3 groups"),
    ("glm4_moe", {"n_group": 8, "topk_group": 8}, "8 experts cannot be divided into 8 groups of at least 2"),
    ("glm4_moe", {"topk_group": 1}, "3 experts of a token cannot be chosen from 1 of 4 groups"),
    ("glm4_moe", {"topk_group": 5}, "3 experts of a token cannot be chosen from 5 of 4 groups"),
    ("glm4_moe", {"routed_scaling_factor": -1.0}, "routed_scaling_factor"),
    ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts"),
    ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    ("exaone_moe", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ("exaone_moe", {"sliding_window": None}, "sliding_window"),
    ("dots1", {"sliding_window": None}, "sliding_window"),
    ("dots1", {"n_shared_experts": None}, "n_shared_experts"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
    ("ernie4_5_moe", {"moe_layer_end_index": "last"}, "moe_layer_end_index"),
    ("ernie4_5_moe", {"moe_norm_min": -1.0}, "routing_floor"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func"),
    (
        "minimax_m2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4}},
        "even head size; got 3",
    ),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention", "attention", "attention"]}, "Mamba layers are not supported"),
    ("granitemoehybrid", {"layer_types": ..., "layers_block_type": ...}, "Mamba layers are not supported"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
    ("granitemoehybrid", {"shared_intermediate_size": 0}, "shared_intermediate_size"),
    ("mixtral", {"num_experts_per_tok": 6}, "experts_per_token 6 are more than num_experts 5"),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layer_types must name conv or full_attention for each of 4 layers"),
    ("lfm2", {"layer_types": ["conv"] * 4}, "a recurrent state in every layer"),
    ("lfm2", {"conv_L_cache": 1}, "conv_kernel above 1"),
    ("lfm2", {"block_ffn_dim_multiplier": "1.0"}, "block_ffn_dim_multiplier"),
    ("lfm3", {"layer_types": ["conv"] * 5}, "layer_types must name conv or sliding_attention or full_attention"),
    (
        "lfm3",
        {"rope_parameters": {"full_attention": DEFAULT}},
        "rope_parameters must have sliding_attention and full_attention",
    ),
    ("lfm3", {"rope_parameters": DEFAULT}, "rope_parameters must have"),
    (
        "lfm3",
        {"rope_parameters": {"full_attention": DEFAULT, "sliding_attention": DEFAULT | {"rope_type": "linear", "factor": 2.0}}},
        "RoPE scaling of sliding-window layers",
    ),
    (
        "lfm3",
        {
            "rope_parameters": {
                "sliding_attention": DEFAULT,
                "full_attention": DEFAULT | {"rope_type": "proportional", "partial_rotary_factor": 1.5},
            }
        },
        "a share of 1.5",
    ),
    ("gemma4_text-shared", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    (
        "gemma4_text-shared",
        {"layer_types": ["full_attention"] * 3},
        "layer_types must name full_attention or sliding_attention for each of 6 layers",
    ),
    ("gemma4_text-shared", {"rope_parameters": ROPE}, "rope_parameters must have an object full_attention"),
    (
        "gemma4_text-shared",
        {"rope_parameters": ROPE | {"full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}},
        "rope_type 'dynamic' of layers with full_attention",
    ),
    ("gemma4_text-shared", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
    (
        "gemma4_text-shared",
        {
            "rope_parameters": ROPE
            | {"full_attention": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 1.5}}
        },
        "at most all pairs",
    ),
    ("gemma4_text-shared", {"per_layer_config": {"1": {"intermediate_size": 7}}}, "intermediate_size of layer 1"),
    (
        "gemma4_text-shared",
        {"per_layer_config": {"1": {"head_dim": 10}, "3": {"head_dim": 16}}},
        "heads of layers with full_attention differ",
    ),
    ("gemma4_text-shared", {"vocab_size_per_layer_input": 90}, "vocab_size_per_layer_input 90 is below vocab_size 96"),
    ("gemma4_text-shared", {"num_kv_shared_layers": 6}, "kv_shared_layers: layer 0 has no layer before"),
    ("gemma4_text-shared", {"enable_moe_block": True}, "no 'num_experts'"),
    ("qwen3_5", {"linear_num_key_heads": 3}, "4 value heads are not divisible by 3 key heads"),
    (
        "qwen3_5",
        {"layer_types": ["full_attention"] * 3},
        "layer_types must name linear_attention or full_attention for each of 4 layers",
    ),
    ("qwen3_5", {"layer_types": ["linear_attention"] * 4}, "a recurrent state in every layer"),
    ("qwen3_5", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
    ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate"),
    ("qwen3_5", {"output_gate_type": "sigmoid"}, "output_gate_type"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"use_bidirectional_attention": "vision"}, "use_bidirectional_attention"),
    ("mistral3", {"model_type": "mistral4"}, "model_type 'mistral4' is not supported; known: mistral, ministral3"),
    ("mistral3-scaled", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "llama_4_scaling_beta"),
    ("qwen3_vl", {"rope_parameters": {"rope_type": "mrope"}}, "rope_type 'mrope'"),
    ("muse_glimmer", {"attention_bias": True}, "attention_bias"),
    ("youtu", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("youtu", {"head_dim": 4}, "head_dim"),
    ("youtu", {"qk_rope_head_dim": 7}, "head_dim"),
    ("youtu", {"rope_interleave": None}, "rope_interleave"),
    ("youtu", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all_dim"),
    ("youtu", {"rope_parameters": {"rope_type": "yarn", "factor": None, "mscale_all_dim": 1.0}}, "factor"),
]


@pytest.mark.parametrize(("kind", "changes", "named"), REFUSED, ids=str)
def test_a_value_that_is_not_built_is_refused_by_its_key(kind, changes, named, tmp_path):
    with torch.device("meta"):  # no weights are wanted
        raw = json.loads(KINDS[kind]().config.to_json_string(use_diff=False))
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    edit_config(tmp_path, **({"text_config": raw["text_config"] | changes} if "text_config" in raw else changes))
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    assert "config.json" in str(caught.value) and named in str(caught.value)
