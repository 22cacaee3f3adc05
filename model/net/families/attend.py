"""Our own spelling: config.json holds the fields of ModelConfig. Every mix of switches can be written so."""

import math
from dataclasses import MISSING, asdict, fields
from typing import Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families.reading import Family, Raw
from attend.model.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
)
from attend.model.sublayers import DeltaSpec

SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "proportional": ProportionalScaling,
    "yarn": YarnScaling,
    "longrope": LongScaling,
}


def read(raw: Raw) -> ModelConfig:
    """Keys of an earlier version are understood too."""
    values = {key: value for key, value in _today(raw).items() if key not in ("model_type", "architectures")}
    known = {field.name: field for field in fields(ModelConfig)}
    strangers = sorted(values.keys() - known.keys())
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values and name != "family"]
    if strangers or missing:
        raise CheckpointError(f"config.json: unknown {strangers}, missing {missing}")
    for name in ("window_layers", "rope_layers", "expert_layers", "delta_layers", "conv_layers", "eos_token_ids"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    if not isinstance(values.setdefault("eos_token_ids", ()), tuple):
        raise CheckpointError(f"config.json: eos_token_ids must be a list; got {values['eos_token_ids']!r}")
    if values.get("rope_scaling") is not None:
        values["rope_scaling"] = _scaling(values["rope_scaling"])
    if isinstance(values.get("delta"), dict):
        values["delta"] = DeltaSpec(**values["delta"])
    return ModelConfig(**values | {"family": "attend"})


def _today(raw: Raw) -> dict[str, Any]:
    """The keys as this version writes them."""
    values = dict(raw)
    if "post_norm" in values:
        values.setdefault("norm_place", "post" if values.pop("post_norm") else "pre")
    if "linear_bias" in values:
        values["out_bias"] = values["mlp_bias"] = values.pop("linear_bias")
    if "scale_embedding" in values:
        values["embedding_scale"] = math.sqrt(values["hidden_size"]) if values.pop("scale_embedding") else 1.0
    if isinstance(values.get("qk_norm"), bool):
        values["qk_norm"] = "head" if values["qk_norm"] else "none"
    return values


def _scaling(given: Any) -> RopeScaling:
    try:
        kind = SCALINGS[given.get("rope_type", "llama3")]
        numbers = {
            key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if key != "rope_type"
        }
        return kind(**numbers)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"config.json: rope_scaling {given!r} is not understood: {error}") from error


def write(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read`."""
    values = asdict(config)
    del values["family"]
    if config.rope_scaling is not None:
        names = {kind: name for name, kind in SCALINGS.items()}
        values["rope_scaling"]["rope_type"] = names[type(config.rope_scaling)]
    return {"model_type": "attend", **values}


FAMILIES = {"attend": Family(read, None, write)}
