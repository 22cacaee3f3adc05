"""The kinds of checkpoint that can be served: config.json -> ModelConfig, and the names of the weights.

A family is two pieces of data. `{}` in a weight's name stands for the number of the block. Several names on the
right of one on the left are laid under each other, in that order; `transposed` families store [in, out].
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from model.config import Activation, ModelConfig, RopeScaling
from model.errors import CheckpointError

Raw = Mapping[str, Any]
"""A parsed config.json."""


@dataclass(frozen=True, slots=True)
class Family:
    """How to read, and to write, one `model_type`."""

    read: Callable[[Raw], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]] | None
    """None: checkpoints of this family are read only."""
    weights: Mapping[str, tuple[str, ...]] | None
    """Our name -> their names; None: the same names."""
    transposed: bool = False
    optional_prefix: str = ""
    """A prefix of their names that some checkpoints leave out."""
    ignored: re.Pattern[str] = re.compile(r"(?!)")
    """Tensors that carry no weights: masks and tables that old checkpoints saved."""


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def need(raw: Raw, key: str) -> Any:
    """The value of a key that config.json must have."""
    if raw.get(key) is None:
        raise CheckpointError(f"config.json has no {key!r}")
    return raw[key]


def size(raw: Raw, key: str, default: int | None = None) -> int:
    """A positive integer; one without a default must be there."""
    value = need(raw, key) if default is None or raw.get(key) is not None else default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a positive integer; got {value!r}")
    return value


def number(raw: Raw, key: str, default: float) -> float:
    """A number, or the default where there is none."""
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be a number; got {value!r}")
    return float(value)


def flag(raw: Raw, key: str, default: bool = False) -> bool:
    """True or false, or the default where there is neither."""
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be true or false; got {value!r}")
    return value


def head_size_of(raw: Raw, hidden: str, heads: str) -> int:
    """Columns of one head where a config does not say: an even share of the width."""
    if size(raw, hidden) % size(raw, heads):
        raise CheckpointError(f"config.json: {hidden} {raw[hidden]} cannot be shared by {heads} {raw[heads]} evenly")
    return size(raw, hidden) // size(raw, heads)


def refuse(raw: Raw, key: str, *harmless: Any) -> None:
    """Stop at a key that changes the arithmetic in a way that is not built."""
    if key in raw and raw[key] not in harmless:
        raise CheckpointError(f"config.json: {key} = {raw[key]!r} is not supported")


def activation(raw: Raw, key: str, default: str) -> Activation:
    """Our name of an activation function."""
    name = raw.get(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise CheckpointError(f"config.json: {key} {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def stop_tokens(raw: Raw) -> tuple[int, ...]:
    """`eos_token_id` may be absent, one id, or several."""
    value = raw.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in values):
        raise CheckpointError(f"config.json: eos_token_id must be a token id, or a list of them; got {value!r}")
    return tuple(values)


LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def rope(raw: Raw) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) as `transformers` reads them: from `rope_scaling`, or else from `rope_parameters`, never from both.

    Every key of that object must be known here. A rope_theta beside the object holds where the object has none.
    """
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    values = raw.get(name) or {}
    if not isinstance(values, dict):
        raise CheckpointError(f"config.json: {name} must be an object; got {values!r}")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise CheckpointError(f"config.json: {name}: rope_type {kind!r} is not supported; known: default, llama3")
    refuse(values, "partial_rotary_factor", None, 1.0)
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *(LLAMA3 if kind == "llama3" else ())}
    if strangers := sorted(map(str, values.keys() - known)):
        raise CheckpointError(f"config.json: {name} has {', '.join(strangers)}, which rope_type {kind!r} does not know")
    theta = number(values, "rope_theta", number(raw, "rope_theta", 10000.0))
    if kind == "default":
        return theta, None
    numbers = [number({key: need(values, key)}, key, 1.0) for key in LLAMA3[:3]]
    positions = size(values, LLAMA3[3])
    refuse(raw, LLAMA3[3], None, positions)
    return theta, RopeScaling(*numbers, positions)


def sliding(raw: Raw) -> tuple[int | None, tuple[int, ...] | None]:
    """(window, the layers that have it, where not all) as `transformers` reads them; an absent key is its default.

    Mistral slides in every layer; Qwen, once switched on, in those that `layer_types` names, else from `max_window_layers` on.
    """
    kind, window = raw["model_type"], raw.get("sliding_window", 4096)
    on = kind == "mistral" or (kind != "llama" and flag(raw, "use_sliding_window"))
    layers = None if kind in ("llama", "mistral") else window_layers(raw)
    if not on or window is None:
        if layers and raw.get("layer_types"):
            raise CheckpointError("config.json: layer_types name sliding layers, but there is no sliding_window in use")
        return None, None
    window = size({"sliding_window": window}, "sliding_window")
    if window >= size(raw, "max_position_embeddings") or layers == ():
        return None, None
    return window, None if layers is None or len(layers) == size(raw, "num_hidden_layers") else layers


