"""Tiny random checkpoints, written by `transformers` itself, and the tiny configs and tokenizers beside them."""

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor, nn

from attend.model.config import ModelConfig
from attend.model.net.transformer import Decoder
from attend.model.text.tokenizer import Tokenizer
from attend.model.train.corpus import train_tokenizer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)  # on tensors this small a second thread only waits: six times slower on a busy machine

VOCAB = 96
POSITIONS = 128

_LLAMA_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _llama(**more: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA_SHAPE | more))


def _qwen2(**more: Any) -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_LLAMA_SHAPE | more))


def _qwen3(**more: Any) -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_LLAMA_SHAPE | more))


def _gpt2(**more: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2_SHAPE | more))


def shaped(family: str, **more: Any) -> nn.Module:
    """A model of a family whose config has the same keys as Llama's."""
    config = getattr(transformers, f"{family}Config")(**_LLAMA_SHAPE | {"num_hidden_layers": 4, "pad_token_id": 0} | more)
    return getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)


_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [1.5, 2.5, 5.0, 9.0],
    "original_max_position_embeddings": 32,
}
_WINDOW: dict[str, Any] = {"sliding_window": 7, "query_pre_attn_scalar": 11}

_QWEN_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}

_ROUTED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 1}
_ROUTED |= {"routed_scaling_factor": 1.7}
_ERNIE: dict[str, Any] = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 20}
_EXAONE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "sliding_window": 7}
_GRANITE: dict[str, Any] = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4}
_GRANITE |= {"attention_multiplier": 0.2}
_GRANITE_MOE: dict[str, Any] = {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 3}
_GRANITE_4: dict[str, Any] = {**_GRANITE_MOE, "layer_types": ["full_attention"] * 4, "mamba_n_heads": 8}

_GPT_OSS: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 7, "head_dim": 16}
_GPT_OSS |= {"rope_parameters": _YARN | {"truncate": False}}

_DELTA: dict[str, Any] = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
_ODD_DELTA: dict[str, Any] = {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2}
_ODD_DELTA |= {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3}
_ODD_DELTA |= {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1}


_CONVS: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 8}
_CONV_EXPERTS: dict[str, Any] = {"layer_types": _CONVS["layer_types"], "num_experts": 8, "num_experts_per_tok": 3}
_CONV_EXPERTS |= {"moe_intermediate_size": 20}
_HYBRID: dict[str, Any] = {"rms_norm_eps": 1e-3, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_HYBRID |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}


def _with_images(family: str, **more: Any) -> nn.Module:
    """A text model beside one of images."""
    config, text = (getattr(transformers, f"{family}{kind}Config") for kind in ("", "Text"))
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 2}
    shape = _LLAMA_SHAPE | {"num_hidden_layers": 4, "pad_token_id": 0} | more
    model = getattr(transformers, f"{family}ForConditionalGeneration")
    return model(config(text_config=text(**shape).to_dict(), vision_config=eyes | {"num_position_embeddings": 4}))


LATENT: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6}
LATENT |= {"qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 5}
DEEPSEEK: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4}
DEEPSEEK |= {"topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
_UNSCALED: dict[str, Any] = {"scale_emb": 1, "scale_depth": None, "dim_model_base": None}
_PADLESS = {"pad_token_id": None}  # `transformers` loads this token's vector as zeros
_MSCALE = _YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}


def _beside(family: str, vision: dict[str, Any], inner: str | None = None, tied: bool = False, **more: Any) -> nn.Module:
    """The same, of a family whose model of images has another config; `inner`: the family of its text model."""
    config = getattr(transformers, f"{family}Config")
    text = getattr(transformers, f"{inner or f'{family}Text'}Config")
    shape = _LLAMA_SHAPE | {"num_hidden_layers": 4, "pad_token_id": 0} | more
    model = getattr(transformers, f"{family}ForConditionalGeneration")
    beside = {"mm_tokens_per_image": 4, "out_hidden_size": 64, "projector_hidden_size": 16, "tie_word_embeddings": tied}
    return model(config(text_config=text(**shape).to_dict(), vision_config=vision, **beside))


_EYES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_EYES |= {"image_size": 28, "patch_size": 14}
_QWEN_EYES = {"depth": 1, "hidden_size": 16, "embed_dim": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
_QWEN_EYES |= {"patch_size": 2}
_MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}
_BETA = {"llama_4_scaling_beta": 0.7}
_HUNYUAN_ROPE = {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 50.0, "factor": 1.0}

