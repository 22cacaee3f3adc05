"""What the service itself spends on a token: streams of an engine that computes nothing, through each transport.

The processor time is that of the thread of the event loop, where the service and the engine both live: Ray's and
HAProxy's part of the way, and the socket's, are not in it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from attend.model.config import DEFAULT_MODEL
from attend.model.engine.request import EngineInfo, EngineStats, FinishReason, Output, Request, StepReport, Times, TokenLogprob
from attend.model.params import SamplingParams
from attend.model.text.chat import ChatTemplate
from attend.model.text.tokenizer import Tokenizer
from attend.service.chat.forms import form_of
from attend.service.generation.generation import GenerationService
from attend.service.generation.unread_bodies import UnreadBodies
from attend.service.grpc_api.servicer import GrpcMethods
from attend.service.http_api.app import build_app
from attend.service.http_api.route_deps import RouteDeps
from attend.service.observe.metrics import Metrics
from attend.v1 import generation_pb2 as pb
from loadtest.bench.figures import Figure, take_turns
from loadtest.bench.parsing import source_text

STREAMS, CONTEXT, TOP = 16, 4096, 5
PROMPT = {"prompt": "def "}
CHAT = {"messages": [{"role": "user", "content": "def "}]}
TOOL = {"type": "function", "function": {"name": "now"}}
Stream = Callable[[int], Awaitable[None]]
"""One stream of so many tokens, to its end."""


class IdleEngine:
    """A TokenEngine without a model: each turn of the event loop brings every stream the next token of one text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = tokenizer.encode(source_text(8 * CONTEXT))[:CONTEXT]
        facts: dict[str, Any] = {"family": "idle", "device": "cpu", "dtype": "float32", "weights": "float32"}
        facts |= {"backend": "none", "fingerprint": "fp_idle", "num_parameters": 0, "hidden_size": 0, "cache_bytes": 0}
        facts |= {"max_model_len": 2 * CONTEXT, "block_size": 16, "num_blocks": CONTEXT, "vocab_size": tokenizer.size}
        facts |= {"max_batch_requests": STREAMS, "max_queued_requests": STREAMS, "bos_token_id": 0, "eos_token_ids": (0,)}
        self.info = EngineInfo(**facts)
        self.draining = False

    def stats(self) -> EngineStats:
        """No load."""
        return EngineStats()

    def cache_resident_bytes(self) -> int:
        """There is no cache."""
        return 0

    def heartbeat_age(self) -> float:
        """Always alive."""
        return 0.0

    def check_room(self, count: int, owner: str | None = None) -> None:
        """There is always room."""

    def on_step(self, observer: Callable[[StepReport], None]) -> None:
        """There are no steps."""

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """Nothing is kept that would have to be freed."""

    async def generate(self, requests: Sequence[Request], at_once: int | None = None) -> AsyncGenerator[list[Output], None]:
        """The tokens of each request, one in each list, with log probabilities where asked for."""
        (request,) = requests
        top = tuple((token, -1.5) for token in self.tokens[: request.logprobs or 0])
        for place in range(request.max_tokens):
            token = self.tokens[place]
            scores = () if request.logprobs is None else (TokenLogprob(token, -0.5, top),)
            await asyncio.sleep(0)
            if place + 1 < request.max_tokens:
                yield [Output(request.request_id, (token,), logprobs=scores)]
            else:
                yield [Output(request.request_id, (token,), FinishReason.LENGTH, Times(0.0, 0.0, 0.0), logprobs=scores)]


@dataclass(frozen=True, slots=True)
class Context:
    """A gRPC context without a call."""

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """Nothing was sent beside the message."""
        return ()

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """What goes back beside the answer."""

    def peer(self) -> str:
        """The caller's address."""
        return "ipv4:127.0.0.1:1"

    def set_code(self, code: Any) -> None:
        """A call that fails has no number to show."""
        raise AssertionError(f"the call failed: {code}")

    def set_details(self, details: str) -> None:
        """See `set_code`, which comes first."""


