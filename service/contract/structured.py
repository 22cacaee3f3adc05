"""Structured output in the two spellings of HTTP: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
from typing import Any

from attend.model.errors import InvalidRequest
from attend.model.params import describe
from attend.model.text.grammar import MAX_CHOICE_CHARACTERS, MAX_CHOICES, GrammarSpec
from attend.service.contract.shapes import TEXT, Schema, closed, listed, one_of

FORMATS = ("text", "json_object", "json_schema")
KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar", "json_object": "json_object"}
"""vLLM's name -> ours."""
_SOME: Schema = TEXT | {"minLength": 1}
_SCHEMA = one_of({"type": "object"}, _SOME, text="A JSON schema, or the text of one. At most 64 KiB.")
_NULL: Schema = {"type": "null"}
_NAMED = {
    "schema": _SCHEMA,
    "name": one_of(TEXT, _NULL, text="Not used."),
    "strict": one_of({"type": "boolean"}, _NULL, text="Not used: answers always fit."),
    "description": one_of(TEXT, _NULL, text="Not used."),
}
RESPONSE_FORMAT = one_of(
    closed({"type": {"enum": ["text", "json_object"], "description": "Anything, or any JSON object."}}, "type"),
    closed(
        {
            "type": {"const": "json_schema", "description": "JSON that fits a schema."},
            "json_schema": closed(_NAMED, "schema") | {"description": "The schema."},
        },
        "type",
        "json_schema",
    ),
)
_CHOICES = listed(_SOME | {"maxLength": MAX_CHOICE_CHARACTERS}, minItems=1, maxItems=MAX_CHOICES)
STRUCTURED_OUTPUTS = closed(
    {
        "json": one_of(*_SCHEMA["anyOf"], _NULL, text=_SCHEMA["description"]),
        "regex": one_of(_SOME, _NULL, text="A regular expression in Rust's syntax, for the whole answer. At most 64 KiB."),
        "choice": one_of(_CHOICES, _NULL, text="The answers to choose from. At most 64 KiB."),
        "grammar": one_of(_SOME, _NULL, text="A grammar in Lark's form, or in GBNF. At most 64 KiB."),
        "json_object": one_of({"type": "boolean"}, _NULL, text="Any JSON object; false is off."),
    }
)


def grammar_of(response_format: dict[str, Any] | None, structured_outputs: dict[str, Any] | None) -> GrammarSpec | None:
    """What the answer must look like; None for anything. Raises InvalidRequest with the field named."""
    first = None if response_format is None else _of_format(response_format)
    second = None if structured_outputs is None else _of_kinds(structured_outputs)
    if first is not None and second is not None:
        raise InvalidRequest("response_format and structured_outputs cannot both be given", "structured_outputs")
    return first or second


def _of_format(value: dict[str, Any]) -> GrammarSpec | None:
    name = "response_format"
    kind = value.get("type")
    if kind not in FORMATS:
        raise InvalidRequest(f"{name}.type must be one of {', '.join(FORMATS)}; got {describe(kind)}", name)
    _only(value, {"type", "json_schema"} if kind == "json_schema" else {"type"}, name)
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec("json_object", "")
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or "schema" not in inner:
        raise InvalidRequest(f"{name}.json_schema must be an object with a schema; got {describe(inner)}", name)
    _only(inner, {"name", "schema", "strict", "description"}, f"{name}.json_schema")
    for key, kind_of_key, wanted in (
        ("name", str, "a string"),
        ("description", str, "a string"),
        ("strict", bool, "a boolean"),
    ):
        if inner.get(key) is not None and not isinstance(inner[key], kind_of_key):
            here = f"{name}.json_schema.{key}"
            raise InvalidRequest(f"{here} must be {wanted}; got {describe(inner[key])}", here)
    return GrammarSpec("json_schema", _schema(inner["schema"], f"{name}.json_schema.schema"))


def _of_kinds(value: dict[str, Any]) -> GrammarSpec | None:
    name = "structured_outputs"
    _only(value, set(KINDS), name)
    given = {key: item for key, item in value.items() if item is not None and not (key == "json_object" and item is False)}
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest(f"{name} must hold one of {', '.join(KINDS)}; got {', '.join(given)}", name)
    ((key, item),) = given.items()
    return GrammarSpec(KINDS[key], _text(key, item, f"{name}.{key}"))  # type: ignore[arg-type]  # the values of KINDS


def _text(key: str, item: Any, name: str) -> str:
    if key == "json_object":
        if item is not True:
            raise InvalidRequest(f"{name} must be a boolean; got {describe(item)}", name)
        return ""
    if key == "json":
        return _schema(item, name)
    if key == "choice":
        return json.dumps(item)
    if not isinstance(item, str):
        raise InvalidRequest(f"{name} must be a string; got {describe(item)}", name)
    return item


def _schema(value: Any, name: str) -> str:
    """A schema as text; vLLM's users also send it as a string."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object, or one in a string; got {describe(value)}", name)
    return json.dumps(value)


def _only(value: dict[str, Any], known: set[str], name: str) -> None:
    for key in value:
        if key not in known and value[key] is not None:
            raise InvalidRequest(f"{name}.{key[:64]} is not a field of this request", f"{name}.{key[:64]}")
