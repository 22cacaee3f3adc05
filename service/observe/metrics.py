"""Every metric of the service, once, under names like vLLM's. All label children exist from the start."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client import Histogram as SharedHistogram

from attend.model.engine.request import FinishReason, StepReport, Times, TokenEngine
from attend.model.errors import (
    AttendError,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    QueueFull,
    Unauthenticated,
    Unavailable,
    is_failure,
)
from attend.model.machine import memory_use
from attend.service.access.caller import NOBODY, Caller
from attend.service.access.keys import KeyRing
from attend.service.contract.routes import COUNTED
from attend.service.errors import ClientGone, wire
from attend.service.observe import logs
from attend.service.observe.capacity import Load, LoadMeter, retry_seconds
from attend.service.observe.collectors import (
    COUNTER,
    GAUGE,
    AuthFailures,
    BatchNumbers,
    Histogram,
    Row,
    RowCollector,
    batch_rows,
    engine_rows,
)
from attend.service.observe.compat import VllmNames
from attend.service.observe.tracing import AnswerFacts, CallFacts, Tracer, context_of
from attend.service.records import Chunk

Headers = Callable[[], Iterable[tuple[str, str]]]
"""Gives a caller's headers or metadata: (name in lower case, value)."""

LINES = "batch"
"""The transport of lines of batches: a route of HTTP that is called from inside. Their times are in no histogram of latency:
lines wait for others, and objectives are about callers who wait."""

OUTCOMES = ("error", "abort", "deadline", "length", "stop", "rejected", "invalid")
"""The first five from the worst to the best: of several answers the worst gives the call its outcome."""

REASONS = ("queue", "preparation", "busy", "key_requests", "key_tokens", "key_concurrent", "draining")
"""What refuses a call whose outcome is `rejected`: the errors' `reason`."""

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
STEP_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
BATCH = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each one, of no use to Prometheus


class Metrics:
    """The registry of one replica."""

    def __init__(
        self,
        engine: TokenEngine,
        model: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
        vllm_names: bool = False,
        keys: KeyRing | None = None,
        preparing: Callable[[], int] = lambda: 0,
    ) -> None:
        self._labels = {"model": model}
        self.clock = clock
        self.tracer = tracer
        self.engine = engine
        self.meter = LoadMeter()
        self.registry = CollectorRegistry()
        self.keys, self.preparing = keys, preparing
        self.tokens = {"prompt": 0, "generation": 0}
        self.registry.register(RowCollector(self._rows, model))
        self._twins = VllmNames(self.registry) if vllm_names else None
        labels = ["model", "transport", "route", "outcome"]
        self._requests = Counter("attend_requests", "Finished generation requests by outcome", labels, registry=self.registry)
        for transport, routes in COUNTED.items():
            for route, outcome in product(routes, OUTCOMES):
                self._requests.labels(model, transport, route, outcome)
        about = f"Rejected requests by reason: {', '.join(REASONS)}"
        self._rejected = Counter("attend_requests_rejected", about, ["model", "reason"], registry=self.registry)
        for reason in REASONS:
            self._rejected.labels(model, reason)
        self.failures = AuthFailures(model, self.registry, clock)
        about = "Time to first token (TTFT), once a call: of its first answer to begin"
        self.first_token = self._histogram("time_to_first_token_seconds", about, SECONDS)
        self.inter_token = self._histogram("inter_token_latency_seconds", "Inter-token latency (ITL)", STEP_SECONDS)
        about = "Time per output token (TPOT): mean of an answer after its first token"
        self.per_token = self._histogram("time_per_output_token_seconds", about, STEP_SECONDS)
        self.duration = self._histogram("request_duration_seconds", "End-to-end latency of a request", SECONDS)
        self.queue = self._histogram("request_queue_seconds", "Queue time: arrival in the engine to the first step", SECONDS)
        self.prefill = self._histogram("request_prefill_seconds", "Prefill time: first step to the first token", SECONDS)
        self.decode = self._histogram("request_decode_seconds", "Decode time: first token to the last", SECONDS)
        self.prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self.answer_length = self._histogram("request_generation_tokens", "Generated tokens of an answer", TOKENS)
        shared = partial(SharedHistogram, labelnames=["model"], registry=self.registry)
        self.step_seconds = shared("attend_step_seconds", "Duration of an engine step", buckets=STEP_SECONDS).labels(model)
        self.step_batch = shared("attend_step_batch_size", "Batch size: requests in a step", buckets=BATCH).labels(model)
        engine.on_step(self._observe_step)

    def has_batches(self, numbers: Callable[[], BatchNumbers]) -> None:
        """Show the metrics of files and batches too."""
        self.registry.register(RowCollector(lambda: batch_rows(numbers()), self._labels["model"]))

    def _rows(self) -> Iterator[Row]:
        yield from engine_rows(self.engine)
        if self.keys is not None:
            text = "1 while the API key file is valid; with 0 the keys read before stay in use, and no replica can start"
            yield GAUGE, "api_keys_file_ok", text, float(self.keys.file_ok), {}
        used, limit = memory_use()
        yield GAUGE, "requests_preparing", "Requests in preparation: being tokenized and validated", self.preparing(), {}
        yield COUNTER, "log_lines_dropped", "Log lines that could not be written in time", logs.lines_dropped(), {}
        yield GAUGE, "memory_used_bytes", "Memory that its container cannot give up", used, {}
        yield GAUGE, "memory_limit_bytes", "Memory that its container may use", limit, {}
        text = "Prompt tokens of the requests that produced a token"
        yield COUNTER, "prompt_tokens", text, self.tokens["prompt"], {}
        yield COUNTER, "generation_tokens", "Generated tokens sent to clients", self.tokens["generation"], {}

    def load(self) -> Load:
        """The load of the replica, and how fast it is."""
        return Load(self.engine.info, self.engine.stats(), self.meter.pace())

    def open(
        self, transport: str, route: str, request_id: str = "", headers: Headers = tuple, caller: Caller = NOBODY
    ) -> "RequestRecord":
        """Start the record of one call. The id and the caller are for the log; `headers` gives the caller's."""
        context = context_of(headers()) if self.tracer else {}
        return RequestRecord(self, transport, route, request_id, context, caller)

    def count(self, transport: str, route: str, outcome: str) -> None:
        """Count one call, once. A line of a batch that found no room is none: it is computed again."""
        if is_counted(transport, route) and (transport, outcome) != (LINES, "rejected"):
            self._requests.labels(self._labels["model"], transport, route, outcome).inc()

    def count_rejection(self, reason: str) -> None:
        """Count a call that is refused for one of REASONS."""
        self._rejected.labels(self._labels["model"], reason).inc()

    def text(self) -> str:
        """This replica's page in the Prometheus text format."""
        return generate_latest(self.registry).decode() + (self._twins.text() if self._twins else "")

    def _observe_step(self, report: StepReport) -> None:
        """Called by the step thread; prometheus_client locks."""
        self.step_seconds.observe(report.seconds)
        self.step_batch.observe(report.num_requests)
        self.meter.observe_step(report)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"attend_{name}", text, self._labels, buckets, self.registry)


