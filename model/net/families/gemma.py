"""Gemma 1 to 3, and VaultGemma: gains of 1 + w, embeddings times sqrt(width), GELU in the gated MLP.

Gemma 2 norms before and after each sublayer, caps scores, and has a window in every other layer. So has
VaultGemma, which norms before alone. Gemma 3 norms queries and keys instead of capping, and its layers with a window turn by a
theta of their own.
"""

import math
from dataclasses import replace
from typing import Any

from attend.model.config import ModelConfig
from attend.model.net.families import llama
from attend.model.net.families.family import (
    Family,
    Raw,
    decoder_sizes,
    flag,
    head_size,
    in_block,
    number,
    optional_number,
    refuse,
    size,
    sliding_layers,
    windows,
)
from attend.model.net.families.positions import rope, two_ropes


def _common(raw: Raw) -> dict[str, Any]:
    refuse(raw, "use_bidirectional_attention", None, False)
    bias = flag(raw, "attention_bias")
    key = "hidden_activation" if raw.get("hidden_activation") is not None else "hidden_act"
    fields = decoder_sizes(raw | {key: raw.get(key) or "gelu_pytorch_tanh"}, tied_head=True, activation_key=key)
    return fields | {"qkv_bias": bias, "out_bias": bias, "embedding_scale": math.sqrt(fields["hidden_size"])}


def read(raw: Raw) -> ModelConfig:
    """Gemma. Its first configs said "gelu" and meant the approximation by tanh."""
    fields = _common(raw | {"hidden_act": "gelu_pytorch_tanh"} if raw.get("hidden_activation") is None else raw)
    return ModelConfig(**fields | rope(raw, head_size(raw)))


def _sandwich(raw: Raw, final_cap: float | None) -> dict[str, Any]:
    """Fields of Gemma 2 and 3, with the cap of the next token's scores where config.json says none."""
    return _common(raw) | {
        "norm_place": "sandwich",
        "attention_scale": number(raw, "query_pre_attn_scalar", 256.0) ** -0.5,
        "logit_softcap": optional_number(raw, "final_logit_softcapping", final_cap),
    }


def read2(raw: Raw) -> ModelConfig:
    """Gemma 2. Even layers have a window."""
    layers = sliding_layers(raw, lambda layer: layer % 2 == 0)
    fields = _sandwich(raw, 30.0) | rope(raw, head_size(raw))
    fields |= {"softcap": optional_number(raw, "attn_logit_softcapping", 50.0)}
    return ModelConfig(**fields | windows(raw, raw.get("sliding_window", 4096), layers))


def read_vault(raw: Raw) -> ModelConfig:
    """Read a VaultGemma config.json."""
    raw = {"num_key_value_heads": 4, "head_dim": 256, **raw}
    return replace(read2(raw), norm_place="pre")


def read3(raw: Raw) -> ModelConfig:
    """Gemma 3's text model. All layers but every sixth have a window. Its reference looks at no `attn_logit_softcapping`."""
    pattern = size(raw, "sliding_window_pattern", 6)
    layers = sliding_layers(raw, lambda layer: (layer + 1) % pattern != 0)
    fields = _sandwich(raw, None) | {"qk_norm": "head"}
    fields |= two_ropes(raw, head_size(raw), theta=1e6, local_key="rope_local_base_freq", local_theta=10000.0)
    return ModelConfig(**fields | local_windows(raw, raw.get("sliding_window", 4096), layers))


def local_windows(raw: Raw, window: Any, layers: tuple[int, ...]) -> dict[str, Any]:
    """A window that is kept where it hides nothing: its layers turn by a theta of their own."""
    if not layers:
        return {}
    whole = len(layers) == size(raw, "num_hidden_layers")
    return {"sliding_window": size({"sliding_window": window}, "sliding_window"), "window_layers": None if whole else layers}


SANDWICH = {
    "attention_norm": ("input_layernorm",),
    "attention_post_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}
BEFORE = {"mlp_norm": SANDWICH["mlp_norm"]}
WEIGHTS = llama.OUTSIDE | in_block("model.layers", SANDWICH | llama.ATTENTION | llama.MLP)
FAMILIES = {
    "gemma": Family(read, llama.WEIGHTS, gain_offset=1.0),
    "gemma2": Family(read2, WEIGHTS, gain_offset=1.0),
    "gemma3_text": Family(read3, WEIGHTS, gain_offset=1.0),
    "vaultgemma": Family(read_vault, llama.WEIGHTS | in_block("model.layers", BEFORE), gain_offset=1.0),
}
