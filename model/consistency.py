"""True if the values of a model's config fit together. CheckpointError names the one that does not."""

import math
from typing import TYPE_CHECKING

from attend.model.errors import CheckpointError
from attend.model.sublayers import DeltaSpec, LatentSpec

if TYPE_CHECKING:
    from attend.model.config import ModelConfig

IN_TURN = ("pre", "output", "sandwich")
"""Places that may differ from layer to layer."""


def check_config(config: "ModelConfig") -> None:
    """Raise CheckpointError where fields contradict each other; each by itself has the right type already."""
    for kv_heads in (config.num_kv_heads, config.global_kv_heads or 1):
        if config.num_heads % kv_heads:
            raise CheckpointError(
                f"config.json: {config.num_heads} query heads are not divisible by {kv_heads} key/value heads"
            )
    _check_latent(config)
    _check_positions(config)
    _check_layers(config)
    starts = () if config.bos_token_id is None else (config.bos_token_id,)
    for name, tokens in (("bos_token_id", starts), ("eos_token_id", config.eos_token_ids)):
        for token in tokens:
            if not isinstance(token, int) or not 0 <= token < config.vocab_size:
                raise CheckpointError(f"config.json: {name} {token!r} is not a token of a vocabulary of {config.vocab_size}")


def _check_latent(config: "ModelConfig") -> None:
    if not isinstance(config.latent, LatentSpec | None):
        raise CheckpointError(f"config.json: latent must be an object of sizes; got {config.latent!r}")
    if config.latent is None:
        return
    if (config.num_kv_heads, config.head_size) != (1, config.latent.cached_size):
        raise CheckpointError(
            f"config.json: latent needs one key/value head of {config.latent.cached_size} columns; "
            f"got {config.num_kv_heads} of {config.head_size}"
        )
    plain = {"qk_norm": "none", "positions": "rotary", "rope_size": None, "sinks": False, "attention_gate": False}
    for name, value in plain.items():
        if getattr(config, name) != value:
            raise CheckpointError(f"config.json: {name} {getattr(config, name)!r} is not supported with latent")


def _check_positions(config: "ModelConfig") -> None:
    thetas = config.rope_thetas
    if thetas is not None and not (
        isinstance(thetas, tuple)
        and len(thetas) == config.num_layers
        and all(type(theta) in (int, float) and 0 <= theta < math.inf for theta in thetas)
    ):
        raise CheckpointError(f"config.json: rope_thetas must be {config.num_layers} numbers from 0; got {thetas!r}")
    if config.qk_norm_after_rope and config.qk_norm == "all":
        raise CheckpointError("config.json: qk_norm_after_rope is not supported with qk_norm 'all'")
    everywhere = (config.rope_theta, config.rope_scaling, config.global_head_size or config.head_size)
    for theta, scaling, head_size in (everywhere, (config.local_rope_theta, config.local_rope_scaling, config.head_size)):
        size = config.rotary_columns(head_size)
        if size > head_size:
            raise CheckpointError(f"config.json: {size!r} rotary dimensions do not fit a head size of {head_size}")
        if config.positions == "rotary" and size % 2:
            raise CheckpointError(f"config.json: rotary positions need an even head size; got {size}")
        if scaling is not None:
            scaling.check(size)
            for each in (theta, *filter(None, config.rope_thetas or ())):
                if each is None or each <= 1:
                    raise CheckpointError(f"config.json: rope scaling needs a rope_theta above 1; got {each}")


def _check_layers(config: "ModelConfig") -> None:
    if config.num_experts is not None:
        _check_experts(config, config.num_experts)
    if config.swiglu_limit is not None and config.activation != "silu":
        raise CheckpointError(f"config.json: swiglu_limit is not supported with activation {config.activation!r}")
    known = range(config.num_layers)
    for name in ("window_layers", "rope_layers", "expert_layers", "delta_layers", "conv_layers"):
        layers = getattr(config, name)
        if layers is not None and not (isinstance(layers, tuple) and all(type(at) is int and at in known for at in layers)):
            raise CheckpointError(f"config.json: {name} must be some of {config.num_layers} layers, from 0; got {layers!r}")
    _check_states(config)


def _check_experts(config: "ModelConfig", count: int) -> None:
    if config.experts_per_token > count:
        raise CheckpointError(f"config.json: experts_per_token {config.experts_per_token} are more than num_experts {count}")
    if not config.gated_mlp:
        raise CheckpointError("config.json: num_experts without gated_mlp is not supported: experts are gated")
    if config.experts_beside_mlp and config.norm_place != "sandwich":
        raise CheckpointError(f"config.json: experts_beside_mlp with norm_place {config.norm_place!r} is not supported")
    groups, chosen = config.expert_groups, config.groups_per_token
    if groups > 1 and (count % groups or count < config.group_top * groups):
        raise CheckpointError(
            f"config.json: {count} experts cannot be divided into {groups} groups of at least {config.group_top}"
        )
    if chosen > groups or chosen * (count // groups) < config.experts_per_token:
        raise CheckpointError(
            f"config.json: {config.experts_per_token} experts of a token cannot be chosen from {chosen} of {groups} groups"
        )


def _check_kv_layers(config: "ModelConfig") -> None:
    count = config.kv_shared_layers
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise CheckpointError(f"config.json: kv_shared_layers must be an integer from 0; got {count!r}")
    owners = range(config.num_layers - count)
    for layer in range(config.num_layers - count, config.num_layers) if count else ():
        if (
            config.delta_layers
            or config.conv_layers
            or not any(config.slides(owner) == config.slides(layer) for owner in owners)
        ):
            raise CheckpointError(
                f"config.json: {count} kv_shared_layers: layer {layer} has no layer before them whose keys it can read"
            )


def _check_states(config: "ModelConfig") -> None:
    _check_kv_layers(config)
    if not isinstance(config.delta, DeltaSpec | None):
        raise CheckpointError(f"config.json: delta must be an object of sizes; got {config.delta!r}")
    if not isinstance(config.delta_layers, tuple) or (config.delta_layers and config.delta is None):
        raise CheckpointError(f"config.json: delta_layers {config.delta_layers!r} need a delta and must be a list")
    if not isinstance(config.conv_layers, tuple) or (config.conv_layers and (config.conv_kernel or 0) < 2):
        raise CheckpointError(
            f"config.json: conv_layers {config.conv_layers!r} must be a list and need a conv_kernel above 1; "
            f"got {config.conv_kernel!r}"
        )
    if config.delta_layers and config.conv_layers:
        raise CheckpointError("config.json: delta_layers and conv_layers in one model are not supported")
    places = (config.delta_norm_place, config.norm_place)
    if config.delta_norm_place is not None and not all(place in IN_TURN for place in places):
        raise CheckpointError(
            f"config.json: delta_norm_place {places[0]!r} beside norm_place {places[1]!r} is not supported; "
            f"known: {', '.join(IN_TURN)}"
        )
    if len({*config.delta_layers, *config.conv_layers}) == config.num_layers:
        raise CheckpointError("config.json: a recurrent state in every layer is not supported: one layer must have attention")
