"""Structured output: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, StrictBool, StrictStr

from attend.model.errors import InvalidRequest
from attend.model.text.grammar import MAX_CHOICE_CHARACTERS, MAX_CHOICES, GrammarSpec
from attend.service.contract.shapes import Shape, ShownAs
from attend.service.contract.tolerance import Off

KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar", "json_object": "json_object"}
"""Kinds of structured output: vLLM's name of each, and ours."""
Some = Annotated[StrictStr, Field(json_schema_extra={"minLength": 1})]
"""A text that `GrammarSpec` refuses where it is empty."""
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_CHARACTERS)]], Field(min_length=1, max_length=MAX_CHOICES)
]
JsonSchema = dict[StrictStr, Any] | Some


class TextFormat(Shape):
    """An answer of any form."""

    type: Literal["text"]
    """That the answer is any text."""


class ObjectFormat(Shape):
    """A JSON object."""

    type: Literal["json_object"]
    """That the answer is a JSON object."""
    content: JsonSchema | None = Field(None, alias="schema")
    """A JSON schema that it must fit, as clients of llama.cpp send it. At most 64 KiB. Default: any object."""


class NamedSchema(Shape):
    """A schema, and what OpenAI's clients send with it."""

    content: JsonSchema = Field(alias="schema")
    """A JSON schema, or the text of one. At most 64 KiB."""
    name: StrictStr | None = None
    """Taken, and not used."""
    strict: StrictBool | None = None
    """Not used: answers always fit."""
    description: StrictStr | None = None
    """Taken, and not used."""


class SchemaFormat(Shape):
    """An answer that fits a schema."""

    type: Literal["json_schema"]
    """That the format is a JSON schema."""
    json_schema: NamedSchema
    """The JSON schema, and its name."""


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Shape):
    """What an answer must look like: one of these."""

    off: ClassVar[dict[str, Off]] = {"structural_tag": Off(())}

    content: JsonSchema | None = Field(None, alias="json")
    """A JSON schema, or the text of one. At most 64 KiB."""
    regex: Some | None = None
    """A regular expression in Rust's syntax, for the whole answer. At most 64 KiB."""
    choice: Annotated[Any, ShownAs(Choices | None)] = None
    """The answers to choose from. At most 64 KiB."""
    grammar: Some | None = None
    """A grammar in Lark's form, or in GBNF. At most 64 KiB."""
    json_object: StrictBool | None = None
    """Any JSON object; false is off."""


def grammar_of(response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None) -> GrammarSpec | None:
    """What the answer must look like; None for anything. Raises InvalidRequest with the field named."""
    first = None if response_format is None else spec_of(response_format)
    second = None if structured_outputs is None else _of_kinds(structured_outputs)
    if first is not None and second is not None:
        raise InvalidRequest("response_format and structured_outputs cannot both be given", "structured_outputs")
    return first or second


class HasSchema(Protocol):
    """A format whose schema stands in it."""

    content: Any


def spec_of(value: TextFormat | ObjectFormat | SchemaFormat | HasSchema) -> GrammarSpec | None:
    """What the answer must look like, in any of OpenAI's words; None for anything."""
    match value:
        case TextFormat():
            return None
        case ObjectFormat(content=None):
            return GrammarSpec("json_object", "")
        case SchemaFormat(json_schema=named):
            return schema_of(named.content)
    return schema_of(value.content)


def schema_of(schema: Any) -> GrammarSpec:
    """JSON that fits a schema, or the text of one."""
    return GrammarSpec("json_schema", _text(schema))


def _of_kinds(value: StructuredOutputs) -> GrammarSpec | None:
    items = {"json": value.content, "regex": value.regex, "choice": value.choice, "grammar": value.grammar}
    given = {key: item for key, item in (items | {"json_object": value.json_object or None}).items() if item is not None}
    if not given:
        return None
    if len(given) > 1:
        kinds = f"one of {', '.join(KINDS)}; got {', '.join(given)}"
        raise InvalidRequest(f"structured_outputs must hold {kinds}", "structured_outputs")
    ((key, item),) = given.items()
    text = "" if key == "json_object" else json.dumps(item) if key == "choice" else _text(item)
    return GrammarSpec(KINDS[key], text)  # type: ignore[arg-type]  # the values of KINDS


def _text(schema: Any) -> str:
    """A schema as text; vLLM's users also send it as a string."""
    return schema if isinstance(schema, str) else json.dumps(schema)
