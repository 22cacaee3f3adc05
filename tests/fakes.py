"""Stand-ins that can be computed by hand: an engine that counts, a tokenizer of bytes, and a whole server around them.

No weights, no Ray, no sleep: a held engine moves only when a test lets it.
"""

import asyncio
import inspect
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2_grpc
from starlette.types import ASGIApp
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from attend.model.engine.config import EngineConfig
from attend.model.engine.request import (
    EngineInfo,
    EngineStats,
    FinishReason,
    OffloadStats,
    Output,
    Request,
    StepReport,
    TokenLogprob,
    check_fits,
)
from attend.model.errors import EngineFailed, Unavailable
from attend.model.pooling import EmbeddingRules, Pooling
from attend.model.scoring import COSINE
from attend.model.text.chat import ChatTemplate
from attend.model.text.tokenizer import Tokenizer
from attend.service.access.caller import FORWARDED, Callers, Network
from attend.service.access.keys import KeyRing
from attend.service.batch.runner import Runner
from attend.service.batch.service import BatchService
from attend.service.chat.forms import TEXT_ALONE, AnswerFormat
from attend.service.generation.explain import ExplainService
from attend.service.generation.generation import GenerationService
from attend.service.generation.unread_bodies import UnreadBodies
from attend.service.grpc_api.register import add_generation_service
from attend.service.grpc_api.servicer import GrpcMethods
from attend.service.http_api.app import build_app
from attend.service.http_api.batches import routes_of
from attend.service.http_api.route_deps import RouteDeps
from attend.service.observe.metrics import Metrics
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from tests.explainer import FakeExplainer

MODEL = "fake"
END = 256
"""The id of <|endoftext|>: the last of the vocabulary, after the 256 bytes."""
VOCAB = 257
CONTEXT = 128
WIDTH = 4
"""Numbers of a hidden state."""
END_OF_TIME = 1.75
"""When every answer ends, by the clock of engine and service; its call arrived at 0."""

INFO = EngineInfo(
    family="fake",
    device="cpu",
    dtype="float32",
    weights="float32",
    backend="arithmetic",
    num_parameters=1,
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    max_model_len=CONTEXT,
    max_batch_requests=64,
    max_queued_requests=256,
    block_size=16,
    num_blocks=64,
    cache_bytes=1 << 20,
    bos_token_id=None,
    eos_token_ids=(END,),
    fingerprint="fp_fake",
    weights_digest="w",
)

LAST_TOKEN = EmbeddingRules(Pooling.LAST, 100, "")
"""How the fake model makes embeddings; its texts are shorter than its context."""
Rule = Callable[[Request], int]