def window_layers(raw: Raw) -> tuple[int, ...]:
    """Qwen's layers that may have a window."""
    count, kinds, first = size(raw, "num_hidden_layers"), raw.get("layer_types"), raw.get("max_window_layers", 28)
    if kinds is None:
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise CheckpointError(f"config.json: max_window_layers must be an integer from 0; got {first!r}")
        return tuple(range(first, count))
    if (
        not isinstance(kinds, list)
        or len(kinds) != count
        or not all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    ):
        raise CheckpointError(
            f"config.json: layer_types must name full_attention or sliding_attention for each of {count} layers; got {kinds!r}"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def read_llama(raw: Raw) -> ModelConfig:
    """Llama, Mistral, Qwen2 and Qwen3: one shape with three switches."""
    kind = raw["model_type"]
    refuse(raw, "quantization_config", None)
    refuse(raw, "partial_rotary_factor", None, 1.0)
    theta, scaling = rope(raw)
    window, layers = sliding(raw)
    heads = size(raw, "num_attention_heads")
    bias = flag(raw, "attention_bias")
    return ModelConfig(
        family=kind,
        vocab_size=size(raw, "vocab_size"),
        hidden_size=size(raw, "hidden_size"),
        num_layers=size(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=size(raw, "num_key_value_heads", heads),
        head_size=size(raw, "head_dim") if raw.get("head_dim") else head_size_of(raw, "hidden_size", "num_attention_heads"),
        mlp_size=size(raw, "intermediate_size"),
        max_positions=size(raw, "max_position_embeddings"),
        norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        activation=activation(raw, "hidden_act", "silu"),
        qkv_bias=kind == "qwen2" or bias,
        linear_bias=_one_bias(kind != "qwen2" and bias, flag(raw, "mlp_bias")),
        qk_norm=kind == "qwen3",
        tied_head=flag(raw, "tie_word_embeddings"),
        sliding_window=window,
        window_layers=layers,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=stop_tokens(raw),
    )


def _one_bias(attention: bool, mlp: bool) -> bool:
    if attention != mlp:
        raise CheckpointError("config.json: attention_bias and mlp_bias must be the same")
    return attention


def write_llama(config: ModelConfig) -> dict[str, Any]:
    """config.json of a Llama-shaped model, as `transformers` reads it."""
    assert config.softcap is None and config.attention_scale is None, f"{config.family} has no soft cap, and no other scale"
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.family]
    scaling = config.rope_scaling and {
        "rope_type": "llama3",
        "factor": config.rope_scaling.factor,
        "low_freq_factor": config.rope_scaling.low_freq_factor,
        "high_freq_factor": config.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": config.rope_scaling.original_positions,
    }
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation),
        "attention_bias": config.linear_bias,
        "mlp_bias": config.linear_bias,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0] if len(config.eos_token_ids) == 1 else list(config.eos_token_ids),
        **write_sliding(config),
    }


