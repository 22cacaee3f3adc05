"""/openapi.json: one document of every route, its bodies, its answers and its failures.

FastAPI knows the routes, with their names, texts and tags; pydantic knows the bodies and the answers, field by field. The
handlers read and write their JSON themselves, so `operations.py` says which body and which answer belong to a route, and how it
fails. Nothing here takes part in answering another request.
"""

import json
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from attend.service.chat.messages import MAX_DEPTH
from attend.service.contract.answers import Error
from attend.service.contract.routes import MESSAGES, TAGS
from attend.service.contract.shapes import Schema
from attend.service.http_api.body import MAX_BYTES
from attend.service.http_api.operation import Operation, Stream
from attend.service.http_api.operations import OPERATIONS
from attend.service.http_api.problems import error_response
from attend.service.records import BYTES_A_TOKEN, MAX_INPUT_TOKENS

OPENAPI_VERSION = "3.1.0"
REF = "#/components/schemas/{model}"
ABOUT = f"""\
Text generation over HTTP, in OpenAI's shapes, with more fields under the names that vLLM uses.

A body is strict JSON in UTF-8: no duplicate keys, no NaN, at most {MAX_DEPTH} levels. It has at most
{MAX_BYTES} bytes, or {BYTES_A_TOKEN} for each token of the model's context where that is more; to /v1/embeddings, /v1/rerank
and /v1/score at least {BYTES_A_TOKEN * MAX_INPUT_TOKENS}. null means absent. An integer is
written without a decimal point: 3.0 is refused.

Every failure is the object `Error`, and every answer has the header X-Request-Id: the caller's own, or a new one."""
_EXAMPLE_ID = "8d3f"
_HEADERS: dict[str, Schema] = {
    "X-Request-Id": {"description": "The request's id, which the logs have too.", "schema": {"type": "string"}},
    "Retry-After": {"description": "Seconds after which to try again.", "schema": {"type": "integer", "minimum": 1}},
    "WWW-Authenticate": {"description": "How to prove who you are.", "schema": {"const": "Bearer"}},
    "x-should-retry": {"description": "Tells OpenAI's clients not to try again.", "schema": {"const": "false"}},
}
_STATUS = {
    400: "The request can never work as it stands; `param` names the field.",
    401: "No API key, or one that is not known.",
    403: "As many files or batches, or bytes in them, as the caller may have.",
    404: "Not the served model, or not the caller's.",
    409: "The regenerated answer differs from the one to resume.",
    413: "The body is too large.",
    415: "The body is not JSON, or is compressed.",
    429: "The queue is full, or a limit of the API key is reached.",
    500: "A bug of the server; the message has the id to ask about.",
    503: "The server is shutting down.",
    504: "The deadline passed before the first token.",
    507: "The disk is full, or as much is kept as may be.",
}
DONE = "[DONE]"
_SSE = (
    f"One of the server-sent events. `data: {DONE}` is always last: a stream without it was cut. A failure in the middle is "
    "an `Error` before it. A line that begins with a colon says nothing but that the server is there."
)


def bare_app(version: str) -> FastAPI:
    """An application without routes: `install_openapi` adds the documents, in place of FastAPI's own."""
    return FastAPI(
        title="Attend",
        version=version,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )


