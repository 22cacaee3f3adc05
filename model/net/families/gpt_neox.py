"""GPT-NeoX and Pythia: attention and MLP side by side, a quarter of each head rotated, LayerNorm and biases everywhere."""

import re
from typing import TYPE_CHECKING

from attend.model.config import ModelConfig
from attend.model.net.families.family import Family, Raw, decoder_sizes, flag, head_size_of, in_block, number, pairs, refuse
from attend.model.net.families.positions import rope

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor


def read(raw: Raw) -> ModelConfig:
    """Read a GPT-NeoX config.json; each query head has a key/value head of its own."""
    size, bias = head_size_of(raw, "hidden_size", "num_attention_heads"), flag(raw, "attention_bias", True)
    refuse(raw, "head_dim", None, size)
    ours = {"head_dim": size, "num_key_value_heads": None, "hidden_act": raw.get("hidden_act") or "gelu"}
    raw = {key: value for key, value in raw.items() if key not in ("rope_theta", "partial_rotary_factor")} | ours
    theta, share = number(raw, "rotary_emb_base", 10000.0), number(raw, "rotary_pct", 0.25)
    return ModelConfig(
        **decoder_sizes(raw)
        | rope(raw, size, theta=theta, partial=share)
        | {
            "norm": "layernorm",
            "norm_eps": number(raw, "layer_norm_eps", 1e-5),
            "norm_place": "parallel" if flag(raw, "use_parallel_residual", True) else "pre",
            "gated_mlp": False,
            "qkv_bias": bias,
            "out_bias": bias,
            "mlp_bias": True,
        }
    )


def adapt(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    """Rows from (query, key, value) of each head in turn to all queries, all keys, all values."""
    if ".query_key_value." not in name:
        return tensor
    return tensor.unflatten(0, (config.num_heads, 3, config.head_size)).transpose(0, 1)


OUTSIDE = (
    pairs("embedding.tokens", "gpt_neox.embed_in") | pairs("norm", "gpt_neox.final_layer_norm") | pairs("head", "embed_out")
)
IN_BLOCK = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("attention.query_key_value",),
    "attention.out": ("attention.dense",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.dense_h_to_4h",),
    "mlp.down": ("mlp.dense_4h_to_h",),
}
IGNORED = re.compile(r"attention\.((masked_)?bias|rotary_emb\.inv_freq)$")
FAMILIES = {
    "gpt_neox": Family(
        read, OUTSIDE | in_block("gpt_neox.layers", IN_BLOCK), prefix="gpt_neox.", adapt=adapt, ignored_tensors=IGNORED
    )
}
