"""Validation of a document by pydantic, whose first error becomes one sentence with the place."""

from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import describe
from attend.service.contract.shapes import UNSUPPORTED, WRONG, Shape, validator_of
from attend.service.contract.tolerance import known_fields
from attend.service.remarks import Remarks

B = TypeVar("B", bound=BaseModel)
S = TypeVar("S", bound=Shape)
Place = tuple[str | int, ...]
LABELLED = ("content", "tool_choice")
"""Fields of several types: a step of pydantic's places after them names one, and is no key of the caller's."""
TAGGED = ("messages", "response_format", "tools")
"""Fields whose objects are told apart by a field of theirs. The value of that one is a step of pydantic's places."""
MAPS = ("logit_bias",)
"""Fields whose keys are the caller's: what is wrong inside is said of the whole."""
_WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "a boolean",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_ABSENT = ("missing", "union_tag_not_found")
_TAG = ("union_tag_invalid", "union_tag_not_found")


class _Mistake(NamedTuple):
    """A complaint, the place of ours that it is about, and what stands there."""

    error: ErrorDetails
    place: Place
    value: Any


def validate(
    kind: type[B],
    document: dict[str, Any],
    remarks: Remarks | None = None,
    *,
    exact: bool = False,
    unknown: type[InvalidRequest] = InvalidRequest,
) -> B:
    """A parsed document as one of ours. Raises InvalidRequest with the field named, and `unknown` for one that is not known.

    What objects in it have that we do not know is ignored, and said in `remarks`; an error where there are none.
    The field is the place itself where `exact`; else no item of a list, and of what is missing the object that lacks it.
    """
    try:
        return validator_of(kind).model_validate(document, context=remarks)
    except ValidationError as error:
        near = {} if remarks is None else remarks.near
        raise first_error(error, document, exact, unknown, near) from error


def read_body(kind: type[S], document: dict[str, Any], remarks: Remarks | None = None) -> S:
    """A parsed body. What it has that its route does not know: see `tolerance.py`; without `remarks`, an error."""
    remarks = Remarks(strict=True) if remarks is None else remarks
    return validate(kind, known_fields(document, kind.names, kind.off, remarks), remarks)


def first_error(
    error: ValidationError, document: dict[str, Any], exact: bool, unknown: type[InvalidRequest], near: dict[str, str]
) -> InvalidRequest:
    """pydantic's first complaint, as one sentence about one place. `near` has the known names that unknown ones resemble."""
    same = _of_first([_mistake(each, document) for each in error.errors(include_url=False)])
    (first, place, value), kind = same[0], same[0].error["type"]
    shown = _field_path(place)
    field = shown if exact else str(place[0]) if kind in (*_ABSENT, *_TAG) else _field_path(_without_items(place))
    if kind in ("extra_forbidden", "none_required"):
        meant = f": did you mean {near[place[-1]]}?" if place[-1] in near else ""
        named = shown if shown.strip() and shown.isprintable() else repr(shown)
        return unknown(f"{named} is not a field of this request{meant}", field)
    if kind in _ABSENT:
        return InvalidRequest(f"{shown} is required", field)
    if kind in (UNSUPPORTED, WRONG):
        return (NotSupported if kind == UNSUPPORTED else InvalidRequest)(
            f"{shown} {first['msg']}; got {describe(value)}", field
        )
    kinds = dict.fromkeys(_expected_value(mistake.error) for mistake in same)
    if "a number" in kinds:
        kinds.pop("an integer", None)  # which is one
    wanted = ", or ".join(kinds)
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
    """A complaint with its place: pydantic's has steps that are names of types, and values that tell objects apart."""
    value: Any = document
    place: list[str | int] = []
    tagged = labelled = False
    for step in error["loc"]:
        if place and place[-1] in LABELLED and not labelled:
            labelled = True
        elif isinstance(value, dict) and tagged and (step not in value or place[0] == "response_format"):
            tagged = False  # there a tag is a key too
        elif isinstance(value, dict) and step in value:
            if place and place[-1] in MAPS:
                break
            value = value[step]
            place.append(step)
            tagged, labelled = len(place) == 1 and step in TAGGED, False
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step]
            place.append(step)
    if error["type"] == "missing":
        place.append(error["loc"][-1])
        value = None
    elif error["type"] in _TAG:
        name = error["ctx"]["discriminator"].strip("'")
        place.append(name)
        value = value.get(name)
    return _Mistake(error, tuple(place), value)


def _field_path(place: Place) -> str:
    """A place as we write it: `messages[0].content`. A name of the caller's is cut short."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step[:64]}" for step in place).removeprefix(".")


def _without_items(place: Place) -> Place:
    while len(place) > 1 and isinstance(place[-1], int):
        place = place[:-1]
    return place


def _expected_value(error: ErrorDetails) -> str:
    kind = error["type"]
    if kind == "union_tag_invalid":
        return f"one of {error['ctx']['expected_tags'].replace(chr(39), '')}"
    if kind == "literal_error":
        return str(error["ctx"]["expected"])
    known = _WANTED.get(kind)
    return known or error["msg"].partition(" after ")[0].replace("String should have", "a string of").replace(
        "List should have", "a list of"
    )