_GEMMA4: dict[str, Any] = {"global_head_dim": 16, "sliding_window": 7, "hidden_size_per_layer_input": 0}
_GEMMA4 |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 5.0}
_GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
_GEMMA4_SHARED: dict[str, Any] = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "vocab_size_per_layer_input": VOCAB}
_GEMMA4_SHARED |= {"hidden_size_per_layer_input": 16, "num_hidden_layers": 6}
_GEMMA4_SHARED |= {"layer_types": ["sliding_attention", "full_attention"] * 3}
_GEMMA4_EXPERTS: dict[str, Any] = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 20}
_ODD_GEMMA4: dict[str, Any] = _GEMMA4_SHARED | _GEMMA4_EXPERTS | {"attention_k_eq_v": False, "attention_bias": True}
_ODD_GEMMA4 |= {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12, "global_head_dim": 10}
_ODD_GEMMA4 |= {"num_hidden_layers": 5, "num_kv_shared_layers": 3, "tie_word_embeddings": False, "hidden_activation": "silu"}
_ODD_GEMMA4 |= {"vocab_size_per_layer_input": VOCAB + 3, "final_logit_softcapping": None}
_ODD_GEMMA4 |= {"layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention", "sliding_attention"]}


def _gemma4(family: str, **more: Any) -> nn.Module:
    """A text model beside one of images and one of sound."""
    config, text = (getattr(transformers, f"{family}{kind}Config") for kind in ("", "Text"))
    shape = _LLAMA_SHAPE | {"num_hidden_layers": 4, "pad_token_id": 0} | more
    eyes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    eyes |= {"num_key_value_heads": 2, "patch_size": 2, "position_embedding_size": 16, "mm_embed_dim": 16, "mm_posemb_size": 4}
    ears = {"audio_embed_dim": 8} if "Unified" in family else None
    model = getattr(transformers, f"{family}ForConditionalGeneration")
    return model(config(text_config=text(**shape).to_dict(), vision_config=eyes, audio_config=ears))


_OTHER_LAYERS = ["full_attention", "sliding_attention", "full_attention", "full_attention"]

