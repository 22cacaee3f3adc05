"""Every family in shapes that nobody published: odd sizes, one key head, biases, patterns of layers, every kind of rope."""

import random
from typing import Any

import pytest
import torch

from attend.model.net.checkpoint import load_decoder
from attend.model.train.loss import hidden_states
from tests.model.checkpoints import VOCAB, shaped, spread, their_logits, their_model

LLAMA_ROPES = ("Gemma", "Gemma2", "Granite", "Llama", "Olmo2", "Qwen3", "SmolLM3", "Arcee", "Cohere", "Ernie4_5", "Exaone4")
LLAMA_ROPES += ("GraniteSWA", "HunYuanDenseV1", "Ministral", "Olmo", "SeedOss", "VaultGemma")
MIXTURES = (
    *("DeepseekV2", "DeepseekV3", "Dots1", "Ernie4_5_Moe", "ExaoneMoe", "Glm4Moe", "Glm4MoeLite"),
    *("GraniteMoe", "GraniteMoeHybrid", "GraniteMoeShared", "MiniMaxM2", "Olmoe"),
)
FAMILIES = (
    *LLAMA_ROPES,
    *("Gemma3Text", "Gemma4Text", "Gemma4UnifiedText", "Glm", "Glm4", "Helium", "Lfm2", "Lfm2Moe", "Lfm3", "MiniCPM3"),
    *("Ministral3", "NanoChat", "Nemotron", "Olmo3", "OlmoHybrid", "Phi3", "Qwen3_5Text", "StableLm", "Youtu"),
    *MIXTURES,
)
EVEN = ("NanoChat", "Phi3", "Helium", "StableLm", "Cohere", "Arcee", "Olmoe")
"""Their width is that of all heads."""
ROLLS = 4
TOKENS = [(7 * place + 3) % VOCAB for place in range(90)]
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear"},
    {"rope_type": "dynamic"},
    {"rope_type": "yarn", "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
]


def rolled(family: str, dice: random.Random) -> dict[str, Any]:
    """Keys of a config, as `transformers` takes them."""
    kv_heads, layers, size = dice.choice([1, 1, 2, 3]), dice.choice([1, 3, 5]), dice.choice([4, 8, 12])
    heads = kv_heads * dice.choice([1, 2, 4])
    keys: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "num_hidden_layers": layers,
        "hidden_size": heads * size if family in EVEN else dice.choice([24, 32, heads * size]),
        "intermediate_size": dice.choice([20, 36 if family in MIXTURES else 33]),
        "tie_word_embeddings": dice.random() < 0.5,
        "rms_norm_eps": dice.choice([1e-6, 1e-3]),
    }
    for key in ("attention_bias", "mlp_bias"):
        keys[key] = dice.random() < 0.5
    keys |= OWN.get(family, lambda dice, layers: {})(dice, layers)
    if family in (*LLAMA_ROPES, *MIXTURES) and dice.random() < 0.6:
        scale = {"rope_theta": dice.choice([100.0, 5e5]), "factor": dice.choice([2.0, 8.0])}
        keys["rope_parameters"] = dice.choice(ROPES) | scale
    return keys


def _gemma(dice: random.Random, layers: int) -> dict[str, Any]:
    return _sliding(dice, layers) | {
        "query_pre_attn_scalar": dice.choice([8, 17, 256]),
        "final_logit_softcapping": dice.choice([None, 5.0]),
        "hidden_activation": dice.choice(["silu", "gelu", "gelu_pytorch_tanh"]),
    }


def _gemma2(dice: random.Random, layers: int) -> dict[str, Any]:
    return _gemma(dice, layers) | {"attn_logit_softcapping": dice.choice([None, 2.0, 50.0])}


def _gemma3(dice: random.Random, layers: int) -> dict[str, Any]:
    return _gemma(dice, layers) | {"sliding_window_pattern": dice.choice([2, 6])} | _two_ropes(dice)


