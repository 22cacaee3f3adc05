"""GPT-2 (Radford et al. 2019): learned positions, GELU, LayerNorm and biases everywhere. GPT-NeoX and Pythia: attention and MLP
side by side, and a quarter of each head rotated.
"""

import re
from typing import TYPE_CHECKING

from attend.model.config import ModelConfig
from attend.model.net.families.family import (
    Family,
    Fields,
    Raw,
    activation,
    flag,
    head_size_of,
    in_block,
    number,
    pairs,
    refuse,
    size,
    stop_tokens,
)
from attend.model.net.families.positions import decoder

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor

BIASED = {"norm": "layernorm", "gated_mlp": False, "mlp_bias": True}


def gpt2(raw: Raw) -> Fields:
    """Keys of config.json have names of their own (n_embd, n_layer, ...)."""
    refuse(raw, "scale_attn_weights", True)
    refuse(raw, "scale_attn_by_inverse_layer_idx", False)
    hidden, heads = size(raw, "n_embd"), size(raw, "n_head")
    return BIASED | {
        "family": "gpt2",
        "vocab_size": size(raw, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": size(raw, "n_layer"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_size": head_size_of(raw, "n_embd", "n_head"),
        "mlp_size": size(raw, "n_inner", 4 * hidden),
        "max_positions": size(raw, "n_positions", 1024),
        "norm_eps": number(raw, "layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "activation": activation(raw, "activation_function", "gelu_new"),
        "qkv_bias": True,
        "out_bias": True,
        "tied_head": flag(raw, "tie_word_embeddings", True),
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_ids": stop_tokens(raw),
    }


def gpt_neox(raw: Raw) -> Fields:
    """Each query head has a key/value head of its own."""
    head, bias = head_size_of(raw, "hidden_size", "num_attention_heads"), flag(raw, "attention_bias", True)
    refuse(raw, "head_dim", None, head)
    ours = {"head_dim": head, "num_key_value_heads": None, "hidden_act": raw.get("hidden_act") or "gelu"}
    raw = {key: value for key, value in raw.items() if key not in ("rope_theta", "partial_rotary_factor")} | ours
    fields = decoder(raw, theta=number(raw, "rotary_emb_base", 10000.0), partial=number(raw, "rotary_pct", 0.25))
    place = {"norm_place": "parallel" if flag(raw, "use_parallel_residual", True) else "pre"}
    norm = {"norm_eps": number(raw, "layer_norm_eps", 1e-5), "qkv_bias": bias, "out_bias": bias}
    return fields | BIASED | place | norm


def by_kind(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    """Rows from (query, key, value) of each head in turn to all queries, all keys, all values."""
    if ".query_key_value." not in name:
        return tensor
    return tensor.unflatten(0, (config.num_heads, 3, config.head_size)).transpose(0, 1)


def _weights(block: str, outside: tuple[str, ...], inside: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Names of the vectors of tokens, the last norm and the head; and those of a block, in turn."""
    parts = ("attention_norm", "attention.qkv", "attention.out", "mlp_norm", "mlp.up", "mlp.down")
    names = in_block(block, {part: (name,) for part, name in zip(parts, inside, strict=True)})
    for part, name in zip(("embedding.tokens", "norm", "head"), outside, strict=True):
        names |= pairs(part, name)
    return names


GPT2 = _weights(
    "transformer.h",
    ("transformer.wte", "transformer.ln_f", "lm_head"),
    ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
)
NEOX = _weights(
    "gpt_neox.layers",
    ("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
    (
        *("input_layernorm", "attention.query_key_value", "attention.dense"),
        *("post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
)
FAMILIES = {
    "gpt2": Family(
        gpt2,
        GPT2 | pairs("embedding.positions", "transformer.wpe"),
        transposed_weights=re.compile(r"^blocks\."),
        prefix="transformer.",
        ignored_tensors=re.compile(r"attn\.(masked_)?bias$"),
    ),
    "gpt_neox": Family(
        gpt_neox,
        NEOX,
        prefix="gpt_neox.",
        adapt=by_kind,
        ignored_tensors=re.compile(r"attention\.((masked_)?bias|rotary_emb\.inv_freq)$"),
    ),
}