@cache
def byte_tokenizer() -> Tokenizer:
    """Token id = byte value; <|endoftext|> follows. No merges, so that every text has one encoding."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    raw = RawTokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(raw)


def successor(request: Request) -> int:
    """The next byte: after "a" comes "b", after byte 255 the end of the text."""
    return (request.tokens(request.num_tokens - 1, 1)[0] + 1) % VOCAB


def says(text: str) -> Rule:
    """An engine that answers `text`, then ends it, whatever it is asked."""
    tokens = (*text.encode(), END)
    return lambda request: tokens[min(len(request.output), len(tokens) - 1)]


def seeded(request: Request) -> int:
    """A token that depends on the seed, the answer and the place, as a drawn one does."""
    return (request.seed * 31 + request.answer_index * 7 + len(request.output)) % 26 + ord("a")


def scored(token: int, top: int | None, others: tuple[int, ...] = ()) -> tuple[TokenLogprob, ...]:
    """What the engine says of a token where `top` is not None: every id is a tenth less likely than the one before it."""
    best = tuple((other, 0.0 - other / 10) for other in (*range(top or 0), *others))
    return () if top is None else (TokenLogprob(token, 0.0 - token / 10, best),)


def hidden_of(request: Request) -> "array[float]":
    """The hidden state of a prompt: its first token, its last, its length, and 3 or 4 for the pooling."""
    prompt, kind = request.prompt, 3 if request.pooling is Pooling.LAST else 4
    return array("d", [prompt[0], -prompt[-1], len(prompt), kind])


class FakeEngine:
    """A TokenEngine whose tokens follow a rule. `held` stops it before each list until `release`."""

    def __init__(self, rule: Rule = successor, *, held: bool = False, burst: int = 1, info: EngineInfo = INFO) -> None:
        self.info = info
        self.rule = rule
        self.held = held
        self.burst = burst
        """Outputs of a request in one list: more than one is what a slow reader finds."""
        self.refusal: Exception | None = None
        """Raised at the next call, as Overloaded or Unavailable are."""
        self.failure: Exception | None = None
        """Raised in the middle of calls."""
        self.broken_after: int | None = None
        """A request with so many tokens ends with FinishReason.ERROR, and this one."""
        self.error = "SecretError in row 3"
        self.draining = False
        self.age, self.resident = 0.0, 0
        self.offload: OffloadStats | None = None
        self.requests: list[Request] = []
        self.open: dict[str, Request] = {}
        self.aborted: list[tuple[str, FinishReason]] = []
        self._ending: dict[str, FinishReason] = {}
        self._permits = 0
        self._wake = asyncio.Event()
        self._observer: Callable[[StepReport], None] = lambda report: None

    def stats(self) -> EngineStats:
        free = self.info.num_blocks - len(self.open)
        return EngineStats(len(self.open), 0, free, 0, offload=self.offload)

    def cache_resident_bytes(self) -> int:
        return self.resident

    def heartbeat_age(self) -> float:
        return self.age

    def check_room(self, count: int, owner: str | None = None) -> None:
        """There is always room."""

    def on_step(self, observer: Callable[[StepReport], None]) -> None:
        self._observer = observer

    def release(self, steps: int = 1) -> None:
        """Let a held engine hand over so many lists."""
        self._permits += steps
        self._notify()

    def fail(self, error: Exception | None = None) -> None:
        """Have every call that runs end in an exception."""
        self.failure = error or EngineFailed("the engine stopped: SecretError")
        self._notify()

    def drain(self) -> None:
        """Refuse new requests and abort those that run, as the end of a drain does."""
        self.draining = True
        for request_id in tuple(self.open):
            self.abort(request_id, FinishReason.ABORT)

    def abort(self, request_id: str, reason: FinishReason) -> None:
        self.aborted.append((request_id, reason))
        if request_id in self.open:
            self._ending.setdefault(request_id, reason)
            self._notify()

    async def generate(self, requests: Sequence[Request], at_once: int | None = None) -> AsyncIterator[list[Output]]:
        self._admit(requests)
        mine = {request.request_id: request for request in requests}
        try:
            while mine:
                steps = await self._turn(mine)
                if self.failure is not None:
                    raise self.failure
                outputs = [output for request in tuple(mine.values()) for output in self._advance(request, steps)]
                self._observer(StepReport(0.001, len(mine), len(mine)))
                for output in outputs:
                    if output.finish_reason is not None:
                        del mine[output.request_id], self.open[output.request_id]
                if outputs:
                    yield outputs
        finally:
            for request_id in mine:
                del self.open[request_id]
                self.abort(request_id, FinishReason.ABORT)

    def _admit(self, requests: Sequence[Request]) -> None:
        if self.refusal is not None:
            raise self.refusal
        if self.draining:
            raise Unavailable("the server is shutting down; try another replica")
        config = EngineConfig(max_model_len=self.info.max_model_len, num_blocks=self.info.num_blocks)
        for request in requests:
            check_fits(request, config.max_model_len)
        self.requests += requests
        self.open |= {request.request_id: request for request in requests}

    def _notify(self) -> None:
        self._wake.set()
        self._wake = asyncio.Event()

    async def _turn(self, mine: dict[str, Request]) -> int:
        """Wait for leave to move; how many steps to take."""
        if not self.held:
            await asyncio.sleep(0)
            return self.burst
        while not (self._permits or self.failure or self._ending.keys() & mine.keys()):
            await self._wake.wait()
        steps = self.burst if self._permits else 0
        self._permits = max(0, self._permits - 1)
        return steps

    def _advance(self, request: Request, steps: int) -> list[Output]:
        outputs: list[Output] = []
        while len(outputs) < steps and not (outputs and outputs[-1].finish_reason):
            outputs.append(self._step(request))
        if not (outputs and outputs[-1].finish_reason) and request.request_id in self._ending:
            outputs.append(self._end(request, self._ending.pop(request.request_id)))
        return outputs

    def _step(self, request: Request) -> Output:
        if self.broken_after == len(request.output):
            return self._end(request, FinishReason.ERROR, error=self.error)
        first, request.scheduled_at, request.first_token_at = request.first_token_at is None, 0.25, 0.75
        of_prompt = [one for token in request.prompt[1:] for one in scored(token, request.prompt_logprobs)] if first else []
        if request.pooling is not None:
            return self._end(request, FinishReason.STOP, hidden=hidden_of(request))
        if not request.max_tokens:
            return self._end(request, FinishReason.LENGTH, prompt_logprobs=tuple(of_prompt))
        token = self.rule(request)
        request.output.append(token)
        own = scored(token, request.logprobs, request.scored_token_ids)
        scores: dict[str, Any] = {"logprobs": own, "prompt_logprobs": tuple(of_prompt)}
        if token in request.stop_token_ids and len(request.output) > request.min_tokens:
            return self._end(request, FinishReason.STOP, token, **scores)
        if len(request.output) >= request.max_tokens:
            return self._end(request, FinishReason.LENGTH, token, **scores)
        return Output(request.request_id, (token,), **scores)

    def _end(self, request: Request, reason: FinishReason, *tokens: int, **more: Any) -> Output:
        return Output(request.request_id, tokens, reason, request.times(END_OF_TIME), **more)


@dataclass
class Server:
    """Everything that a replica holds, in this process."""

    engine: FakeEngine
    service: GenerationService
    metrics: Metrics
    methods: GrpcMethods
    build: Callable[[], ASGIApp]
    explaining: ExplainService
    batch_service: BatchService | None = None
    runner: Runner | None = None
    """Of a server with batches: it works once it is started."""

    @cached_property
    def app(self) -> ASGIApp:
        """The ASGI application, built where it is asked for: that takes longer than most tests, and many need none."""
        return self.build()

    def http(self) -> httpx.AsyncClient:
        """A client of the ASGI application; a bug is its 500, as for a real caller."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def post(self, body: Any, path: str = "/v1/completions", **more: Any) -> httpx.Response:
        """One POST in an event loop of its own: a dict as JSON, bytes or pieces as they are."""
        sent = {"json": body} if isinstance(body, dict) else {"content": body}
        return self.ask("POST", path, headers={"content-type": "application/json"} | more.pop("headers", {}), **sent, **more)

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        """One call in an event loop of its own."""

        async def call() -> httpx.Response:
            async with self.http() as client:
                return await client.request(method, path, **more)

        return asyncio.run(call())

    def rpc(self, method: str, message: Any) -> list[Any]:
        """The answers of one call over gRPC, one or a stream of them, in an event loop of its own."""

        async def call() -> list[Any]:
            async with grpc_channel(self) as channel:
                answers = getattr(GenerationServiceStub(channel), method)(message)
                return [each async for each in answers] if hasattr(answers, "__aiter__") else [await answers]

        return asyncio.run(call())

    def outcomes(self) -> dict[tuple[str, str, str], int]:
        """How many calls ended how: (transport, route, outcome) to a count, without the zeros."""
        samples = [s for family in self.metrics.registry.collect() for s in family.samples if s.name == "attend_requests_total"]
        return {(s.labels["transport"], s.labels["route"], s.labels["outcome"]): int(s.value) for s in samples if s.value}

    def value(self, name: str, **labels: str) -> float | None:
        """One sample of the metrics."""
        return self.metrics.registry.get_sample_value(name, {"model": MODEL} | labels)