KINDS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _llama(tie_word_embeddings=False),
    "llama-tied": lambda: _llama(tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "llama-biased": lambda: _llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "llama3-rope": lambda: _llama(rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=False),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**_LLAMA_SHAPE, sliding_window=None)),
    "qwen2": lambda: _qwen2(tie_word_embeddings=False),
    "qwen2-tied": lambda: _qwen2(tie_word_embeddings=True),
    "qwen3": lambda: _qwen3(tie_word_embeddings=False),
    "qwen3-tied": lambda: _qwen3(tie_word_embeddings=True, num_key_value_heads=4),
    "llama-yarn": lambda: _llama(rope_parameters={**_YARN}, tie_word_embeddings=False),
    "llama-linear": lambda: _llama(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}),
    "llama-dynamic": lambda: _llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}),
    "llama-half-biased": lambda: _llama(attention_bias=True, tie_word_embeddings=False),
    "gemma": lambda: shaped("Gemma"),
    "gemma2": lambda: shaped("Gemma2", **_WINDOW),
    "gemma2-uncapped": lambda: shaped("Gemma2", **_WINDOW, attn_logit_softcapping=None, final_logit_softcapping=3.0),
    "gemma3_text": lambda: shaped("Gemma3Text", **_WINDOW, sliding_window_pattern=3),
    "gemma4_text": lambda: shaped("Gemma4Text", **_GEMMA4),
    "gemma4_text-shared": lambda: shaped("Gemma4Text", **_GEMMA4 | _GEMMA4_SHARED),
    "gemma4_text-experts": lambda: shaped("Gemma4Text", **_GEMMA4 | _GEMMA4_EXPERTS),
    "gemma4_text-strange": lambda: shaped("Gemma4Text", **_GEMMA4 | _ODD_GEMMA4),
    "gemma4": lambda: _gemma4("Gemma4", **_GEMMA4 | _GEMMA4_SHARED),
    "gemma4_unified": lambda: _gemma4("Gemma4Unified", **_GEMMA4),
    "gemma4_unified_text": lambda: shaped("Gemma4UnifiedText", **_GEMMA4, tie_word_embeddings=False),
    "glm4": lambda: shaped("Glm4", tie_word_embeddings=False, head_dim=16),
    "glm4_moe": lambda: shaped("Glm4Moe", **_ROUTED, head_dim=16, n_group=4, topk_group=2, use_qk_norm=True),
    "glm4_moe-plain": lambda: shaped(
        "Glm4Moe",
        **_ROUTED | {"n_shared_experts": 2},
        head_dim=8,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        attention_bias=True,
    ),
    "dots1": lambda: shaped("Dots1", **_ROUTED, first_k_dense_replace=1, sliding_window=7, max_window_layers=2),
    "exaone_moe": lambda: shaped("ExaoneMoe", **_EXAONE),
    "exaone_moe-groups": lambda: shaped(
        "ExaoneMoe",
        **_EXAONE,
        layer_types=_OTHER_LAYERS,
        mlp_layer_types=["sparse", "dense", "dense", "sparse"],
        n_group=2,
        topk_group=1,
    ),
    "ernie4_5_moe": lambda: shaped("Ernie4_5_Moe", **_ERNIE),
    "ernie4_5_moe-odd": lambda: shaped(
        "Ernie4_5_Moe",
        **_ERNIE,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        moe_layer_interval=2,
        moe_norm_min=0.4,
        tie_word_embeddings=False,
    ),
    "minimax_m2": lambda: shaped("MiniMaxM2", num_local_experts=6, num_experts_per_tok=3, rotary_dim=4),
    "olmoe": lambda: shaped("Olmoe", num_experts=6, num_experts_per_tok=3),
    "olmoe-chosen": lambda: shaped("Olmoe", num_experts=6, num_experts_per_tok=3, norm_topk_prob=True, attention_bias=True),
    "granite": lambda: shaped("Granite", **_GRANITE),
    "granitemoe": lambda: shaped("GraniteMoe", **_GRANITE_MOE),
    "granitemoeshared": lambda: shaped("GraniteMoeShared", **_GRANITE_MOE, shared_intermediate_size=20),
    "granitemoehybrid": lambda: shaped(
        "GraniteMoeHybrid", **_GRANITE_4, shared_intermediate_size=20, position_embedding_type="rope"
    ),
    "granitemoehybrid-dense": lambda: shaped(
        "GraniteMoeHybrid", **_GRANITE_4 | {"num_local_experts": 0}, shared_intermediate_size=20
    ),
    "olmo2": lambda: shaped("Olmo2"),
    "olmo3": lambda: shaped("Olmo3", sliding_window=7),
    "phi3": lambda: shaped("Phi3"),
    "phi3-long": lambda: shaped("Phi3", rope_parameters=_LONG, original_max_position_embeddings=32),
    "phi3-partial": lambda: shaped("Phi3", head_dim=8, rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5}),
    "smollm3": lambda: shaped("SmolLM3", tie_word_embeddings=False),
    "mixtral": lambda: shaped("Mixtral", num_local_experts=5, rope_parameters={"rope_theta": 500.0}),
    "mixtral-sliding": lambda: shaped("Mixtral", num_local_experts=4, num_experts_per_tok=3, sliding_window=7),
    "qwen3_moe": lambda: shaped("Qwen3Moe", **_QWEN_EXPERTS, norm_topk_prob=True),
    "qwen3_moe-mixed": lambda: shaped("Qwen3Moe", **_QWEN_EXPERTS, decoder_sparse_step=2, mlp_only_layers=[3]),
    "qwen3_moe-sliding": lambda: shaped("Qwen3Moe", **_QWEN_EXPERTS, use_sliding_window=True, sliding_window=9),
    "qwen2_moe": lambda: shaped("Qwen2Moe", **_QWEN_EXPERTS, shared_expert_intermediate_size=20),
    "qwen2_moe-chosen": lambda: shaped(
        "Qwen2Moe", **_QWEN_EXPERTS, shared_expert_intermediate_size=20, qkv_bias=False, norm_topk_prob=True
    ),
    "gpt_neox": lambda: shaped("GPTNeoX"),
    "gpt_neox-tied": lambda: shaped("GPTNeoX", tie_word_embeddings=True, rope_parameters={**_YARN}),
    "gpt_neox-in-turn": lambda: shaped("GPTNeoX", use_parallel_residual=False, attention_bias=False, hidden_act="relu"),
    "cohere2": lambda: shaped("Cohere2", sliding_window=7, logit_scale=3.0),
    "cohere2-biased": lambda: shaped(
        "Cohere2", sliding_window=7, attention_bias=True, layer_types=_OTHER_LAYERS, logit_scale=2.5
    ),
    "starcoder2": lambda: shaped("Starcoder2", sliding_window=7),
    "starcoder2-plain": lambda: shaped("Starcoder2", use_bias=False, hidden_act="gelu", tie_word_embeddings=False),
    "gpt_oss": lambda: shaped("GptOss", **_GPT_OSS),
    "gpt_oss-tight": lambda: shaped("GptOss", **_GPT_OSS, swiglu_limit=0.9, swiglu_alpha=1.2, attention_bias=False),
    "qwen3_5": lambda: _with_images("Qwen3_5", **_DELTA),
    "qwen3_5_text": lambda: shaped("Qwen3_5Text", **_DELTA),
    "qwen3_5_text-odd": lambda: shaped("Qwen3_5Text", **_DELTA | _ODD_DELTA),
    "qwen3_5_moe": lambda: _with_images("Qwen3_5Moe", **_DELTA, **_QWEN_EXPERTS, shared_expert_intermediate_size=20),
    "qwen3_5_moe_text": lambda: shaped("Qwen3_5MoeText", **_DELTA, **_QWEN_EXPERTS, shared_expert_intermediate_size=12),
    "qwen3_next": lambda: shaped(
        "Qwen3Next", **_DELTA, **_QWEN_EXPERTS, shared_expert_intermediate_size=20, mlp_only_layers=[1]
    ),
    "lfm2": lambda: shaped("Lfm2", **_CONVS),
    "lfm2-biased": lambda: shaped(
        "Lfm2",
        head_dim=12,
        num_hidden_layers=3,
        full_attn_idxs=[1],
        conv_bias=True,
        conv_L_cache=5,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
        num_key_value_heads=1,
        rope_parameters={**_YARN},
    ),
    "lfm2_moe": lambda: shaped("Lfm2Moe", **_CONV_EXPERTS, num_dense_layers=1, routed_scaling_factor=1.0),
    "lfm2_moe-plain": lambda: shaped(
        "Lfm2Moe",
        **_CONV_EXPERTS,
        num_dense_layers=0,
        use_expert_bias=False,
        norm_topk_prob=False,
        routed_scaling_factor=1.7,
        conv_bias=True,
        tie_word_embeddings=False,
    ),
    "lfm3": lambda: shaped("Lfm3", sliding_window=7, num_hidden_layers=6),
    "lfm3-plain": lambda: shaped(
        "Lfm3",
        layer_types=["sliding_attention", "conv", "sliding_attention", "full_attention"],
        sliding_window=5,
        use_sandwich_norm=False,
        use_attention_gate=False,
        attention_bias=True,
        conv_bias=True,
        conv_L_cache=3,
        tie_word_embeddings=False,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
            "full_attention": {**_YARN},
        },
    ),
    "olmo_hybrid": lambda: shaped("OlmoHybrid", **_HYBRID, rope_parameters={"rope_type": "default", "rope_theta": None}),
    "olmo_hybrid-rotated": lambda: shaped(
        "OlmoHybrid",
        **_HYBRID | _ODD_DELTA,
        linear_allow_neg_eigval=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "minicpm3-long": lambda: shaped("MiniCPM3", **LATENT, scale_emb=3.0, rope_parameters=_LONG, tie_word_embeddings=False),
    "minicpm3": lambda: shaped(
        "MiniCPM3", **LATENT | _UNSCALED | {"q_lora_rank": None, "v_head_dim": None}, attention_bias=True, mlp_bias=True
    ),
    "deepseek_v2": lambda: shaped("DeepseekV2", **LATENT | {"q_lora_rank": None}, **DEEPSEEK, attention_bias=True),
    "deepseek_v2-groups": lambda: shaped(
        "DeepseekV2", **LATENT, **DEEPSEEK, topk_method="group_limited_greedy", rope_parameters=_MSCALE
    ),
    "deepseek_v3": lambda: shaped("DeepseekV3", **LATENT, **DEEPSEEK, rope_parameters=_MSCALE),
    "deepseek_v3-halves": lambda: shaped(
        "DeepseekV3", **LATENT, **DEEPSEEK, rope_interleave=False, norm_topk_prob=False, attention_bias=True
    ),
    "glm4_moe_lite": lambda: shaped("Glm4MoeLite", **LATENT, **DEEPSEEK | {"n_group": 1, "topk_group": 1}),
    "glm4_moe_lite-some": lambda: shaped(
        "Glm4MoeLite", **LATENT, **DEEPSEEK, mlp_layer_types=["sparse", "dense", "dense", "sparse"], tie_word_embeddings=True
    ),
    "youtu": lambda: shaped("Youtu", **LATENT, **_PADLESS, attention_bias=True, rope_parameters=_MSCALE),
    "youtu-halves": lambda: shaped("Youtu", **LATENT | _PADLESS | {"q_lora_rank": None}, rope_interleave=False),
    "seed_oss": lambda: shaped("SeedOss"),
    "ernie4_5": lambda: shaped("Ernie4_5", use_bias=True, tie_word_embeddings=False),
    "helium": lambda: shaped("Helium", attention_bias=True, mlp_bias=True),
    "exaone4": lambda: shaped("Exaone4", sliding_window=7),
    "exaone4-whole": lambda: shaped("Exaone4", sliding_window=None, layer_types=["full_attention"] * 4),
    "arcee": lambda: shaped("Arcee", mlp_bias=True),
    "hunyuan_v1_dense": lambda: shaped("HunYuanDenseV1", attention_bias=True),
    "hunyuan_v1_dense-alpha": lambda: shaped("HunYuanDenseV1", rope_parameters=_HUNYUAN_ROPE, tie_word_embeddings=True),
    "granite_swa": lambda: shaped(
        "GraniteSWA", sliding_window=7, layer_rope_theta=[0, 500.0, 1e4, 500.0], residual_multiplier=0.4, logits_scaling=2.0
    ),
    "ministral": lambda: shaped("Ministral", sliding_window=7, layer_types=_OTHER_LAYERS),
    "ministral3": lambda: shaped("Ministral3", rope_parameters=_YARN | _BETA | {"original_max_position_embeddings": 9}),
    "cohere": lambda: shaped("Cohere", logit_scale=3.0),
    "glm": lambda: shaped("Glm", head_dim=16),
    "stablelm": lambda: shaped("StableLm", use_qkv_bias=True),
    "stablelm-parallel": lambda: shaped("StableLm", use_parallel_residual=True),
    "vaultgemma": lambda: shaped("VaultGemma", **_WINDOW),
    "olmo": lambda: shaped("Olmo", attention_bias=True),
    "nanochat": lambda: shaped("NanoChat"),
    "nanochat-yarn": lambda: shaped("NanoChat", rope_parameters={**_YARN}, attention_bias=True),
    "nemotron": lambda: shaped("Nemotron", head_dim=16, mlp_bias=True, num_hidden_layers=2),
    "gemma3": lambda: _beside("Gemma3", _EYES | {"model_type": "siglip_vision_model"}, tied=True, **_WINDOW),
    "gemma3-capped": lambda: _beside(
        "Gemma3", _EYES | {"model_type": "siglip_vision_model"}, **_WINDOW, final_logit_softcapping=3.0
    ),
    "mistral3": lambda: _beside("Mistral3", _EYES | {"model_type": "pixtral"}, "Mistral", sliding_window=7),
    "mistral3-scaled": lambda: _beside(
        "Mistral3", _EYES | {"model_type": "pixtral"}, "Ministral3", tied=True, rope_parameters=_YARN | _BETA
    ),
    "qwen2_vl": lambda: _beside("Qwen2VL", _QWEN_EYES, rope_parameters=_MROPE),
    "qwen2_5_vl": lambda: _beside("Qwen2_5_VL", _QWEN_EYES, tied=True, rope_parameters=_MROPE),
    "qwen3_vl": lambda: _beside("Qwen3VL", _QWEN_EYES | {"deepstack_visual_indexes": [0]}, rope_parameters=_MROPE),
    "qwen3_vl_moe": lambda: _beside(
        "Qwen3VLMoe",
        _QWEN_EYES | {"deepstack_visual_indexes": [0]},
        rope_parameters=_MROPE,
        **_QWEN_EXPERTS,
        mlp_only_layers=[1],
    ),
    "qwen3_vl_moe-everywhere": lambda: _beside("Qwen3VLMoe", _QWEN_EYES | {"deepstack_visual_indexes": [0]}, **_QWEN_EXPERTS),
    "muse_glimmer": lambda: _beside("MuseGlimmer", _EYES, sliding_window=7, output_multiplier=2.0),
    "gpt2": lambda: _gpt2(),
    "gpt2-untied": lambda: _gpt2(tie_word_embeddings=False, activation_function="relu"),
}
"""Each kind of checkpoint that must be served, with the model of `transformers` that defines it."""


