"""GGUF metadata of DeepSeek-V2, V3 and GLM-4.7-Flash, which llama.cpp calls one architecture."""

from attend.model.gguf.common import shared_experts
from attend.model.gguf.keys import Keys, Raw

FLASH = (47, 154880)
"""Layers and vocabulary of GLM-4.7-Flash: llama.cpp knows its sigmoid by them where no key says it."""
SOFTMAX, SIGMOID = 1, 2


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
