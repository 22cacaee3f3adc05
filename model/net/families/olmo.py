"""OLMo: Llama with LayerNorms without gain. OLMo 2, OLMo 3 and OLMo Hybrid: norms of a sublayer's output alone, and of all
queries or keys side by side. OLMoE has the latter.

OLMo 3 has windows in three of four layers, which are not scaled where the others are. OLMo Hybrid has the gated delta rule
there, with norms before the sublayers.
"""

import re

from attend.model.net.families import dense, llama, mixtures
from attend.model.net.families.family import (
    Family,
    Fields,
    Raw,
    alone_in_block,
    biases,
    decoder_sizes,
    flag,
    head_size,
    in_block,
    kept_windows,
    layer_kinds,
    layers_of,
    refuse,
    size,
    sliding_layers,
    with_ends,
)
from attend.model.net.families.positions import decoder, rope, two_ropes
from attend.model.sublayers import DeltaSpec

LINEAR, FULL = DELTA_KINDS = ("linear_attention", "full_attention")
OUTPUT = {"norm_place": "output", "qk_norm": "all"}


def olmo(raw: Raw) -> Fields:
    """Its LayerNorms have no gain."""
    refuse(raw, "clip_qkv", None)
    return decoder(raw) | {"norm": "layernorm_without_bias", "norm_eps": 1e-5} | biases(raw)


def olmo3(raw: Raw) -> Fields:
    """Three layers of four have a sliding window, and a RoPE of their own."""
    layers = sliding_layers(raw, lambda layer: (layer + 1) % 4 != 0)
    ropes = two_ropes(raw, head_size(raw), theta=500000.0, local_key="rope_theta", local_theta=500000.0)
    slides = kept_windows(raw, raw.get("sliding_window", 4096), layers)
    return decoder_sizes(raw, eps=1e-5) | biases(raw) | OUTPUT | ropes | slides


def hybrid(raw: Raw) -> Fields:
    """OLMo Hybrid. A theta that is null means that nothing is rotated; an absent one is not null."""
    values = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rotates = values.get("rope_theta", raw.get("rope_theta", 10000.0)) is not None
    raw = with_ends(raw, None, 100257)
    turns = rope(raw, head_size(raw)) if rotates else {"rope_layers": ()}
    return decoder_sizes(raw) | biases(raw) | OUTPUT | turns | _delta(raw)


def _delta(raw: Raw) -> Fields:
    """Which layers have the delta rule, all but every fourth and one of few where nothing is said, and its sizes."""
    last, heads = size(raw, "num_hidden_layers") - 1, size(raw, "num_attention_heads")
    kinds = layer_kinds(raw, DELTA_KINDS, lambda layer: FULL if layer % 4 == 3 or layer == last < 3 else LINEAR)
    key_heads = size(raw, "linear_num_key_heads", heads)
    key_size = size(raw, "linear_key_head_dim", int(0.75 * size(raw, "hidden_size") / key_heads))
    spec = DeltaSpec(
        key_heads=key_heads,
        value_heads=size(raw, "linear_num_value_heads", heads),
        key_size=key_size,
        value_size=size(raw, "linear_value_head_dim", 2 * key_size),
        kernel=size(raw, "linear_conv_kernel_dim", 4),
        negative_eigenvalues=flag(raw, "linear_allow_neg_eigval", True),
        norm_eps=1e-5,
    )
    layers = layers_of(kinds, LINEAR)
    return {"delta": spec, "delta_layers": layers, "delta_norm_place": "pre"} if layers else {}


def olmoe(raw: Raw) -> Fields:
    """OLMoE, whose queries, keys and values are not clipped in any published model."""
    refuse(raw, "clip_qkv", None)
    raw = {"num_local_experts": 64, **with_ends(raw, None, 50279)}
    experts = {"num_experts": size(raw, "num_experts", raw["num_local_experts"]), "routing": mixtures.routing(raw)}
    chosen = {"experts_per_token": size(raw, "num_experts_per_tok", 8), "qk_norm": "all"}
    return decoder(raw, eps=1e-5) | biases(raw) | experts | chosen


DELTA = {
    "attention.inputs": tuple(f"linear_attn.{x}_proj" for x in "qkvg"),
    "attention.gates": ("linear_attn.b_proj", "linear_attn.a_proj"),
    "attention.merge": ("linear_attn.o_proj",),
}
ALONE = {"convolution": "conv1d.weight", "log_speed": "A_log", "step_bias": "dt_bias", "gain": "o_norm.weight"}
PUBLISHED = {
    "blocks.{}.attention.convolution": tuple(f"model.layers.{{}}.linear_attn.{x}_conv1d.weight" for x in "qkv"),
    **alone_in_block("model.layers", {"attention_norm.weight": "attention_layer_norm.weight"}),
    **alone_in_block(
        "model.layers", dict.fromkeys(("mlp_norm.weight", "attention_post_norm.weight"), "feedforward_layer_norm.weight")
    ),
}
"""As files have them, beside the names of the model in memory. `transformers` writes the second norm of every layer so."""
HYBRID = dense.OUTPUT | in_block("model.layers", llama.PRE_NORMS | DELTA)
HYBRID |= alone_in_block("model.layers", {f"attention.{ours}": f"linear_attn.{name}" for ours, name in ALONE.items()})
FAMILIES = {
    "olmo": Family(olmo, llama.WEIGHTS, gainless=re.compile(r"norm\.weight$")),
    "olmo2": Family(lambda raw: decoder(raw, eps=1e-5) | biases(raw) | OUTPUT, dense.OUTPUT),
    "olmo3": Family(olmo3, dense.OUTPUT),
    "olmo_hybrid": Family(hybrid, HYBRID, fused_tensors=PUBLISHED),
    "olmoe": Family(olmoe, mixtures.QWEN_WEIGHTS),
}
