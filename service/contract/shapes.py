"""What is known of a field beside its type: what /openapi.json says of it, and where else than in JSON it stands."""

from dataclasses import dataclass, fields
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from attend.model.params import DecodingParams, SamplingParams, StopRules

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
MAYBE: Any = None
"""The value of a field that may be missing. Where it is there, it has its type: null is part of that only if it is named."""
_DEFAULTS = {each.name: each.default for kind in (SamplingParams, DecodingParams, StopRules) for each in fields(kind)}


class Shape(BaseModel):
    """A JSON object with these fields and no others. The text under a field is its description."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Null of any name is absent, also of one that is not known."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name in cls.model_fields}


@dataclass(frozen=True, slots=True)
class Wire:
    """Where else than in a body of HTTP a field stands."""

    proto: tuple[str, ...] = ()
    """Its places in the message of gRPC, such as `sampling.top_p`; none where it is not there."""
    client: bool = False
    """Whether Attend's own HTTP clients take it."""
    flag: bool = False
    """Whether `attend generate` has a flag of its name."""


def told(default: Any = None, *, proto: str = "", client: bool = False, flag: bool = False, **keywords: Any) -> Any:
    """A field that may be absent. `default` is what that means, where a single value says it; `keywords` go with its type.

    `proto` names its places in the message of gRPC, with spaces between them; `client` and `flag`: see `Wire`.
    """
    field: Any = Field(None, json_schema_extra=keywords | ({} if default is None else {"default": default}))
    field.metadata.append(Wire(tuple(proto.split()), client, flag))
    return field


def param(name: str, *, flag: bool = True, **keywords: Any) -> Any:
    """A field with the default of `model/params.py`, which the clients have too."""
    return told(_DEFAULTS[name], client=True, flag=flag, **keywords)


def wires(model: type[BaseModel]) -> dict[str, Wire]:
    """Where the fields of a body stand elsewhere, by name."""
    found = {name: [each for each in field.metadata if isinstance(each, Wire)] for name, field in model.model_fields.items()}
    return {name: each[-1] if each else Wire() for name, each in found.items()}


def body(*required: str, **others: Schema) -> ConfigDict:
    """For a body: fields whose absence ours refuse, and fields that its model lacks because they may only ask for nothing."""

    def extend(schema: Schema) -> None:
        schema["properties"] |= others
        schema["required"] = [*schema.get("required", ()), *required]

    return ConfigDict(json_schema_extra=extend)


def off(text: str, *values: Any) -> Schema:
    """A field that may be null or one of these values, which ask for nothing."""
    return {"enum": [None, *values], "description": text}


def listed(items: Schema, **limits: int) -> Schema:
    """A list."""
    return {"type": "array", "items": items, **limits}


def closed(properties: dict[str, Schema], *required: str) -> Schema:
    """An object without other fields."""
    least = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, "additionalProperties": False, **least}


def one_of(*shapes: Schema, text: str | None = None) -> Schema:
    """Any of the shapes."""
    return {"anyOf": list(shapes)} | ({} if text is None else {"description": text})


def between(low: float, high: float) -> Schema:
    """A range with its ends."""
    return {"minimum": low, "maximum": high}


def above(low: float, high: float) -> Schema:
    """A range without its lower end."""
    return {"exclusiveMinimum": low, "maximum": high}
