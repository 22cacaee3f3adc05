"""A published config.json of each served family, and what transformers 5 makes of it, are read as transformers reads them."""

import dataclasses
import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from attend.model.backends.backend import Placement
from attend.model.backends.choice import choose_backend
from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import read_config
from attend.model.net.families.table import FAMILIES, read_checked

COMMON = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "attention_dropout": 0.0,
}


def shape(width: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, positions: int) -> dict[str, Any]:
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
    values = (width, mlp, layers, heads, kv_heads, vocab)
    return COMMON | dict(zip(names.split(), values, strict=True)) | {"max_position_embeddings": positions}


LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
LLAMA3 |= {"original_max_position_embeddings": 8192}
LLAMA2 = shape(4096, 11008, 32, 32, 32, 32000, 4096) | {"model_type": "llama", "rms_norm_eps": 1e-5, "pretraining_tp": 1}
LLAMA2 |= {"bos_token_id": 1, "eos_token_id": 2}
LLAMA = shape(2048, 8192, 16, 32, 8, 128256, 131072) | {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
LLAMA |= {
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 64,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
MISTRAL = shape(4096, 14336, 32, 32, 8, 32000, 32768) | {"model_type": "mistral", "rms_norm_eps": 1e-5}
MISTRAL |= {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
QWEN2 = shape(896, 4864, 24, 14, 2, 151936, 32768) | {"model_type": "qwen2", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
QWEN2 |= {"rope_theta": 1e6, "sliding_window": 32768, "use_sliding_window": False, "use_mrope": False}
QWEN2 |= {"bos_token_id": 151643, "eos_token_id": 151643}
QWEN3 = shape(1024, 3072, 28, 16, 8, 151936, 40960) | {"model_type": "qwen3", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
QWEN3 |= {"attention_bias": False, "head_dim": 128, "max_window_layers": 28, "rope_scaling": None, "rope_theta": 1000000}
QWEN3 |= {"bos_token_id": 151643, "eos_token_id": 151645}
GPT2 = {"model_type": "gpt2", "activation_function": "gelu_new", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12}
GPT2 |= {"n_positions": 1024, "vocab_size": 50257, "attn_pdrop": 0.1, "summary_type": "cls_index"}
GPT2 |= {"bos_token_id": 50256, "eos_token_id": 50256}
MIXTRAL = shape(4096, 14336, 32, 32, 8, 32000, 32768) | {"model_type": "mixtral", "rms_norm_eps": 1e-5, "sliding_window": None}
MIXTRAL |= {"num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False, "router_aux_loss_coef": 0.02}
MIXTRAL |= {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "rope_theta": 1e6}
QWEN3_MOE = shape(2048, 6144, 48, 32, 4, 151936, 40960) | {"model_type": "qwen3_moe", "rms_norm_eps": 1e-6}
QWEN3_MOE |= {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "max_window_layers": 48,
    "mlp_only_layers": [],
}
QWEN3_MOE |= {"moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8}
QWEN3_MOE |= {"rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False}
QWEN3_MOE |= {"tie_word_embeddings": False, "bos_token_id": 151643, "eos_token_id": 151645}
QWEN2_MOE = shape(2048, 5632, 24, 16, 16, 151936, 8192) | {"model_type": "qwen2_moe", "rms_norm_eps": 1e-6, "num_experts": 60}
QWEN2_MOE |= {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4}
QWEN2_MOE |= {"norm_topk_prob": False, "decoder_sparse_step": 1, "max_window_layers": 21, "rope_theta": 1000000.0}
QWEN2_MOE |= {"sliding_window": 32768, "use_sliding_window": False, "tie_word_embeddings": False, "bos_token_id": 151643}
LAYERS = ["sliding_attention", "full_attention"]
GPT_OSS = shape(2880, 2880, 24, 64, 8, 201088, 131072) | {"model_type": "gpt_oss", "rms_norm_eps": 1e-5, "head_dim": 64}
GPT_OSS |= {"attention_bias": True, "experts_per_token": 4, "num_experts_per_tok": 4, "num_local_experts": 32}
GPT_OSS |= {"initial_context_length": 4096, "layer_types": LAYERS * 12, "rope_theta": 150000, "sliding_window": 128}
GPT_OSS |= {"swiglu_limit": 7.0, "tie_word_embeddings": False, "eos_token_id": 200002, "pad_token_id": 199999}
GPT_OSS |= {"quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"}}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False}
PYTHIA = shape(512, 2048, 6, 8, 8, 50304, 2048) | {"model_type": "gpt_neox", "hidden_act": "gelu", "layer_norm_eps": 1e-5}
PYTHIA |= {"rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True}
PYTHIA |= {"bos_token_id": 0, "eos_token_id": 0}
COMMAND = shape(4096, 14336, 32, 32, 8, 256000, 8192) | {"model_type": "cohere2", "attention_bias": False, "head_dim": 128}
COMMAND |= {"layer_norm_eps": 1e-5, "layer_switch": 4, "logit_scale": 0.25, "position_embedding_type": "rope_gptj"}
COMMAND |= {"rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4, "use_qk_norm": False}
COMMAND |= {"use_parallel_block": True, "bos_token_id": 5, "eos_token_id": 255001}
STARCODER2 = shape(3072, 12288, 30, 24, 2, 49152, 16384) | {"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh"}
STARCODER2 |= {"mlp_type": "default", "norm_epsilon": 1e-5, "norm_type": "layer_norm", "use_bias": True, "sliding_window": 4096}
STARCODER2 |= {"rope_theta": 999999.4420358813, "bos_token_id": 0, "eos_token_id": 0}
DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
DELTA |= {"linear_value_head_dim": 128, "full_attention_interval": 4, "head_dim": 256, "rms_norm_eps": 1e-6}
QWEN3_NEXT = shape(2048, 5120, 48, 16, 2, 151936, 262144) | DELTA | {"model_type": "qwen3_next", "decoder_sparse_step": 1}
QWEN3_NEXT |= {"mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True, "num_experts": 512}
QWEN3_NEXT |= {"num_experts_per_tok": 10, "shared_expert_intermediate_size": 512, "partial_rotary_factor": 0.25}
QWEN3_NEXT |= {"rope_scaling": None, "rope_theta": 10000000, "tie_word_embeddings": False, "eos_token_id": 151645}
MROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000}
QWEN3_5_TEXT = shape(5120, 17408, 64, 24, 4, 248320, 262144) | DELTA | {"model_type": "qwen3_5_text", "attn_output_gate": True}
QWEN3_5_TEXT |= {"eos_token_id": 248044, "linear_num_value_heads": 48, "mtp_num_hidden_layers": 1}
QWEN3_5_TEXT |= {"mamba_ssm_dtype": "float32", "rope_parameters": MROPE | {"partial_rotary_factor": 0.25}}
EYES = {"depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "in_channels": 3, "intermediate_size": 4304}
QWEN3_5 = {"model_type": "qwen3_5", "text_config": QWEN3_5_TEXT, "vision_config": EYES, "tie_word_embeddings": False}
MOE = ("moe_intermediate_size", "num_experts", "shared_expert_intermediate_size", "mlp_only_layers")
QWEN3_5_MOE_TEXT = {key: value for key, value in QWEN3_5_TEXT.items() if key != "intermediate_size"}
QWEN3_5_MOE_TEXT |= {key: QWEN3_NEXT[key] for key in MOE} | {"num_experts": 256, "num_experts_per_tok": 8}
QWEN3_5_MOE_TEXT |= {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "num_key_value_heads": 2}
LFM2 = shape(2048, 12288, 16, 32, 8, 65536, 128000) | {"model_type": "lfm2", "block_ff_dim": 12288, "block_multiple_of": 256}
LFM2 |= {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "conv_L_cache": 3, "conv_bias": False}
LFM2 |= {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "norm_eps": 1e-5, "rope_theta": 1e6, "tie_embedding": True}
LFM2 |= {"bos_token_id": 1, "eos_token_id": 7}
LFM2_MOE = shape(2048, 7168, 24, 32, 8, 65536, 128000) | {"model_type": "lfm2_moe", "conv_L_cache": 3, "conv_bias": False}
LFM2_MOE |= {"moe_intermediate_size": 1792, "norm_eps": 1e-5, "norm_topk_prob": True, "num_dense_layers": 2}
LFM2_MOE |= {"num_experts": 32, "num_experts_per_tok": 4, "routed_scaling_factor": 1.0, "use_expert_bias": True}
LFM2_MOE |= {"layer_types": ["conv", "conv", "full_attention"] * 8, "rope_theta": 1e6, "bos_token_id": 1, "eos_token_id": 7}
HYBRID = shape(3840, 11008, 32, 30, 30, 100352, 65536) | {"model_type": "olmo_hybrid", "rms_norm_eps": 1e-6}
HYBRID |= {"linear_key_head_dim": 96, "linear_value_head_dim": 192, "linear_num_key_heads": 30, "linear_num_value_heads": 30}
HYBRID |= {"linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4, "eos_token_id": 100257, "tie_word_embeddings": False}
HYBRID |= {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 8}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
V3 = shape(7168, 18432, 61, 128, 128, 129280, 163840) | LATENT | {"model_type": "deepseek_v3", "rms_norm_eps": 1e-6}
V3 |= {"ep_size": 1, "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8}
V3 |= {"n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "topk_group": 4}
V3 |= {"num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
V3 |= {"rope_theta": 10000, "tie_word_embeddings": False, "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1}
V3 |= {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
YARN_40 = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
V2_LITE = shape(2048, 10944, 27, 16, 16, 102400, 163840) | LATENT | {"model_type": "deepseek_v2", "q_lora_rank": None}
V2_LITE |= {"attention_bias": False, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "moe_intermediate_size": 1408}
V2_LITE |= {"moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False}
V2_LITE |= {"num_experts_per_tok": 6, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 1.0}
V2_LITE |= {"scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy"}
V2_LITE |= {"rope_scaling": YARN_40 | {"mscale": 0.707, "mscale_all_dim": 0.707}, "bos_token_id": 100000}
FLASH = shape(2048, 10240, 47, 20, 20, 154880, 202752) | LATENT | {"model_type": "glm4_moe_lite", "rms_norm_eps": 1e-5}
FLASH |= {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "first_k_dense_replace": 1, "n_group": 1}
FLASH |= {"moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True, "topk_group": 1}
FLASH |= {"num_experts_per_tok": 4, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "routed_scaling_factor": 1.8}
FLASH |= {"rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False, "topk_method": "noaux_tc"}
FLASH |= {"attention_bias": False, "eos_token_id": [154820, 154827, 154829], "pad_token_id": 154820}
MINICPM3 = shape(2560, 6400, 62, 40, 40, 73448, 32768) | {"model_type": "minicpm3", "rms_norm_eps": 1e-5}
MINICPM3 |= {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
MINICPM3 |= {"scale_depth": 1.4, "scale_emb": 12, "dim_model_base": 256, "bos_token_id": 1, "eos_token_id": [2, 73440]}
MINICPM3 |= {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 32768}}
MINICPM3["rope_scaling"] |= {name: [1.0 + at / 16 for at in range(16)] for name in ("long_factor", "short_factor")}
GLM = shape(4096, 10944, 46, 96, 8, 151552, 131072) | {"model_type": "glm4_moe", "head_dim": 128, "use_qk_norm": False}
GLM |= {"attention_bias": True, "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1}
GLM |= {"n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8}
GLM |= {"num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": None}
GLM |= {"rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "pad_token_id": 151329}
GLM |= {"eos_token_id": [151329, 151336, 151338]}
GRANITE_MOE = shape(1024, 512, 24, 16, 8, 49155, 4096) | {"model_type": "granitemoe", "attention_multiplier": 0.015625}
GRANITE_MOE |= {"attention_bias": False, "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22}
GRANITE_MOE |= {"num_experts_per_tok": 8, "num_local_experts": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000}
GRANITE_MOE |= {"rope_scaling": None, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0}
GRANITE_4 = GRANITE_MOE | shape(2560, 8192, 40, 40, 8, 100352, 131072) | {"model_type": "granitemoehybrid"}
GRANITE_4 |= {"layer_types": ["attention"] * 40, "num_local_experts": 0, "num_experts_per_tok": 0, "rope_theta": 10000000}
GRANITE_4 |= {"position_embedding_type": "rope", "shared_intermediate_size": 8192, "mamba_n_heads": 128, "mamba_d_head": 40}
GEMMA3 = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
GEMMA3 |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, "bos_token_id": 2}
SIGLIP = {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model"}
SIGLIP |= {"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False}
SMALL = shape(5120, 32768, 40, 32, 8, 131072, 131072) | {"model_type": "mistral", "head_dim": 128, "rms_norm_eps": 1e-5}
SMALL |= {"bos_token_id": 1, "eos_token_id": 2}
SMALL |= {"rope_theta": 1e9, "sliding_window": None}
PIXTRAL = {"head_dim": 64, "hidden_size": 1024, "image_size": 1540, "intermediate_size": 4096, "model_type": "pixtral"}
MINISTRAL3 = shape(3072, 9216, 26, 32, 8, 131072, 262144) | {"model_type": "ministral3", "head_dim": 128, "rms_norm_eps": 1e-5}
MINISTRAL3 |= {"bos_token_id": 1, "eos_token_id": 2}
MINISTRAL3 |= {"sliding_window": None, "tie_word_embeddings": True}
MINISTRAL3 |= {"rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1}}
MINISTRAL3["rope_parameters"] |= {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384}
MINISTRAL3["rope_parameters"] |= {"rope_theta": 1e6, "rope_type": "yarn", "type": "yarn"}
QWEN2_VL = shape(2048, 11008, 36, 16, 2, 151936, 128000) | {"model_type": "qwen2_5_vl", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN2_VL |= {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "tie_word_embeddings": True}
QWEN2_VL |= {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 70, "eos_token_id": 151645}
QWEN2_VL |= {"bos_token_id": 151643, "vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 2048}}
QWEN3_VL = shape(2560, 9728, 36, 32, 8, 151936, 262144) | {"model_type": "qwen3_vl_text", "head_dim": 128, "rms_norm_eps": 1e-6}
QWEN3_VL |= {"rope_theta": 5000000, "tie_word_embeddings": True, "attention_bias": False}
QWEN3_VL |= {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}
HUNYUAN = shape(2048, 6144, 32, 16, 4, 120818, 262144) | {
    "model_type": "hunyuan_v1_dense",
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
}
HUNYUAN |= {"bos_token_id": 1, "eos_token_id": 2}
HUNYUAN |= {
    "attention_head_dim": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_qk_norm": True,
}
HUNYUAN |= {"rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "type": "dynamic"}}
ARCEE = shape(2560, 18432, 36, 20, 4, 128004, 65536) | {"model_type": "arcee", "hidden_act": "relu2", "rms_norm_eps": 1e-5}
ARCEE |= {"bos_token_id": 128000, "eos_token_id": 128001}
ARCEE |= {"rope_theta": 10000.0, "tie_word_embeddings": False, "head_dim": 128, "mlp_bias": False}
ARCEE |= {"rope_scaling": YARN | {"factor": 20.0, "original_max_position_embeddings": 4096}}
SLIDING = ("mistral", "gpt_oss", "cohere2", "starcoder2", "gemma3", "exaone4", "mistral3")
PUBLISHED = {
    "gemma-3-4b-it": {"model_type": "gemma3", "text_config": GEMMA3, "vision_config": SIGLIP, "eos_token_id": [1, 106]},
    "Mistral-Small-3.1-24B": {"model_type": "mistral3", "text_config": SMALL, "vision_config": PIXTRAL},
    "Ministral-3-3B": {"model_type": "mistral3", "text_config": MINISTRAL3, "vision_config": PIXTRAL},
    "Qwen2.5-VL-3B": QWEN2_VL,
    "Qwen3-VL-4B": {"model_type": "qwen3_vl", "text_config": QWEN3_VL, "vision_config": EYES, "tie_word_embeddings": True},
    "Hunyuan-1.8B": HUNYUAN,
    "AFM-4.5B": ARCEE,
    "Mixtral-8x7B-v0.1": MIXTRAL,
    "Qwen3-30B-A3B": QWEN3_MOE,
    "Qwen1.5-MoE-A2.7B": QWEN2_MOE | {"eos_token_id": 151643},
    "gpt-oss-20b": GPT_OSS | {"rope_scaling": YARN | {"original_max_position_embeddings": 4096}},
    "pythia-70m": PYTHIA,
    "c4ai-command-r7b": COMMAND,
    "starcoder2-3b": STARCODER2,
    "Llama-2-7b": LLAMA2 | {"rope_scaling": None, "tie_word_embeddings": False},
    "Llama-3.2-1B": LLAMA | {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "Mistral-7B-v0.1": MISTRAL | {"rope_theta": 10000.0, "sliding_window": 4096},
    "Mistral-7B-v0.3": MISTRAL | {"rope_theta": 1e6, "sliding_window": None, "vocab_size": 32768},
    "Qwen2.5-0.5B": QWEN2 | {"max_window_layers": 24},
    "Qwen2.5-0.5B-Instruct": QWEN2 | {"max_window_layers": 21, "rope_scaling": None},
    "Qwen3-0.6B": QWEN3 | {"sliding_window": None, "use_sliding_window": False},
    "DeepSeek-V3": V3 | {"rope_scaling": YARN_40 | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "DeepSeek-V2-Lite": V2_LITE | {"eos_token_id": 100001},
    "GLM-4.7-Flash": FLASH,
    "MiniCPM3-4B": MINICPM3,
    "gpt2": GPT2,
    "LFM2-1.2B": LFM2,
    "LFM2-8B-A1B": LFM2_MOE,
    "Olmo-Hybrid-7B": HYBRID | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    "GLM-4.5-Air": GLM,
    "granite-3.1-1b-a400m": GRANITE_MOE,
    "granite-4.0-micro": GRANITE_4,
    "Qwen3-Next-80B-A3B": QWEN3_NEXT,
    "Qwen3.5-27B": QWEN3_5,
    "Qwen3.5-35B-A3B": QWEN3_5 | {"model_type": "qwen3_5_moe", "text_config": QWEN3_5_MOE_TEXT},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_transformers_reads_it_in_both_spellings(tmp_path: Path, name: str):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]), encoding="utf-8")
    ours, whole = read_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    theirs = whole.get_text_config()
    assert ours.sliding_window == (theirs.sliding_window if ours.family in SLIDING else None)
    if ours.ropes:
        rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
        stretch = rope.get("alpha", 1.0) ** (ours.head_size / (ours.head_size - 2))
        assert ours.rope_theta == rope["rope_theta"] * stretch
        assert (ours.rope_scaling is None) == (rope["rope_type"] == "default" or "alpha" in rope)
    assert ours.tied_head == whole.tie_word_embeddings
    if ours.latent is None:
        assert ours.num_kv_heads == getattr(theirs, "num_key_value_heads", ours.num_heads)
    whole.save_pretrained(tmp_path)
    assert "rope_theta" not in json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert ours == read_config(tmp_path)


@pytest.mark.parametrize("name", [name for name, raw in PUBLISHED.items() if "kv_lora_rank" not in raw])
def test_a_published_model_is_computed_by_triton_on_a_gpu(name: str):
    """In its own sizes, which the tiny checkpoints do not have."""
    pytest.importorskip("triton")
    config = FAMILIES[PUBLISHED[name]["model_type"]].read(PUBLISHED[name])
    assert "triton" == choose_backend("auto", config, Placement(torch.bfloat16, "cuda", 32)).name


NO_KEYS = """__class__ _attn_implementation _attn_implementation_internal _experts_implementation conv_ default_theta
_experts_implementation_internal _rope_type_labels get_text_config json kv_sharing_modes number_of_conv_states
save_pretrained standardize_rope_params sub_configs validate_rope"""
"""What has the form of a key in the source, and is none of config.json."""
HARMLESS = """_name_or_path architectures attention_dropout attn_pdrop base_model_pp_plan base_model_tp_plan
chunk_size_feed_forward classifier_dropout compile_config distributed_config dtype embd_pdrop embedding_dropout
embedding_initializer_range extra_files fusion_config gradient_checkpointing hidden_dropout id2label init_std
initializer_factor initializer_range is_decoder label2id linear_a_log_max linear_a_log_min linear_dt_init_floor
linear_dt_max linear_dt_min name_or_path num_labels num_mtp_layers num_nextn_predict_layers output_attentions
output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type reorder_and_upcast_attn
resid_pdrop residual_dropout return_dict router_aux_loss_coef router_jitter_noise sep_token_id
transformers_version transformers_weights use_cache"""
"""Of training, of other heads than that of the next token, and of how `transformers` computes."""
ELSEWHERE = "attention_chunk_size rope_parameters sliding_window"
"""Acts with kinds of layers that are refused; not beside `rope_scaling`; and a window that no layer looks at is told."""

TOWERS = """attention_context_left attention_context_right attention_invalid_logits_value attention_logit_cap audio_config
audio_token_id conv_kernel_size deepstack_visual_indexes depth embed_dim fullatt_block_indexes gradient_clipping
image_token_id in_channels merge_size mlp_ratio mm_tokens_per_image num_heads num_position_embeddings
out_hidden_size output_proj_dims patch_size patch_temporal pooling_kernel_size pos_emb_height pos_emb_width
position_embedding_size projector_hidden_act projector_hidden_size residual_weight spatial_merge_size
standardize subsampling_conv_channels temporal_patch_size use_clipped_linears video_token_id vision_config
window_size"""
"""Of images and sound."""
OUTSIDE = "eos_token_id model_type text_config tie_word_embeddings"
"""Of a text model inside of another: what the other says."""
EXCUSED = {
    "cohere2": "head_dim",  # the heads share the width
    "ernie4_5_moe": "num_experts num_experts_per_tok",  # other names of keys that are there, and so below
    "exaone4": "sliding_window_pattern",  # beside layer_types
    "exaone_moe": "sliding_window_pattern",
    "gemma": "hidden_act",  # whose first configs said another than they meant
    "gemma3": "attn_logit_softcapping final_logit_softcapping",  # its forward looks at neither
    "gemma3_text": "attn_logit_softcapping",
    "dots1": "num_local_experts",
    "gemma4": "hidden_act moe_intermediate_size num_experts top_k_experts use_double_wide_mlp",  # without enable_moe_block
    "gemma4_text": "hidden_act moe_intermediate_size num_experts top_k_experts use_double_wide_mlp",
    "gemma4_unified": "use_double_wide_mlp",  # without num_kv_shared_layers
    "gemma4_unified_text": "use_double_wide_mlp",
    "glm4_moe": "num_local_experts",
    "gpt2": """head_dim hidden_size max_position_embeddings num_attention_heads num_hidden_layers summary_activation
    summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type summary_use_proj""",
    "granitemoehybrid": """layers_block_type mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state
    mamba_expand mamba_n_groups mamba_n_heads mamba_proj_bias num_experts_per_tok time_step_limit""",  # without Mamba
    "hunyuan_v1_dense": "eod_token_id",
    "lfm2": "tie_word_embeddings",
    "minicpm3": "logits_scaling",  # a property
    "muse_glimmer": "hidden_act layer_norm_eps",
    "olmoe": "num_local_experts",
    "qwen2_moe": "max_window_layers",  # without use_sliding_window
    "qwen2_vl": "max_window_layers",
    "qwen3_5_moe": "intermediate_size",
    "qwen3_5_moe_text": "intermediate_size",
    "stablelm": "partial_rotary_factor",
}
"""Of single families: with why they change nothing."""
NEEDED = {"dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}}
"""What a config.json must have that its class leaves out."""


class Unread:
    """A value that no reader takes for one of its own."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


def reading(raw: dict[str, Any], **changed: Any) -> object:
    """What is read of a config with other keys of its text model, or why it is refused."""
    text = {"text_config": raw["text_config"] | changed} if "text_config" in raw else changed
    try:
        return read_checked(FAMILIES[raw["model_type"]], raw | text)
    except CheckpointError as error:
        return str(error)


def keys_in(files: Iterable[Path]) -> set[str]:
    form = re.compile(r"\bconfig\.([a-z_][a-z_0-9]*)|getattr\(\w*\.?\w*config, \"([a-z_0-9]+)\"")
    return {one or other for file in files for one, other in form.findall(file.read_text(encoding="utf-8"))}


def test_each_key_that_acts_in_transformers_is_read_or_refused():
    """Those of its config classes, and those that its source of the family, or of all families, looks at."""
    root, left = Path(transformers.__file__).parent, {}
    names = ("modeling_utils", "masking_utils", "modeling_rope_utils", "cache_utils", "integrations/sdpa_attention")
    everywhere = keys_in(root / f"{name}.py" for name in names)
    known = {key for keys in (NO_KEYS, HARMLESS, ELSEWHERE, TOWERS) for key in keys.split()}
    for kind in FAMILIES.keys() - {"attend"}:
        raws = [raw for raw in PUBLISHED.values() if raw["model_type"] == kind]
        raws = raws or [json.loads(AutoConfig.for_model(kind).to_json_string(use_diff=False)) | NEEDED.get(kind, {})]
        text = AutoConfig.for_model(**raws[0]).get_text_config()
        acts = everywhere | keys_in(Path(inspect.getfile(type(text))).parent.glob("modeling_*.py"))
        acts |= {field.name for field in dataclasses.fields(text)}
        for raw in raws:
            usual = reading(raw)
            acts = {key for key in acts - known if reading(raw, **{key: Unread()}) == usual}
        excused = {*EXCUSED.get(kind, "").split(), *(OUTSIDE.split() if "text_config" in raws[0] else ())}
        left[kind] = sorted(acts - excused)
    assert {kind: keys for kind, keys in left.items() if keys} == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("is_causal", False),
        ("is_encoder_decoder", True),
        ("use_bidirectional_attention", True),
        ("per_layer_config", {"0": {"sliding_window": 4}}),
        ("layer_types", ["chunked_attention"] * 62),
    ],
)
def test_a_key_that_acts_in_every_family_is_refused_by_its_name(key, value):
    for name, raw in PUBLISHED.items():
        assert key in str(reading(raw, **{key: value})), name
        if "text_config" in raw and key.startswith(("is_", "use_")):
            assert key in str(reading({**raw, key: value})), name


def test_sliding_layers_are_refused_where_a_family_has_none_and_a_window_alone_is_told(caplog):
    caplog.set_level("INFO")
    windowed = LLAMA2 | {"sliding_window": 1000}
    assert reading(windowed) == reading(LLAMA2)
    assert "sliding_window = 1000, which model_type 'llama' does not use: ignored" in caplog.text
    assert "layer_types name sliding_attention" in str(reading(windowed | {"layer_types": ["sliding_attention"] * 32}))
    assert reading(windowed | {"layer_types": ["full_attention"] * 32}) == reading(LLAMA2)


@pytest.mark.parametrize(
    ("scaling", "most", "usual", "window"),
    [
        ({"rope_type": "dynamic", "factor": 3.0}, 3 * 32768, 32768, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 4 * 32768, 32768, 32768),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16384}, 32768, 32768, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 32768, 32768, 32768),
        ({"rope_type": "linear", "factor": 4.0}, 32768, 32768, None),
    ],
)
def test_a_context_may_grow_as_far_as_its_scaling_and_windows_hold_there(scaling, most, usual, window):
    """As Qwen has YaRN switched on: `max_position_embeddings` stays, and so does the context where nobody asks for one."""
    ours = reading(MISTRAL | {"sliding_window": 32768, "rope_scaling": scaling})
    assert (ours.max_positions, ours.default_context, ours.sliding_window) == (most, usual, window)


WINDOWED = """cohere2 dots1 exaone4 exaone_moe gemma2 gemma3_text gemma4_text gemma4_unified_text gpt_oss granite_swa lfm3
ministral olmo3 qwen2 qwen2_moe qwen3 vaultgemma"""


def test_the_layers_that_have_a_window_where_nobody_names_them_are_those_of_transformers():
    for kind in WINDOWED.split():
        asked = {"num_hidden_layers": 9, "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 5}
        theirs = AutoConfig.for_model(kind, **asked)
        raw = json.loads(theirs.to_json_string(use_diff=False)) | NEEDED.get(kind, {})
        found = reading({key: value for key, value in raw.items() if key not in ("layer_types", "per_layer_config")})
        ours = ["sliding_attention" if found.slides(layer) else "full_attention" for layer in range(9)]
        wanted = [kind if kind == "sliding_attention" else "full_attention" for kind in theirs.layer_types]
        assert ours == wanted, kind