def _gemma4_unified(dice: random.Random, layers: int) -> dict[str, Any]:
    kinds = [dice.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    turning = {"rope_theta": dice.choice([100.0, 1e6])}
    whole = [{"rope_type": "proportional", "partial_rotary_factor": dice.choice([0.25, 0.5, 1.0]), "factor": 2.0}]
    whole += [{"rope_type": "default"}, {"rope_type": "linear", "factor": 3.0}, *ROPES[2:]]
    ropes = [{"factor": 4.0} | dice.choice(whole) | turning, {"factor": 2.0} | dice.choice(whole) | {"rope_theta": 30.0}]
    own = {"layer_types": kinds} if dice.random() < 0.8 else {}
    if dice.random() < 0.7:
        own["rope_parameters"] = dict(zip(("full_attention", "sliding_attention"), ropes, strict=True))
    return own | {
        "sliding_window": dice.choice([1, 3, 9, 200]),
        "global_head_dim": dice.choice([4, 6, 16]),
        "attention_k_eq_v": dice.random() < 0.5,
        "num_global_key_value_heads": dice.choice([None, 1]),
        "final_logit_softcapping": dice.choice([None, 5.0]),
        "hidden_activation": dice.choice(["silu", "gelu", "gelu_pytorch_tanh"]),
    }


def _gemma4(dice: random.Random, layers: int) -> dict[str, Any]:
    own = _gemma4_unified(dice, layers) | {"hidden_size_per_layer_input": 0}
    if dice.random() < 0.7:
        known = {"vocab_size_per_layer_input": dice.choice([VOCAB, VOCAB + 5])}
        own |= known | {"hidden_size_per_layer_input": dice.choice([1, 5, 8])}
    if dice.random() < 0.5:
        experts = {"num_experts": 5, "top_k_experts": dice.choice([1, 2, 5]), "moe_intermediate_size": dice.choice([8, 20])}
        own |= experts | {"enable_moe_block": True}
    if layers == 5 and own["hidden_size_per_layer_input"]:
        kinds = ["sliding_attention", "full_attention", *dice.choices(["full_attention", "sliding_attention"], k=3)]
        own |= {"layer_types": kinds, "num_kv_shared_layers": dice.choice([1, 3]), "use_double_wide_mlp": dice.random() < 0.5}
    return own


def _sliding(dice: random.Random, layers: int) -> dict[str, Any]:
    kinds = [dice.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    return {"sliding_window": dice.choice([1, 3, 9, 200])} | ({"layer_types": kinds} if dice.random() < 0.6 else {})


def _two_ropes(dice: random.Random) -> dict[str, Any]:
    whole = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}
    ropes = {"full_attention": whole, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
    return {"rope_parameters": ropes} if dice.random() < 0.5 else {}


def _phi3(dice: random.Random, layers: int) -> dict[str, Any]:
    return {"sliding_window": dice.choice([None, 4, 300])}


def _smollm3(dice: random.Random, layers: int) -> dict[str, Any]:
    rotates = {"no_rope_layers": [dice.choice([0, 1]) for _ in range(layers)]} if dice.random() < 0.5 else {}
    return {"use_sliding_window": dice.random() < 0.5, "sliding_window": 5, "no_rope_layer_interval": 2} | rotates


def _qwen3_5(dice: random.Random, layers: int) -> dict[str, Any]:
    key_heads, kinds = dice.choice([1, 1, 3]), [dice.choice(["full_attention", "linear_attention"]) for _ in range(layers)]
    kinds[dice.randrange(layers)] = "full_attention"  # without one, the reference computes nothing either
    rope = {"rope_theta": dice.choice([100.0, 1e7]), "partial_rotary_factor": dice.choice([0.5, 1.0])}
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * dice.choice([1, 2, 3]),
        "linear_key_head_dim": dice.choice([3, 8, 16]),
        "linear_value_head_dim": dice.choice([1, 5, 8]),
        "linear_conv_kernel_dim": dice.choice([2, 4, 5]),
        "hidden_act": dice.choice(["silu", "gelu"]),
        "rope_parameters": rope | {"rope_type": "default"},
        "layer_types": kinds,
    }


def _lfm2(dice: random.Random, layers: int) -> dict[str, Any]:
    attending = sorted({dice.randrange(layers), dice.randrange(layers)})
    kinds = ["full_attention" if layer in attending else "conv" for layer in range(layers)]
    return dice.choice([{"layer_types": kinds}, {"full_attn_idxs": attending}]) | {
        "conv_bias": dice.random() < 0.5,
        "conv_L_cache": dice.choice([2, 3, 7]),
        "block_auto_adjust_ff_dim": dice.random() < 0.7,
        "block_ffn_dim_multiplier": dice.choice([1.0, 1.3, 2]),
        "block_multiple_of": dice.choice([1, 7, 16]),
        "norm_eps": dice.choice([1e-5, 1e-3]),
        "rope_parameters": dice.choice([{"rope_type": "default"}, dice.choice(ROPES) | {"rope_theta": 500.0, "factor": 4.0}]),
    }


def _lfm2_moe(dice: random.Random, layers: int) -> dict[str, Any]:
    kinds = [dice.choice(["conv", "full_attention"]) for _ in range(layers)]
    kinds[dice.randrange(layers)] = "full_attention"
    return {
        "layer_types": kinds,
        "conv_bias": dice.random() < 0.5,
        "conv_L_cache": dice.choice([2, 3, 7]),
        "norm_eps": dice.choice([1e-5, 1e-3]),
        "num_dense_layers": dice.choice([0, 1, 2]),
        "num_experts": dice.choice([4, 6]),
        "num_experts_per_tok": dice.choice([1, 3]),
        "moe_intermediate_size": 12,
        "use_expert_bias": dice.random() < 0.5,
        "norm_topk_prob": dice.random() < 0.5,
        "routed_scaling_factor": dice.choice([1.0, 2.5]),
    }


def _lfm3(dice: random.Random, layers: int) -> dict[str, Any]:
    kinds = [dice.choice(["conv", "sliding_attention", "full_attention"]) for _ in range(layers)]
    kinds[dice.randrange(layers)] = dice.choice(["sliding_attention", "full_attention"])
    share = {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": dice.choice([0.25, 0.5, 1.0])}
    whole = dice.choice([share, share | {"factor": 4.0}, dice.choice(ROPES) | {"rope_theta": 500.0, "factor": 4.0}])
    ropes = {"full_attention": whole, "sliding_attention": dice.choice([dict(whole), {"rope_type": "default"}])}
    return {
        "layer_types": kinds,
        "sliding_window": dice.choice([1, 3, 9, 200]),
        "conv_bias": dice.random() < 0.5,
        "norm_eps": dice.choice([1e-5, 1e-3]),
        "use_sandwich_norm": dice.random() < 0.5,
        "use_attention_gate": dice.random() < 0.5,
    } | dice.choice([{}, {"rope_parameters": ropes}])


def _hybrid(dice: random.Random, layers: int) -> dict[str, Any]:
    kinds = [dice.choice(["full_attention", "linear_attention"]) for _ in range(layers + 1)]
    kinds[:2] = dice.sample(["full_attention", "linear_attention"], 2)  # the reference wants both
    sizes = {key: value for key, value in _qwen3_5(dice, layers).items() if key.startswith("linear")}
    said = sizes if dice.random() < 0.6 else {}
    return said | {
        "num_hidden_layers": layers + 1,
        "layer_types": kinds,
        "linear_allow_neg_eigval": dice.random() < 0.5,
        "hidden_act": dice.choice(["silu", "gelu"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": dice.choice([None, 500.0])},
    }


def _granite(dice: random.Random, layers: int) -> dict[str, Any]:
    return {
        "embedding_multiplier": dice.choice([1.0, 12.0]),
        "logits_scaling": dice.choice([1.0, 8.0]),
        "residual_multiplier": dice.choice([1.0, 0.22]),
        "attention_multiplier": dice.choice([1.0, 0.0156]),
    }


def _experts(dice: random.Random, layers: int, groups: int = 1) -> dict[str, Any]:
    count, chosen = groups * dice.choice([2, 3, 5]), dice.choice([1, 2])
    named = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), count)
    return named | {"num_experts_per_tok": chosen, "moe_k": chosen, "moe_intermediate_size": dice.choice([12, 20])}


def _deepseek(dice: random.Random, layers: int) -> dict[str, Any]:
    groups, shared = dice.choice([1, 1, 2, 3]), dice.choice([1, 2])
    return _experts(dice, layers, groups) | {
        "n_group": groups,
        "topk_group": dice.randint(1, groups),
        "n_shared_experts": shared,
        "num_shared_experts": shared,
        "first_k_dense_replace": dice.choice([0, 1, layers]),
        "norm_topk_prob": dice.random() < 0.5,
        "routed_scaling_factor": dice.choice([1.0, 2.5]),
        "use_qk_norm": dice.random() < 0.5,
    }


def _ernie(dice: random.Random, layers: int) -> dict[str, Any]:
    return _experts(dice, layers) | {
        "moe_layer_start_index": dice.choice([0, 1]),
        "moe_layer_end_index": dice.choice([-1, layers - 1, 1]),
        "moe_layer_interval": dice.choice([1, 2]),
        "moe_num_shared_experts": dice.choice([0, 1, 3]),
        "moe_norm_min": dice.choice([1e-12, 0.3]),
    }


def _granite_4(dice: random.Random, layers: int) -> dict[str, Any]:
    rotates = {"position_embedding_type": dice.choice(["rope", "nope", None]), "shared_intermediate_size": dice.choice([8, 20])}
    mamba = {"layer_types": ["attention"] * layers, "mamba_n_heads": 2}
    return (
        _granite(dice, layers)
        | _experts(dice, layers)
        | rotates
        | mamba
        | ({"num_local_experts": 0} if dice.random() < 0.5 else {})
    )


def _latent(dice: random.Random, layers: int) -> dict[str, Any]:
    heads, turned = dice.choice([1, 2, 3, 5]), dice.choice([4, 8, 10])
    scale = {"factor": dice.choice([2.0, 8.0]), "mscale_all_dim": dice.choice([0.0, 0.7, 1.0]), "mscale": 1.0}
    rope = {"rope_theta": dice.choice([100.0, 5e5])} | dice.choice([{"rope_type": "default"}, ROPES[0], ROPES[2] | scale])
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": heads * dice.choice([8, 12]),
        "kv_lora_rank": dice.choice([3, 8, 17]),
        "q_lora_rank": dice.choice([None, 4, 9]),
        "qk_nope_head_dim": dice.choice([1, 5, 8]),
        "qk_rope_head_dim": turned,
        "head_dim": turned,
        "v_head_dim": dice.choice([1, 6, 16]),
        "rope_parameters": {"factor": 2.0} | rope,
    }


def _minicpm3(dice: random.Random, layers: int) -> dict[str, Any]:
    return _latent(dice, layers) | {
        "scale_emb": dice.choice([1, 12]),
        "scale_depth": dice.choice([None, 1.4]),
        "dim_model_base": dice.choice([None, 8]),
    }


def _youtu(dice: random.Random, layers: int) -> dict[str, Any]:
    return _latent(dice, layers) | {"pad_token_id": None, "rope_interleave": dice.random() < 0.5}


def _deepseek_v2(dice: random.Random, layers: int) -> dict[str, Any]:
    method = dice.choice(["greedy", "group_limited_greedy"])
    plain = {"topk_method": method, "norm_topk_prob": False, "mlp_bias": False}
    plain |= {"kv_lora_rank": dice.choice([2, 8, 18]), "qk_nope_head_dim": dice.choice([2, 6])}  # complex numbers there
    return _deepseek(dice, layers) | _latent(dice, layers) | plain


def _deepseek_v3(dice: random.Random, layers: int) -> dict[str, Any]:
    return _deepseek(dice, layers) | _latent(dice, layers) | {"rope_interleave": dice.random() < 0.5}


def _glm_flash(dice: random.Random, layers: int) -> dict[str, Any]:
    named = {"mlp_layer_types": [dice.choice(["dense", "sparse"]) for _ in range(layers)]} if dice.random() < 0.6 else {}
    return _deepseek_v3(dice, layers) | {"first_k_dense_replace": 1} | named


def _granite_swa(dice: random.Random, layers: int) -> dict[str, Any]:
    thetas = [dice.choice([0, 100.0, 5e5]) for _ in range(layers)]
    return _granite(dice, layers) | _sliding(dice, layers) | ({"layer_rope_theta": thetas} if dice.random() < 0.6 else {})


def _exaone4(dice: random.Random, layers: int) -> dict[str, Any]:
    whole = {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    return whole if dice.random() < 0.3 else _sliding(dice, layers) | {"sliding_window_pattern": dice.choice([1, 2, 4])}


def _ministral3(dice: random.Random, layers: int) -> dict[str, Any]:
    rope = {"llama_4_scaling_beta": dice.choice([0.1, 1.5]), "original_max_position_embeddings": dice.choice([7, 64])}
    kinds = [{"rope_type": "default"}, {"rope_type": "yarn", "factor": 8.0}, {"rope_type": "linear", "factor": 2.0}]
    return {"sliding_window": dice.choice([None, 9]), "rope_parameters": rope | {"rope_theta": 500.0} | dice.choice(kinds)}


def _stablelm(dice: random.Random, layers: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": dice.choice([0.5, 1.0])}
    return {"use_qkv_bias": dice.random() < 0.5, "use_parallel_residual": dice.random() < 0.5, "rope_parameters": rope}


OWN = {
    "DeepseekV2": _deepseek_v2,
    "DeepseekV3": _deepseek_v3,
    "Dots1": lambda dice, layers: _deepseek(dice, layers) | _sliding(dice, layers) | {"max_window_layers": 1},
    "Ernie4_5_Moe": _ernie,
    "ExaoneMoe": lambda dice, layers: _deepseek(dice, layers) | _sliding(dice, layers),
    "Glm4Moe": _deepseek,
    "Glm4MoeLite": _glm_flash,
    "GraniteMoe": lambda dice, layers: _granite(dice, layers) | _experts(dice, layers),
    "GraniteMoeHybrid": _granite_4,
    "GraniteMoeShared": lambda dice, layers: (
        _granite(dice, layers) | _experts(dice, layers) | {"shared_intermediate_size": dice.choice([0, 12])}
    ),
    "MiniMaxM2": lambda dice, layers: _experts(dice, layers) | {"rotary_dim": dice.choice([2, 4])},
    "Olmoe": lambda dice, layers: _experts(dice, layers) | {"norm_topk_prob": dice.random() < 0.5},
    "Arcee": lambda dice, layers: {"hidden_act": dice.choice(["relu2", "silu"])},
    "Cohere": lambda dice, layers: {"logit_scale": dice.choice([0.5, 2.0])},
    "Ernie4_5": lambda dice, layers: {"use_bias": dice.random() < 0.5},
    "Exaone4": _exaone4,
    "GraniteSWA": _granite_swa,
    "NanoChat": lambda dice, layers: {"tie_word_embeddings": False},
    "Ministral": _sliding,
    "Ministral3": _ministral3,
    "SeedOss": lambda dice, layers: {"attention_out_bias": dice.random() < 0.5},
    "StableLm": _stablelm,
    "VaultGemma": _gemma2,
    "Gemma2": _gemma2,
    "Gemma3Text": _gemma3,
    "Gemma4Text": _gemma4,
    "Gemma4UnifiedText": _gemma4_unified,
    "Granite": _granite,
    "Lfm2": _lfm2,
    "Lfm2Moe": _lfm2_moe,
    "Lfm3": _lfm3,
    "OlmoHybrid": _hybrid,
    "MiniCPM3": _minicpm3,
    "Olmo3": lambda dice, layers: _sliding(dice, layers) | _two_ropes(dice),
    "Phi3": _phi3,
    "Qwen3_5Text": _qwen3_5,
    "SmolLM3": _smollm3,
    "Youtu": _youtu,
}


@pytest.mark.parametrize("roll", range(ROLLS))
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers_whatever_the_shape(tmp_path, family, roll):
    torch.manual_seed(roll)
    theirs = shaped(family, **rolled(family, random.Random(f"{family} {roll}")))
    spread(theirs)
    theirs.save_pretrained(tmp_path)
    expected = their_logits(their_model(tmp_path), TOKENS)
    net = load_decoder(tmp_path, torch.float32, "cpu")
    ours = net.logits(hidden_states(net, torch.tensor([TOKENS])))
    assert (ours - expected).abs().max() <= 2e-4 * expected.abs().max()