class RequestRecord:
    """The life of one call, from its arrival at a transport to its one outcome."""

    def __init__(
        self, metrics: Metrics, transport: str, route: str, request_id: str, context: Mapping[str, str], caller: Caller = NOBODY
    ) -> None:
        self._metrics = metrics
        self.request_id = request_id
        """For the log; so is the caller, with the API key as soon as it is known."""
        self.caller = caller
        self._where = (transport, route)
        self._arrived = metrics.clock()
        self._last: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self._resumed: dict[int, int] = {}
        """Tokens of an answer that an earlier call has made, and counted."""
        self._reasons: dict[int, FinishReason | None] = {}
        self._prompts: set[int] = set()
        self._counted = (0, 0)
        self._closed = False
        self.has_status = False
        """True if the status of a stream has been sent, or is about to be."""
        self.at_once = False
        """True if the caller is given the whole answer at the end, or nothing if it fails."""
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self._context = context
        self._first_token: float | None = None
        """Seconds after the arrival, of any answer."""
        self._answers: list[AnswerFacts] = []

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Count the call if the block ends in an exception. What is counted once stays as it was counted."""
        try:
            yield
        except AttendError as error:
            if isinstance(error, QueueFull):
                error.retry_after = retry_seconds(self._metrics.load())
            if isinstance(error, (Overloaded, Unavailable)) and not self._closed and self._where[0] != LINES:
                self._metrics.count_rejection(error.reason)
            self._close(outcome_of(error), error)
            raise
        except BaseException as error:
            if is_failure(error):
                self._close("error", error)
            else:  # the caller has gone: CancelledError, or GeneratorExit where a stream is closed
                self._close("abort", ClientGone("the caller left before the end"))
            raise

    @contextmanager
    def outcome(self) -> Iterator[None]:
        """Count the call when the block ends, however it ends."""
        with self.errors():
            yield
        self._count_tokens()
        self._close(min((reason or FinishReason.ABORT for reason in self._reasons.values()), key=OUTCOMES.index))

    def count_computed(self, num_prompt_tokens: int) -> None:
        """Count a call that has been answered and asked for no tokens, but computed those of its text."""
        self.num_prompt_tokens = num_prompt_tokens
        self._count_tokens()
        self._close("stop")

    def count_finished(self) -> None:
        """Count a call that asked for no text, and was answered."""
        self._close("ok")

    def count_delivered(self, chunks: Sequence[Chunk], n: int) -> None:
        """Count what the caller, who asked for `n` answers to each prompt, is about to be given."""
        now = self._metrics.clock()
        for chunk in chunks:
            if chunk.index not in self._reasons:
                self._answer_begins(chunk, n)
            if chunk.token_ids:
                self._tokens(chunk, now)
            if chunk.finish_reason is not None:
                self._answer_ends(chunk, now)
        if not self.at_once:
            self._count_tokens()

    def _answer_begins(self, chunk: Chunk, n: int) -> None:
        self._reasons[chunk.index] = None
        if chunk.index // n not in self._prompts:
            self._prompts.add(chunk.index // n)
            self.num_prompt_tokens += chunk.num_prompt_tokens
            self._metrics.prompt_length.observe(chunk.num_prompt_tokens)

    def _count_tokens(self) -> None:
        """Bring the counters up to what the caller has been given."""
        prompts, answers = self._counted
        self._counted = (self.num_prompt_tokens, self.num_tokens)
        self._metrics.tokens["prompt"] += self.num_prompt_tokens - prompts
        self._metrics.tokens["generation"] += self.num_tokens - answers

    def _tokens(self, chunk: Chunk, now: float) -> None:
        new, last = len(chunk.token_ids), self._last.get(chunk.index)
        if last is not None:
            self._latency(self._metrics.inter_token, (now - last) / new)
        else:
            self._first[chunk.index], self._resumed[chunk.index] = now, chunk.num_tokens - new
        if not self.num_tokens:
            self._first_token = now - self._arrived
            self._latency(self._metrics.first_token, self._first_token)
        self._last[chunk.index] = now
        self.num_tokens += new

    def engine_times(self, times: Times) -> None:
        """How long an answer waited, worked on its prompt, and on its output."""
        self._latency(self._metrics.queue, times.queue)
        self._latency(self._metrics.prefill, times.prefill)
        self._latency(self._metrics.decode, times.decode)

    def _latency(self, histogram: Histogram, seconds: float) -> None:
        if self._where[0] != LINES:
            histogram.observe(seconds)

    def _answer_ends(self, chunk: Chunk, now: float) -> None:
        self._reasons[chunk.index] = chunk.finish_reason
        if chunk.times is not None and chunk.finish_reason is not None:
            self._answers.append(AnswerFacts(chunk.index, now - self._arrived, chunk.times, chunk.finish_reason))
        made = chunk.num_tokens - self._resumed.get(chunk.index, chunk.num_tokens)
        self._metrics.answer_length.observe(made)
        if made > 1:
            self._latency(self._metrics.per_token, (now - self._first[chunk.index]) / (made - 1))

    def _close(self, outcome: str, error: BaseException | None = None) -> None:
        if not self._closed:
            self._closed = True
            self._metrics.count(*self._where, outcome)
            facts = self._facts(outcome, error)
            if isinstance(error, Unauthenticated) and not self._metrics.failures.add(facts.transport):
                return
            trace = None
            if is_counted(facts.transport, facts.route):
                self._latency(self._metrics.duration, facts.seconds)
                trace = self._metrics.tracer.record(facts) if self._metrics.tracer else None
            logs.log_call(facts, trace)

    def _facts(self, outcome: str, error: BaseException | None) -> CallFacts:
        transport, route = self._where
        return CallFacts(
            transport=transport,
            route=route,
            request_id=self.request_id,
            outcome=outcome,
            seconds=self._metrics.clock() - self._arrived,
            first_token=self._first_token,
            prompt_tokens=self.num_prompt_tokens,
            generation_tokens=self.num_tokens,
            answers=tuple(self._answers),
            context=self._context,
            status=self._status(error),
            error=None if error is None else wire(error).code,
            caller=self.caller,
        )

    def _status(self, error: BaseException | None) -> int | str:
        """What the caller was given: a stream over HTTP has its status before it fails."""
        if self._where[0] == "grpc":
            return "OK" if error is None else wire(error).grpc.name
        begun = self.has_status or (bool(self._reasons) and not self.at_once)
        return 200 if error is None or begun else wire(error).status


def is_counted(transport: str, route: str) -> bool:
    """True if a call is one that computes."""
    return route in COUNTED["http" if transport == LINES else transport]


def outcome_of(error: AttendError) -> str:
    """The outcome of a call that ended in this error."""
    if isinstance(error, (InvalidRequest, ModelNotFound, Unauthenticated)):
        return "invalid"
    if isinstance(error, DeadlineExceeded):
        return "deadline"
    if isinstance(error, ClientGone):
        return "abort"
    return "error" if isinstance(error, EngineFailed) else "rejected"
