"""What /openapi.json says of each route beside what FastAPI knows of it: body, answer, failures, and examples."""

from typing import Any

from attend.model.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NoChatTemplate,
    NotSupported,
    Overloaded,
    Unavailable,
)
from attend.model.scoring import NO_SCORES
from attend.service.contract import (
    answers,
    anthropic_answers,
    chat_answers,
    response_answers,
    scores,
    server_answers,
    text_answers,
)
from attend.service.contract.anthropic import CountTokensRequest, MessagesRequest
from attend.service.contract.chat import ChatRequest
from attend.service.contract.requests import CompletionRequest
from attend.service.contract.responses import ResponsesRequest
from attend.service.contract.texts import AttentionRequest, DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from attend.service.errors import SHUTTING_DOWN
from attend.service.http_api.batch_operations import BATCH_OPERATIONS
from attend.service.http_api.operation import BUG, KEY, KEYED, NOT_JSON, SPENT, TOO_LARGE, Operation, Stream
from attend.service.observe.capacity import MAX_TOKENS, Question

_RANGE = InvalidRequest("temperature must be a number from 0 to 2; got 3 (integer)", "temperature")
_MODEL = ModelNotFound("the model 'other' (string) does not exist; this server has 'attend'")
_TYPE = InvalidRequest("model must be a string; got 3 (integer)", "model")
BODY: tuple[Exception, ...] = (KEY, _MODEL, TOO_LARGE, NOT_JSON, BUG)
"""How a call with a body can fail, whatever the body is for."""
_REFUSALS: tuple[Exception, ...] = (
    Overloaded("the queue is full", retry_after=1),
    SPENT,
    Unavailable(SHUTTING_DOWN),
    DeadlineExceeded("the deadline passed before the first token"),
)
_TEXT_TOO_LONG = ContextTooLong("prompt: /v1/attention takes at most 512 tokens; prompt and answer have 600", "prompt")
SCORING: tuple[Exception, ...] = (
    InvalidRequest("documents must hold 1 to 2048 texts; got 0", "documents"),
    NotSupported(NO_SCORES.refusal, "model"),
    ContextTooLong("documents[3]: this model embeds texts of at most 512 tokens; got 600", "documents"),
    *_REFUSALS,
    *BODY,
)
"""How a call for scores can fail."""
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