def write_sliding(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `sliding`: an absent window would be read as one of 4096 by Mistral, and as none by the others."""
    variants, window = config.attention_variants, config.sliding_window
    if config.family == "mistral":
        assert len(set(variants)) == 1, "Mistral slides in every layer or in none"
        return {"sliding_window": window}
    if window is None:
        return {}
    assert config.family != "llama", "Llama has no sliding window"
    kinds = ["sliding_attention" if variant.window else "full_attention" for variant in variants]
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}


def _pairs(ours: str, *theirs: str) -> dict[str, tuple[str, ...]]:
    """The entry of a matrix, and that of its bias; a bias that a config does without is never asked for."""
    return {f"{ours}.{part}": tuple(f"{name}.{part}" for name in theirs) for part in ("weight", "bias")}


LLAMA_WEIGHTS = (
    _pairs("embedding.tokens", "model.embed_tokens")
    | _pairs("blocks.{}.attention_norm", "model.layers.{}.input_layernorm")
    | _pairs("blocks.{}.attention.qkv", *(f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkv"))
    | _pairs("blocks.{}.attention.q_norm", "model.layers.{}.self_attn.q_norm")
    | _pairs("blocks.{}.attention.k_norm", "model.layers.{}.self_attn.k_norm")
    | _pairs("blocks.{}.attention.out", "model.layers.{}.self_attn.o_proj")
    | _pairs("blocks.{}.mlp_norm", "model.layers.{}.post_attention_layernorm")
    | _pairs("blocks.{}.mlp.gate_up", "model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj")
    | _pairs("blocks.{}.mlp.down", "model.layers.{}.mlp.down_proj")
    | _pairs("norm", "model.norm")
    | _pairs("head", "lm_head")
)


def read_gpt2(raw: Raw) -> ModelConfig:
    """GPT-2 (Radford et al. 2019): LayerNorm before each sublayer, learned positions, GELU, biases everywhere."""
    refuse(raw, "scale_attn_weights", True)
    refuse(raw, "scale_attn_by_inverse_layer_idx", False)
    refuse(raw, "add_cross_attention", False)
    hidden, heads = size(raw, "n_embd"), size(raw, "n_head")
    return ModelConfig(
        family="gpt2",
        vocab_size=size(raw, "vocab_size"),
        hidden_size=hidden,
        num_layers=size(raw, "n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_size=head_size_of(raw, "n_embd", "n_head"),
        mlp_size=size(raw, "n_inner", 4 * hidden),
        max_positions=size(raw, "n_positions"),
        norm="layernorm",
        norm_eps=number(raw, "layer_norm_epsilon", 1e-5),
        positions="learned",
        activation=activation(raw, "activation_function", "gelu_new"),
        gated_mlp=False,
        qkv_bias=True,
        linear_bias=True,
        tied_head=flag(raw, "tie_word_embeddings", True),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=stop_tokens(raw),
    )


GPT2_WEIGHTS = (
    _pairs("embedding.tokens", "transformer.wte")
    | _pairs("embedding.positions", "transformer.wpe")
    | _pairs("blocks.{}.attention_norm", "transformer.h.{}.ln_1")
    | _pairs("blocks.{}.attention.qkv", "transformer.h.{}.attn.c_attn")
    | _pairs("blocks.{}.attention.out", "transformer.h.{}.attn.c_proj")
    | _pairs("blocks.{}.mlp_norm", "transformer.h.{}.ln_2")
    | _pairs("blocks.{}.mlp.up", "transformer.h.{}.mlp.c_fc")
    | _pairs("blocks.{}.mlp.down", "transformer.h.{}.mlp.c_proj")
    | _pairs("norm", "transformer.ln_f")
    | _pairs("head", "lm_head")
)


def read_attend(raw: Raw) -> ModelConfig:
    """Our own spelling: config.json holds the fields of ModelConfig. Every mix of switches can be written so."""
    known = {field.name: field for field in fields(ModelConfig)}
    strangers = sorted(set(raw) - set(known) - {"model_type", "architectures"})
    missing = [name for name, field in known.items() if field.default is MISSING and name not in raw and name != "family"]
    if strangers or missing:
        raise CheckpointError(f"config.json: unknown {strangers}, missing {missing}")
    values = {name: raw[name] for name in known if name in raw}
    stops, scaling = raw.get("eos_token_ids", []), raw.get("rope_scaling")
    if not isinstance(stops, list):
        raise CheckpointError(f"config.json: eos_token_ids must be a list; got {stops!r}")
    values |= {"family": "attend", "eos_token_ids": tuple(stops)}
    if isinstance(raw.get("window_layers"), list):
        values["window_layers"] = tuple(raw["window_layers"])
    if scaling:
        try:
            values["rope_scaling"] = RopeScaling(**scaling)
        except TypeError as error:
            raise CheckpointError(f"config.json: rope_scaling {scaling!r} is not understood: {error}") from error
    return ModelConfig(**values)


def write_attend(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_attend`."""
    values = asdict(config)
    del values["family"]
    return {"model_type": "attend", **values}


_LLAMA = Family(read_llama, write_llama, LLAMA_WEIGHTS, ignored=re.compile(r"rotary_emb\.inv_freq$"))

FAMILIES: dict[str, Family] = {
    "attend": Family(read_attend, write_attend, None),
    "gpt2": Family(
        read_gpt2,
        None,
        GPT2_WEIGHTS,
        transposed=True,
        optional_prefix="transformer.",
        ignored=re.compile(r"attn\.(masked_)?bias$"),
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


def family_of(raw: Raw) -> Family:
    """The family of a config.json, by its `model_type`."""
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise CheckpointError(f"config.json: model_type {kind!r} is not supported; known: {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def their_names(family: Family, ours: str) -> tuple[str, ...]:
    """The names under which a checkpoint of `family` holds our parameter `ours`."""
    if family.weights is None:
        return (ours,)
    template = re.sub(r"^blocks\.\d+\.", "blocks.{}.", ours)
    number = ours.split(".")[1]
    return tuple(name.replace("{}", number) for name in family.weights[template])


def part_sizes(config: ModelConfig, ours: str, parts: int) -> list[int]:
    """Rows of each part of a parameter that a checkpoint keeps in `parts` pieces."""
    if parts == 1:
        return []
    return [config.query_size, config.kv_size, config.kv_size] if ".qkv." in ours else [config.mlp_size] * parts
