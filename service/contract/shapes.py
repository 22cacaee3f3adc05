"""The base class of request bodies: fields with their ranges and documentation, and errors of one sentence with the place."""

import re
from dataclasses import fields
from threading import Lock
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, get_args, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
    with_config,
)
from pydantic_core import ErrorDetails, core_schema

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import DecodingParams, SamplingParams, StopRules, describe
from attend.service.contract.tolerance import Unsupported, known_fields
from attend.service.remarks import Remarks

Schema = dict[str, Any]
T = TypeVar("T")
_DEFAULTS = {each.name: each.default for kind in (SamplingParams, DecodingParams, StopRules) for each in fields(kind)}
NOT_SUPPORTED, WRONG = "not_supported", "wrong"
"""Types of the complaints whose text is ours: they end in a NotSupported, and in an InvalidRequest."""


_BUILDING = Lock()


class Shape(BaseModel):
    """A JSON object with these fields. The text under a field is its description. For other fields see `tolerance.py`."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, defer_build=True)
    names: ClassVar[frozenset[str]] = frozenset()
    """The fields, as callers write them."""
    unsupported: ClassVar[dict[str, Unsupported]] = {}
    """Fields that are not carried out."""

    @classmethod
    def __pydantic_init_subclass__(cls, **keywords: Any) -> None:
        super().__pydantic_init_subclass__(**keywords)
        cls.names = frozenset(field.alias or name for name, field in cls.__pydantic_fields__.items())

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any, info: ValidationInfo) -> Any:
        return known_fields(data, cls.names, cls.unsupported, info.context)

    @classmethod
    def built(cls) -> type[Self]:
        """This shape, ready to validate. All of them take half a second to build, so each is built when it is first asked for:
        by one thread, as pydantic takes a shape apart while it builds it.
        """
        if not cls.__pydantic_complete__:
            with _BUILDING:
                cls.model_rebuild()
        return cls

    @classmethod
    def read(cls, document: dict[str, Any], remarks: Remarks | None = None) -> Self:
        """A parsed body. Raises InvalidRequest with the place named. Without `remarks`, unknown fields are errors."""
        remarks = remarks or Remarks(strict=True)
        try:
            return cls.built().model_validate(document, context=remarks)
        except ValidationError as error:
            raise first_error(error, document, remarks.near) from error


def build_all(kind: type[Shape] = Shape) -> None:
    """Build all shapes that are defined, for a thread beside those that serve."""
    for each in kind.__subclasses__():
        each.built()
        build_all(each)


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


def optional_field(default: Any = None, **keywords: Any) -> Any:
    """A field that may be absent. `default` is what that means, where a single value says it; `keywords` go with its type."""
    return Field(None, json_schema_extra=keywords | ({} if default is None else {"default": default}))


def param(name: str) -> Any:
    """A field with the default of `model/params.py`."""
    return optional_field(_DEFAULTS[name])


# --- errors

Place = tuple[str | int, ...]
OF_OBJECTS = ("messages", "tools", "input", "system")
"""Lists whose items an error names as its field; of other lists it names the whole."""
_WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "a boolean",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}


class _Mistake(NamedTuple):
    """A complaint, the place of ours that it is about, and what stands there."""

    error: ErrorDetails
    place: Place
    value: Any


def first_error(error: ValidationError, document: dict[str, Any], near: dict[str, str]) -> InvalidRequest:
    """pydantic's first complaint, of an unknown name if there is one, as one sentence about one place. `near` has the known
    names that unknown ones resemble.
    """
    found = sorted(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
    same = _of_first([_mistake(each, document) for each in found])
    (first, place, value), kind = same[0], same[0].error["type"]
    shown = "".join(f"[{step}]" if isinstance(step, int) else f".{step[:64]}" for step in place).removeprefix(".")
    field = shown if place[0] in OF_OBJECTS else re.sub(r"(\[\d+\])+$", "", shown)
    if kind == "extra_forbidden":
        meant = f": did you mean {near[place[-1]]}?" if place[-1] in near else ""
        named = shown if shown.strip() and shown.isprintable() else repr(shown)
        return InvalidRequest(f"{named} is not a field of this request{meant}", field)
    if kind == "missing":
        return InvalidRequest(f"{shown} is required", field)
    if kind in (NOT_SUPPORTED, WRONG):
        sort = NotSupported if kind == NOT_SUPPORTED else InvalidRequest
        return sort(f"{shown} {first['msg']}; got {describe(value)}", field)
    wanted = ", or ".join(dict.fromkeys(_expected_value(mistake.error) for mistake in same))
    return InvalidRequest(f"{shown} must be {wanted}; got {describe(value)}", field)


def _of_first(found: list[_Mistake]) -> list[_Mistake]:
    """The complaints that are of one mistake with the first: what each type that a value may have says of it.

    Where all types but one want another kind of value, that one's first complaint counts, which lies deeper.
    """
    first = found[0]
    same = [each for each in found if each.place[: len(first.place)] == first.place]
    label = len(first.error["loc"]) - 1
    deeper = [each for each in same if len(each.place) > len(first.place)]
    if deeper and len({each.error["loc"][label] for each in deeper}) == 1:
        return _of_first(deeper)
    return same


def _mistake(error: ErrorDetails, document: dict[str, Any]) -> _Mistake:
    """A complaint with its place: pydantic's has steps that are names of types."""
    value: Any = document
    place: list[str | int] = []
    is_missing = error["type"] == "missing"
    for step in error["loc"][:-1] if is_missing else error["loc"]:
        if (isinstance(value, dict) and step in value) or (isinstance(value, list) and isinstance(step, int)):
            value = value[step]  # type: ignore[index]
            place.append(step)
    if is_missing:
        place.append(error["loc"][-1])
        value = None
    return _Mistake(error, tuple(place), value)


def _expected_value(error: ErrorDetails) -> str:
    kind = error["type"]
    if kind == "literal_error":
        return str(error["ctx"]["expected"])
    said = error["msg"].removeprefix("must be ").partition(" after ")[0]
    for one, ours in (("String", "a string"), ("List", "a list"), ("Value", "a list")):
        said = said.replace(f"{one} should have", f"{ours} of")
    return _WANTED.get(kind, said)
