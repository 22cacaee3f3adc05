"""What `make docs` writes of the contract: the page of all fields, and the fields that Attend's own HTTP clients take."""

from collections.abc import Iterator
from typing import Any

from attend.service.contract.chat import ChatRequest
from attend.service.contract.requests import CompletionRequest
from attend.service.contract.scores import RerankRequest, ScoreRequest
from attend.service.contract.shapes import Shape, wires
from attend.service.contract.texts import AttentionRequest, DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from attend.service.http_api.openapi import schemas

BODIES: dict[str, type[Shape]] = {
    "POST /v1/completions": CompletionRequest,
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/embeddings": EmbeddingsRequest,
    "POST /v1/rerank": RerankRequest,
    "POST /v1/score": ScoreRequest,
    "POST /v1/attention": AttentionRequest,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
}
HEAD = """\
# Every field on the wire

Written by `make docs` from `service/contract/`; a test compares. What the calls do: [service/API.md](service/API.md).

In a body null means absent. A range is written `0..2`, or `>0..1` without its lower end. The column *gRPC* is the
field's place in the message; *client*: Attend's own HTTP clients take it; *CLI*: `attend generate` has a flag of its
name.
"""
JSON_TYPES = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "object": "dict[str, Any]"}
Schema = dict[str, Any]


def page() -> str:
    """The page of all bodies and answers."""
    known = schemas()
    bodies = {model.__name__ for model in BODIES.values()}
    parts = [HEAD, "## Bodies\n"]
    for route, model in BODIES.items():
        parts.append("\n".join([f"### {route}\n", *_body(model, known[model.__name__])]) + "\n")
    parts.append("## Parts of bodies and answers\n")
    for name in sorted(known.keys() - bodies):
        parts.append(
            "\n".join([f"### {_title(name)}\n", known[name].get("description", "").strip() + "\n", *_rows(known[name])]) + "\n"
        )
    return "\n".join(parts)


def _title(name: str) -> str:
    """The name of a schema; of two with one name, which pydantic tells apart by their modules, with the module's."""
    module, _, own = name.rpartition("__")
    return f"{own} of {module.rpartition('__')[2]}" if module else name


def _body(model: type[Shape], schema: Schema) -> Iterator[str]:
    yield "| field | type | default | gRPC | client | CLI | what |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    places = wires(model)
    for name, field in schema["properties"].items():
        wire = places.get(name)
        proto = ", ".join(f"`{path}`" for path in wire.proto) if wire else ""
        has = ["yes" if wire and flag else "" for flag in ((wire and wire.client), (wire and wire.flag))]
        default = f"`{_json(field['default'])}`" if "default" in field else ""
        star = "**" if name in schema.get("required", ()) else ""
        yield f"| {star}`{name}`{star} | {_kind(field)} | {default} | {proto} | {has[0]} | {has[1]} | {_words(field)} |"


def _rows(schema: Schema) -> Iterator[str]:
    if "properties" not in schema:
        yield f"One of: {_kind(schema)}"
        return
    yield "| field | type | what |"
    yield "| --- | --- | --- |"
    for name, field in schema["properties"].items():
        optional = "" if name in schema.get("required", ()) else " (may be missing)"
        yield f"| `{name}` | {_kind(field)}{optional} | {_words(field)} |"


def _words(field: Schema) -> str:
    return " ".join(field.get("description", "").split()).replace("|", "\\|")


def _json(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)


def _kind(schema: Schema) -> str:
    """A type with its range, as the page writes it."""
    if "$ref" in schema:
        title = _title(schema["$ref"].rpartition("/")[2])
        return f"[{title}](#{title.lower().replace(' ', '-')})"
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{_json(value)}`" for value in schema.get("enum", [schema.get("const")]) if value is not None)
    if "anyOf" in schema or "oneOf" in schema:
        found = [_kind(each) for each in schema.get("anyOf", schema.get("oneOf", ())) if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(found))
    types = schema.get("type", "anything")
    types = [each for each in (types if isinstance(types, list) else [types]) if each != "null"]
    return (" or ".join(types) or "null") + _limits(schema)


def _bound(value: float | None) -> str:
    """A bound of a range; the largest integers as powers of two."""
    powers: dict[float, str] = {-(2**63): "-2^63", 2**63 - 1: "2^63-1", 2**31 - 1: "2^31-1"}
    return "" if value is None else powers.get(value, str(value))


def _limits(schema: Schema) -> str:
    """What narrows a type: a range, lengths, the items of a list."""
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    above = ">" if "exclusiveMinimum" in schema else ""
    found = "" if low is None and high is None else f" {above}{_bound(low)}..{_bound(high)}"
    if "items" in schema:
        found += f" of {_kind(schema['items'])}"
    for least, most, what in (
        ("minLength", "maxLength", "characters"),
        ("minItems", "maxItems", "items"),
        ("minProperties", "maxProperties", "entries"),
    ):
        if least in schema or most in schema:
            found += f", {schema.get(least, 0)}..{schema.get(most, '')} {what}"
    return found


CLIENT_HEAD = '''\
"""The fields of the calls that both HTTP clients take. Written by `make docs`; REFERENCE.md says what they mean."""

from typing import Any, Required, TypedDict

'''
SINGLE = {"prompt": "Required[str | list[int]]", "messages": "Required[list[dict[str, Any]]]"}
"""What a client needs, of one prompt alone: a stream of several cannot go on."""


def client() -> str:
    """The code of `service/client/fields.py`."""
    known = schemas()
    fields = {
        model: {name: SINGLE.get(name) or _python(known[model.__name__]["properties"][name]) for name in _of_client(model)}
        for model in (CompletionRequest, ChatRequest)
    }
    completion, chat = fields[CompletionRequest], fields[ChatRequest]
    both = {name: kind for name, kind in completion.items() if chat.get(name) == kind}
    classes = {
        "SamplingFields(TypedDict, total=False)": ("Fields of both calls.", both),
        "Completion(SamplingFields, total=False)": ("Fields of a completion.", _less(completion, both)),
        "Chat(SamplingFields, total=False)": ("Fields of a chat.", _less(chat, both)),
    }
    parts = [
        "\n".join([f"class {head}:", f'    """{words}"""\n', *(f"    {name}: {kind}" for name, kind in own.items())])
        for head, (words, own) in classes.items()
    ]
    return CLIENT_HEAD + "\n" + "\n\n\n".join(parts) + "\n"


def _of_client(model: type[Shape]) -> list[str]:
    return [name for name, wire in wires(model).items() if wire.client]


def _less(fields: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    return {name: kind for name, kind in fields.items() if name not in others}


def _python(schema: Schema) -> str:
    """The type of a field as Python writes it."""
    if "anyOf" in schema:
        found = [_python(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " | ".join(dict.fromkeys(found))
    if "$ref" in schema or "oneOf" in schema:
        return "dict[str, Any]"
    if "enum" in schema or "const" in schema:
        return "str"
    kinds = schema["type"]
    (kind,) = [each for each in (kinds if isinstance(kinds, list) else [kinds]) if each != "null"]
    if kind == "array":
        return f"list[{_python(schema['items'])}]"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"dict[str, {_python(schema['additionalProperties'])}]"
    return JSON_TYPES[kind]
