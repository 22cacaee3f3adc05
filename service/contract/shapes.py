"""The base class of request bodies, and what a field says of itself: range, documentation, place in the message of gRPC."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from threading import Lock
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
    with_config,
)
from pydantic_core import core_schema

from attend.model.params import DecodingParams, SamplingParams, StopRules
from attend.service.contract.tolerance import Unsupported, known_fields

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
    off: ClassVar[dict[str, Unsupported]] = {}
    """Fields that are not carried out."""

    @classmethod
    def __pydantic_init_subclass__(cls, **keywords: Any) -> None:
        super().__pydantic_init_subclass__(**keywords)
        cls.names = frozenset(field.alias or name for name, field in cls.__pydantic_fields__.items())

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any, info: ValidationInfo) -> Any:
        return known_fields(data, cls.names, cls.off, info.context)


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


T = TypeVar("T")


def closed(kind: type[T]) -> type[T]:
    """For a TypedDict, which is read three times as quickly as a Shape: other fields as there."""

    def get_schema(source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        names: frozenset[str] = source.__required_keys__ | source.__optional_keys__

        def check(data: Any, info: ValidationInfo) -> Any:
            return known_fields(data, names, {}, info.context)

        read: Any = {**handler(source)}
        ref = read.pop("ref")  # else pydantic gives what is inside to the second one who asks for this type
        return core_schema.with_info_before_validator_function(check, read, ref=ref)

    def document(schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        """pydantic's own; null is absent, so fields that may be absent may be null."""
        made = handler(schema)
        found = handler.resolve_ref_schema(made)
        for name in found["properties"].keys() - {*found.get("required", ())}:
            field = found["properties"][name]
            if field.keys() - {"title", "description"} and {"type": "null"} not in field.get("anyOf", ()):
                said = {word: field.pop(word) for word in ("title", "description") if word in field}
                found["properties"][name] = {"anyOf": [field, {"type": "null"}], **said}
        return made

    kind.__get_pydantic_core_schema__ = staticmethod(get_schema)  # type: ignore[attr-defined]  # a TypedDict has no methods
    kind.__get_pydantic_json_schema__ = staticmethod(document)  # type: ignore[attr-defined]
    return with_config(Shape.model_config)(kind)


open_to_more = with_config(ConfigDict(**Shape.model_config | ConfigDict(extra="ignore")))
"""For a TypedDict whose other fields are left out."""


class ErrorText:
    """For an annotation: what is said of a value that is not of its type, after its place."""

    def __init__(self, text: str, kind: str = WRONG) -> None:
        self._text, self._kind = text, kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """pydantic's own, under our words."""
        return core_schema.custom_error_schema(handler(source), self._kind, custom_error_message=self._text)


class Range:
    """For an annotation of an int or a float: the range, both ends included unless it is `above` the lower one."""

    def __init__(self, low: float, high: float, *, above: bool = False) -> None:
        self._low, self._high, self._above = low, high, above

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """A number in the range, and one sentence for all that is none."""
        low, high = self._low, self._high
        if source is int:
            schema: Any = core_schema.int_schema(strict=True, ge=int(low), le=int(high))
            text = f"must be an integer from {low} to {high}"
        else:
            least = {"gt" if self._above else "ge": low}
            schema = {"type": "float", "strict": True, "le": high, **least}
            text = f"must be a number {f'above {low} and at most' if self._above else f'from {low} to'} {high}"
        return core_schema.custom_error_schema(schema, WRONG, custom_error_message=text)


class ByType:
    """For a union of objects that their field `type` tells apart; `default` is that of one without it, or with another. An
    object whose type is any text takes what no other does.
    """

    def __init__(self, default: str | None = None) -> None:
        self._default = default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """A union by tags that are no keys of any object: places in errors have them."""
        choices: dict[str, Any] = {}
        for shape in get_args(source):
            values = get_args(get_type_hints(shape)["type"]) or ("*",)
            choices |= dict.fromkeys((f"type={value}" for value in values), handler.generate_schema(shape))
        default = f"type={self._default}"

        def tag(value: Any) -> str | None:
            kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)  # of a model, to write it
            found = f"type={kind}" if isinstance(kind, str) else default
            return next((each for each in (found, "type=*" if isinstance(kind, str) else "", default) if each in choices), None)

        said = f"must be an object whose type is one of {', '.join(each.removeprefix('type=') for each in choices)}"
        return core_schema.tagged_union_schema(choices, tag, custom_error_type=WRONG, custom_error_message=said)

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        """Any of them: what takes all others takes these too."""
        made = handler(schema)
        return {"anyOf": made["oneOf"]} if "oneOf" in made else made


@dataclass(frozen=True, slots=True)
class Wire:
    """Where a field of a body stands in the message of gRPC."""

    proto: tuple[str, ...] = ()
    """Its places, such as `sampling.top_p`; none where it is not there."""


def optional_field(default: Any = None, *, proto: str = "", **keywords: Any) -> Any:
    """A field that may be absent. `default` is what that means, where a single value says it; `keywords` go with its type;
    `proto` has its places in the message of gRPC, with spaces between them.
    """
    field: Any = Field(None, json_schema_extra=keywords | ({} if default is None else {"default": default}))
    field.metadata.append(Wire(tuple(proto.split())))
    return field


def param(name: str, proto: str) -> Any:
    """A field with the default of `model/params.py`."""
    return optional_field(_DEFAULTS[name], proto=proto)


def wires(model: type[BaseModel]) -> dict[str, Wire]:
    """Where the fields of a body stand in a message, by name."""
    found = {name: [each for each in field.metadata if isinstance(each, Wire)] for name, field in model.model_fields.items()}
    return {name: each[-1] if each else Wire() for name, each in found.items()}


def body(off: Mapping[str, Unsupported]) -> ConfigDict:
    """For a body: the fields that its model lacks because they may only ask for nothing."""

    def extend(schema: Schema) -> None:
        schema["properties"] |= {name: rule.schema for name, rule in off.items()}

    return ConfigDict(json_schema_extra=extend)


def list_of(items: Schema, **limits: int) -> Schema:
    """The schema of a list of the items."""
    return {"type": "array", "items": items, **limits}


def one_of(*shapes: Schema) -> Schema:
    """The schema of a value that fits one of the shapes."""
    return {"anyOf": list(shapes)}
