"""/openapi.json: what FastAPI knows of the routes, pydantic of bodies and answers, and OPERATIONS of which belong together."""

import sys
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import ConfigDict, TypeAdapter, with_config
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema
from typing_extensions import is_typeddict

from attend.service.chat.messages import MAX_DEPTH
from attend.service.contract import (
    answers,
    anthropic,
    batches,
    response_answers,
    scores,
    server_answers,
    texts,
)
from attend.service.contract.anthropic import CountTokensRequest, MessagesRequest
from attend.service.contract.requests import ChatRequest, CompletionRequest
from attend.service.contract.responses import ResponsesRequest
from attend.service.contract.routes import MESSAGES, RESPONSES, TAGS
from attend.service.contract.shapes import Schema
from attend.service.contract.texts import AttentionRequest, DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from attend.service.http_api.body import MAX_BYTES
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
KEYED = (401, 429, 500)
"""How a call can fail that needs an API key where keys are set."""
BODY = (400, 404, 413, 415, *KEYED)
"""How a call with a JSON body can fail."""
COMPUTE = (*BODY, 503, 504)
"""How a call can fail that needs the engine."""
KEPT = (404, *KEYED)
"""How a call for a file or a batch can fail."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    answer: type | str
    """The shape of the answer with status 200, or its media type where it is no JSON."""
    body: type | None = None
    example: dict[str, Any] = field(default_factory=dict)
    """A small body."""
    failures: tuple[int, ...] = (500,)
    event: type | None = None
    """The shape of an event where `stream` is true."""
    parameters: tuple[dict[str, Any], ...] = ()
    """Of the query, where the handler reads them itself, as OpenAPI writes them."""
    unwell: str = ""
    """What status 503 means where it is plain text."""
    failure: type = answers.Error
    """The shape of an error."""
    takes: str = "application/json"
    """The media type of the body."""


def _query(name: str, text: str, schema: dict[str, Any], example: object) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": schema, "example": example}


def _limit(most: int, default: int) -> dict[str, Any]:
    return _query(
        "limit", "How many of them at most.", {"type": "integer", "minimum": 1, "maximum": most, "default": default}, 20
    )


def _after(example: str) -> dict[str, Any]:
    return _query("after", "Those beyond the one of this id.", {"type": "string"}, example)


_FILES = (
    _query("purpose", "Those of this purpose.", {"enum": ["batch", "batch_output"]}, "batch"),
    _limit(10000, 10000),
    _query("order", "The newest first, or the oldest.", {"enum": ["desc", "asc"], "default": "desc"}, "desc"),
    _after("file-0123456789abcdef0123456789abcdef"),
)
_BATCHES = (_limit(100, 20), _after("batch_0123456789abcdef0123456789abcdef"))
_TURN = [{"role": "user", "content": "Hello"}]
_ANTHROPIC = anthropic.AnthropicError

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("post", "/v1/completions"): Operation(
        *(answers.Completion, CompletionRequest, {"prompt": "Once upon a time", "max_tokens": 16}, COMPUTE),
        answers.CompletionChunk,
    ),
    ("post", "/v1/chat/completions"): Operation(
        *(answers.ChatCompletion, ChatRequest, {"messages": _TURN, "max_completion_tokens": 16}, COMPUTE),
        answers.ChatCompletionChunk,
    ),
    ("post", "/v1/responses"): Operation(
        *(response_answers.Response, ResponsesRequest, {"input": "Hello", "max_output_tokens": 16}, COMPUTE),
        response_answers.ResponseEvent,
    ),
    ("post", "/v1/messages"): Operation(
        *(anthropic.MessageAnswer, MessagesRequest, {"messages": _TURN, "max_tokens": 16}, COMPUTE),
        anthropic.MessageEvent,
        failure=_ANTHROPIC,
    ),
    ("post", "/v1/messages/count_tokens"): Operation(
        *(anthropic.TokenCount, CountTokensRequest, {"messages": _TURN}, BODY), failure=_ANTHROPIC
    ),
    ("get", "/v1/models"): Operation(server_answers.ModelList, failures=KEYED),
    ("get", "/v1/models/{model_id}"): Operation(server_answers.Model, failures=KEPT),
    ("post", "/v1/attention"): Operation(texts.Attention, AttentionRequest, {"prompt": "Hi", "layers": [0]}, COMPUTE),
    ("post", "/v1/embeddings"): Operation(texts.Embeddings, EmbeddingsRequest, {"input": "Hi there"}, COMPUTE),
    ("post", "/v1/rerank"): Operation(
        *(scores.Reranked, scores.RerankRequest, {"query": "Rain?", "documents": ["It rains.", "It is late."]}, COMPUTE)
    ),
    ("post", "/v1/score"): Operation(
        *(scores.Scores, scores.ScoreRequest, {"text_1": "Rain?", "text_2": ["It rains.", "It is late."]}, COMPUTE)
    ),
    ("post", "/tokenize"): Operation(texts.Tokens, TokenizeRequest, {"prompt": "Hi"}, BODY),
    ("post", "/detokenize"): Operation(texts.Text, DetokenizeRequest, {"tokens": [72, 105]}, BODY),
    ("get", "/tokenizer_info"): Operation(server_answers.TokenizerInfo, failures=KEYED),
    ("get", "/healthz"): Operation("text/plain", unwell="To be restarted."),
    ("get", "/readyz"): Operation("text/plain", unwell="Shutting down."),
    ("get", "/version"): Operation(server_answers.Version),
    ("get", "/v1/capacity"): Operation(server_answers.Capacity, failures=KEYED),
    ("get", "/metrics"): Operation("text/plain"),
    ("post", "/v1/files"): Operation(
        *(batches.FileObject, batches.FileForm, {}, (400, 403, 413, 415, 507, *KEPT)), takes="multipart/form-data"
    ),
    ("get", "/v1/files"): Operation(batches.FileList, failures=(400, *KEPT), parameters=_FILES),
    ("get", "/v1/files/{file_id}"): Operation(batches.FileObject, failures=KEPT),
    ("get", "/v1/files/{file_id}/content"): Operation("application/octet-stream", failures=(507, *KEPT)),
    ("delete", "/v1/files/{file_id}"): Operation(batches.FileDeleted, failures=(400, *KEPT)),
    ("post", "/v1/batches"): Operation(
        batches.BatchObject,
        batches.BatchRequest,
        {
            "input_file_id": "file-0123456789abcdef0123456789abcdef",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
        (403, 507, *BODY),
    ),
    ("get", "/v1/batches"): Operation(batches.BatchList, failures=(400, *KEPT), parameters=_BATCHES),
    ("get", "/v1/batches/{batch_id}"): Operation(batches.BatchObject, failures=KEPT),
    ("post", "/v1/batches/{batch_id}/cancel"): Operation(batches.BatchObject, failures=KEPT),
}
"""A new route needs its row here."""


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
    """Have `app` describe itself by `openapi_document`, made when it is first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = openapi_document(app, has_api_keys=has_api_keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to another document


def openapi_document(app: FastAPI, *, has_api_keys: bool) -> dict[str, Any]:
    """The OpenAPI document of the routes that `app` has and shows, with or without a need for API keys."""
    tags = [{"name": name, "description": text} for name, text in TAGS.items()]
    whole = get_openapi(
        title=app.title, version=app.version, openapi_version=OPENAPI_VERSION, description=ABOUT, tags=tags, routes=app.routes
    )
    for path, item in whole["paths"].items():
        for method, found in item.items():
            known = OPERATIONS[method, path]
            own = [*found.get("parameters", ()), *known.parameters, {"$ref": "#/components/parameters/X-Request-Id"}]
            found |= {"parameters": own, "responses": _responses(known, path, found["responses"]["200"]["description"])}
            if known.body is not None:
                shown = {"example": known.example} if known.example else {}
                found["requestBody"] = {"required": True, "content": {known.takes: {"schema": _ref(known.body), **shown}}}
            found["security"] = [{"ApiKey": []}] if 401 in known.failures and has_api_keys else []
    whole["components"] = {
        "schemas": schemas(),
        "parameters": {"X-Request-Id": _REQUEST_ID},
        "securitySchemes": {"ApiKey": {"type": "http", "scheme": "bearer", "description": "Where the server has API keys."}},
    }
    return whole


_REQUEST_ID: Schema = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "The id to call this request by: 1 to 128 letters, digits and . _ : / + = @ -; another makes a new one.",
    "schema": {"type": "string"},
    "example": "8d3f",
}


