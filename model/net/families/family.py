"""What readers of config.json share. A value that is missing, of the wrong type, or not understood raises CheckpointError."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attend.model.config import Activation, ModelConfig
from attend.model.errors import CheckpointError

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor

Raw = Mapping[str, Any]
"""The entries of a config.json."""
Fields = dict[str, Any]
"""Fields of a ModelConfig."""
Names = dict[str, tuple[str, ...]]
"""Our name -> their names."""


@dataclass(frozen=True, slots=True)
class Family:
    """How to read, and to write, one `model_type`.

    `{}` in a weight's name stands for the number of the block. The rows of several names on the right of one on the left are
    concatenated, in that order. `{e}` stands for the number of an expert, or of a head: first all names of the first one, then
    the next's.
    """

    fields: Callable[[Raw], Fields]
    """The entries of config.json -> the fields of ModelConfig."""
    weights: Mapping[str, tuple[str, ...]] | None
    """Our name -> their names; None: the same names."""
    write: Callable[[ModelConfig], dict[str, Any]] | None = None
    """None: checkpoints of this family are read only."""
    adapt: Callable[[ModelConfig, str, "Tensor"], "Tensor"] | None = None
    """(config, their name, their tensor, its rows first) -> its numbers in the order of our rows: a view of more dimensions,
    where that does without a copy.
    """
    transposed_weights: re.Pattern[str] | None = None
    """Which of our parameters' names belong to matrices that are stored as [in, out], alone or [experts, in, out]."""
    rows: re.Pattern[str] | None = None
    """Which of our parameters' names belong to vectors that are stored as a matrix of one row."""
    transposed_by_shape: bool = False
    """True if one of those may lie as ours does: it does where its shape is that of ours."""
    gain_offset: float | None = None
    """What is added to the stored gains of norms: Gemma stores w of 1 + w. The sums are kept in float32, also those with 0."""
    offset_gains: re.Pattern[str] = re.compile(r"norm\.weight$")
    """Which of our gains that holds for."""
    gainless: re.Pattern[str] | None = None
    """Which of our gains their norms do not have: 1."""
    head_if_there: bool = False
    """True if a head in the files is the model's where config.json does not say whether it is tied."""
    prefix: str = "model."
    """How their names begin, but for the head's. Checkpoints of a model without its head leave parts of it out, or all."""
    older: Mapping[str, str] = field(default_factory=dict)
    """Other prefixes that names may have -> what stands before the head's name then."""
    fused_tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Entries in place of those of `weights` where a checkpoint has their tensors, but for blocks that have the others."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """How names of tensors begin that are not read, and what is not served for lack of them. `{}`: the number of layers."""
    ignored_tensors: re.Pattern[str] = re.compile(r"rotary_emb\.inv_freq$")
    """Tensors that carry no weights: masks and tables that old checkpoints saved."""

    def read(self, raw: Raw) -> ModelConfig:
        """The config of a model."""
        return ModelConfig(**self.fields(raw))


MTP = "multi-token prediction (MTP) is not supported"
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def need(raw: Raw, key: str) -> Any:
    """The value of a key that config.json must have."""
    if raw.get(key) is None:
        raise CheckpointError(f"config.json has no {key!r}")
    return raw[key]


def size(raw: Raw, key: str, default: int | None = None) -> int:
    """A positive integer, or the default where the key is absent. Raises ConfigError for anything else."""
    value = need(raw, key) if default is None or raw.get(key) is not None else default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 32:
        raise CheckpointError(f"config.json: {key} must be a positive integer of 32 bits; got {repr(value)[:100]}")
    if key in LAYERS and value > MAX_LAYERS:
        raise CheckpointError(f"config.json: {key} may be at most {MAX_LAYERS}; got {value}")
    return value


LAYERS, MAX_LAYERS = ("num_hidden_layers", "n_layer"), 4096
"""Names of the number of layers, for each of which something is made here; and the most that are read."""
POSITIONS = {
    **dict.fromkeys(
        ("llama", "gpt_neox", "granite", "olmo", "olmo2", "olmo3", "exaone4", "hunyuan_v1_dense", "nanochat"), 2048
    ),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared", "dots1", "exaone_moe", "deepseek_v2"), 2048),
    **dict.fromkeys(("phi3", "starcoder2", "arcee", "helium", "nemotron", "stablelm", "olmoe", "deepseek_v3"), 4096),
    **dict.fromkeys(("cohere", "cohere2", "gemma", "gemma2", "granite_swa", "vaultgemma"), 8192),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "smollm3", "minicpm3"), 32768),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen2_vl", "qwen2_5_vl"), 32768),
    "olmo_hybrid": 65536,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "lfm2", "lfm2_moe", "lfm3"), 128000),
    **dict.fromkeys(("gemma3", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_oss", "mistral", "mixtral", "youtu"), 131072),
    **dict.fromkeys(("gemma4", "gemma4_text"), 131072),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "ministral", "mistral3", "muse_glimmer"), 131072),
    **{
        "minimax_m2": 196608,
        "glm4_moe_lite": 202752,
        "ministral3": 262144,
        "gemma4_unified": 262144,
        "gemma4_unified_text": 262144,
        "seed_oss": 524288,
    },
}
"""How many a model has whose config.json does not say, by `model_type`."""


def positions(raw: Raw) -> int:
    """Longest context in tokens: `max_position_embeddings`."""
    return size(raw, "max_position_embeddings", POSITIONS[raw["model_type"]])


def count(raw: Raw, key: str, default: int) -> int:
    """An integer of 0 or more, or the default where the key is absent. Raises ConfigError for anything else."""
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"config.json: {key} must be an integer from 0; got {value!r}")
    return value


def number(raw: Raw, key: str, default: float) -> float:
    """A number, or the default where the key is absent. Raises ConfigError for anything else."""
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be a number; got {value!r}")
    return float(value)


def optional_number(raw: Raw, key: str, default: float | None) -> float | None:
    """A number, None where the key says null, or the default where there is no such key."""
    return default if key not in raw else None if raw[key] is None else number(raw, key, 0.0)


def flag(raw: Raw, key: str, default: bool = False) -> bool:
    """True or false, or the default where there is neither."""
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be true or false; got {value!r}")
    return value


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


def with_ends(raw: Raw, start: int | None, end: int) -> dict[str, Any]:
    """The keys with the start and the end token of a family where they are absent; not where the vocabulary lacks them."""
    tokens = {"bos_token_id": start, "eos_token_id": end}
    return {key: token for key, token in tokens.items() if token is not None and token < size(raw, "vocab_size")} | dict(raw)


def head_size_of(raw: Raw, hidden: str, heads: str) -> int:
    """Columns of one head where a config does not say: an even share of the width."""
    if size(raw, hidden) % size(raw, heads):
        raise CheckpointError(f"config.json: {hidden} {raw[hidden]} is not divisible by {heads} {raw[heads]}")
    return size(raw, hidden) // size(raw, heads)


def biases(raw: Raw) -> Fields:
    """`attention_bias` holds for all four matrices of attention."""
    return dict.fromkeys(("qkv_bias", "out_bias"), flag(raw, "attention_bias"))


def head_size(raw: Raw) -> int:
    """`head_dim`, or an even share of the width."""
    return size(raw, "head_dim") if raw.get("head_dim") else head_size_of(raw, "hidden_size", "num_attention_heads")


def decoder_sizes(raw: Raw, *, eps: float = 1e-6, tied_head: bool = False, activation_key: str = "hidden_act") -> Fields:
    """The fields of ModelConfig whose keys are the same in most families; keywords are what an absent key means."""
    heads = size(raw, "num_attention_heads")
    default = "silu" if activation_key == "hidden_act" else "gelu_pytorch_tanh"
    return {
        "family": raw["model_type"],
        "vocab_size": size(raw, "vocab_size"),
        "hidden_size": size(raw, "hidden_size"),
        "num_layers": size(raw, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": size(raw, "num_key_value_heads", heads),
        "head_size": head_size(raw),
        "mlp_size": size(raw, "intermediate_size"),
        "max_positions": positions(raw),
        "norm_eps": number(raw, "rms_norm_eps", eps),
        "activation": activation(raw, activation_key, default),
        "tied_head": flag(raw, "tie_word_embeddings", tied_head),
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_ids": stop_tokens(raw),
    }


KINDS = ("full_attention", "sliding_attention")


def layer_kinds(
    raw: Raw, supported_kinds: tuple[str, ...], default: Callable[[int], str], key: str = "layer_types"
) -> list[str]:
    """What a list with a word for each layer calls it; without it what `default` does."""
    count, kinds = size(raw, "num_hidden_layers"), raw.get(key)
    kinds = [default(layer) for layer in range(count)] if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in supported_kinds for kind in kinds):
        named = f"{key} must name {' or '.join(supported_kinds)} for each of {count} layers"
        raise CheckpointError(f"config.json: {named}; got {kinds!r}")
    return kinds


def layers_of(kinds: list[str], name: str) -> tuple[int, ...]:
    """The layers, from 0, of one kind."""
    return tuple(layer for layer, kind in enumerate(kinds) if kind == name)


def sliding_layers(raw: Raw, default: Callable[[int], bool]) -> tuple[int, ...]:
    """The layers, from 0, that `layer_types` calls sliding; without it those for which `default` is true."""
    return layers_of(layer_kinds(raw, KINDS, lambda layer: KINDS[default(layer)]), KINDS[1])


def some_layers(raw: Raw, layers: tuple[int, ...]) -> tuple[int, ...] | None:
    """None in place of all layers."""
    return None if len(layers) == size(raw, "num_hidden_layers") else layers


def layer_thetas(raw: Raw) -> tuple[float, ...] | None:
    """`layer_rope_theta`: a theta for each layer, 0 or null for one that does not rotate; None where the key is absent."""
    thetas, layers = raw.get("layer_rope_theta"), size(raw, "num_hidden_layers")
    if thetas is None:
        return None
    if not isinstance(thetas, list) or len(thetas) != layers:
        raise CheckpointError(f"config.json: layer_rope_theta must have a number for each of {layers} layers; got {thetas!r}")
    return tuple(number({"layer_rope_theta": theta}, "layer_rope_theta", 0.0) for theta in thetas)


def windows(raw: Raw, window: Any, layers: tuple[int, ...] | None) -> Fields:
    """Fields for a window that holds for `layers`, or for all; none where no query could fail to see a key: not where a scaling
    of positions may lead beyond those that are said.
    """
    if window is None or layers == ():
        return {}
    fields, scaling = kept_windows(raw, window, layers), raw.get("rope_scaling") or raw.get("rope_parameters")
    grows = isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) in ("dynamic", "yarn")
    return fields if grows or window < positions(raw) else {}


def kept_windows(raw: Raw, window: Any, layers: tuple[int, ...] | None) -> Fields:
    """The same, also where the window hides nothing: its layers may turn by a theta of their own."""
    if layers == ():
        return {}
    window = size({"sliding_window": window}, "sliding_window")
    return {"sliding_window": window, "window_layers": None if layers is None else some_layers(raw, layers)}


def windows_of_types(raw: Raw, window: Any, default: Callable[[int], bool]) -> Fields:
    """Fields for a window in the layers that `layer_types` calls sliding; without it those for which `default` is true."""
    layers = sliding_layers(raw, lambda layer: window is not None and default(layer))
    if layers and window is None:
        raise CheckpointError("config.json: layer_types name sliding layers, but there is no sliding_window")
    return windows(raw, window, layers)


def pairs(ours: str, *theirs: str) -> Names:
    """The entry of a matrix, and that of its bias; a bias that a config does without is never asked for."""
    return {f"{ours}.{part}": tuple(f"{name}.{part}" for name in theirs) for part in ("weight", "bias")}


def in_block(block: str, names: Mapping[str, tuple[str, ...]]) -> Names:
    """The entries of our parts of a block, whose names in their block `block` are given."""
    entries: Names = {}
    for ours, theirs in names.items():
        entries |= pairs(f"blocks.{{}}.{ours}", *(f"{block}.{{}}.{name}" for name in theirs))
    return entries


def alone_in_block(block: str, names: Mapping[str, str]) -> Names:
    """The entries of parameters that have no bias beside them, by their whole names."""
    return {f"blocks.{{}}.{ours}": (f"{block}.{{}}.{name}",) for ours, name in names.items()}