_CHAT_CHOICE = {"index": 0, "logprobs": None, "finish_reason": None, "stop_reason": None}
_COUNTS = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
_DETAILS = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}}
_COMPLETION_EVENTS: dict[str, dict[str, Any]] = {
    "The last piece of an answer": {"seed": 229101},
    "The usage": {"choices": [], "usage": _COUNTS | _DETAILS},
}
_CHAT_EVENTS: dict[str, dict[str, Any]] = {
    "The first event of an answer": {
        "choices": [_CHAT_CHOICE | {"delta": {"role": "assistant", "content": ""}}],
        "seed": 229101,
    },
    "The last piece of an answer": {"seed": 229101},
}
_HELLO = [{"role": "user", "content": "Hello"}]
_COMPLETIONS = Operation(
    answers.Completion,
    Stream(answers.CompletionChunk, _COMPLETION_EVENTS),
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
    errors=GENERATION,
)
_CHAT_COMPLETIONS = Operation(
    chat_answers.ChatCompletion,
    Stream(chat_answers.ChatCompletionChunk, _CHAT_EVENTS),
    ChatRequest,
    {
        "A question": {"messages": _HELLO, "max_completion_tokens": 32},
        "A stream": {"messages": _HELLO, "stream": True, "max_completion_tokens": 32},
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
_NO_TEMPLATE = NoChatTemplate("attend has no chat template: use /v1/completions")
_TURN = [{"role": "user", "content": "Hello"}]
_RESPONSES = Operation(
    response_answers.Response,
    Stream(
        response_answers.ResponseEvent,
        {"The end of a text": {"type": "response.output_text.done", "text": "Hello", "logprobs": []}},
        is_named=True,
    ),
    ResponsesRequest,
    {
        "A text": {"input": "Hello", "max_output_tokens": 32},
        "A stream, with what the model is told first": {
            "instructions": "Be brief.",
            "input": _TURN,
            "stream": True,
            "max_output_tokens": 32,
        },
        "JSON that fits a schema": {
            "input": "Your age?",
            "text": {"format": {"type": "json_schema", "name": "age", "schema": {"type": "integer"}}},
            "max_output_tokens": 8,
        },
        "A tool that must be called": {
            "input": "What time is it?",
            "tools": [{"type": "function", "name": "now", "description": "The time."}],
            "tool_choice": "required",
        },
    },
    errors=(*GENERATION, _NO_TEMPLATE),
)
_MESSAGES = Operation(
    anthropic_answers.MessageAnswer,
    Stream(
        anthropic_answers.MessageEvent,
        {"A piece of a text": {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}}},
        is_named=True,
    ),
    MessagesRequest,
    {
        "A question": {"messages": _TURN, "max_tokens": 32},
        "A stream, with what the model is told first": {
            "system": "Be brief.",
            "messages": _TURN,
            "stream": True,
            "max_tokens": 32,
        },
        "An answer that is begun": {"messages": [*_TURN, {"role": "assistant", "content": "Hi"}], "max_tokens": 8},
        "A tool that must be called": {
            "messages": [{"role": "user", "content": "What time is it?"}],
            "tools": [{"name": "now", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}],
            "tool_choice": {"type": "any"},
            "max_tokens": 64,
        },
    },
    errors=(*GENERATION, _NO_TEMPLATE),
    failure=anthropic_answers.AnthropicError,
)
_COUNT_TOKENS = Operation(
    anthropic_answers.TokenCount,
    body=CountTokensRequest,
    requests={"A question": {"messages": _TURN}},
    errors=(_TYPE, _NO_TEMPLATE, SPENT, *BODY),
    failure=anthropic_answers.AnthropicError,
)

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
    ("post", "/v1/responses"): _RESPONSES,
    ("post", "/v1/messages"): _MESSAGES,
    ("post", "/v1/messages/count_tokens"): _COUNT_TOKENS,
    ("get", "/v1/models"): Operation(server_answers.ModelList, errors=KEYED),
    ("get", "/v1/models/{model_id}"): Operation(server_answers.Model, errors=(_MODEL, *KEYED)),
    ("post", "/v1/attention"): Operation(
        text_answers.Attention,
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
        text_answers.Embeddings,
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
    ("post", "/v1/rerank"): Operation(
        scores.Reranked,
        body=scores.RerankRequest,
        requests={
            "Two documents": {"query": "What falls from clouds?", "documents": ["Rain does.", "It is late."]},
            "The best, with its text": {
                "query": "What falls from clouds?",
                "documents": [{"text": "Rain does."}, {"text": "It is late."}],
                "top_n": 1,
                "return_documents": True,
            },
        },
        errors=SCORING,
    ),
    ("post", "/v1/score"): Operation(
        scores.Scores,
        body=scores.ScoreRequest,
        requests={
            "A query and two documents": {"text_1": "What falls from clouds?", "text_2": ["Rain does.", "It is late."]},
            "Two pairs": {"queries": ["Rain?", "Late?"], "documents": ["It rains.", "It is late."], "max_tokens_per_doc": 100},
        },
        errors=SCORING,
    ),
    ("post", "/tokenize"): Operation(
        text_answers.Tokens,
        body=TokenizeRequest,
        requests={"A text": {"prompt": "Hi"}, "With the tokens' spelling": {"prompt": "Hi", "return_token_strs": True}},
        errors=(_TYPE, SPENT, *BODY),
    ),
    ("post", "/detokenize"): Operation(
        text_answers.Text,
        body=DetokenizeRequest,
        requests={"Two tokens": {"tokens": [72, 105]}},
        errors=(_TYPE, SPENT, *BODY),
    ),
    ("get", "/tokenizer_info"): Operation(server_answers.TokenizerInfo, errors=KEYED),
    ("get", "/healthz"): Operation("ok\n", unwell=("To be restarted.", "the engine is stuck\n")),
    ("get", "/readyz"): Operation("ready\n", unwell=("Shutting down.", "draining\n")),
    ("get", "/version"): Operation(server_answers.Version),
    ("get", "/v1/capacity"): Operation(
        server_answers.Capacity,
        parameters=_QUESTION,
        errors=(
            InvalidRequest("max_tokens must be an integer from 0 to 2147483647; got 'a' (string)", "max_tokens"),
            *KEYED,
        ),
    ),
    ("get", "/metrics"): Operation(
        '# TYPE attend_requests_waiting gauge\nattend_requests_waiting{replica="a",model="attend"} 0.0\n'
    ),
    **BATCH_OPERATIONS,
}
"""A new route needs its row here, and its answer's shape in `answers.py`."""