def install_openapi(app: FastAPI, *, has_api_keys: bool = False) -> None:
    """Have `app` describe itself by `openapi_document`, made when it is first asked for. Requests are handled as before.

    `has_api_keys` is whether it asks for API keys.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = openapi_document(app, has_api_keys=has_api_keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to another document


def openapi_document(app: FastAPI, *, has_api_keys: bool) -> dict[str, Any]:
    """The OpenAPI document of the routes that `app` has and shows, with or without a need for API keys."""
    tags = [{"name": name, "description": text} for name, text in TAGS.items()]
    whole = get_openapi(
        title=app.title,
        version=app.version,
        openapi_version=OPENAPI_VERSION,
        description=ABOUT,
        tags=tags,
        routes=app.routes,
    )
    definitions = schemas()
    for path, item in whole["paths"].items():
        for method, found in item.items():
            known = OPERATIONS[method, path]
            found |= _operation(found, known, definitions)
            found["security"] = [{"ApiKey": []}] if known.needs_key and has_api_keys else []
    whole["components"] = {
        "schemas": definitions,
        "headers": _HEADERS,
        "parameters": {"X-Request-Id": _REQUEST_ID},
        "securitySchemes": {"ApiKey": _API_KEY},
    }
    return whole


_REQUEST_ID: Schema = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "The id to call this request by: 1 to 128 letters, digits and . _ : / + = @ -; another makes a new one.",
    "schema": {"type": "string"},
    "example": _EXAMPLE_ID,
}
_API_KEY: Schema = {"type": "http", "scheme": "bearer", "description": "An API key, where the server has keys."}


def _operation(found: dict[str, Any], known: Operation, definitions: dict[str, Schema]) -> dict[str, Any]:
    """What FastAPI could not know of an operation."""
    described = {} if known.body is None else {"requestBody": _request(known)}
    responses = _responses(known, found["responses"]["200"]["description"], definitions)
    return {
        "parameters": [*found.get("parameters", ()), *known.parameters, {"$ref": "#/components/parameters/X-Request-Id"}],
        "responses": {str(status): answer for status, answer in sorted(responses.items())},
        **described,
    }


def _request(known: Operation) -> dict[str, Any]:
    assert known.body is not None
    shown = {name: {"value": value} for name, value in known.requests.items()}
    examples = {"examples": shown} if shown else {}
    return {"required": True, "content": {known.takes: {"schema": _ref(known.body), **examples}}}


def _responses(known: Operation, success: str, definitions: dict[str, Schema]) -> dict[int, dict[str, Any]]:
    answers = {200: _answer(success, _content(known.answer, definitions, known.gives))}
    if known.unwell is not None:
        answers[503] = _answer(known.unwell[0], _content(known.unwell[1], definitions))
    if known.stream is not None:
        answers[200]["content"]["text/event-stream"] = _events(known.stream, known.failure, definitions)
    return _failures(known) | answers


def _content(answer: type | str, definitions: dict[str, Schema], media: str = "text/plain") -> dict[str, Any]:
    if isinstance(answer, str):
        return {media: {"schema": {"type": "string"}, "example": answer}}
    return {"application/json": {"schema": _ref(answer), "example": schema_example(_ref(answer), definitions)}}


def _events(stream: Stream, failure: type, definitions: dict[str, Schema]) -> dict[str, Any]:
    """One event of a stream, as clients parse it: OpenAPI 3.1 has no word for the whole."""
    json_event = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"oneOf": [_ref(stream.event), _ref(failure)]},
    }
    ends = [] if stream.is_named else [{"const": DONE}]
    data = {"anyOf": [*ends, json_event], "description": "The object as JSON, or the end of the stream."}
    schema = {"type": "object", "properties": {"data": data}, "required": ["data"], "description": _SSE}
    event = schema_example(_ref(stream.event), definitions)
    texts = {name: json.dumps(event | other) for name, other in stream.examples.items()}
    texts |= {} if stream.is_named else {"The end": DONE}
    return {"schema": schema, "examples": {name: {"value": {"data": text}} for name, text in texts.items()}}


def _failures(known: Operation) -> dict[int, dict[str, Any]]:
    """By status: the answers as the handlers of `problems.py` make them."""
    failures: dict[int, dict[str, Any]] = {}
    path = "" if known.failure is Error else MESSAGES.path
    for error in known.errors:
        made = error_response(error, _EXAMPLE_ID, path)
        names = [name for name in _HEADERS if name.lower() in made.headers]
        shape = {"application/json": {"schema": _ref(known.failure), "examples": {}}}
        empty = _answer(_STATUS[made.status_code], shape, *names)
        failure = failures.setdefault(made.status_code, empty)
        value = json.loads(bytes(made.body))
        failure["content"]["application/json"]["examples"][value["error"]["code"]] = {"value": value}
    return failures


def _answer(text: str, content: dict[str, Any], *headers: str) -> dict[str, Any]:
    named = {name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Request-Id", *headers)}
    return {"description": text, "headers": named, "content": content}


def _ref(model: type) -> Schema:
    return {"$ref": REF.format(model=model.__name__)}


class _Plain(GenerateJsonSchema):
    """JSON Schema without titles and null defaults; a type or null is a list of both."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """True if a field has a title: never."""
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """The type alone: what absence means is in the notes."""
        return self.generate_inner(schema["schema"])

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """`{"type": [.., "null"]}` where that says it."""
        return nullable([self.generate_inner(schema["schema"])])

    def union_schema(self, schema: core_schema.UnionSchema) -> JsonSchemaValue:
        """An integer or a number is a number."""
        made = super().union_schema(schema)
        return {"type": "number"} if made == {"anyOf": [{"type": "integer"}, {"type": "number"}]} else made


def nullable(shapes: list[Schema]) -> Schema:
    """One of the shapes, or null."""
    if len(shapes) == 1 and isinstance(shapes[0].get("type"), str) and not shapes[0].keys() & {"const", "enum"}:
        return shapes[0] | {"type": [shapes[0]["type"], "null"]}
    alternatives = [each for shape in shapes for each in (shape["anyOf"] if set(shape) == {"anyOf"} else [shape])]
    return {"anyOf": [*alternatives, {"type": "null"}]}


def schema_example(schema: Schema, definitions: dict[str, Schema]) -> Any:
    """The example of a schema: its own, or that of its parts. A field that may be missing is in it where it has an example."""
    if "examples" in schema:
        return schema["examples"][0]
    if "$ref" in schema:
        return schema_example(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if "properties" in schema:
        shown = [key for key, field in schema["properties"].items() if key in schema.get("required", ()) or "examples" in field]
        return {key: schema_example(schema["properties"][key], definitions) for key in shown}
    if "items" in schema:
        return [schema_example(schema["items"], definitions)]
    return schema.get("minimum")


@cache
def schemas() -> dict[str, Schema]:
    """Every body and answer, by its model's name. Made once, since it takes a second: the caller changes nothing in it."""
    rows = OPERATIONS.values()
    found = [model for row in rows for model in (row.body, row.answer, row.stream and row.stream.event)]
    models = [model for model in (*found, *(row.failure for row in rows)) if isinstance(model, type)]
    inputs: list[Any] = [(model, "validation", TypeAdapter(model)) for model in models]
    _, made = TypeAdapter.json_schemas(inputs, ref_template=REF, schema_generator=_Plain)
    definitions: dict[str, Schema] = made["$defs"]
    bodies: list[Any] = [(row.body, "validation", TypeAdapter(row.body)) for row in rows if row.body is not None]
    _, read = TypeAdapter.json_schemas(bodies, ref_template=REF, schema_generator=_Plain)
    for name, schema in definitions.items():
        schema.pop("title", None)
        if name in read["$defs"]:  # other fields are ignored, and said
            schema.pop("additionalProperties", None)
        for field in schema.get("properties", {}).values():
            if "description" in field:
                field["description"] = " ".join(field["description"].split())
    return dict(sorted(definitions.items()))
