"""Every family in shapes that nobody published: odd sizes, one key head, biases, patterns of layers, every kind of rope."""

import random
from typing import Any

import pytest
import torch

from attend.model.net.checkpoint import load
from attend.model.train.loss import hidden_states
from tests.model.checkpoints import VOCAB, shaped, spread, their_logits, their_model

LLAMA_ROPES = ("Gemma", "Gemma2", "Granite", "Llama", "Olmo2", "Qwen3", "SmolLM3")
FAMILIES = (*LLAMA_ROPES, "Gemma3Text", "Gemma4Text", "Gemma4UnifiedText", "Glm4", "Olmo3", "Phi3", "Qwen3_5Text")
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
        "hidden_size": heads * size if family == "Phi3" else dice.choice([24, 32, heads * size]),
        "intermediate_size": dice.choice([20, 33]),
        "tie_word_embeddings": dice.random() < 0.5,
        "rms_norm_eps": dice.choice([1e-6, 1e-3]),
    }
    for key in ("attention_bias", "mlp_bias"):
        keys[key] = dice.random() < 0.5
    keys |= OWN.get(family, lambda dice, layers: {})(dice, layers)
    if family in LLAMA_ROPES and dice.random() < 0.6:
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


def _granite(dice: random.Random, layers: int) -> dict[str, Any]:
    return {
        "embedding_multiplier": dice.choice([1.0, 12.0]),
        "logits_scaling": dice.choice([1.0, 8.0]),
        "residual_multiplier": dice.choice([1.0, 0.22]),
        "attention_multiplier": dice.choice([1.0, 0.0156]),
    }


OWN = {
    "Gemma2": _gemma2,
    "Gemma3Text": _gemma3,
    "Gemma4Text": _gemma4,
    "Gemma4UnifiedText": _gemma4_unified,
    "Granite": _granite,
    "Olmo3": lambda dice, layers: _sliding(dice, layers) | _two_ropes(dice),
    "Phi3": _phi3,
    "Qwen3_5Text": _qwen3_5,
    "SmolLM3": _smollm3,
}


@pytest.mark.parametrize("roll", range(ROLLS))
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers_whatever_the_shape(tmp_path, family, roll):
    torch.manual_seed(roll)
    theirs = shaped(family, **rolled(family, random.Random(f"{family} {roll}")))
    spread(theirs)
    theirs.save_pretrained(tmp_path)
    expected = their_logits(their_model(tmp_path), TOKENS)
    net = load(tmp_path, torch.float32, "cpu")
    ours = net.logits(hidden_states(net, torch.tensor([TOKENS])))
    assert (ours - expected).abs().max() <= 2e-4 * expected.abs().max()
