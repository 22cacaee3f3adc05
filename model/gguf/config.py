"""GGUF metadata -> the config.json that the model would have in the Hugging Face layout, for the readers of the families.

Sources: the keys of docs/gguf.md of ggml, and what llama.cpp takes a missing one for. A key of an architecture changes its
arithmetic more often than not: one that is not read here is refused.
"""

from collections.abc import Callable
from typing import Any

from attend.model.gguf import mixtures
from attend.model.gguf.common import LONG, NO_TURN, SHORT, common, expert_keys, sliding_window_keys
from attend.model.gguf.container import Container
from attend.model.gguf.keys import Keys, Raw


def read_config(container: Container) -> Raw:
    """The keys of config.json; its `eos_token_id` is left to the vocabulary. Raises CheckpointError."""
    keys = check_architecture(container)
    raw = common(keys)
    raw |= ARCHITECTURES[keys.arch](keys, raw)
    keys.check_all_read()
    return raw


NO_MODEL = {
    "mmproj": "give the file of the text model; images are not served",
    "adapter": "--adapter NAME=FOLDER takes a LoRA adapter as a PEFT folder, beside its model",
}
"""What to do with files of a `general.type` that is no model."""


def check_architecture(container: Container) -> Keys:
    """The metadata of a model that is read from GGUF. Raises CheckpointError for another, and for what is no model."""
    keys = Keys(container)
    if (kind := container.metadata.get("general.type", "model")) != "model":
        advice = NO_MODEL.get(str(kind), "give the file of the model itself")
        raise keys.wrong(f"it holds no model by itself: its general.type is {kind!r}; {advice}")
    if keys.arch == "clip":
        raise keys.wrong(f"it holds what a model sees images with (mmproj); {NO_MODEL['mmproj']}")
    if keys.arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise keys.wrong(f"general.architecture {keys.arch!r} is not read from GGUF; known: {known}")
    return keys


def _llama(keys: Keys, raw: Raw) -> Raw:
    """Llama and Mistral, and Mixtral where there are experts."""
    if keys.get("expert_count"):
        return expert_keys(keys, norm_topk_prob=True) | {"model_type": "mixtral"}
    keys.refuse("expert_used_count", 0)
    return {"model_type": "llama"}


def _granite(keys: Keys, raw: Raw) -> Raw:
    """Granite, and its mixtures. Whether heads are rotated is a key of another name. Granite 4 without Mamba has keys of it."""
    for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        keys.get(f"ssm.{name}")
    rotates, shared = keys.get("rope.scaling.finetuned") is not False, keys.get("expert_shared_feed_forward_length") or 0
    if keys.get("expert_count"):
        found = expert_keys(keys, norm_topk_prob=True) | {"model_type": "granitemoeshared" if shared else "granitemoe"}
    else:
        keys.refuse("expert_used_count", 0)
        found, shared = {"model_type": "granite"}, raw["intermediate_size"]
    if not rotates or keys.arch == "granitehybrid":
        layers = {"layer_types": ["attention"] * raw["num_hidden_layers"], "model_type": "granitemoehybrid"}
        found = {"num_local_experts": 0} | found | layers | {"position_embedding_type": "rope" if rotates else None}
    return _granite_multipliers(keys, raw) | found | {"shared_intermediate_size": shared}


def _granite_multipliers(keys: Keys, raw: Raw) -> Raw:
    multipliers = {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale"}
    multipliers |= {"attention_multiplier": "attention.scale"}
    found = {theirs: keys.number(name, 0.0) for theirs, name in multipliers.items()}
    found = {theirs: value for theirs, value in found.items() if value}  # 0 is written for none
    if "attention_multiplier" not in found:
        found["attention_multiplier"] = raw["head_dim"] ** -0.5
    return found | {"logits_scaling": keys.number("logit_scale")}


def _qwen2moe(keys: Keys, raw: Raw) -> Raw:
    shared = keys.size("expert_shared_feed_forward_length", raw["intermediate_size"])
    sizes = {"moe_intermediate_size": keys.size("expert_feed_forward_length"), "shared_expert_intermediate_size": shared}
    biased = {"qkv_bias": keys.has("blk.0.attn_q.bias")}
    return expert_keys(keys, norm_topk_prob=False) | sizes | biased | {"model_type": "qwen2_moe"}


def _qwen3moe(keys: Keys, raw: Raw) -> Raw:
    size = {"moe_intermediate_size": keys.size("expert_feed_forward_length")}
    return expert_keys(keys, norm_topk_prob=True) | size | {"model_type": "qwen3_moe"}


def _query_scalar(raw: Raw, odd_layers: int) -> Raw:
    """`query_pre_attn_scalar`, which no key says: the head's size, but for the models of 27B, known by their layers."""
    odd = raw["num_hidden_layers"] == odd_layers
    return {"query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"] if odd else raw["head_dim"]}


