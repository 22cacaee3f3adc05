"""Small models with random weights and a served model's kinds of layers: for the kernel check, and to measure speed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from attend.model.config import ModelConfig
from attend.model.net.checkpoint import draw_weights
from attend.model.net.formats.codes import INT4, Kind
from attend.model.net.quantised import QuantisedLinear, quantise_matrices
from attend.model.net.transformer import Decoder
from attend.model.sublayers import LayerSpec

NARROW, VOCAB, EXPERTS, WINDOW = 128, 256, 16, 24
"""The most that a small model has on a CPU of a width, and anywhere of tokens and of experts; the widest window on a CPU."""


def reduce_config(config: ModelConfig, *, narrow: bool) -> ModelConfig:
    """A model of one layer of each kind, with few tokens and experts; `narrow`: with narrow matrices and windows too."""
    most = NARROW if narrow else 1 << 30
    sizes = {
        "hidden_size": most,
        "vocab_size": VOCAB,
        "per_layer_vocab_size": VOCAB,
        "sliding_window": WINDOW if narrow else most,
    }
    sizes |= dict.fromkeys(("mlp_size", "expert_size", "shared_expert_size", "kv_shared_mlp_size"), most)
    return with_layers(config, [layers[0] for layers in layers_by_kind(config)], sizes)


def with_layers(config: ModelConfig, layer_indices: Sequence[int], sizes: Mapping[str, int]) -> ModelConfig:
    """A model of some layers, with few experts. `sizes` bounds fields."""
    layer_indices = sorted(layer_indices)
    changes: dict[str, Any] = {"num_layers": len(layer_indices), "bos_token_id": None, "eos_token_ids": ()}
    for name in ("window_layers", "rope_layers", "expert_layers", "delta_layers", "conv_layers"):
        layers = getattr(config, name)
        changes[name] = layers and tuple(new for new, old in enumerate(layer_indices) if old in layers)
    changes |= {name: min(size, limit) for name, limit in sizes.items() if (size := getattr(config, name)) is not None}
    changes["rope_thetas"] = config.rope_thetas and tuple(config.rope_thetas[old] for old in layer_indices)
    changes["kv_shared_layers"] = sum(config.layer(old).kv_layer is not None for old in layer_indices)
    changes["num_experts"] = None if config.num_experts is None else _experts(config, config.num_experts)
    return replace(config, **changes)


def layers_by_kind(config: ModelConfig) -> list[list[int]]:
    """The layers of each kind. Those that read others' keys and values are of a kind by whether they do."""
    found: dict[LayerSpec, list[int]] = {}
    for number, layer in enumerate(config.layers):
        found.setdefault(replace(layer, kv_layer=None if layer.kv_layer is None else 0), []).append(number)
    return list(found.values())


def _experts(config: ModelConfig, number: int) -> int:
    """Number of experts in the small model: as few as routing allows."""
    each = max(-(-config.experts_per_token // config.groups_per_token), -(-EXPERTS // config.expert_groups), config.group_top)
    return min(number, each * config.expert_groups)


def on_meta(config: ModelConfig, kind: Kind | None, context: int) -> Decoder:
    """A decoder without numbers, in the form that is served. A kind of 4 bits with a table of its own is int4 here."""
    with torch.device("meta"):
        net = Decoder(config, context)
    if kind is not None:
        quantise_matrices(net, INT4 if kind.values else kind)
    return net


def random_net(config: ModelConfig, dtype: torch.dtype, device: str, kind: Kind | None, context: int) -> Decoder:
    """A decoder with random weights, gains and biases too, the same each time."""
    net = on_meta(config, kind, context)
    draw_weights(net, dtype, device)
    if kind is not None and kind.values:
        _read_as(net, kind)
    dice = torch.Generator(device).manual_seed(1)
    for name, parameter in net.named_parameters():
        if parameter.dim() < 2 or not name.endswith("weight"):
            scale = 0.1 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.data += scale * torch.randn(parameter.shape, generator=dice, device=device).to(parameter.dtype)
        if name.endswith("layer_scale"):
            parameter.data.fill_(0.5)
    return net.to(device).eval().requires_grad_(False)


def _read_as(net: Decoder, kind: Kind) -> None:
    """Have the codes of int4 stand for the values of another kind of 4 bits, about as large."""
    for module in net.modules():
        if isinstance(module, QuantisedLinear) and module.kind == INT4:
            module.kind = kind
            module.units.mul_(max(INT4.values) / max(kind.values))
