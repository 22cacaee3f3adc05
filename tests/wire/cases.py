"""The exchanges whose transcripts are kept: what a client's author would try first, and every way in which it may fail.

The server's engine counts: after "a" it says "b". A token is a byte, and the end-of-text token is 256.
"""

from dataclasses import replace
from typing import Any

from attend.model.errors import EngineFailed, Overloaded
from attend.service.access.quota import Limits
from tests.fakes import END, INFO, FakeEngine, says, seeded
from tests.wire.exchange import SECRET, Http, MakeEngine

CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = "{{ tools | tojson if tools }}{# <think> <tool_call> #}" + CHATML
ZONE = {"type": "object", "properties": {"zone": {"type": "string"}}}
NOW = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": ZONE}}
ANSWER = """<think>
They ask for the time.
</think>

I look.
<tool_call>
{"name": "now", "arguments": {"zone": "UTC"}}
</tool_call>"""
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
GOOD_KEY = f"Bearer {SECRET}"
NO_LIMITS = Limits()
ONE_A_MINUTE = Limits(requests_per_minute=1)


def refusing(error: Exception) -> MakeEngine:
    """An engine that takes nothing."""
    return _changed(refusal=error)


def breaking(after: int) -> MakeEngine:
    """An engine that fails in the middle."""
    return _changed(broken_after=after)


def draining() -> FakeEngine:
    engine = FakeEngine()
    engine.drain()
    return engine


def stalled(steps: int) -> MakeEngine:
    """An engine that takes so many steps and then no more."""

    def make() -> FakeEngine:
        engine = FakeEngine(held=True)
        engine.release(steps)
        return engine

    return make


def _changed(**attributes: Any) -> MakeEngine:
    def make() -> FakeEngine:
        engine = FakeEngine()
        for name, value in attributes.items():
            setattr(engine, name, value)
        return engine

    return make


def speaking(text: str) -> MakeEngine:
    """An engine that says `text` to everything."""
    return lambda: FakeEngine(says(text))


def complete(name: str, *, engine: MakeEngine = FakeEngine, **body: Any) -> Http:
    return Http(name, {"model": "fake", "prompt": "a", "max_tokens": 3, "seed": 7} | body, engine=engine)


def chat(name: str, *, engine: MakeEngine = speaking("Hi é!"), **body: Any) -> Http:
    path = "/v1/chat/completions"
    return Http(name, {"model": "fake"} | HELLO | {"seed": 7} | body, path, engine=engine, template=CHATML)


def tools(name: str, **body: Any) -> Http:
    """A chat whose answer thinks, speaks and calls a tool."""
    more = {"tools": [NOW], "request_id": "r1", "max_tokens": 300} | body
    path = "/v1/chat/completions"
    return Http(name, {"model": "fake"} | HELLO | {"seed": 7} | more, path, engine=calling, template=TOOLS)


def other(name: str, path: str, *, engine: MakeEngine | None = None, **body: Any) -> Http:
    """The same by another API: /v1/responses or /v1/messages."""
    asked: dict[str, Any] = {
        "/v1/responses": {"input": "Hello", "tools": [{"type": "function"} | NOW["function"]]},
        "/v1/messages": HELLO | {"tools": [{"name": "now", "input_schema": ZONE}], "max_tokens": 300},
    }[path]
    more = {"model": "fake"} | asked | {"seed": 7, "request_id": "r1"} | body
    return Http(name, more, path, engine=engine or calling, template=TOOLS)


def calling() -> FakeEngine:
    """An engine that answers every chat with a call."""
    return FakeEngine(says(ANSWER), burst=20, info=replace(INFO, max_model_len=1024))


def get(name: str, path: str, *, engine: MakeEngine = FakeEngine) -> Http:
    return Http(name, path=path, method="GET", engine=engine)


def refused(name: str, body: Any = None, **more: Any) -> Http:
    return Http(f"error-{name}", {"prompt": "a"} if body is None else body, **more)


