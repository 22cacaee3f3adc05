"""Llama, Mistral, Qwen2 and Qwen3: one shape with a few switches; and parts of names and tensors that other families borrow."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families.family import (
    Family,
    Fields,
    Names,
    Raw,
    biases,
    flag,
    in_block,
    pairs,
    sliding_layers,
    windows,
)
from attend.model.net.families.positions import decoder
from attend.model.rope import Llama3Scaling

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor

ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def read(raw: Raw) -> Fields:
    """Qwen2 has a bias on queries, keys and values alone; Qwen3 norms queries and keys. Not every family looks at every key."""
    kind = raw["model_type"]
    biased = biases(raw) if kind in ("llama", "qwen3") else {"qkv_bias": kind == "qwen2"}
    mlp = {"mlp_bias": kind == "llama" and flag(raw, "mlp_bias"), "qk_norm": "head" if kind == "qwen3" else "none"}
    return decoder(raw) | sliding(raw) | biased | mlp


def sliding(raw: Raw) -> Fields:
    """The window as `transformers` reads it; an absent key is its default.

    Mistral slides in every layer; Qwen, once switched on, in those that `layer_types` names, else from `max_window_layers` on.
    """
    kind, window = raw["model_type"], raw.get("sliding_window", 4096)
    on = kind == "mistral" or (kind != "llama" and flag(raw, "use_sliding_window"))
    layers = None if kind in ("llama", "mistral") else qwen_layers(raw, int.__ge__)
    if not on or window is None:
        if layers and raw.get("layer_types"):
            raise CheckpointError("config.json: layer_types name sliding layers, but there is no sliding_window in use")
        return {}
    return windows(raw, window, layers)


def qwen_layers(raw: Raw, slides: Callable[[int, int], bool]) -> tuple[int, ...]:
    """The layers that `layer_types` calls sliding; without it those for which `slides(layer, max_window_layers)` is true."""
    border = raw.get("max_window_layers", 28)
    if raw.get("layer_types") is None and (not isinstance(border, int) or isinstance(border, bool) or border < 0):
        raise CheckpointError(f"config.json: max_window_layers must be an integer from 0; got {border!r}")
    return sliding_layers(raw, lambda layer: slides(layer, border))


def write(config: ModelConfig) -> dict[str, Any]:
    """config.json of a Llama-shaped model, as `transformers` reads it."""
    assert config.softcap is None and config.attention_scale is None, f"{config.family} has no soft cap, and no other scale"
    assert config.rope_scaling is None or isinstance(config.rope_scaling, Llama3Scaling), "written as llama3 alone"
    scaling = config.rope_scaling and {
        "rope_type": "llama3",
        "factor": config.rope_scaling.factor,
        "low_freq_factor": config.rope_scaling.low_freq_factor,
        "high_freq_factor": config.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": config.rope_scaling.original_positions,
    }
    return {
        "architectures": [f"{ARCHITECTURES[config.family]}ForCausalLM"],
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
        "attention_bias": config.out_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0] if len(config.eos_token_ids) == 1 else list(config.eos_token_ids),
        **_write_sliding(config),
    }


def _write_sliding(config: ModelConfig) -> dict[str, Any]:
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


ATTENTION = {
    "attention.qkv": tuple(f"self_attn.{x}_proj" for x in "qkv"),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.out": ("self_attn.o_proj",),
}
MLP = {"mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down": ("mlp.down_proj",)}
PRE_NORMS = {"attention_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",)}
SANDWICH = {
    "attention_norm": ("input_layernorm",),
    "attention_post_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}
SINKS = {"blocks.{}.attention.sinks": ("model.layers.{}.self_attn.sinks",)}


def weights(*parts: Names, prefix: str = "model.") -> Names:
    """Names of weights as Llama has them, with these parts of a block in place of its own."""
    outside = pairs("embedding.tokens", f"{prefix}embed_tokens") | pairs("norm", f"{prefix}norm") | pairs("head", "lm_head")
    block: Names = {**ATTENTION, **MLP}
    for part in parts:
        block |= part
    return outside | in_block(f"{prefix}layers", block)


def fused_experts(prefix: str) -> Names:
    """Matrices of all experts in one tensor."""
    return {
        f"blocks.{{}}.mlp.experts.{ours}.weight": (f"{prefix}layers.{{}}.mlp.experts.{theirs}",)
        for ours, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj"))
    }


def halves(tensor: "Tensor", head: int, rotary_dim: int, first: int = 0) -> "Tensor":
    """Rows of queries or keys [heads * D, ...] whose pairs are (2i, 2i + 1), in the order in which pairs are (i, i + R / 2).

    Of a head R = `rotary_dim` rows are rotated, from the `first` on. Queries and keys change places alike,
    so their products stay.
    """
    last = first + rotary_dim
    order = [*range(first), *range(first, last, 2), *range(first + 1, last, 2), *range(last, head)]
    return tensor.unflatten(0, (-1, head))[:, order].flatten(0, 1)


def from_neighbours(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    """Reorder the rows of queries and keys: rotary pairs from neighbours to halves. GGUF has names of its own."""
    turned = name.rpartition(".")[0].endswith(("self_attn.q_proj", "self_attn.k_proj", ".attn_q", ".attn_k"))
    return halves(tensor, config.head_size, config.rope_size or config.head_size) if turned else tensor


def normed_vectors(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    """The vectors of tokens, normed in float32: once, as they are read."""
    if not name.endswith("embed_tokens.weight"):
        return tensor
    if not tensor.is_floating_point() or tensor.shape[-1] != config.hidden_size:
        raise CheckpointError(f"tensor {name} is quantised, which is not supported: it is normed as it is read")
    vectors = tensor.float()
    return (vectors * (vectors.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt()).to(tensor.dtype)


WEIGHTS = weights(PRE_NORMS)
FAMILIES = dict.fromkeys(ARCHITECTURES, Family(read, WEIGHTS, write))
