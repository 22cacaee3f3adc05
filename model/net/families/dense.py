"""Families without experts that differ from Llama by a few switches, by defaults of config.json, or by names of weights."""

import re
from typing import TYPE_CHECKING, Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import llama
from attend.model.net.families.family import (
    Family,
    Fields,
    Raw,
    biases,
    flag,
    head_size_of,
    need,
    number,
    optional_number,
    refuse,
    size,
    sliding_layers,
    some_layers,
    windows,
    windows_of_types,
)
from attend.model.net.families.positions import ORIGINAL, decoder, original_positions, rope_type

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor

BETA = "llama_4_scaling_beta"
YARN = {"type": "yarn", "rope_theta": 1e6, "factor": 16.0, ORIGINAL: 16384, "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1}


def arcee(raw: Raw) -> Fields:
    """An MLP without a gate, whose activation is the square of ReLU."""
    fields = decoder({"hidden_act": "relu2", **raw}, eps=1e-5) | biases(raw)
    return fields | {"gated_mlp": False, "mlp_bias": flag(raw, "mlp_bias")}


def nemotron(raw: Raw) -> Fields:
    """The same, with LayerNorms with gains of 1 + w, and a part of each head rotated."""
    fields = decoder({"hidden_act": "relu2", **raw}, partial=0.5) | biases(raw)
    norm = {"norm": "layernorm", "norm_eps": number(raw, "norm_eps", 1e-5)}
    return fields | norm | {"gated_mlp": False, "mlp_bias": flag(raw, "mlp_bias")}


def nanochat(raw: Raw) -> Fields:
    """The same MLP, with norms without gain, after the rotation too. Vectors of tokens are normed: no head is tied to them."""
    refuse(raw, "tie_word_embeddings", None, False)
    normed = {"qk_norm": "head", "qk_norm_after_rope": True, "gated_mlp": False}
    cap = {"logit_softcap": optional_number(raw, "final_logit_softcapping", 15.0)}
    return decoder({"hidden_act": "relu2", **raw}) | biases(raw) | normed | cap


def swapped_halves(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    """Heads of queries and keys with their halves swapped, which turn as others do, not the other way: scores stay."""
    if name.rpartition(".")[0].endswith(("self_attn.q_proj", "self_attn.k_proj")):
        return tensor.unflatten(0, (-1, 2, config.head_size // 2)).flip(1).flatten(0, 2)
    return llama.normed_vectors(config, name, tensor)


def ernie(raw: Raw) -> Fields:
    """ERNIE 4.5: neighbours rotate together; `use_bias` holds for all matrices."""
    fields = decoder({"num_key_value_heads": 2, "head_dim": 128, **raw}, eps=1e-5, tied_head=True, theta=500000.0)
    return fields | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), flag(raw, "use_bias"))


def helium(raw: Raw) -> Fields:
    """Neighbours rotate together, and the attention output has no bias."""
    fields = decoder({"num_key_value_heads": 20, "head_dim": 128, **raw}, eps=1e-8, theta=100000.0)
    return fields | {"qkv_bias": flag(raw, "attention_bias"), "mlp_bias": flag(raw, "mlp_bias")}


def seed_oss(raw: Raw) -> Fields:
    """Three biases, each with a key of its own."""
    biased = {"qkv_bias": flag(raw, "attention_bias", True), "out_bias": flag(raw, "attention_out_bias")}
    return decoder({"num_key_value_heads": 8, "head_dim": 128, **raw}) | biased | {"mlp_bias": flag(raw, "mlp_bias")}


def smollm3(raw: Raw) -> Fields:
    """Every fourth layer has no positions: `no_rope_layers` holds a 1 for each layer that rotates."""
    count, interval = size(raw, "num_hidden_layers"), size(raw, "no_rope_layer_interval", 4)
    rotates = raw.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
    if not isinstance(rotates, list) or len(rotates) < count or not all(type(one) is int and one in (0, 1) for one in rotates):
        raise CheckpointError(f"config.json: no_rope_layers must hold 0 or 1 for each of {count} layers; got {rotates!r}")
    slides = flag(raw, "use_sliding_window") and raw.get("sliding_window") is not None
    fields = decoder(raw, tied_head=True, theta=2e6) | biases(raw) | {"mlp_bias": flag(raw, "mlp_bias")}
    fields |= {"rope_layers": some_layers(raw, tuple(layer for layer in range(count) if rotates[layer]))}
    if raw.get("layer_types") is not None or slides:
        fields |= windows(raw, raw.get("sliding_window"), sliding_layers(raw, lambda layer: slides and not rotates[layer]))
    return fields


def stablelm(raw: Raw) -> Fields:
    """StableLM 2: LayerNorm, and a part of each head rotated; some models run attention and MLP in parallel."""
    refuse(raw, "qk_layernorm", None, False)
    refuse(raw, "head_dim", None, head_size_of(raw, "hidden_size", "num_attention_heads"))
    norm = {"norm": "layernorm", "norm_eps": number(raw, "layer_norm_eps", 1e-5), "qkv_bias": flag(raw, "use_qkv_bias")}
    place = {"norm_place": "shared" if flag(raw, "use_parallel_residual") else "pre"}
    return decoder({"num_key_value_heads": 32, **raw}, partial=0.25) | norm | place


def starcoder2(raw: Raw) -> Fields:
    """LayerNorm, biases everywhere, and an MLP without a gate; a sliding window, if given, holds in every layer."""
    fields = decoder(raw | {"hidden_act": raw.get("hidden_act") or "gelu_pytorch_tanh"}, tied_head=True)
    norm = {"norm": "layernorm", "norm_eps": number(raw, "norm_epsilon", 1e-5), "gated_mlp": False}
    biased = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), flag(raw, "use_bias", True))
    return fields | windows(raw, raw.get("sliding_window"), None) | norm | biased


