"""GGUF metadata -> the config.json that the model would have in the Hugging Face layout, for the readers of the families.

Sources: the keys of docs/gguf.md of ggml, and what llama.cpp takes a missing one for. A key of an architecture changes its
arithmetic more often than not: one that is not read here is refused.
"""

from collections.abc import Callable
from typing import Any

from attend.model.gguf.container import Container
from attend.model.gguf.keys import Keys

Raw = dict[str, Any]
FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def read_config(container: Container) -> Raw:
    """The keys of config.json; its `eos_token_id` is left to the vocabulary. Raises CheckpointError."""
    keys = Keys(container)
    if container.metadata.get("general.type", "model") != "model":
        raise keys.wrong(f"it holds no model by itself: its general.type is {container.metadata['general.type']!r}")
    if keys.arch not in ARCHITECTURES:
        raise keys.wrong(f"general.architecture {keys.arch!r} is not read from GGUF; known: {', '.join(ARCHITECTURES)}")
    raw = _common(keys)
    raw |= ARCHITECTURES[keys.arch](keys, raw)
    keys.check_all_read()
    return raw


def _common(keys: Keys) -> Raw:
    """What every architecture has, with the values of Llama where others differ."""
    embedding = keys.container.tensors.get("token_embd.weight")
    if embedding is None:
        raise keys.wrong("tensor token_embd.weight is missing")
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    if hidden % heads and keys.get("attention.key_length") is None:
        raise keys.wrong(f"{keys.arch}.embedding_length {hidden} is not divisible by {heads} heads")
    head = keys.size("attention.key_length", max(1, hidden // heads))
    if (values := keys.size("attention.value_length", head)) != head:
        raise keys.wrong(f"{keys.arch}.attention.value_length {values} differs from key_length {head}: not supported")
    for name, *harmless in (("attention.causal", True), ("pooling_type", *range(5)), ("use_parallel_residual", False)):
        keys.refuse(name, *harmless)
    for name in ("attention.clamp_kqv", "attention.max_alibi_bias"):
        keys.refuse(name, 0, 0.0)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length", keys.get("expert_feed_forward_length")),
        "num_hidden_layers": _layers(keys),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": keys.size("context_length"),
        "tie_word_embeddings": not keys.has("output.weight"),
        **_rope(keys, head),
    }


def _layers(keys: Keys) -> int:
    """Layers without those for multi-token prediction, which are the last ones of a file."""
    count, predicting = keys.size("block_count"), keys.get("nextn_predict_layers") or 0
    if type(predicting) is not int or not 0 <= predicting < count:
        raise keys.wrong(f"{keys.arch}.nextn_predict_layers must be below block_count {count}; got {repr(predicting)[:100]}")
    return count - predicting


def _rope(keys: Keys, head: int) -> Raw:
    """Theta, how many columns turn, and how wavelengths are stretched."""
    raw: Raw = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    rotated = keys.size("rope.dimension_count", head)
    if rotated != head:
        raw["partial_rotary_factor"] = (rotated + 0.5) / head  # times `head` and rounded down it is `rotated` again
    scaling = _scaling(keys)
    if keys.has(FREQUENCIES):
        if scaling is not None:
            raise keys.wrong(f"tensor {FREQUENCIES} beside {keys.arch}.rope.scaling.type is not supported")
        factors = keys.numbers(FREQUENCIES)
        scaling = {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0}
        scaling |= {"short_factor": factors, "long_factor": factors}
        scaling |= {"original_max_position_embeddings": keys.size("context_length")}
    return raw | ({} if scaling is None else {"rope_scaling": scaling})


def _scaling(keys: Keys) -> Raw | None:
    """`rope_scaling`, but for factors that lie in tensors."""
    kind = keys.get("rope.scaling.type")
    linear = keys.number("rope.scale_linear", 1.0)
    factor = keys.number("rope.scaling.factor", linear)
    keys.get("rope.scaling.finetuned")
    original = keys.get("rope.scaling.original_context_length")
    if kind == "yarn":
        keys.refuse("rope.scaling.yarn_ext_factor", 1.0, -1.0)  # below 0 it is not set
        fast, slow = keys.number("rope.scaling.yarn_beta_fast", 32.0), keys.number("rope.scaling.yarn_beta_slow", 1.0)
        raw = {"rope_type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow}
        raw["attn_factor"] = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
        if divisor := keys.number("rope.scaling.yarn_log_multiplier", 0.0):
            raw |= {"mscale": 1.0, "mscale_all_dim": divisor}
        return raw | {"original_max_position_embeddings": original or keys.size("context_length")}
    if kind in (None, "linear"):
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind not in ("none", "longrope"):
        raise keys.wrong(f"{keys.arch}.rope.scaling.type {kind!r} is not supported; known: none, linear, longrope, yarn")
    return None


def _eps(keys: Keys) -> Raw:
    return {"rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon")}


def _experts(keys: Keys, *, renormed: bool) -> Raw:
    """A mixture's sizes; `renormed`: whether the chosen experts' weights are made to sum up to 1."""
    keys.refuse("expert_gating_func", 0, 1)  # softmax
    keys.refuse("expert_weights_scale", 0.0, 1.0)
    keys.refuse("expert_weights_norm", renormed)
    keys.refuse("leading_dense_block_count", 0)
    count, chosen = keys.size("expert_count"), keys.size("expert_used_count")
    return {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": chosen, "norm_topk_prob": renormed}


def _sliding(keys: Keys, raw: Raw, pattern: int, window: int | None = None) -> Raw:
    """A window in all layers but every `pattern`-th, where the file does not name the layers."""
    window = keys.size("attention.sliding_window", window)
    named = keys.layers("attention.sliding_window_pattern")
    if named is None:
        every = keys.size("attention.sliding_window_pattern", pattern)
        named = [(layer + 1) % every != 0 for layer in range(raw["num_hidden_layers"])]
    return {"sliding_window": window, "layer_types": ["sliding_attention" if slides else "full_attention" for slides in named]}


def _llama(keys: Keys, raw: Raw) -> Raw:
    """Llama and Mistral, and Mixtral where there are experts."""
    if keys.get("expert_count"):
        return _eps(keys) | _experts(keys, renormed=True) | {"model_type": "mixtral"}
    keys.refuse("expert_used_count", 0)
    biased = {"attention_bias": keys.has("blk.0.attn_q.bias"), "mlp_bias": keys.has("blk.0.ffn_up.bias")}
    return _eps(keys) | biased | {"model_type": "llama"}


def _granite(keys: Keys, raw: Raw) -> Raw:
    keys.refuse("rope.scaling.finetuned", True)
    keys.refuse("expert_count", 0)
    multipliers = {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale"}
    multipliers |= {"attention_multiplier": "attention.scale"}
    found = {theirs: keys.number(name, 0.0) for theirs, name in multipliers.items()}
    found = {theirs: value for theirs, value in found.items() if value}  # 0 is written for none
    if "attention_multiplier" not in found:
        found["attention_multiplier"] = raw["head_dim"] ** -0.5
    biased = {"attention_bias": keys.has("blk.0.attn_q.bias"), "mlp_bias": keys.has("blk.0.ffn_up.bias")}
    return _eps(keys) | found | biased | {"model_type": "granite", "logits_scaling": keys.number("logit_scale")}


def _smollm3(keys: Keys, raw: Raw) -> Raw:
    return _eps(keys) | {"model_type": "smollm3", "no_rope_layer_interval": 4}


def _qwen2(keys: Keys, raw: Raw) -> Raw:
    return _eps(keys) | {"model_type": "qwen2"}


def _qwen3(keys: Keys, raw: Raw) -> Raw:
    return _eps(keys) | {"model_type": "qwen3", "attention_bias": keys.has("blk.0.attn_q.bias")}


def _qwen2moe(keys: Keys, raw: Raw) -> Raw:
    shared = keys.size("expert_shared_feed_forward_length", raw["intermediate_size"])
    sizes = {"moe_intermediate_size": keys.size("expert_feed_forward_length"), "shared_expert_intermediate_size": shared}
    biased = {"qkv_bias": keys.has("blk.0.attn_q.bias")}
    return _eps(keys) | _experts(keys, renormed=False) | sizes | biased | {"model_type": "qwen2_moe"}


def _qwen3moe(keys: Keys, raw: Raw) -> Raw:
    size = {"moe_intermediate_size": keys.size("expert_feed_forward_length")}
    return _eps(keys) | _experts(keys, renormed=True) | size | {"model_type": "qwen3_moe"}


def _delta(keys: Keys, raw: Raw) -> Raw:
    """Layers of the delta rule among those of attention, and what positions of a text leave of those of images."""
    count, heads, inner = raw["num_hidden_layers"], keys.size("ssm.time_step_rank"), keys.size("ssm.inner_size")
    if inner % heads:
        raise keys.wrong(f"{keys.arch}.ssm.inner_size {inner} is not divisible by ssm.time_step_rank {heads}")
    every, named = keys.size("full_attention_interval", 4), keys.array("attention.recurrent_layers")
    recurrent = [(layer + 1) % every != 0 for layer in range(count)] if named is None else named[:count]
    if any((keys.array("rope.dimension_sections") or [])[3:]):  # positions of a text are the same but for the fourth
        raise keys.wrong(f"{keys.arch}.rope.dimension_sections has a fourth section, which is not supported")
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0),
        "attention_bias": any(keys.has(f"blk.{layer}.attn_q.bias") for layer in range(count)),
    }


def _qwen35(keys: Keys, raw: Raw) -> Raw:
    return _eps(keys) | _delta(keys, raw) | {"model_type": "qwen3_5_text"}


def _shared(keys: Keys, raw: Raw) -> Raw:
    """A mixture with a shared expert beside layers of the delta rule."""
    sizes = {"moe_intermediate_size": keys.size("expert_feed_forward_length")}
    sizes |= {"shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", raw["intermediate_size"])}
    return _eps(keys) | _delta(keys, raw) | _experts(keys, renormed=True) | sizes


