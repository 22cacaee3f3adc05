"""GGUF metadata -> the config.json that the model would have in the Hugging Face layout, for the readers of the families.

Sources: the keys of docs/gguf.md of ggml, and what llama.cpp takes a missing one for. A key of an architecture changes its
arithmetic more often than not: one that is not read here is refused.
"""

import mmap
import struct
from collections.abc import Callable
from typing import Any

import numpy

from attend.model.errors import CheckpointError
from attend.model.gguf.container import Container

Raw = dict[str, Any]
HARMLESS = frozenset({"vocab_size", "attention.value_length", "expert_group_count", "expert_group_used_count"})
"""Keys that repeat what the tensors say, or whose values are checked beside them."""
BY_LAYER = {"gemma4": ("feed_forward_length", "attention.head_count_kv")}
"""Keys of an architecture whose values differ from layer to layer."""
NO_TURN = 1e30
"""A factor of a wavelength that no position reaches."""
FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


class Keys:
    """The metadata of an architecture by what follows its name, ARCH.NAME; remembers which were read."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self.arch = container.metadata.get("general.architecture")
        start = f"{self.arch}."
        self._values = {key[len(start) :]: value for key, value in container.metadata.items() if key.startswith(start)}
        self._read = set(HARMLESS)

    def wrong(self, what: str) -> CheckpointError:
        """What is wrong with the file, as an error."""
        return CheckpointError(f"{self.container.path}: {what}")

    def get(self, name: str) -> Any:
        """A value, or None. Where an array has one for each layer, they must all be the same, and it is that one; but it is the
        first of those that the architecture may have differ.
        """
        self._read.add(name)
        value = self._values.get(name)
        if isinstance(value, list):
            if not value or (name not in BY_LAYER.get(str(self.arch), ()) and any(each != value[0] for each in value)):
                raise self.wrong(f"{self.arch}.{name} differs from layer to layer, which is not supported")
            value = value[0]
        return value

    def layers(self, name: str) -> list[Any] | None:
        """An array with a value for each layer, None where there is none."""
        self._read.add(name)
        value = self._values.get(name)
        return value if isinstance(value, list) else None

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(name) if self.get(name) is not None else default
        if type(value) is not int or value < 1:
            raise self.wrong(f"{self.arch}.{name} must be a positive integer; got {repr(value)[:100]}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number: of those that float32 keeps alike the one with the fewest digits, as the model's maker wrote it."""
        value = self.get(name) if self.get(name) is not None else default
        if type(value) not in (int, float):
            raise self.wrong(f"{self.arch}.{name} must be a number; got {repr(value)[:100]}")
        return float(str(numpy.float32(value)))

    def refuse(self, name: str, *harmless: Any) -> None:
        """Stop at a key that changes the arithmetic in a way that is not built."""
        value = self.get(name)
        if value is not None and value not in harmless:
            raise self.wrong(f"{self.arch}.{name} = {repr(value)[:100]} is not supported")

    def check_all_read(self) -> None:
        """Raise CheckpointError where there is a key that nobody asked for."""
        if strangers := sorted(self._values.keys() - self._read):
            raise self.wrong(f"{self.arch}.{strangers[0]} is not known here, and may change what the model computes")

    def has(self, tensor: str) -> bool:
        """Whether the files have a tensor."""
        return tensor in self.container.tensors

    def numbers(self, tensor: str) -> list[float]:
        """The numbers of a small tensor in float32: factors of rope."""
        stored = self.container.tensors[tensor]
        if stored.kind.name != "F32" or len(stored.shape) != 1 or stored.size > mmap.PAGESIZE:
            raise self.wrong(f"tensor {tensor} must have at most {mmap.PAGESIZE // 4} elements in F32")
        with stored.file.open("rb") as file:
            file.seek(stored.start)
            return list(struct.unpack(f"<{stored.shape[0]}f", file.read(stored.size)))


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
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": keys.size("context_length"),
        "tie_word_embeddings": not keys.has("output.weight"),
        **_rope(keys, head),
    }


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


def _gemma4(keys: Keys, raw: Raw) -> Raw:
    """Gemma 4. The file names the heads of layers without a window, and beside them those of the others."""
    count, found = raw["num_hidden_layers"], _sliding(keys, raw, 6)
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
        experts, size = _experts(keys, renormed=True), keys.size("expert_feed_forward_length")
        found |= {"enable_moe_block": True, "moe_intermediate_size": size, "num_experts": experts["num_experts"]}
        found |= {"top_k_experts": experts["num_experts_per_tok"]}
    return _eps(keys) | found


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
    "gemma4": _gemma4,
    "glm4": _glm4,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "llama": _llama,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
"""By `general.architecture`."""