def phi3(raw: Raw) -> Fields:
    """Phi-3 and Phi-4: fused matrices, and LongRoPE, of which `su` and `yarn` are old names here."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    values = raw.get(key)
    if isinstance(values, dict) and rope_type(values) in ("su", "yarn"):
        raw = raw | {key: {name: value for name, value in values.items() if name != "type"} | {"rope_type": "longrope"}}
    raw = raw | {ORIGINAL: size(raw, ORIGINAL, 4096)}
    return decoder(raw, eps=1e-5, partial=1.0) | windows(raw, raw.get("sliding_window"), None)


def hunyuan(raw: Raw) -> Fields:
    """HunYuan norms each head of queries and keys after it was rotated. `transformers` has no size of a head but `head_dim`."""
    head = size(raw, "head_dim")
    return decoder(_scale_theta(raw, head), eps=1e-5) | biases(raw) | {"qk_norm": "head", "qk_norm_after_rope": True}


def _scale_theta(raw: Raw, head: int) -> Raw:
    """A "dynamic" RoPE with an `alpha` has a larger theta, whatever the length (NTK-aware scaling)."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    values: Any = raw.get(key)
    if rope_type(values) != "dynamic" or not values.get("alpha"):
        return raw
    alpha, theta = number(values, "alpha", 1.0), number({**raw, **values}, "rope_theta", 10000.0)
    if alpha < 0 or head < 4:
        raise CheckpointError(f"config.json: {key}: alpha must be above 0, and need 4 rotated columns; got {alpha}, {head}")
    return {**raw, key: {"rope_type": "default", "rope_theta": theta * alpha ** (head / (head - 2))}}


def exaone4(raw: Raw) -> Fields:
    """EXAONE 4 norms outputs of sublayers alone. Layers with a window rotate, three of four where nothing names them."""
    raw = {"num_key_value_heads": 32, "sliding_window": 4096, **raw}
    fields = decoder(raw, eps=1e-5) | {"norm_place": "output", "qk_norm": "head"}
    if raw["sliding_window"] is None:
        return fields | windows_of_types(raw, None, lambda layer: False)
    pattern = 4 if raw.get("layer_types") is not None else size(raw, "sliding_window_pattern", 4)
    layers = sliding_layers(raw, lambda layer: (layer + 1) % pattern != 0)
    slides = windows_of_types(raw, raw["sliding_window"], lambda layer: layer in layers)
    return fields | slides | {"rope_layers": some_layers(raw, layers)}


def ministral(raw: Raw) -> Fields:
    """Mistral with a window in some layers, in every one without `layer_types`."""
    raw = {"num_key_value_heads": 8, **raw}
    return decoder(raw) | windows_of_types(raw, raw.get("sliding_window", 4096), lambda layer: True)


def ministral3(raw: Raw) -> Fields:
    """Mistral whose queries grow with their positions. An absent `rope_parameters` means the released models' YaRN."""
    raw = {"num_key_value_heads": 8, "head_dim": 128, **raw}
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    values = YARN if raw.get(key) is None else raw[key]
    if not isinstance(values, dict):
        raise CheckpointError(f"config.json: {key} must be an object; got {values!r}")
    beta = number({BETA: need(values, BETA)}, BETA, 0.0)
    learned = rope_type(values) in ("llama3", "yarn", "longrope")
    length = original_positions(raw, values) if learned else size(values, ORIGINAL)
    others = {name: value for name, value in values.items() if name not in (BETA, "max_position_embeddings")}
    scale = {"query_scale_beta": beta, "query_scale_length": length} if beta else {}
    return decoder({**raw, key: others}, eps=1e-5) | scale | windows(raw, raw.get("sliding_window"), None)


