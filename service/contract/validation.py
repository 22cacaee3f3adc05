"""Validation of a document by pydantic, whose first error becomes one sentence with the place."""

import re
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import describe
from attend.service.contract.shapes import UNSUPPORTED, WRONG, validator_of
from attend.service.remarks import Remarks

B = TypeVar("B", bound=BaseModel)
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
    "model_attributes_type": "an object",
}


class _Mistake(NamedTuple):
    """A complaint, the place of ours that it is about, and what stands there."""

    error: ErrorDetails
    place: Place
    value: Any


def read_body(kind: type[B], document: dict[str, Any], remarks: Remarks | None = None) -> B:
    """A parsed body. Raises InvalidRequest with the place named. For fields that are not known see `tolerance.py`; without
    `remarks` they are errors.
    """
    try:
        return validator_of(kind).model_validate(document, context=remarks)
    except ValidationError as error:
        raise first_error(error, document, {} if remarks is None else remarks.near) from error


def first_error(error: ValidationError, document: dict[str, Any], near: dict[str, str]) -> InvalidRequest:
    """pydantic's first complaint, of an unknown name if there is one, as one sentence about one place. `near` has the known
    names that unknown ones resemble.
    """
    found = sorted(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
    same = _of_first([_mistake(each, document) for each in found])
    (first, place, value), kind = same[0], same[0].error["type"]
    shown = "".join(f"[{step}]" if isinstance(step, int) else f".{step[:64]}" for step in place).removeprefix(".")
    field = shown if place[0] in OF_OBJECTS else re.sub(r"(\[\d+\])+$", "", shown)
    if kind in ("extra_forbidden", "none_required"):
        meant = f": did you mean {near[place[-1]]}?" if place[-1] in near else ""
        named = shown if shown.strip() and shown.isprintable() else repr(shown)
        return InvalidRequest(f"{named} is not a field of this request{meant}", field)
    if kind == "missing":
        return InvalidRequest(f"{shown} is required", field)
    if kind in (UNSUPPORTED, WRONG):
        sort = NotSupported if kind == UNSUPPORTED else InvalidRequest
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
