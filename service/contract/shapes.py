"""The base class of request bodies and answers, and what a field says of itself (range, docs, proto)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from threading import Lock
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationInfo, model_validator, with_config
from pydantic_core import core_schema

from attend.model.params import DecodingParams, SamplingParams, StopRules
from attend.service.contract.tolerance import Off, is_ignored
from attend.service.remarks import Remarks

Schema = dict[str, Any]
S = TypeVar("S", bound=BaseModel)
TEXT: Schema = {"type": "string"}
_DEFAULTS = {each.name: each.default for kind in (SamplingParams, DecodingParams, StopRules) for each in fields(kind)}


UNSUPPORTED, WRONG = "unsupported", "wrong"
"""Types of the complaints whose text is ours: they end in a NotSupported, and in an InvalidRequest."""


class Shape(BaseModel):
    """A JSON object with these fields. The text under a field is its description. For other fields see `tolerance.py`."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, defer_build=True)
    names: ClassVar[frozenset[str]] = frozenset()
    """The fields, as callers write them."""
    off: ClassVar[dict[str, Off]] = {}
    """Fields that are not carried out."""

    @classmethod
    def __pydantic_init_subclass__(cls, **keywords: Any) -> None:
        super().__pydantic_init_subclass__(**keywords)
        cls.names = frozenset(field.alias or name for name, field in cls.__pydantic_fields__.items())

    @model_validator(mode="before")
    @classmethod
    def _looked_through(cls, data: Any, info: ValidationInfo) -> Any:
        return _drop_names(data, cls.names, info.context, cls.off)


NO_OFF: Mapping[str, Off] = MappingProxyType({})
_BUILDING = Lock()


def validator_of(kind: type[S]) -> type[S]:
    """A shape that can validate. All of them take half a second to build, so each is built when it is first asked for: by one
    thread, as pydantic takes a shape apart while it builds it.
    """
    if not kind.__pydantic_complete__:
        with _BUILDING:
            kind.model_rebuild()
    return kind


def build_all(kind: type[Shape] = Shape) -> None:
    """Build all shapes that are defined, for a thread beside those that serve."""
    for each in kind.__subclasses__():
        validator_of(each)
        build_all(each)


def _drop_names(data: Any, names: frozenset[str], remarks: Remarks | None, off: Mapping[str, Off] = NO_OFF) -> Any:
    """Null of any name is absent, also of one that is not known. Other unknown names are left out, and said; but the first of
    them that may not be is kept, and is an error.
    """
    if not isinstance(data, dict) or names.issuperset(data):
        return data
    unknown = [name for name, value in data.items() if name not in names and value is not None]
    wrong = next((name for name in unknown if remarks is None or name in off or not is_ignored(name, names, remarks)), None)
    return {name: value for name, value in data.items() if name in names or name == wrong}


closed = with_config(Shape.model_config)
"""For a TypedDict: no other fields, and its texts are descriptions."""
open_to_more = with_config(ConfigDict(**Shape.model_config | ConfigDict(extra="ignore")))
"""The same, but other fields are left out."""


class NullAsAbsent:
    """For an annotation of a TypedDict, which is read three times as quickly as a Shape: null is absent there too."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """pydantic's own, after a look at the names."""
        names = frozenset(source.__required_keys__ | source.__optional_keys__)

        def drop_names(
            data: Any, info: ValidationInfo
        ) -> Any:  # asked for each part of each message: the usual case is told here
            return data if isinstance(data, dict) and names.issuperset(data) else _drop_names(data, names, info.context)

        return core_schema.with_info_before_validator_function(drop_names, handler(source))


class Or:
    """For an annotation: what is said of a value that is not of its type, after its place."""

    def __init__(self, text: str, kind: str = WRONG) -> None:
        self._text, self._kind = text, kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """pydantic's own, under our words."""
        return core_schema.custom_error_schema(handler(source), self._kind, custom_error_message=self._text)


class ShownAs:
    """For an annotation: what /openapi.json says of a field that is read in full later, off the event loop."""

    def __init__(self, shape: Any) -> None:
        self._shape = shape

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """What is annotated for Python's objects, which is all that we validate; the shape for JSON, which is described."""
        shown = handler.generate_schema(self._shape)
        return core_schema.json_or_python_schema(json_schema=shown, python_schema=handler(source))


@dataclass(frozen=True, slots=True)
class Wire:
    """Where else than in a body of HTTP a field stands."""

    proto: tuple[str, ...] = ()
    """Its places in the message of gRPC, such as `sampling.top_p`; none where it is not there."""
    flag: bool = False
    """True if `attend generate` has a flag of its name."""


def optional_field(default: Any = None, *, proto: str = "", flag: bool = False, **keywords: Any) -> Any:
    """A field that may be absent. `default` is what that means, where a single value says it; `keywords` go with its type.

    `proto` names its places in the message of gRPC, with spaces between them; `flag`: see `Wire`.
    """
    field: Any = Field(None, json_schema_extra=keywords | ({} if default is None else {"default": default}))
    field.metadata.append(Wire(tuple(proto.split()), flag))
    return field


def param(name: str, *, flag: bool = True, **keywords: Any) -> Any:
    """A field with the default of `model/params.py`."""
    return optional_field(_DEFAULTS[name], flag=flag, **keywords)


def wires(model: type[BaseModel]) -> dict[str, Wire]:
    """Where the fields of a body stand elsewhere, by name."""
    found = {name: [each for each in field.metadata if isinstance(each, Wire)] for name, field in model.model_fields.items()}
    return {name: each[-1] if each else Wire() for name, each in found.items()}


def body(*required_fields: str, off: Mapping[str, Off] = NO_OFF) -> ConfigDict:
    """For a body: fields whose absence ours refuse, and fields that its model lacks because they may only ask for nothing."""

    def extend(schema: Schema) -> None:
        schema["properties"] |= {name: _off(rule) for name, rule in off.items()}
        schema["required"] = [*schema.get("required", ()), *required_fields]

    return ConfigDict(json_schema_extra=extend)


def _off(rule: Off) -> Schema:
    instead = f": {rule.instead}" if rule.instead else ""
    return {"enum": [None, *(rule.values or ())], "description": f"Not supported{instead}."}


def null_or_one_of(text: str, *values: Any) -> Schema:
    """A field that may be null or one of these values, which ask for nothing."""
    return {"enum": [None, *values], "description": text}


def list_of(items: Schema, **limits: int) -> Schema:
    """The schema of a list of the items."""
    return {"type": "array", "items": items, **limits}


def one_of(*shapes: Schema) -> Schema:
    """The schema of a value that fits one of the shapes."""
    return {"anyOf": list(shapes)}


def between(low: float, high: float) -> Schema:
    """The JSON schema of a range, both ends included."""
    return {"minimum": low, "maximum": high}


def range_up_to(low: float, high: float) -> Schema:
    """A range without its lower end."""
    return {"exclusiveMinimum": low, "maximum": high}
