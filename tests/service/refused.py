"""The table of what is refused: a call, the field that `error.param` names, a word of the sentence, and the error's code.

Each row is bad for every server, whatever its model. What a message of gRPC can say too is sent on both transports.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from attend.v1 import generation_pb2 as pb
from tests.service.bad_calls import CHAT, COMPLETIONS, DETOKENIZE, EMBEDDINGS, JSON, TOKENIZE
from tests.service.messages import chat_message, embed_message, generate_message

INVALID, UNSUPPORTED, CONTEXT, MODEL = "invalid_value", "unsupported_value", "context_length_exceeded", "model_not_found"
KEY = "invalid_api_key"
STATUSES = {CONTEXT: 400, INVALID: 400, UNSUPPORTED: 400, "request_too_large": 413, "unsupported_media_type": 415}
STATUSES |= {MODEL: 404, "not_found": 404, "method_not_allowed": 405, KEY: 401}
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
SECRET = "att_open-sesame"
A = {"prompt": "a"}
GOOD = pb.GenerateRequest(text="a").SerializeToString()
SAID = {"role": "user", "content": "a"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One bad input. `code` gives the HTTP status and the gRPC code too."""

    code: str = INVALID
    param: str | None = None
    word: str
    """Stands in the message, on both transports."""
    body: bytes | None = None
    """Sent by HTTP where not None."""
    method: str = "POST"
    path: str = COMPLETIONS
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    rpc: str = "Generate"
    message: bytes | None = None
    """Sent by gRPC where not None."""
    metadata: tuple[tuple[str, str], ...] = ()
    keyed: bool = False
    """Needs a server with API keys."""

    @property
    def transports(self) -> tuple[str, ...]:
        """Where it is sent."""
        return tuple(name for name, sent in (("http", self.body), ("grpc", self.message)) if sent is not None)

    @property
    def name(self) -> str:
        """The beginning of what is sent."""
        return f"{self.path} {self.body if self.message is None else self.message!r}"[:70]


RPCS = {COMPLETIONS: ("Generate", generate_message), CHAT: ("Chat", chat_message), EMBEDDINGS: ("Embed", embed_message)}


