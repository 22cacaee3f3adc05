"""Our own spelling: config.json holds the fields of ModelConfig. Every mix of switches can be written so."""

from dataclasses import MISSING, asdict, fields
from typing import Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families.family import Family, Fields, Raw
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
SPECS: dict[str, type] = {"delta": DeltaSpec, "latent": LatentSpec}


def fields_of(raw: Raw) -> Fields:
    """The fields of ModelConfig, tuples written as lists, and `model_type`."""
    values = {key: _tuple(value) for key, value in raw.items() if key not in ("model_type", "architectures")}
    known = {field.name: field for field in fields(ModelConfig)}
    unknown = sorted(values.keys() - known.keys())
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values and name != "family"]
    if unknown or missing:
        raise CheckpointError(f"config.json: unknown {unknown}, missing {missing}")
    if not isinstance(values.setdefault("eos_token_ids", ()), tuple):
        raise CheckpointError(f"config.json: eos_token_ids must be a list; got {values['eos_token_ids']!r}")
    for name in ROPES:
        if values.get(name) is not None:
            values[name] = _scaling(name, values[name])
    for name, spec in SPECS.items():
        if isinstance(values.get(name), dict):
            values[name] = spec(**values[name])
    return values | {"family": "attend"}


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _scaling(name: str, given: Any) -> RopeScaling:
    try:
        kind = SCALINGS[given.get("rope_type", "llama3")]
        return kind(**{key: _tuple(value) for key, value in given.items() if key != "rope_type"})
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"config.json: {name} {given!r} is not understood: {error}") from error


def write(config: ModelConfig) -> dict[str, Any]:
    """A config's entries in config.json, which `fields_of` turns into the same config."""
    values = asdict(config)
    del values["family"]
    names = {kind: name for name, kind in SCALINGS.items()}
    for name in ROPES:
        if (scaling := getattr(config, name)) is not None:
            values[name]["rope_type"] = names[type(scaling)]
    return {"model_type": "attend", **values}


FAMILIES = {"attend": Family(fields_of, None, write)}
