"""Values of wrong types for every field of a body, by what /openapi.json says of it."""

from typing import Any

from attend.service.contract.shapes import Shape
from attend.service.http_api.openapi import schemas

OF_TYPE: dict[str, tuple[Any, ...]] = {
    "integer": (3.0, 1e2, 1.5, "3", True, False, [], [3], {}),
    "number": ("0.5", True, False, [], {}),
    "boolean": (0, 1, 1.0, "true", "", [], {}),
    "string": (0, 1.5, True, [], ["x"], {}),
    "array of integer": (1, "1", {}, [1.0], ["1"], [True], [None], [[1]]),
    "array of string": (1, "x", True, {}, [1], ["a", None], [["a"]]),
    "object": (1, True, "x", []),
}


def wrong_types(model: type[Shape], own: dict[str, tuple[Any, ...]]) -> list[tuple[str, Any]]:
    """(field, value) for each field of a body; `own` has the values of fields that are of several types."""
    found = schemas()[model.__name__]["properties"]
    values = {name: own[name] if name in own else OF_TYPE[kind_of(found[name])] for name in model.model_fields}
    return [(name, value) for name, wrong in values.items() for value in wrong]


def scalar_of(schema: dict[str, Any]) -> Any:
    """A value of a field that is not its default."""
    kind, default = kind_of(schema), schema.get("default")
    if kind == "boolean":
        return not default
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    return {"integer": low + 1, "number": low + 0.5, "string": "x"}[kind]


def kind_of(schema: dict[str, Any]) -> str:
    """The type of a field that is not null."""
    shapes = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    kinds = {_kind(each) for each in shapes}
    assert len(kinds) == 1, f"give values of your own for a field of several types: {schema}"
    return kinds.pop()


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema or "oneOf" in schema:
        return "object"
    if "enum" in schema:
        return "string"
    kinds = schema["type"]
    (kind,) = [each for each in (kinds if isinstance(kinds, list) else [kinds]) if each != "null"]
    return f"array of {_kind(schema['items'])}" if kind == "array" else str(kind)
