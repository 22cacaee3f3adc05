"""What /openapi.json says of each route beside what FastAPI knows of it: bodies, answers, failures, and examples of them."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from model.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NoChatTemplate,
    NotSupported,
    Overloaded,
    RateLimited,
    Unauthenticated,
    Unavailable,
)
from model.generation_config import NO_DEFAULTS
from service.errors import TooLarge, WrongMediaType
from service.http_api import chat_responses, event_ids, responses
from service.http_api.attention import Attention, AttentionRequest
from service.http_api.chat import ChatRequest
from service.http_api.embeddings import Embeddings, EmbeddingsRequest
from service.http_api.schemas import CompletionRequest
from service.http_api.tokens import DetokenizeRequest, TokenizeRequest
from service.observe.capacity import MAX_TOKENS, Question

BUG = RuntimeError("not one of ours")
_RANGE = InvalidRequest("temperature must be a number from 0 to 2; got 3 (integer)", "temperature")
_KEY = Unauthenticated("this server needs an API key: send Authorization: Bearer KEY")
_MODEL = ModelNotFound("the model 'other' (string) does not exist; this server has 'attend'")
_TOO_LARGE = TooLarge("the body must be at most 1048576 bytes; got 2000000")
_NOT_JSON = WrongMediaType("Content-Type must be application/json, in UTF-8; got 'text/plain'")
_TYPE = InvalidRequest("model must be a string; got 3 (integer)", "model")
BODY: tuple[Exception, ...] = (_KEY, _MODEL, _TOO_LARGE, _NOT_JSON, BUG)
"""How a call with a body can fail, whatever the body is for."""
_REFUSALS: tuple[Exception, ...] = (
    Overloaded("the queue is full", retry_after=1),
    RateLimited("the API key's limit of requests is reached", retry_after=12, reason="key_requests"),
    Unavailable("the server is shutting down; try another replica"),
    DeadlineExceeded("the deadline passed before the first token"),
)
_TEXT_TOO_LONG = ContextTooLong("prompt: attention is told of at most 512 tokens; prompt and answer have 600", "prompt")
GENERATION: tuple[Exception, ...] = (
    _RANGE,
    NotSupported("suffix is not supported yet; got ' end' (string)", "suffix"),
    ContextTooLong(
        "max_tokens: this model's maximum context length is 1024 tokens, but the request asks for 2003: 3 in the prompt and "
        "2000 in max_tokens",
        "max_tokens",
    ),
    *BODY,
    *_REFUSALS,
)
"""How a call that generates can fail before its first token."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The answer where `stream` is true."""

    event: type[BaseModel]
    examples: dict[str, dict[str, Any]]
    """Events, by what they are."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    tag: str
    summary: str
    success: tuple[str, Any]
    """What status 200 means, and an example; a str is plain text."""
    answer: type[BaseModel] | None = None
    """The shape of the answer with status 200, where it is JSON."""
    stream: Stream | None = None
    body: type[BaseModel] | None = None
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Examples of bodies, by what they show."""
    parameters: tuple[dict[str, Any], ...] = ()
    """Of the path and of the query, as OpenAPI writes them."""
    errors: tuple[Exception, ...] = (BUG,)
    """One example of each way to fail."""
    unwell: tuple[str, str] | None = None
    """What status 503 means where it is plain text, and that text."""

    @property
    def answers(self) -> dict[int, tuple[str, Any]]:
        """By status: what it means, and an example."""
        return {200: self.success} | ({} if self.unwell is None else {503: self.unwell})

    @property
    def guarded(self) -> bool:
        """Whether the route wants an API key where keys are set."""
        return any(isinstance(error, Unauthenticated) for error in self.errors)


_FINGERPRINT = "fp_5f0c1d2e3a4b"
_USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
_SEED = 229101
_EVENT = {"created": 1767225600, "model": "attend", "system_fingerprint": _FINGERPRINT}
_CHOICE = {"index": 0, "logprobs": None, "finish_reason": "length", "stop_reason": None}
_COMPLETION = {"id": "cmpl-8d3f", "object": "text_completion", **_EVENT}
_CHAT = {"id": "chatcmpl-8d3f", "object": "chat.completion", **_EVENT}
_MODEL_OBJECT = {"id": "attend", "object": "model", "created": 1767225600, "owned_by": "attend", "max_model_len": 1024}
_MODEL_OBJECT |= {"default_sampling": NO_DEFAULTS.values(), "stop_token_ids": [2]}