def cohere(raw: Raw) -> Fields:
    """Command R: attention and MLP side by side after one LayerNorm without bias; neighbours rotate together.

    Norms of queries and keys with a gain for each head are not built.
    """
    refuse(raw, "use_qk_norm", None, False)
    return _cohere(raw, theta=500000.0)


def cohere2(raw: Raw) -> Fields:
    """Command R7B: layers with a window alone rotate. Without `layer_types`, all layers but every fourth have one."""
    pattern, window = size(raw, "sliding_window_pattern", 4), raw.get("sliding_window", 4096)
    layers = sliding_layers(raw, lambda layer: (layer + 1) % pattern != 0)
    fields = _cohere({**raw, "head_dim": head_size_of(raw, "hidden_size", "num_attention_heads")}, theta=10000.0)
    return fields | windows(raw, window, layers) | {"rope_layers": () if window is None else some_layers(raw, layers)}


def _cohere(raw: Raw, theta: float) -> Fields:
    norm = {"norm": "layernorm_without_bias", "norm_eps": number(raw, "layer_norm_eps", 1e-5), "norm_place": "shared"}
    return decoder(raw, tied_head=True, theta=theta) | biases(raw) | norm | {"logit_scale": number(raw, "logit_scale", 0.0625)}


def glm(raw: Raw) -> Fields:
    """GLM-4: half of each head rotated, neighbour with neighbour. The later models (glm4) norm before and after sublayers."""
    raw = raw | {"head_dim": raw.get("head_dim") or 128, "num_key_value_heads": raw.get("num_key_value_heads") or 2}
    if raw.get("eos_token_id") is None:
        raw = raw | {"eos_token_id": [151329, 151336, 151338]}
    place = {"norm_place": "sandwich" if raw["model_type"] == "glm4" else "pre"}
    return decoder(raw, eps=1.5625e-7, partial=0.5) | place | {"qkv_bias": flag(raw, "attention_bias", True)}


UP_DOWN = llama.weights(llama.PRE_NORMS, {"mlp.up": ("mlp.up_proj",)})
FUSED_MLP = {"mlp.gate_up": ("mlp.gate_up_proj",)}
OUTPUT_NORMS = {"attention_post_norm": ("post_attention_layernorm",), "mlp_post_norm": ("post_feedforward_layernorm",)}
OUTPUT = llama.weights(OUTPUT_NORMS)
GLM4_NORMS = {
    "attention_norm": ("input_layernorm",),
    "attention_post_norm": ("post_self_attn_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp_post_norm": ("post_mlp_layernorm",),
}
HEAD_NORMS = {"attention.q_norm": ("self_attn.query_layernorm",), "attention.k_norm": ("self_attn.key_layernorm",)}
ONE_NORM = llama.weights({"attention_norm": ("input_layernorm",)})
FAMILIES = {
    "arcee": Family(arcee, UP_DOWN),
    "cohere": Family(cohere, ONE_NORM, adapt=llama.from_neighbours),
    "cohere2": Family(cohere2, ONE_NORM, adapt=llama.from_neighbours),
    "ernie4_5": Family(ernie, llama.WEIGHTS, adapt=llama.from_neighbours),
    "exaone4": Family(exaone4, OUTPUT),
    "glm": Family(glm, llama.weights(llama.PRE_NORMS, FUSED_MLP), adapt=llama.from_neighbours),
    "glm4": Family(glm, llama.weights(GLM4_NORMS, FUSED_MLP), adapt=llama.from_neighbours),
    "helium": Family(helium, llama.WEIGHTS, adapt=llama.from_neighbours),
    "hunyuan_v1_dense": Family(hunyuan, llama.weights(llama.PRE_NORMS, HEAD_NORMS)),
    "ministral": Family(ministral, llama.WEIGHTS),
    "ministral3": Family(ministral3, llama.WEIGHTS),
    "nanochat": Family(
        nanochat,
        llama.weights({"mlp.up": ("mlp.fc1",), "mlp.down": ("mlp.fc2",)}),
        adapt=swapped_halves,
        gainless=re.compile(r"norm\.weight$"),
    ),
    "nemotron": Family(nemotron, UP_DOWN, gain_offset=1.0),
    "phi3": Family(phi3, llama.weights(llama.PRE_NORMS, FUSED_MLP, {"attention.qkv": ("self_attn.qkv_proj",)})),
    "seed_oss": Family(seed_oss, llama.WEIGHTS),
    "smollm3": Family(smollm3, llama.WEIGHTS),
    "stablelm": Family(stablelm, llama.WEIGHTS),
    "starcoder2": Family(starcoder2, llama.weights(llama.PRE_NORMS, {"mlp.up": ("mlp.c_fc",), "mlp.down": ("mlp.c_proj",)})),
}
