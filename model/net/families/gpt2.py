"""GPT-2 (Radford et al. 2019): LayerNorm before each sublayer, learned positions, GELU, biases everywhere."""

import re

from attend.model.config import ModelConfig
from attend.model.net.families.family import (
    Family,
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


def read(raw: Raw) -> ModelConfig:
    """Read a GPT-2 config.json, whose keys have names of their own (n_embd, n_layer, ...)."""
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
        max_positions=size(raw, "n_positions", 1024),
        norm="layernorm",
        norm_eps=number(raw, "layer_norm_epsilon", 1e-5),
        positions="learned",
        activation=activation(raw, "activation_function", "gelu_new"),
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied_head=flag(raw, "tie_word_embeddings", True),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=stop_tokens(raw),
    )


WEIGHTS = (
    pairs("embedding.tokens", "transformer.wte")
    | pairs("embedding.positions", "transformer.wpe")
    | pairs("norm", "transformer.ln_f")
    | pairs("head", "lm_head")
    | in_block(
        "transformer.h",
        {
            "attention_norm": ("ln_1",),
            "attention.qkv": ("attn.c_attn",),
            "attention.out": ("attn.c_proj",),
            "mlp_norm": ("ln_2",),
            "mlp.up": ("mlp.c_fc",),
            "mlp.down": ("mlp.c_proj",),
        },
    )
)
FAMILIES = {
    "gpt2": Family(
        read,
        WEIGHTS,
        transposed_weights=re.compile(r"^blocks\."),
        prefix="transformer.",
        ignored_tensors=re.compile(r"attn\.(masked_)?bias$"),
    )
}
