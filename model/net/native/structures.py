"""What the native library is told of a model, of a cache and of a step, as C structures, as in layers.h."""

import ctypes
from collections.abc import Iterator
from typing import Any

from attend.model.config import ModelConfig
from attend.model.net.transformer import Decoder
from attend.model.sublayers import AttentionVariant, ConvSpec, DeltaSpec

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""In the order of the enum `Activation` in matrix.h."""
PLACES = ("parallel", "shared")
"""Places of norms with attention and MLP side by side, in the order of `Place` in layers.h, from 1 on."""
MIXERS = (type(None), DeltaSpec, ConvSpec)
"""What layers have in place of attention, in the order of `Mixer` in layers.h."""
EVERYTHING = 1 << 24
"""A window without a window: float32 holds it, and no context is as long."""


def attention_numbers(variant: AttentionVariant, head_size: int) -> tuple[float, ...]:
    """Scale, soft cap and window of a layer."""
    return variant.scale or head_size**-0.5, variant.softcap or 0.0, variant.window or EVERYTHING


class Caches(ctypes.Structure):
    """`Caches` of layers.h: its arrays live as long as it does."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("block_size", "in_8_bits")),
        *((name, ctypes.c_void_p) for name in ("groups", "states")),
    )

    def __init__(self, *parts: Any) -> None:
        self.held = parts
        super().__init__(*(ctypes.cast(part, ctypes.c_void_p) if isinstance(part, ctypes.Array) else part for part in parts))


class StepCall(ctypes.Structure):
    """The struct `StepCall` of layers.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("T", "R", "G", "S")),
        *((name, ctypes.c_void_p) for name in ("tokens", "starts", "counts", "kept")),
        ("tables", ctypes.POINTER(ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("sources", "places", "vectors", "hidden", "scored", "scores", "draws", "drawn")),
        ("progress", ctypes.c_void_p),
    )


class ModelSizes(ctypes.Structure):
    """The struct `ModelSizes` of layers.h."""

    _fields_ = tuple(
        (name, kind)
        for kind, names in (
            (
                ctypes.c_int64,
                "layers E V H P attention_gate norms_all normed_after query_length activation gated centred place",
            ),
            (ctypes.c_int64, "X C F S undivided shared_gate sigmoid groups groups_of_token beside"),
            (ctypes.c_int64, "key_heads value_heads key_size value_size delta_kernel conv_kernel head_gate"),
            (ctypes.c_float, "eps output_eps embedding_scale residual_scale limit slope"),
            (ctypes.c_float, "query_beta routing_eps routing_floor routed_scale delta_eps rate_scale"),
            (ctypes.c_float, "logit_scale logit_softcap"),
        )
        for name in names.split()
    )


class LayerSizes(ctypes.Structure):
    """The struct `LayerSizes` of layers.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("mixed", "mixer", "K", "D", "R", "M", "shares", "same", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "after")),
    )


def model_sizes(config: ModelConfig) -> ModelSizes:
    """The sizes of a model, as the library reads them."""
    return ModelSizes(
        layers=config.num_layers,
        E=config.hidden_size,
        V=config.vocab_size,
        H=config.num_heads,
        P=config.per_layer_input_size or 0,
        attention_gate=config.attention_gate,
        head_gate=config.head_gate,
        norms_all=config.qk_norm == "all",
        normed_after=config.qk_norm_after_rope,
        query_length=config.query_scale_length,
        activation=ACTIVATIONS.index(config.activation),
        gated=config.gated_mlp,
        centred=config.norm != "rmsnorm",
        place=PLACES.index(config.norm_place) + 1 if config.norm_place in PLACES else 0,
        eps=config.norm_eps,
        output_eps=config.post_norm_eps or config.norm_eps,
        embedding_scale=config.embedding_scale,
        residual_scale=config.residual_scale,
        limit=config.swiglu_limit or 0.0,
        slope=config.swiglu_slope,
        query_beta=config.query_scale_beta or 0.0,
        logit_scale=config.logit_scale,
        logit_softcap=config.logit_softcap or 0.0,
        conv_kernel=(config.conv_kernel or 0) if config.conv_layers else 0,
        **_mixture(config),
        **_delta(config),
    )


def _mixture(config: ModelConfig) -> dict[str, Any]:
    """Sizes of the experts, which are alike in all layers that have some."""
    spec = next((layer.experts for layer in config.layers if layer.experts is not None), None)
    if spec is None:
        return {}
    return {
        "X": spec.num_experts,
        "C": spec.experts_per_token,
        "F": spec.expert_size,
        "S": spec.shared_expert_size or 0,
        "undivided": spec.routing == "all",
        "shared_gate": spec.shared_expert_size is not None and spec.shared_expert_gate,
        "sigmoid": spec.scoring_func == "sigmoid",
        "groups": spec.expert_groups,
        "groups_of_token": spec.groups_per_token,
        "routing_eps": spec.routing_eps or 0.0,
        "routing_floor": spec.routing_floor or 0.0,
        "routed_scale": spec.routed_scaling_factor,
        "beside": spec.experts_beside_mlp,
    }


def _delta(config: ModelConfig) -> dict[str, Any]:
    """Sizes of the delta rules, the eps of their norms, and what their rates are multiplied by."""
    spec = config.delta if config.delta_layers else None
    if spec is None:
        return {}
    return {
        "key_heads": spec.key_heads,
        "value_heads": spec.value_heads,
        "key_size": spec.key_size,
        "value_size": spec.value_size,
        "delta_kernel": spec.kernel,
        "delta_eps": config.norm_eps if spec.norm_eps is None else spec.norm_eps,
        "rate_scale": 2.0 if spec.negative_eigenvalues else 1.0,
    }


def layer_sizes(net: Decoder) -> Iterator[tuple[float, ...]]:
    """For each layer the fields of its `LayerSizes`."""
    for block, layer in zip(net.blocks, net.config.layers, strict=True):
        scale, softcap, window = attention_numbers(layer.attention, layer.head_size)
        kinds = (layer.experts is not None, MIXERS.index(type(layer.recurrence)))
        heads = (layer.num_kv_heads, layer.head_size, 0 if layer.rope is None else layer.rope.size)
        kept = (layer.kv_layer is not None, layer.keys_are_values)
        after = 1.0 if block.layer_scale is None else block.layer_scale.item()
        yield *kinds, *heads, layer.mlp_size, *kept, int(window), scale, softcap, after