def _gemma2(keys: Keys, raw: Raw) -> Raw:
    caps = {"attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0)}
    caps |= {"final_logit_softcapping": keys.number("final_logit_softcapping", 30.0)}
    common = {"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"}
    return caps | common | _query_scalar(raw, 46) | sliding_window_keys(keys, raw, 2, 4096)


def _gemma3(keys: Keys, raw: Raw) -> Raw:
    cap, local = keys.number("final_logit_softcapping", 0.0), keys.number("rope.freq_base_swa", 10000.0)
    common = {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": local}
    slides = {"layer_types": ["full_attention"] * raw["num_hidden_layers"]}
    if keys.get("attention.sliding_window"):
        slides = sliding_window_keys(keys, raw, 6)
    keys.layers("attention.sliding_window_pattern")
    return common | {"final_logit_softcapping": cap or None} | _query_scalar(raw, 62) | slides


def _gemma4(keys: Keys, raw: Raw) -> Raw:
    """Gemma 4. The file names the heads of layers without a window, and beside them those of the others."""
    count, found = raw["num_hidden_layers"], sliding_window_keys(keys, raw, 6)
    shared, inputs = (
        int(keys.number(name, 0.0)) for name in ("attention.shared_kv_layers", "embedding_length_per_layer_input")
    )
    local, cap = keys.size("attention.key_length_swa", raw["head_dim"]), keys.number("final_logit_softcapping", 0.0)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        keys.refuse(name, local)
    width = raw["intermediate_size"]
    widths = keys.layers("feed_forward_length") or [width]
    kv_heads = keys.layers("attention.head_count_kv") or [raw["num_key_value_heads"]] * count
    if widths not in ([width], *([width] * (count - shared) + [width * times] * shared for times in (1, 2))):
        raise keys.wrong(f"gemma4.feed_forward_length {repr(widths)[:100]} differs from layer to layer, which is not supported")
    if len(kv_heads) != count or len(found["layer_types"]) != count:
        raise keys.wrong(f"gemma4.attention.head_count_kv and sliding_window_pattern must have {count} values")
    own: dict[str, Raw] = {str(layer): {"num_key_value_heads": heads} for layer, heads in enumerate(kv_heads)}
    whole = [layer for layer, kind in enumerate(found["layer_types"]) if kind == "full_attention"]
    for layer in whole:
        own[str(layer)]["head_dim"] = raw["head_dim"]
    same = any(layer < count - shared and not keys.has(f"blk.{layer}.attn_v.weight") for layer in whole)
    found |= {"per_layer_config": own, "head_dim": local, "attention_k_eq_v": same, "rope_scaling": None}
    found |= {"num_kv_shared_layers": shared, "use_double_wide_mlp": widths[-1] != width}
    found |= {"hidden_size_per_layer_input": inputs, "vocab_size_per_layer_input": raw["vocab_size"]}
    found |= {"model_type": "gemma4_text", "final_logit_softcapping": cap or None, "rope_parameters": _two_ropes(keys, raw)}
    if keys.get("expert_count"):
        mixture, size = expert_keys(keys, norm_topk_prob=True), keys.size("expert_feed_forward_length")
        found |= {"enable_moe_block": True, "moe_intermediate_size": size, "num_experts": mixture["num_experts"]}
        found |= {"top_k_experts": mixture["num_experts_per_tok"]}
    return found


def _two_ropes(keys: Keys, raw: Raw) -> Raw:
    """Gemma 4's: a tensor says which pairs of columns of layers without a window turn."""
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", raw["rope_theta"])}
    scaling, whole = raw.get("rope_scaling"), {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    if scaling is not None:
        factors = scaling.get("short_factor") or []
        turning = factors.count(1.0)
        if not factors or factors[:turning] != [1.0] * turning or min(factors[turning:], default=NO_TURN) < NO_TURN:
            raise keys.wrong(f"gemma4: rope scaling by other factors than 1 and {NO_TURN} is not supported")
        share = turning / len(factors)
        share += 0.25 / len(factors) if share * 2 * len(factors) < 2 * turning else 0.0  # rounded down it is `turning` again
        whole |= {"rope_type": "proportional", "partial_rotary_factor": share}
    return {"full_attention": whole, "sliding_attention": local}


def _olmo2(keys: Keys, raw: Raw) -> Raw:
    """OLMo 2, and OLMo 3 where there is a window."""
    if not keys.get("attention.sliding_window"):
        return {"model_type": "olmo2"}
    local = keys.number("rope.freq_base_swa", raw["rope_theta"])
    if local != raw["rope_theta"]:
        raise keys.wrong(f"olmo2.rope.freq_base_swa {local} differs from freq_base: not supported")
    return {"model_type": "olmo3"} | sliding_window_keys(keys, raw, 4)


def _olmo(keys: Keys, raw: Raw) -> Raw:
    """OLMo's LayerNorm knows one eps alone. Raises CheckpointError for another."""
    if raw["norm_eps"] != 1e-5:
        raise keys.wrong(f"olmo.attention.layer_norm_epsilon = {raw['norm_eps']} is not supported")
    return {"model_type": "olmo"}


def _phi3(keys: Keys, raw: Raw) -> Raw:
    """Phi-3 and Phi-4; a window of 0 is none."""
    original = keys.size("rope.scaling.original_context_length", raw["max_position_embeddings"])
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    found = {"model_type": "phi3", "original_max_position_embeddings": original}
    found |= {"sliding_window": keys.get("attention.sliding_window") or None}
    if keys.has(LONG) and keys.has(SHORT):
        lists = {"short_factor": keys.numbers(SHORT), "long_factor": keys.numbers(LONG)}
        found["rope_scaling"] = {"rope_type": "longrope", "attention_factor": attention, **lists}
    return found


def _exaone4(keys: Keys, raw: Raw) -> Raw:
    """The model of 64 layers has a window, also where no key says it."""
    slides: Raw = {"sliding_window": None}
    if keys.get("attention.sliding_window") or raw["num_hidden_layers"] == 64:
        slides = sliding_window_keys(keys, raw, 4, 4096)
    return {"model_type": "exaone4"} | slides


def _mistral3(keys: Keys, raw: Raw) -> Raw:
    """Ministral 3 where queries grow with their positions, by steps of what its YaRN learned; else Mistral."""
    beta, scaling = keys.number("attention.temperature_scale", 0.0), raw.get("rope_scaling") or {}
    if not beta:
        return _llama(keys, raw)
    if scaling.get("rope_type") != "yarn":
        raise keys.wrong("mistral3.attention.temperature_scale without rope.scaling.type yarn is not supported")
    keys.refuse("attention.temperature_length", scaling["original_max_position_embeddings"])
    return {"model_type": "ministral3", "rope_scaling": scaling | {"llama_4_scaling_beta": beta}}


def _with_images(kind: str) -> Callable[[Keys, Raw], Raw]:
    """Text models of vision-language models: positions of a text are the same in each part of a head."""

    def read(keys: Keys, raw: Raw) -> Raw:
        for name in ("rope.dimension_sections", "n_deepstack_layers"):
            keys.layers(name)
        return (_qwen3moe(keys, raw) if kind == "qwen3_vl_moe" else {}) | {"model_type": kind}

    return read


def _cohere(keys: Keys, raw: Raw) -> Raw:
    scale = {"logit_scale": keys.number("logit_scale")}
    if keys.arch == "cohere2":
        return scale | {"model_type": "cohere2"} | sliding_window_keys(keys, raw, 4)
    return scale | {"model_type": "cohere", "use_qk_norm": keys.has("blk.0.attn_q_norm.weight")}


def _gpt_oss(keys: Keys, raw: Raw) -> Raw:
    """The bounds of YaRN are not rounded, as in the original; llama.cpp rounds them."""
    size = {"intermediate_size": keys.size("expert_feed_forward_length")}
    scaling = raw.get("rope_scaling") or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scaling = scaling | {"truncate": False}
    found = size | {"model_type": "gpt_oss", "rope_scaling": scaling}
    return expert_keys(keys, norm_topk_prob=True) | found | sliding_window_keys(keys, raw, 2)


def _lfm2(keys: Keys, raw: Raw) -> Raw:
    """LFM2, and its mixtures where there are experts. The width of its MLP is said as it is."""
    counts = keys.layers("attention.head_count_kv") or [raw["num_key_value_heads"]] * raw["num_hidden_layers"]
    kinds = ["conv" if count == 0 else "full_attention" for count in counts]
    sizes = {"conv_L_cache": keys.size("shortconv.l_cache")}
    biased = {"conv_bias": "conv" in kinds and keys.has(f"blk.{kinds.index('conv')}.shortconv.conv.bias")}
    own = mixtures.lfm2moe(keys) if keys.arch == "lfm2moe" else {"model_type": "lfm2", "block_auto_adjust_ff_dim": False}
    return sizes | biased | own | {"layer_types": kinds}


def _with_shared(keys: Keys, raw: Raw) -> Raw:
    """A mixture with a shared expert beside layers of the delta rule."""
    sizes = {"moe_intermediate_size": keys.size("expert_feed_forward_length")}
    sizes |= {"shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", raw["intermediate_size"])}
    return _delta_layers(keys, raw) | expert_keys(keys, norm_topk_prob=True) | sizes


def _by_name(kind: str, **more: Any) -> Callable[[Keys, Raw], Raw]:
    """An architecture of which the common keys say all."""
    return lambda keys, raw: {"model_type": kind} | more


def _with_bias(kind: str, key: str, tensor: str = "blk.0.attn_q.bias", **more: Any) -> Callable[[Keys, Raw], Raw]:
    """The same, with a key that says whether there is a bias."""
    return lambda keys, raw: {"model_type": kind, key: keys.has(tensor)} | more


def _delta_layers(keys: Keys, raw: Raw) -> Raw:
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


ARCHITECTURES: dict[str, Callable[[Keys, Raw], Raw]] = {
    **{name: _by_name(name) for name in ("arcee", "glm4", "nemotron", "qwen2", "qwen3")},
    **dict.fromkeys(("cohere2", "command-r"), _cohere),
    "deepseek2": mixtures.deepseek2,
    "ernie4_5": _with_bias("ernie4_5", "use_bias"),
    "ernie4_5-moe": mixtures.ernie4_5_moe,
    "exaone4": _exaone4,
    "gemma": _by_name("gemma", hidden_activation="gelu_pytorch_tanh"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm4moe": mixtures.glm4moe,
    "gpt-oss": _gpt_oss,
    **dict.fromkeys(("granite", "granitehybrid", "granitemoe"), _granite),
    "hunyuan-dense": _by_name("hunyuan_v1_dense"),  # its theta is stretched already
    **dict.fromkeys(("lfm2", "lfm2moe"), _lfm2),
    "llama": _llama,
    "minimax-m2": mixtures.minimax_m2,
    "mistral3": _mistral3,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmoe": lambda keys, raw: expert_keys(keys, norm_topk_prob=False) | {"model_type": "olmoe"},
    "phi3": _phi3,
    "qwen2moe": _qwen2moe,
    "qwen2vl": _with_images("qwen2_vl"),  # and Qwen2.5-VL
    "qwen35": lambda keys, raw: _delta_layers(keys, raw) | {"model_type": "qwen3_5_text"},
    "qwen35moe": lambda keys, raw: _with_shared(keys, raw) | {"model_type": "qwen3_5_moe_text"},
    "qwen3moe": _qwen3moe,
    "qwen3next": lambda keys, raw: _with_shared(keys, raw) | {"model_type": "qwen3_next"},
    "qwen3vl": _with_images("qwen3_vl"),
    "qwen3vlmoe": _with_images("qwen3_vl_moe"),
    "seed_oss": _with_bias("seed_oss", "attention_out_bias", "blk.0.attn_output.bias"),
    "smollm3": _by_name("smollm3", no_rope_layer_interval=4),
    "starcoder2": _with_bias("starcoder2", "use_bias", sliding_window=None),
}
"""By `general.architecture`: the function that gives the entries of config.json beyond the common ones."""
