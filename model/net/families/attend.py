"""Our own spelling: config.json holds the fields of ModelConfig. Every mix of switches can be written so."""

from dataclasses import MISSING, asdict, fields
from typing import Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families.family import Family, Raw
from attend.model.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
)
from attend.model.sublayers import DeltaSpec, LatentSpec

SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "proportional": ProportionalScaling,
    "yarn": YarnScaling,
    "longrope": LongScaling,
}
ROPES = ("rope_scaling", "local_rope_scaling")


def read(raw: Raw) -> ModelConfig:
    """The fields of ModelConfig, tuples written as lists, and `model_type`."""
    values = {key: value for key, value in raw.items() if key not in ("model_type", "architectures")}
    known = {field.name: field for field in fields(ModelConfig)}
    unknown = sorted(values.keys() - known.keys())
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values and name != "family"]
    if unknown or missing:
        raise CheckpointError(f"config.json: unknown {unknown}, missing {missing}")
    for name in (
        "window_layers",
        "rope_layers",
        "rope_thetas",
        "expert_layers",
        "delta_layers",
        "conv_layers",
        "eos_token_ids",
    ):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    if not isinstance(values.setdefault("eos_token_ids", ()), tuple):
        raise CheckpointError(f"config.json: eos_token_ids must be a list; got {values['eos_token_ids']!r}")
    for name in ROPES:
        if values.get(name) is not None:
            values[name] = _scaling(name, values[name])
    if isinstance(values.get("delta"), dict):
        values["delta"] = DeltaSpec(**values["delta"])
    if isinstance(values.get("latent"), dict):
        values["latent"] = LatentSpec(**values["latent"])
    return ModelConfig(**values | {"family": "attend"})


def _scaling(name: str, given: Any) -> RopeScaling:
    try:
        kind = SCALINGS[given.get("rope_type", "llama3")]
        numbers = {
            key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if key != "rope_type"
        }
        return kind(**numbers)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"config.json: {name} {given!r} is not understood: {error}") from error


def write(config: ModelConfig) -> dict[str, Any]:
    """A config's entries in config.json, which `read` turns into the same config."""
    values = asdict(config)
    del values["family"]
    names = {kind: name for name, kind in SCALINGS.items()}
    for name in ROPES:
        if (scaling := getattr(config, name)) is not None:
            values[name]["rope_type"] = names[type(scaling)]
    return {"model_type": "attend", **values}


FAMILIES = {"attend": Family(read, None, write)}
