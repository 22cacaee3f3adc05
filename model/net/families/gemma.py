"""Gemma 1 to 3, and VaultGemma: gains of 1 + w, embeddings times sqrt(width), GELU in the gated MLP.

Gemma 2 norms before and after each sublayer, caps scores, and has a window in every other layer. So has
VaultGemma, which norms before alone. Gemma 3 norms queries and keys instead of capping, and its layers with a window turn by a
theta of their own.
"""

import math

from attend.model.net.families import llama
from attend.model.net.families.family import (
    Family,
    Fields,
    Raw,
    biases,
    decoder_sizes,
    head_size,
    in_block,
    kept_windows,
    number,
    optional_number,
    refuse,
    size,
    sliding_layers,
    windows,
)
from attend.model.net.families.positions import rope, two_ropes


def _common(raw: Raw) -> Fields:
    refuse(raw, "use_bidirectional_attention", None, False)
    key = "hidden_activation" if raw.get("hidden_activation") is not None else "hidden_act"
    fields = decoder_sizes(raw | {key: raw.get(key) or "gelu_pytorch_tanh"}, tied_head=True, activation_key=key)
    return fields | biases(raw) | {"embedding_scale": math.sqrt(fields["hidden_size"])}


def gemma(raw: Raw) -> Fields:
    """Its first configs said "gelu" and meant the approximation by tanh."""
    said = {"hidden_act": "gelu_pytorch_tanh"} if raw.get("hidden_activation") is None else {}
    return _common(raw | said) | rope(raw, head_size(raw))


def _sandwich(raw: Raw, final_cap: float | None) -> Fields:
    """Fields of Gemma 2 and 3, with the cap of the next token's scores where config.json says none."""
    return _common(raw) | {
        "norm_place": "sandwich",
        "attention_scale": number(raw, "query_pre_attn_scalar", 256.0) ** -0.5,
        "logit_softcap": optional_number(raw, "final_logit_softcapping", final_cap),
    }


def gemma2(raw: Raw) -> Fields:
    """Even layers have a window."""
    layers = sliding_layers(raw, lambda layer: layer % 2 == 0)
    fields = _sandwich(raw, 30.0) | rope(raw, head_size(raw))
    fields |= {"softcap": optional_number(raw, "attn_logit_softcapping", 50.0)}
    return fields | windows(raw, raw.get("sliding_window", 4096), layers)


def gemma3(raw: Raw) -> Fields:
    """Gemma 3's text model. All layers but every sixth have a window. Its reference looks at no `attn_logit_softcapping`."""
    pattern = size(raw, "sliding_window_pattern", 6)
    layers = sliding_layers(raw, lambda layer: (layer + 1) % pattern != 0)
    fields = _sandwich(raw, None) | {"qk_norm": "head"}
    fields |= two_ropes(raw, head_size(raw), theta=1e6, local_key="rope_local_base_freq", local_theta=10000.0)
    return fields | kept_windows(raw, raw.get("sliding_window", 4096), layers)


WEIGHTS = llama.weights(llama.SANDWICH)
VAULT = llama.WEIGHTS | in_block("model.layers", {"mlp_norm": llama.SANDWICH["mlp_norm"]})
FAMILIES = {
    "gemma": Family(gemma, llama.WEIGHTS, gain_offset=1.0),
    "gemma2": Family(gemma2, WEIGHTS, gain_offset=1.0),
    "gemma3_text": Family(gemma3, WEIGHTS, gain_offset=1.0),
    "vaultgemma": Family(
        lambda raw: gemma2({"num_key_value_heads": 4, "head_dim": 256, **raw}) | {"norm_place": "pre"}, VAULT, gain_offset=1.0
    ),
}