def _responses(known: Operation, path: str, success: str) -> dict[str, dict[str, Any]]:
    """The answers of a route, by status."""
    failure = {"application/json": {"schema": _ref(known.failure)}}
    found = {status: _answer(_STATUS[status], failure) for status in known.failures}
    text: dict[str, Any] = {"schema": {"type": "string"}}
    content = {known.answer: text} if isinstance(known.answer, str) else {"application/json": {"schema": _ref(known.answer)}}
    if known.event is not None:
        content["text/event-stream"] = {"schema": _event(known.event, known.failure, path)}
    found[200] = _answer(success, content)
    if known.unwell:
        found[503] = _answer(known.unwell, {"text/plain": text})
    return {str(status): found[status] for status in sorted(found)}


def _event(event: type, failure: type, path: str) -> Schema:
    """One event of a stream, as clients parse it: OpenAPI 3.1 has no word for the whole."""
    shape = {"oneOf": [_ref(event), _ref(failure)]}
    ends = [] if path in (RESPONSES.path, MESSAGES.path) else [{"const": DONE}]
    json_event = {"type": "string", "contentMediaType": "application/json", "contentSchema": shape}
    data = {"anyOf": [*ends, json_event], "description": "The object as JSON, or the end of the stream."}
    return {"type": "object", "properties": {"data": data}, "required": ["data"], "description": _SSE}