_GUESS = {"id": 7, "token": " there", "logprob": -0.5}
_HEAD = {"head": 0, "key_value_head": 0, "weights": [[1.0], [0.25, 0.75]]}
_ATTENTION = {"id": "attn-8d3f", "object": "attention", **_EVENT, "num_layers": 6, "num_heads": 6, "num_prompt_tokens": 2}
_ATTENTION |= {
    "tokens": [
        {"id": 5, "token": "Hi", "logprob": None, "entropy": None, "top_logprobs": None},
        _GUESS | {"entropy": 1.5, "top_logprobs": [_GUESS]},
    ],
    "next": {"entropy": 1.5, "top_logprobs": [_GUESS]},
    "layers": [{"layer": 0, "kind": "attention", "window": None, "heads": [_HEAD]}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2},
}

_EMBEDDINGS = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.6, -0.8]}],
    "model": "attend",
    "usage": {"prompt_tokens": 2, "total_tokens": 2},
}

_COMPLETION_EVENTS = {
    "The last piece of an answer": _COMPLETION | {"choices": [_CHOICE | {"text": " there was"}], "seed": _SEED},
    "The usage": _COMPLETION | {"choices": [], "usage": _USAGE},
}
_CHAT_EVENT = _CHAT | {"object": "chat.completion.chunk", "seed": _SEED}
_BEGUN = _CHOICE | {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
_CHAT_EVENTS = {
    "The first event of an answer": _CHAT_EVENT | {"choices": [_BEGUN]},
    "The last piece of an answer": _CHAT_EVENT | {"choices": [_CHOICE | {"delta": {"content": "Hi there"}}]},
}

_COMPLETIONS = Operation(
    "generation",
    "Continue a prompt",
    (
        "The answers.",
        _COMPLETION | {"choices": [_CHOICE | {"text": " there was"}], "seed": _SEED, "usage": _USAGE},
    ),
    responses.Completion,
    Stream(responses.CompletionChunk, _COMPLETION_EVENTS),
    CompletionRequest,
    {
        "A text": {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0.8, "seed": 7},
        "A stream that ends with the usage": {
            "prompt": "Once upon a time",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "Two answers to each of two prompts": {"prompt": ["One", "Two"], "n": 2, "stop": ["\n"], "top_p": 0.9},
        "The log probabilities of a text": {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 1},
        "Token ids, in and out": {"prompt": [79, 110, 99, 101], "return_token_ids": True, "logit_bias": {"46": -100}},
        "One of two words": {"prompt": "Yes or no? ", "structured_outputs": {"choice": ["yes", "no"]}},
    },
    parameters=(event_ids.PARAMETER,),
    errors=GENERATION,
)
_CHAT_COMPLETIONS = Operation(
    "generation",
    "Continue a conversation",
    (
        "The answers.",
        _CHAT
        | {
            "choices": [_CHOICE | {"message": {"role": "assistant", "content": "Hi there", "refusal": None}}],
            "seed": _SEED,
            "usage": _USAGE,
        },
    ),
    chat_responses.ChatCompletion,
    Stream(chat_responses.ChatCompletionChunk, _CHAT_EVENTS),
    ChatRequest,
    {
        "A question": {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 32},
        "A stream": {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_completion_tokens": 32},
        "Parts, and log probabilities": {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            ],
            "logprobs": True,
            "top_logprobs": 2,
            "max_completion_tokens": 8,
        },
        "JSON that fits a schema": {
            "messages": [{"role": "user", "content": "Your age?"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "age", "schema": {"type": "integer"}}},
            "max_completion_tokens": 8,
        },
        "A tool that must be called": {
            "messages": [{"role": "user", "content": "What time is it?"}],
            "tools": [{"type": "function", "function": {"name": "now", "description": "The time."}}],
            "tool_choice": "required",
        },
    },
    errors=(*GENERATION, NoChatTemplate("attend has no chat template: use /v1/completions")),
)

_MODEL_ID = {
    "name": "model_id",
    "in": "path",
    "required": True,
    "description": "The model's name.",
    "schema": {"type": "string"},
    "example": "attend",
}

_TOKEN_COUNT = {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS}
_QUESTION = tuple(
    {"name": name, "in": "query", "description": text, "schema": _TOKEN_COUNT | {"default": default}, "example": example}
    for name, text, default, example in (
        ("prompt_tokens", "Tokens of the prompt of a call to come.", Question().prompt_tokens, 100),
        ("max_tokens", "The most tokens of its answer.", Question().max_tokens, 200),
    )
)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("post", "/v1/completions"): _COMPLETIONS,
    ("post", "/v1/chat/completions"): _CHAT_COMPLETIONS,
    ("get", "/v1/models"): Operation(
        "models",
        "The served models",
        ("The models.", {"object": "list", "data": [_MODEL_OBJECT]}),
        responses.ModelList,
        errors=(_KEY, BUG),
    ),
    ("get", "/v1/models/{model_id}"): Operation(
        "models",
        "One served model",
        ("The model.", _MODEL_OBJECT),
        responses.Model,
        parameters=(_MODEL_ID,),
        errors=(_KEY, _MODEL, BUG),
    ),
    ("post", "/v1/attention"): Operation(
        "attention",
        "What the model does with a text",
        ("What it does.", _ATTENTION),
        Attention,
        body=AttentionRequest,
        requests={
            "A prompt": {"prompt": "Hi there", "layers": [0], "heads": [0]},
            "With its answer, and what each layer would say": {
                "prompt": "Hi",
                "answer": " there",
                "layers": [],
                "logit_lens": 1,
            },
        },
        errors=(
            InvalidRequest("layers must hold integers from 0 to 5; got 9 (integer)", "layers"),
            _TEXT_TOO_LONG,
            *_REFUSALS,
            *BODY,
        ),
    ),
    ("post", "/v1/embeddings"): Operation(
        "embeddings",
        "Texts as vectors",
        ("The vectors.", _EMBEDDINGS),
        Embeddings,
        body=EmbeddingsRequest,
        requests={
            "A text": {"input": "Hi there"},
            "Two texts, in OpenAI's short form": {"input": ["Hi", "there"], "encoding_format": "base64"},
            "The first numbers of a vector": {"input": [72, 105], "dimensions": 2},
        },
        errors=(
            InvalidRequest("dimensions must be an integer from 1 to 384; got 1000 (integer)", "dimensions"),
            NotSupported("this model makes no embeddings: its checkpoint has no modules.json that says how", "model"),
            ContextTooLong("input: this model embeds texts of at most 512 tokens; got 600", "input"),
            *_REFUSALS,
            *BODY,
        ),
    ),
    ("post", "/tokenize"): Operation(
        "tokens",
        "Text to token ids",
        ("The tokens.", {"count": 2, "max_model_len": 1024, "tokens": [72, 105], "token_strs": ["H", "i"]}),
        responses.Tokens,
        body=TokenizeRequest,
        requests={"A text": {"prompt": "Hi"}, "With the tokens' spelling": {"prompt": "Hi", "return_token_strs": True}},
        errors=(_TYPE, *BODY),
    ),
    ("post", "/detokenize"): Operation(
        "tokens",
        "Token ids to text",
        ("The text.", {"prompt": "Hi"}),
        responses.Text,
        body=DetokenizeRequest,
        requests={"Two tokens": {"tokens": [72, 105]}},
        errors=(_TYPE, *BODY),
    ),
    ("get", "/tokenizer_info"): Operation(
        "tokens",
        "The tokenizer",
        (
            "What the checkpoint says of it.",
            {"eos_token": "<|endoftext|>", "vocab_size": 4096, "model_max_length": 1024},
        ),
        responses.TokenizerInfo,
        errors=(_KEY, BUG),
    ),
    ("get", "/healthz"): Operation(
        "operations", "Liveness", ("Alive.", "ok\n"), unwell=("To be restarted.", "the engine is stuck\n")
    ),
    ("get", "/readyz"): Operation(
        "operations", "Readiness", ("Ready for requests.", "ready\n"), unwell=("Shutting down.", "draining\n")
    ),
    ("get", "/version"): Operation(
        "operations",
        "Version",
        (
            "What is running.",
            {
                "version": "0.1.0",
                "model": "attend",
                "family": "llama",
                "device": "cpu",
                "dtype": "bfloat16",
                "weights": "bfloat16",
                "backend": "cpu",
                "system_fingerprint": _FINGERPRINT,
            },
        ),
        responses.Version,
    ),
    ("get", "/v1/capacity"): Operation(
        "operations",
        "Capacity",
        (
            "What there is room for.",
            {
                "replicas": {"expected": 1, "answered": 1},
                "free_blocks": 900,
                "num_blocks": 1024,
                "block_size": 16,
                "running": 3,
                "waiting": 0,
                "max_batch_requests": 64,
                "max_queued_requests": 256,
                "max_model_len": 1024,
                "tokens_per_second": 211.4,
                "computed_tokens_per_second": 498.0,
                "prompt_tokens": 100,
                "max_tokens": 200,
                "fits": True,
                "estimated_wait_seconds": 0.0,
                "estimated_seconds": 2.9,
            },
        ),
        responses.Capacity,
        parameters=_QUESTION,
        errors=(
            InvalidRequest("max_tokens must be an integer from 0 to 2147483647; got 'a' (string)", "max_tokens"),
            _KEY,
            BUG,
        ),
    ),
    ("get", "/metrics"): Operation(
        "operations",
        "Metrics",
        (
            "Prometheus text.",
            '# TYPE attend_requests_waiting gauge\nattend_requests_waiting{replica="a",model="attend"} 0.0\n',
        ),
    ),
}
"""A new route needs its row here, and its answer's shape in `responses.py`."""

TAGS = {
    "generation": "Text from the model.",
    "models": "What is served.",
    "attention": "What the model does with a text.",
    "embeddings": "Texts as vectors.",
    "tokens": "Text and token ids.",
    "operations": "For those who run the server.",
}