class Methods(GrpcMethods):
    """The gRPC methods of a replica that never drains."""

    def is_draining(self) -> bool:
        """See `GrpcMethods.is_draining`."""
        return False


def engine_only(engine: IdleEngine) -> Stream:
    """The engine and nothing else: what is to be taken away from the others."""

    async def run(tokens: int) -> None:
        seen = 0
        async for outputs in engine.generate([Request("alone", [0], tokens, SamplingParams())]):
            seen += len(outputs[0].token_ids)
        assert seen == tokens

    return run


def http(service: GenerationService, metrics: Metrics, **more: Any) -> Stream:
    """A streamed completion through the ASGI application."""

    async def scrape() -> str:
        return metrics.text()

    chats = "messages" in more
    template, form = ChatTemplate("{{ messages[0].content }}"), form_of("", "hermes", "think")
    app = build_app(RouteDeps(service, metrics, "0", scrape, lambda: False, template, form))
    headers = [(b"content-type", b"application/json")]
    path = "/v1/chat/completions" if chats else "/v1/completions"
    asked = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}

    async def run(tokens: int) -> None:
        body = orjson.dumps({"max_tokens": tokens, "ignore_eos": True, "stream": True} | more)
        messages = iter([{"type": "http.request", "body": body}])
        events = 0

        async def receive() -> dict[str, Any]:
            for message in messages:
                return message
            return await asyncio.Future[dict[str, Any]]()  # nothing more comes

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal events
            events += message.get("body", b"").count(b'"choices":')  # not in an error's event

        await app(asked | {"state": {}}, receive, send)
        # a chat's stream begins with the role; white space waits, since a marker may follow it
        assert tokens / 2 < events <= tokens + 1 if chats else events == tokens, f"{events} events for {tokens} tokens"

    return run


def grpc(service: GenerationService, metrics: Metrics) -> Stream:
    """A GenerateStream call of the servicer object, each message serialized."""
    methods = Methods()
    methods.service, methods.metrics, methods.unread_bodies = service, metrics, UnreadBodies()

    async def run(tokens: int) -> None:
        request = pb.GenerateRequest(text="def ", max_tokens=tokens, stopping=pb.StoppingCriteria(ignore_eos=True))
        count = size = 0
        async for message in methods.GenerateStream(request.SerializeToString(), Context()):
            size += len(message.SerializeToString())
            count = message.outputs[0].num_tokens
        assert count == tokens and size > tokens

    return run


def streams() -> dict[str, Stream]:
    """Each way to a token, by its name."""
    tokenizer = Tokenizer.load(DEFAULT_MODEL)
    engine = IdleEngine(tokenizer)
    service = GenerationService(engine, tokenizer, model_name="attend-default")
    metrics = Metrics(engine, service.model_name)
    return {
        "the idle engine alone": engine_only(engine),
        "SSE": http(service, metrics, **PROMPT),
        f"SSE with logprobs={TOP}": http(service, metrics, logprobs=TOP, **PROMPT),
        "SSE of a chat": http(service, metrics, **CHAT),
        "SSE of a chat with tools": http(service, metrics, tools=[TOOL], **CHAT),
        "gRPC": grpc(service, metrics),
    }


async def at_once(stream: Stream, tokens: int) -> float:
    """Microseconds of processor time for each token."""
    started = time.thread_time()
    await asyncio.gather(*(stream(tokens) for _ in range(STREAMS)))
    return (time.thread_time() - started) * 1e6 / (STREAMS * tokens)


async def measure(turns: int, tokens: int) -> list[Figure]:
    """Microseconds a token of each way; the ways take turns."""
    found = await take_turns({name: partial(at_once, stream, tokens) for name, stream in streams().items()}, turns)
    return [Figure(f"a token through {name}", "us of CPU", tuple(values)) for name, values in found.items()]


def run(turns: int, tokens: int) -> list[Figure]:
    """`measure` in an event loop of its own."""
    return asyncio.run(measure(turns, tokens))