def _qwen35moe(keys: Keys, raw: Raw) -> Raw:
    return _shared(keys, raw) | {"model_type": "qwen3_5_moe_text"}


def _qwen3next(keys: Keys, raw: Raw) -> Raw:
    return _shared(keys, raw) | {"model_type": "qwen3_next"}


def _gemma(keys: Keys, raw: Raw) -> Raw:
    return _eps(keys) | {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"}


def _query_scalar(raw: Raw, odd_layers: int) -> Raw:
    """`query_pre_attn_scalar`, which no key says: the head's size, but for the models of 27B, known by their layers."""
    odd = raw["num_hidden_layers"] == odd_layers
    return {"query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"] if odd else raw["head_dim"]}


def _gemma2(keys: Keys, raw: Raw) -> Raw:
    caps = {"attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0)}
    caps |= {"final_logit_softcapping": keys.number("final_logit_softcapping", 30.0)}
    common = {"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"}
    return _eps(keys) | caps | common | _query_scalar(raw, 46) | _sliding(keys, raw, 2, 4096)


def _gemma3(keys: Keys, raw: Raw) -> Raw:
    cap, local = keys.number("final_logit_softcapping", 0.0), keys.number("rope.freq_base_swa", 10000.0)
    common = {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": local}
    slides = {"layer_types": ["full_attention"] * raw["num_hidden_layers"]}
    if keys.get("attention.sliding_window"):
        slides = _sliding(keys, raw, 6)
    keys.layers("attention.sliding_window_pattern")
    return _eps(keys) | common | {"final_logit_softcapping": cap or None} | _query_scalar(raw, 62) | slides


def _olmo2(keys: Keys, raw: Raw) -> Raw:
    """OLMo 2, and OLMo 3 where there is a window."""
    if not keys.get("attention.sliding_window"):
        return _eps(keys) | {"model_type": "olmo2"}
    local = keys.number("rope.freq_base_swa", raw["rope_theta"])
    if local != raw["rope_theta"]:
        raise keys.wrong(f"olmo2.rope.freq_base_swa {local} differs from freq_base: not supported")
    return _eps(keys) | {"model_type": "olmo3"} | _sliding(keys, raw, 4)


def _phi3(keys: Keys, raw: Raw) -> Raw:
    """Phi-3 and Phi-4; a window of 0 is none."""
    original = keys.size("rope.scaling.original_context_length", raw["max_position_embeddings"])
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    found = {"model_type": "phi3", "original_max_position_embeddings": original}
    found |= {"sliding_window": keys.get("attention.sliding_window") or None}
    if keys.has(LONG) and keys.has(SHORT):
        lists = {"short_factor": keys.numbers(SHORT), "long_factor": keys.numbers(LONG)}
        found["rope_scaling"] = {"rope_type": "longrope", "attention_factor": attention, **lists}
    return _eps(keys) | found


def _starcoder2(keys: Keys, raw: Raw) -> Raw:
    eps = {"norm_epsilon": keys.number("attention.layer_norm_epsilon")}
    return eps | {"model_type": "starcoder2", "use_bias": keys.has("blk.0.attn_q.bias"), "sliding_window": None}


def _glm4(keys: Keys, raw: Raw) -> Raw:
    return _eps(keys) | {"model_type": "glm4", "attention_bias": keys.has("blk.0.attn_q.bias")}


def _cohere2(keys: Keys, raw: Raw) -> Raw:
    eps = {"layer_norm_eps": keys.number("attention.layer_norm_epsilon"), "logit_scale": keys.number("logit_scale")}
    return eps | {"model_type": "cohere2"} | _sliding(keys, raw, 4)


def _gpt_oss(keys: Keys, raw: Raw) -> Raw:
    """Its columns of YaRN are not rounded, as its makers have them; llama.cpp rounds."""
    size = {"intermediate_size": keys.size("expert_feed_forward_length")}
    scaling = raw.get("rope_scaling") or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scaling = scaling | {"truncate": False}
    found = size | {"model_type": "gpt_oss", "rope_scaling": scaling, "attention_bias": keys.has("blk.0.attn_q.bias")}
    return _eps(keys) | _experts(keys, renormed=True) | found | _sliding(keys, raw, 2)


ARCHITECTURES: dict[str, Callable[[Keys, Raw], Raw]] = {
    "cohere2": _cohere2,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4": _glm4,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "llama": _llama,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3": _qwen3,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "qwen3moe": _qwen3moe,
    "qwen3next": _qwen3next,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
"""By `general.architecture`."""