TORCH_ALONE = frozenset(kind for kind in KINDS if kind.startswith(("deepseek", "glm4_moe_lite", "minicpm3", "youtu")))
"""Those that neither the native decoder nor Triton's computes."""

SEEDS = {"lfm2_moe": 9}
"""Kinds whose usual draw has a router that decides within the noise of float32 (`test_experts.py`), with another seed."""

_WRITTEN = tempfile.TemporaryDirectory(prefix="attend-checkpoints-")
"""What this process has had written by `transformers`; removed at its end."""


@cache
def _written(kind: str) -> Path:
    """The folder of a kind, written at its first use."""
    folder = Path(_WRITTEN.name) / kind
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEEDS.get(kind, len(kind)))
        net = KINDS[kind]()
        spread(net)
    net.save_pretrained(folder)
    return folder


def write_checkpoint(kind: str, folder: Path) -> Path:
    """A checkpoint folder of `kind`, float32, its weights spread so that logits are far from flat; the caller may change it."""
    shutil.copytree(_written(kind), folder, dirs_exist_ok=True)
    return folder


def their_model(folder: Path, **options: Any) -> nn.Module:
    """What `transformers` makes of a folder."""
    [name] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, **options).eval()


@torch.no_grad()
def their_logits(theirs: nn.Module, tokens: list[int]) -> Tensor:
    """The logits [T, V] of `transformers` for one text."""
    return theirs(torch.tensor([tokens])).logits[0]