def build_server(
    engine: FakeEngine | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    expose_docs: bool = True,
    cors_origins: Sequence[str] = (),
    template: ChatTemplate | None = None,
    form: AnswerFormat = TEXT_ALONE,
    keys: KeyRing | None = None,
    behind_edge: bool = False,
    trusted: Sequence[Network] = (),
    tenant_header: str = FORWARDED,
    hosts: Set[str] = frozenset(),
    unread_bodies: UnreadBodies | None = None,
    batch_service: BatchService | None = None,
    **more: Any,
) -> Server:
    """A replica without Ray around `engine`."""
    engine = engine or FakeEngine()
    facts = {"model_name": MODEL, "embedding": LAST_TOKEN, "scoring": COSINE, "clock": lambda: END_OF_TIME} | more
    service = GenerationService(engine, byte_tokenizer(), **facts)
    metrics = Metrics(engine, MODEL, clock=clock, preparing=lambda: service.num_preparing, keys=keys)

    async def scrape() -> str:
        return metrics.text()

    class Methods(GrpcMethods):
        def is_draining(self) -> bool:
            return engine.draining

    methods, explaining = Methods(), ExplainService(service, FakeExplainer())
    methods.service, methods.metrics, methods.explaining = service, metrics, explaining
    methods.template, methods.form, methods.keys = template, form, keys
    methods.callers = Callers(trusted, tenant_header, behind_edge=behind_edge)
    methods.unread_bodies = unread_bodies or UnreadBodies()
    deps = RouteDeps(
        service,
        metrics,
        "1.2.3",
        scrape,
        lambda: engine.draining,
        template,
        form,
        explaining=explaining,
        unread_bodies=methods.unread_bodies,
    )
    if keys is not None:
        deps = replace(deps, keys=keys)
    deps = replace(deps, callers=methods.callers)
    deps = replace(deps, batch_service=batch_service)
    app = partial(build_app, deps, expose_docs=expose_docs, cors_origins=cors_origins, hosts=hosts)
    server = Server(engine, service, metrics, methods, app, explaining)
    if batch_service is not None:
        metrics.has_batches(lambda: batch_service.numbers)
        server.runner = Runner(batch_service, routes_of(deps, server.app), keys, lambda: service.num_attended)
    return server


