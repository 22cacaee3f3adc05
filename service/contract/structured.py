"""Structured output: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, StrictBool, StrictStr, WithJsonSchema

from attend.model.errors import InvalidRequest
from attend.model.text.grammar import GrammarSpec, Kind
from attend.service.contract.shapes import ByType, Shape
from attend.service.contract.tolerance import Unsupported

KINDS: dict[str, Kind] = {"json" if kind == "json_schema" else kind: kind for kind in get_args(Kind) if kind != "tools"}
"""Kinds of structured output: vLLM's name of each, and ours."""
JsonSchema = dict[StrictStr, Any] | StrictStr


class TextFormat(Shape):
    """An answer of any form."""

    type: Literal["text"]


class ObjectFormat(Shape):
    """A JSON object."""

    type: Literal["json_object"]
    content: JsonSchema | None = Field(None, alias="schema")
    """A JSON schema that it must fit, as clients of llama.cpp send it. At most 64 KiB. Default: any object."""


class NamedSchema(Shape):
    """A schema, and what OpenAI's clients send with it, which is not used: answers always fit."""

    content: JsonSchema = Field(alias="schema")
    """A JSON schema, or the text of one. At most 64 KiB."""
    name: StrictStr | None = None
    strict: StrictBool | None = None
    description: StrictStr | None = None


class SchemaFormat(Shape):
    """An answer that fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, ByType()]


class StructuredOutputs(Shape):
    """What an answer must look like: one of these. Each has at most 64 KiB."""

    unsupported: ClassVar = {"structural_tag": Unsupported(())}

    content: JsonSchema | None = Field(None, alias="json")
    """A JSON schema, or the text of one."""
    regex: StrictStr | None = None
    """A regular expression in Rust's syntax, for the whole answer."""
    choice: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "string"}})] = None
    """The answers to choose from."""
    grammar: StrictStr | None = None
    """A grammar in Lark's form, or in GBNF."""
    json_object: StrictBool | None = None
    """Any JSON object; false is off."""


def grammar_of(value: StructuredOutputs | None, response_format: Any, place: str) -> GrammarSpec | None:
    """What the answer must look like; None for anything. `place` is where the format stands. Raises InvalidRequest."""
    schema, given = None, {} if value is None else _given(value)
    if isinstance(response_format, SchemaFormat):
        place, schema = f"{place}.json_schema", response_format.json_schema.content
    elif response_format is not None and not isinstance(response_format, TextFormat):
        schema = response_format.content
    if schema is not None or isinstance(response_format, ObjectFormat):
        if given:
            raise InvalidRequest(f"{place} and structured_outputs cannot both be given", "structured_outputs")
        kind: Kind = "json_object" if schema is None else "json_schema"
        return GrammarSpec(kind, "" if schema is None else _text(schema), f"{place}.schema")
    if len(given) > 1:
        kinds = f"one of {', '.join(KINDS)}; got {', '.join(given)}"
        raise InvalidRequest(f"structured_outputs must hold {kinds}", "structured_outputs")
    for name, item in given.items():
        text = "" if name == "json_object" else json.dumps(item) if name == "choice" else _text(item)
        return GrammarSpec(KINDS[name], text, f"structured_outputs.{name}")
    return None


def _given(value: StructuredOutputs) -> dict[str, Any]:
    items = {name: getattr(value, "content" if name == "json" else name) for name in KINDS}
    return {name: item for name, item in items.items() if item is not None and (name != "json_object" or item)}


def _text(schema: Any) -> str:
    """A schema as text; vLLM's users also send it as a string."""
    return schema if isinstance(schema, str) else json.dumps(schema)