GENERATION = [
    Http("defaults", {"prompt": "a"}),
    complete("empty-prompt", prompt="", return_token_ids=True),
    complete("plain"),
    complete("stream", stream=True),
    complete("stream-usage", **USAGE),
    complete("stream-continuous-usage", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    complete("n-2", n=2, engine=lambda: FakeEngine(seeded)),
    complete("stream-n-2", n=2, engine=lambda: FakeEngine(seeded), **USAGE),
    complete("list-of-prompts", prompt=["a", "hello"], n=2),
    complete("stream-list-of-prompts", prompt=[[97], [104, 105]], **USAGE),
    complete("echo", prompt="xyz", echo=True),
    complete("logprobs", logprobs=2),
    complete("stream-logprobs", logprobs=2, stream=True),
    complete("logprobs-utf-8", engine=speaking("é"), logprobs=0),
    complete("echo-logprobs", prompt="xyz", echo=True, logprobs=1),
    complete("stream-echo-logprobs", prompt="xyz", echo=True, logprobs=1, stream=True),
    complete("prompt-logprobs", prompt="xyz", prompt_logprobs=1),
    complete("max-tokens-0", prompt="xyz", echo=True, logprobs=0, max_tokens=0),
    complete("stop-string", stop=["de"], max_tokens=16),
    complete("stream-stop-string", stop=["de"], max_tokens=16, stream=True),
    complete("stop-string-logprobs", stop=["de"], max_tokens=16, logprobs=0),
    complete("stop-string-included", stop=["de"], include_stop_str_in_output=True, max_tokens=16),
    complete("stop-token", stop_token_ids=[100], max_tokens=16, return_token_ids=True),
    complete("end-of-text", prompt=[253], max_tokens=16, return_token_ids=True),
    complete("ignore-eos", prompt=[253], ignore_eos=True, skip_special_tokens=False, return_token_ids=True),
    complete("stream-utf-8", engine=speaking("é😀"), max_tokens=16, stream=True, return_token_ids=True),
    complete("stream-utf-8-cut", engine=speaking("é😀"), max_tokens=4, stream=True),
    complete("seed-of-53-bits", seed=2**53 - 1, max_tokens=1),
    complete("timing", timing=True),
    complete("stream-timing", timing=True, **USAGE),
    complete("return-token-ids", return_token_ids=True),
    complete("stream-return-token-ids", return_token_ids=True, stream=True),
    complete("resume", resume_token_ids=[98, 99], max_tokens=5, logprobs=0, return_token_ids=True),
    complete("stream-resume", resume_token_ids=[98, 99], max_tokens=5, **USAGE),
    complete("stream-deadline", deadline_ms=500, engine=stalled(2), **USAGE),
    complete("request-id", request_id="mine.7", max_tokens=1),
    chat("chat"),
    chat("chat-stream", stream=True),
    chat("chat-stream-usage", max_completion_tokens=2, **USAGE),
    chat("chat-logprobs", logprobs=True, top_logprobs=1, max_tokens=4),
    chat("chat-stream-logprobs", logprobs=True, top_logprobs=1, max_tokens=4, stream=True),
    chat("chat-stream-n-2", n=2, max_tokens=2, stream=True, engine=lambda: FakeEngine(seeded)),
    tools("chat-tools"),
    tools("chat-tools-stream", **USAGE),
    tools("chat-tools-cut", max_tokens=110),
    chat("chat-return-token-ids", max_tokens=2, return_token_ids=True),
    other("responses", "/v1/responses"),
    other("responses-stream", "/v1/responses", stream=True),
    other("responses-cut", "/v1/responses", max_output_tokens=110),
    other("responses-logprobs", "/v1/responses", engine=speaking("Hi é!"), include=["message.output_text.logprobs"]),
    other("responses-stream-cut", "/v1/responses", max_output_tokens=110, stream=True),
    other("messages-stream-cut", "/v1/messages", max_tokens=110, stream=True),
    other("messages", "/v1/messages"),
    other("messages-stream", "/v1/messages", stream=True),
    other("messages-cut", "/v1/messages", max_tokens=110),
    other("messages-stop", "/v1/messages", engine=speaking("Hi there"), stop_sequences=["the"]),
]
SERVER = [
    Http("tokenize", {"prompt": "é!", "return_token_strs": True}, "/tokenize"),
    Http("detokenize", {"tokens": [195, 169, 33, END]}, "/detokenize"),
    get("tokenizer-info", "/tokenizer_info"),
    Http("attention", {"prompt": "ab", "answer": "c", "heads": [1], "top_logprobs": 1}, "/v1/attention"),
    Http(
        "attention-all",
        {"prompt": [97, 226], "scores": True, "logit_lens": 1, "top_logprobs": 0, "request_id": "mine.7"},
        "/v1/attention",
    ),
    Http("embeddings", {"input": ["ab", "c"], "dimensions": 2}, "/v1/embeddings"),
    Http("embeddings-base64", {"input": [97, 98], "encoding_format": "base64"}, "/v1/embeddings"),
    Http(
        "rerank",
        {"query": "ab", "documents": ["c", {"text": "ab"}, "c"], "top_n": 2, "return_documents": True, "request_id": "mine.8"},
        "/v1/rerank",
    ),
    Http("score", {"text_1": "ab", "text_2": ["c", "ab"]}, "/v1/score"),
    get("models", "/v1/models"),
    get("model", "/v1/models/fake"),
    get("version", "/version"),
    get("healthz", "/healthz"),
    get("healthz-stuck", "/healthz", engine=_changed(age=1e6)),
    get("readyz", "/readyz"),
    get("readyz-draining", "/readyz", engine=draining),
]
ERRORS = [
    refused("400-range", {"prompt": "a", "temperature": 3}),
    refused("400-type", {"prompt": "a", "max_tokens": "3"}),
    refused("400-unknown-field", {"prompt": "a", "max_token": 3}),
    refused("400-not-built", {"prompt": "a", "suffix": "z"}),
    refused("400-json", '{"prompt": "a"'),
    refused("400-context", {"prompt": "a", "max_tokens": 128}),
    refused("400-stream", {"prompt": "a", "temperature": 3, "stream": True}),
    refused("400-no-chat-template", HELLO, path="/v1/chat/completions"),
    refused("400-tools", HELLO | {"tools": [{"type": "function"}]}, path="/v1/chat/completions", template=CHATML),
    refused("400-missing-field", {}, path="/tokenize"),
    refused("400-attention", {"prompt": "a", "layers": [3]}, path="/v1/attention"),
    refused("400-embeddings", {"input": "a", "dimensions": 5}, path="/v1/embeddings"),
    refused("400-rerank", {"query": "a", "documents": ["b", "c" * 101]}, path="/v1/rerank"),
    refused("400-score", {"text_1": ["a", "b"], "text_2": ["c"]}, path="/v1/score"),
    refused("401-no-key", limits=NO_LIMITS),
    refused("401-attention", path="/v1/attention", limits=NO_LIMITS),
    refused("401-wrong-key", limits=NO_LIMITS, headers={"Authorization": "Bearer att_other"}),
    refused("404-model", {"prompt": "a", "model": "gpt-4"}),
    get("error-404-models-id", "/v1/models/gpt-4"),
    refused("404-route", path="/v1/images"),
    refused("405", path="/v1/completions", method="PUT"),
    refused("307-slash", path="/v1/completions/"),
    Http("error-405-head", path="/healthz", method="HEAD"),
    refused("413", headers={"Content-Length": "1048577"}),
    refused("415", "prompt=a", headers={"Content-Type": "application/x-www-form-urlencoded"}),
    refused("429-queue", engine=refusing(Overloaded("the queue is full", 2))),
    refused("429-key-limit", limits=ONE_A_MINUTE, headers={"Authorization": GOOD_KEY}, times=2),
    refused("500", engine=refusing(EngineFailed("SecretError"))),
    refused("500-request-id", {"prompt": "a", "request_id": "mine.7"}, engine=refusing(EngineFailed("SecretError"))),
    refused("503", engine=draining),
    refused("504", {"prompt": "a", "deadline_ms": 1}, engine=stalled(0)),
    refused("given-id", {"prompt": "a", "n": 0}, headers={"X-Request-Id": "mine.7"}),
    complete("error-in-stream", engine=breaking(2), **USAGE),
    chat("chat-error-in-stream", engine=breaking(1), **USAGE),
    other("responses-error-in-stream", "/v1/responses", engine=breaking(2), stream=True),
    other("messages-error-in-stream", "/v1/messages", engine=breaking(2), stream=True),
    refused("400-messages", {"messages": []}, path="/v1/messages", template=CHATML),
]
HTTP = GENERATION + SERVER + ERRORS