class CallContext:
    """The part of Ray's RayServegRPCContext that a method may use: what it sets is applied when it has returned."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.metadata: list[tuple[str, str]] = []
        self.trailing: list[tuple[str, str]] = []

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self.metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def peer(self) -> str:
        return "ipv4:10.0.0.2:5000"

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None:
        self.trailing = trailing_metadata

    def apply(self, context: Any) -> None:
        context.set_trailing_metadata(self.trailing)
        if self.code is not None:
            context.set_code(self.code)
            context.set_details(self.details)


class RayLike:
    """A gRPC servicer that calls the methods as Ray's proxy does: `grpc_context` only where a method takes it."""

    def __init__(self, methods: GrpcMethods) -> None:
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._methods, name)
        wants_context = "grpc_context" in inspect.signature(method).parameters

        def begin(request: Any) -> tuple[Any, CallContext]:
            context = CallContext()
            return method(request, **({"grpc_context": context} if wants_context else {})), context

        async def unary(request: Any, context: Any) -> Any:
            call, ours = begin(request)
            answer = await call
            ours.apply(context)
            return answer

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            call, ours = begin(request)
            async with aclosing(call):
                async for answer in call:
                    yield answer
            ours.apply(context)

        return stream if inspect.isasyncgenfunction(method) else unary


@asynccontextmanager
async def grpc_port(server: Server) -> AsyncIterator[int]:
    """The free loopback port of a real gRPC server, for as long as the block lasts."""
    real = grpc.aio.server()
    servicer = RayLike(server.methods)
    add_generation_service(servicer, real)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, real)
    port = real.add_insecure_port("127.0.0.1:0")
    await real.start()
    try:
        yield port
    finally:
        await real.stop(None)


@asynccontextmanager
async def grpc_channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to such a server."""
    async with grpc_port(server) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


async def until(condition: Callable[[], Any]) -> None:
    """Give way to the rest of the event loop until `condition` holds; fails after ten seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition is the test's own, and nobody announces it
            await asyncio.sleep(0.001)


def info(**changes: Any) -> EngineInfo:
    """The facts of the fake engine, some of them changed."""
    return replace(INFO, **changes)
