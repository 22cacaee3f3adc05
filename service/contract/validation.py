"""A body as pydantic reads it, and its first complaint as one sentence about one field."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from attend.model.errors import InvalidRequest
from attend.model.params import describe

B = TypeVar("B", bound=BaseModel)


def validated(kind: type[B], document: dict[str, Any]) -> B:
    """A parsed body as one of ours. Raises InvalidRequest with the field named."""
    unknown = {name for name in document.keys() - kind.model_fields.keys() if document[name] is not None}
    if len(unknown) > 1:  # each would be an error with a text of its own
        first = next(name for name in document if name in unknown)
        document = {name: value for name, value in document.items() if name == first or name not in unknown}
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise explained(error, document) from error


def kind_of(value: Any) -> type:
    """1 and 1.0 are one kind: a number. true is not."""
    return float if type(value) is int else type(value)


def explained(error: ValidationError, document: dict[str, Any]) -> InvalidRequest:
    """pydantic's first complaint, as one sentence about one field."""
    found = error.errors(include_url=False, include_context=False)
    first = found[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        path = ".".join(str(part) for part in first["loc"])[:64]
        shown = path if path.strip() and path.isprintable() else repr(path)
        return InvalidRequest(f"{shown} is not a field of this request", path)
    value, place = document.get(name), ""
    inner = first["loc"][-1]
    if isinstance(value, dict) and str(inner) in value:
        name, value = f"{name}.{inner}", value[str(inner)]
    same = [item for item in found if item["loc"][0] == first["loc"][0]]
    if isinstance(value, list) and isinstance(inner, int) and len({item["loc"] for item in same}) == 1:
        place, value = f"{name}[{inner}]", value[inner]
    wanted = "; or ".join(dict.fromkeys(_wanted(item["type"], item["msg"]) for item in same))
    return InvalidRequest(f"{place or name} must be {wanted}; got {describe(value)}", name)


def _wanted(kind: str, message: str) -> str:
    known = {
        "missing": "given",
        "int_type": "an integer",
        "float_type": "a number",
        "string_type": "a string",
        "bool_type": "a boolean",
        "list_type": "a list",
        "dict_type": "an object",
        "model_type": "an object",
    }
    return known.get(kind) or message.replace("String should have", "a string of")