@torch.no_grad()
def spread(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        if name.endswith("A_log"):  # a state that fades at once leaves outputs near 0, which the norm of a head blows up
            parameter.uniform_(-4.0, 0.0)
        elif parameter.dim() > 1:
            parameter.normal_(0.0, 0.3)
        else:  # gains near 1, biases far from 0: none may be forgotten unseen
            parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))
    for name, buffer in net.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.uniform_(-0.4, 0.4)
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.6, 1.4)


def tiny_config(**switches: Any) -> ModelConfig:
    """A config of a few thousand weights, with the given fields changed."""
    values: dict[str, Any] = {
        "family": "attend",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "mlp_size": 48,
        "max_positions": POSITIONS,
    }
    return ModelConfig(**values | switches)


def tiny_decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    """A decoder with weights spread like those of the checkpoints."""
    torch.manual_seed(seed)
    net = Decoder(config)
    torch.empty(config.vocab_size, config.hidden_size).normal_()  # the tests' seeds were chosen while an embedding drew this
    if config.positions == "learned":
        torch.empty(config.max_positions, config.hidden_size).normal_()
    spread(net)
    return net.eval()


def edit_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    """Change keys of a JSON file of the folder; a value of ... removes its key."""
    path = folder / name
    document = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}), encoding="utf-8")


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Change tensors of model.safetensors; a value of ... removes its tensor, `__` in a key stands for a dot."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {key.replace("__", "."): value for key, value in changes.items()}
    save_file({key: value for key, value in tensors.items() if value is not ...}, path, metadata={"format": "pt"})


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with merges inside words, inside emoji, and one special token."""
    texts = [
        "the cat sat on the mat, then sat there. ",
        "naïve café, 日本語, 😀😁🚀👩‍👩‍👧 ",
        "def attend(q, k, v):\n    return v\n",
    ]
    return train_tokenizer(texts * 4, 320)


def write_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json to a folder, made if absent."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer().raw.save(str(folder / "tokenizer.json"))
    return folder


def write_letters(folder: Path) -> Path:
    """Write a tokenizer.json of VOCAB tokens to a folder: each printable character, and <|endoftext|>."""
    raw = RawTokenizer(models.BPE({chr(code): i for i, code in enumerate(range(32, 127))}, []))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(["<|endoftext|>"])
    assert raw.get_vocab_size() == VOCAB
    raw.save(str(folder / "tokenizer.json"))
    return folder