def _answer(text: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": content}


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
        shape = self.generate_inner(schema["schema"])
        if isinstance(shape.get("type"), str) and not shape.keys() & {"const", "enum"}:
            return shape | {"type": [shape["type"], "null"]}
        return {"anyOf": [*(shape["anyOf"] if set(shape) == {"anyOf"} else [shape]), {"type": "null"}]}

    def union_schema(self, schema: core_schema.UnionSchema) -> JsonSchemaValue:
        """An integer or a number is a number."""
        made = super().union_schema(schema)
        return {"type": "number"} if made == {"anyOf": [{"type": "integer"}, {"type": "number"}]} else made


@cache
def schemas() -> dict[str, Schema]:
    """Every body and answer, by its model's name. Made once, since it takes a second: the caller changes nothing in it."""
    rows = OPERATIONS.values()
    found = [model for row in rows for model in (row.body, row.answer, row.event, row.failure)]
    models = [model for model in found if isinstance(model, type)]
    for name in {model.__module__ for model in models}:
        for kind in filter(is_typeddict, vars(sys.modules[name]).values()):
            if not hasattr(kind, "__pydantic_config__"):  # an answer has no other fields; the text under one describes it
                with_config(ConfigDict(extra="forbid", use_attribute_docstrings=True))(kind)
    inputs: list[Any] = [(model, "validation", TypeAdapter(model)) for model in models]
    _, made = TypeAdapter.json_schemas(inputs, ref_template=REF, schema_generator=_Plain)
    definitions: dict[str, Schema] = made["$defs"]
    bodies: list[Any] = [(row.body, "validation", TypeAdapter(row.body)) for row in rows if row.body is not None]
    _, read = TypeAdapter.json_schemas(bodies, ref_template=REF, schema_generator=_Plain)
    for name, schema in definitions.items():
        schema.pop("title", None)
        if name in read["$defs"]:  # other fields are ignored, and said
            schema.pop("additionalProperties", None)
        for each in schema.get("properties", {}).values():
            if "description" in each:
                each["description"] = " ".join(each["description"].split())
    return dict(sorted(definitions.items()))
