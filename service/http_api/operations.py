"""What /openapi.json says of each route beside what FastAPI knows of it: body, answer, statuses, and an example."""

from dataclasses import dataclass, field
from typing import Any

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
from attend.service.contract.texts import AttentionRequest, DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from attend.service.observe.capacity import MAX_TOKENS, Question

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


_COUNT = {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS}
_PROMPT_TOKENS, _MAX_TOKENS = (_COUNT | {"default": getattr(Question(), name)} for name in ("prompt_tokens", "max_tokens"))
_QUESTION = (
    _query("prompt_tokens", "Tokens of the prompt of a call to come.", _PROMPT_TOKENS, 100),
    _query("max_tokens", "The most tokens of its answer.", _MAX_TOKENS, 200),
)
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
    ("get", "/v1/capacity"): Operation(server_answers.Capacity, failures=(400, *KEYED), parameters=_QUESTION),
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