def http(body: Any, param: str | None, word: str, code: str = INVALID, path: str = COMPLETIONS, **more: Any) -> Row:
    """A body, as bytes or as a JSON document."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Row(code=code, param=param, word=word, body=sent, path=path, **more)


def row(fields: dict[str, Any], param: str | None, word: str, code: str = INVALID, path: str = COMPLETIONS) -> Row:
    """Fields beside a good body, or in its place; also as a message, if it can hold them."""
    least: dict[str, Any] = {COMPLETIONS: A, EMBEDDINGS: {"input": "a"}, RESPONSES: {"input": "a"}, TOKENIZE: A, DETOKENIZE: {}}
    body = least.get(path, {"messages": [SAID]}) | fields
    try:
        rpc, to_message = RPCS[path]
        return http(body, param, word, code, path, rpc=rpc, message=to_message(body).SerializeToString())
    except (KeyError, TypeError, ValueError, AttributeError):
        return http(body, param, word, code, path)


def grpc(message: bytes, word: str, code: str = INVALID, **more: Any) -> Row:
    """The bytes of a message."""
    return Row(code=code, word=word, message=message, **more)


FIELDS: list[tuple[Any, ...]] = [
    ({"max_tokens": -7}, "max_tokens", "from 0 to 2147483647"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 0, "timing": True}, "max_tokens", "at least 1"),
    ({"temperature": 2.01}, "temperature", "from 0 to 2"),
    ({"top_p": -1e-9}, "top_p", "from 0 to 1"),
    ({"min_p": 2}, "min_p", "from 0 to 1"),
    ({"top_k": -2}, "top_k", "from -1"),
    ({"n": 0}, "n", "from 1 to 8"),
    ({"presence_penalty": -2.1}, "presence_penalty", "-2 to 2"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "-2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"logit_bias": {"3": 101}}, "logit_bias[3]", "-100 to 100"),
    ({"deadline_ms": 0}, "deadline_ms", "from 1"),
    ({"priority": 10}, "priority", "from 0 to 9"),
    ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens", "from 1"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "0 to 20"),
    ({"seed": 2**63}, "seed", "from -9223372036854775808"),
    ({"cache_salt": "s" * 129}, "cache_salt", "at most 128 characters"),
    # how fields go together
    ({"stream_options": {}}, "stream_options", "stream is true"),
    ({"best_of": 2}, "best_of", "use n", UNSUPPORTED),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs", "both"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "from 0 to 4"),
    ({"min_tokens": 1, "structured_outputs": {"regex": "a"}}, "min_tokens", "structured output"),
    ({"n": 2, "resume_token_ids": [3]}, "resume_token_ids", "n = 1"),
    ({"prompt": ["a", "b"], "resume_token_ids": [1]}, "resume_token_ids", "single prompt"),
    ({"suffix": "b", "echo": True}, "suffix", "no echo"),
    # token ids
    ({"prompt": [-1]}, "prompt", "from 0 to"),
    ({"prompt": [3, 2**31]}, "prompt", "from 0 to"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids", "from 0 to"),
    ({"logit_bias": {"1000000000": 1}}, "logit_bias", "from 0 to"),
    ({"allowed_token_ids": [3, -3]}, "allowed_token_ids", "from 0 to"),
    ({"resume_token_ids": [10**9]}, "resume_token_ids", "from 0 to"),
    ({"prompt": []}, "prompt", "empty list"),
    ({"prompt": [[]]}, "prompt", "empty list"),
    *[({"logit_bias": {key: 1}}, "logit_bias", "as keys, in digits") for key in ("", "the", "-1", "01", "1.0", "٣", "9" * 20)],
    # limits
    ({"prompt": " a" * 5000}, "prompt", "maximum context length", CONTEXT),
    ({"prompt": [3] * 5000}, "prompt", "maximum context length", CONTEXT),
    ({"max_tokens": 10**6}, "max_tokens", "maximum context length", CONTEXT),
    ({"stop": [*"abcde"]}, "stop", "at most 4"),
    ({"stop": ["z" * 257]}, "stop", "256"),
    ({"stop": [""]}, "stop", "at least 1"),
    ({"stop_token_ids": [3] * 301}, "stop_token_ids", "300"),
    ({"logit_bias": {str(number): 1 for number in range(301)}}, "logit_bias", "300"),
    ({"bad_words": ["x"] * 65}, "bad_words", "64"),
    ({"bad_words": [""]}, "bad_words", "at least 1"),
    ({"request_id": "i" * 129}, "request_id", "1 to 128"),
    ({"request_id": "a\r\nb"}, "request_id", "letters, digits"),
    ({"user": "u" * 257}, "user", "a string of at most 256 characters"),
    ({"prompt": ["a"] * 43, "n": 3}, "n", "128"),
    ({"model": "no-such-model"}, "model", "no-such-model", MODEL),
    ({"model": "m" * 500}, "model", "does not exist", MODEL),
    ({"model": 'x"} \n{"level": "info'}, "model", "does not exist", MODEL),
    # types, and fields that nobody knows
    ({"max_tokens": 8.0}, "max_tokens", "integer"),
    ({"n": "9" * 100_000}, "n", "integer"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"stream": 1}, "stream", "boolean"),
    ({"stop_token_ids": ["7"]}, "stop_token_ids", "integer"),
    ({"prompt": {"text": "a"}}, "prompt", "string"),
    ({"prompt": ["a", 5]}, "prompt", "string"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
    ({"stream": True, "stream_options": {"includeusage": True}}, "stream_options.includeusage", "did you mean include_usage?"),
    ({"messages": []}, "messages", "/v1/chat/completions", UNSUPPORTED),
    ({"typical_p": 0.5}, "typical_p", "not supported", UNSUPPORTED),
    ({"temprature": 1}, "temprature", "not a field"),
    # structured output
    ({"response_format": {"type": "xml"}}, "response_format", "one of text"),
    ({"response_format": "json"}, "response_format", "object"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "must hold one"),
    ({"structured_outputs": {"gramar": "a"}}, "structured_outputs.gramar", "mean grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 1000"),
    ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"regex": "((a{999}){999}){999}"}}, "structured_outputs.regex", "regex"),
    ({"structured_outputs": {"regex": "a" * 65537}}, "structured_outputs.regex", "65536"),
    ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs.grammar", "no text"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "Expecting"),
    ({"structured_outputs": {"json": {"$ref": "file:///etc/passwd"}}}, "structured_outputs.json", "registry"),
    ({"structured_outputs": {"json": {"multipleOf": 100000007}}}, "structured_outputs.json", "too complex"),
]
HTTP_ALONE = [
    http({}, "prompt", "prompt is required"),
    http({"prompt": "a", "logprobs": 6}, "logprobs", "from 0 to 5"),
    http({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
    http({"prompt": "a", "suffix": "b", "echo": True}, "suffix", "no echo"),
    http(b'{"prompt": "a", "top_p": NaN}', None, "NaN"),
    http(b'{"prompt": "a", "temperature": 1e309}', None, "out of range"),
    http(b'{"prompt": "' + b"a" * 2**20 + b'"}', None, "1048576", "request_too_large"),
    http({"prompt": "a", "model": "other"}, "model", "does not exist", MODEL, TOKENIZE),
    http({"tokens": [5, 10**30]}, "tokens", "from 0 to", path=DETOKENIZE),
    http({"tokens": [1, True]}, "tokens", "integer", path=DETOKENIZE),
    http(b"", "model", "does not exist", MODEL, "/v1/models/no-such-model", method="GET"),
]
GRPC_ALONE = [
    grpc(pb.GenerateRequest(text="a", sampling={"top_p": 0}).SerializeToString(), "top_p"),
    grpc(pb.GenerateRequest(token_ids={}).SerializeToString(), "empty list"),
]
ROWS = (*(row(*each) for each in FIELDS), *HTTP_ALONE, *GRPC_ALONE)
