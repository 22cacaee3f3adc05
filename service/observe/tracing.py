"""OpenTelemetry traces: one tree of spans for each call, made when it has ended. Packages are imported where an endpoint is
set."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from attend.model.engine.request import FinishReason, Times
from attend.model.errors import SettingError
from attend.service.access.caller import NOBODY, Caller
from attend.service.contract.routes import SERVICE

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

CONTEXT = ("traceparent", "tracestate")
"""The headers, and gRPC metadata, in which a caller passes its own trace on (W3C Trace Context)."""
CLOSE_SECONDS = 2.0
"""How long the end of a replica waits for spans that a slow collector has not taken."""
FAILED = frozenset({"error", "rejected", "invalid"})
"""Outcomes without an answer; a deadline or an abort may have had a part of one."""


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """One answer of a call, when it has ended."""

    index: int
    ended_at: float
    """Seconds after the call's arrival."""
    times: Times
    reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """A call, when it has ended. Times are seconds."""

    transport: str
    route: str
    request_id: str
    outcome: str
    seconds: float
    """From its arrival to its end."""
    first_token: float | None = None
    """From its arrival; None where there was none."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    answers: tuple[AnswerFacts, ...] = ()
    """The answers that ended; when a caller disconnects, none did."""
    context: Mapping[str, str] = field(default_factory=dict)
    """What the caller sent of CONTEXT."""
    status: int | str = ""
    """HTTP's status, or the name of gRPC's code, as the caller was given it."""
    error: str | None = None
    """OpenAI's code of the error; None where there was none."""
    caller: Caller = NOBODY


def context_of(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The trace context among a caller's headers or metadata; names are in lower case there."""
    return {name: value for name, value in headers if name in CONTEXT}


def check_endpoint(endpoint: str) -> None:
    """Raise SettingError where an endpoint is set that cannot be used. Imports no exporter."""
    if not endpoint:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise SettingError(f"otel_endpoint must begin with http:// or https://; got {endpoint[:64]!r}")
    try:
        found = find_spec("opentelemetry.exporter.otlp.proto.http") and find_spec("opentelemetry.sdk.trace")
    except ModuleNotFoundError:  # a parent package is not there either
        found = None
    if found is None:
        raise SettingError("otel_endpoint needs packages that are not installed: pip install 'attend-server[otel]'")


def open_tracer(endpoint: str, model: str, *, version: str, replica: str) -> "Tracer":
    """A tracer that sends spans to `endpoint`/v1/traces by OTLP/HTTP, in the background. Raises SettingError."""
    check_endpoint(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    ours = {"service.name": "attend", "service.version": version, "service.instance.id": replica}
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME wins over ours
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    collector = endpoint.rstrip("/").removesuffix("/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{collector}/v1/traces")))
    return Tracer(provider, model)


class Tracer:
    """Makes the spans of calls. `model` is the served name; `clock` gives nanoseconds since 1970."""

    def __init__(self, provider: "TracerProvider", model: str, *, clock: Callable[[], int] = time.time_ns) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._api = trace
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("attend")
        self._model = model
        self._clock = clock

    def record(self, facts: CallFacts) -> str:
        """Make the spans of a call that ends now; returns the trace's id, 32 hex digits."""
        end = self._clock()
        start = end - _nanoseconds(facts.seconds)
        root = self._tracer.start_span(
            f"POST {facts.route}" if facts.transport != "grpc" else f"{SERVICE}/{facts.route}",
            self._propagator.extract(facts.context),
            self._api.SpanKind.SERVER,
            attributes=attributes_of(facts, self._model),
            start_time=start,
        )
        if facts.first_token is not None:
            root.add_event("first token", timestamp=start + _nanoseconds(facts.first_token))
        if facts.outcome == "error":
            root.set_status(self._api.StatusCode.ERROR)
        for answer in facts.answers:
            self._answer(root, start, answer)
        root.end(end)
        return self._api.format_trace_id(root.get_span_context().trace_id)

    def close(self) -> None:
        """Send what is left, for CLOSE_SECONDS at most."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)

    def _answer(self, root: "Span", start: int, answer: AnswerFacts) -> None:
        """The spans queue, prefill and decode, one after the other, up to the answer's end."""
        times = answer.times
        inside = self._api.set_span_in_context(root)
        at = start + _nanoseconds(max(0.0, answer.ended_at - times.queue - times.prefill - times.decode))
        for name in ("queue", "prefill", "decode"):
            attributes: dict[str, AttributeValue] = {"attend.answer": answer.index}
            if name == "prefill":
                attributes["attend.cached_tokens"] = times.cached_tokens
            span = self._tracer.start_span(name, inside, attributes=attributes, start_time=at)
            at += _nanoseconds(getattr(times, name))
            span.end(at)


def attributes_of(facts: CallFacts, model: str) -> "dict[str, AttributeValue]":
    """The root span's attributes, after OpenTelemetry's conventions for HTTP, RPC and generative AI."""
    where: dict[str, AttributeValue] = (
        {"http.request.method": "POST", "http.route": facts.route}
        if facts.transport != "grpc"
        else {"rpc.system.name": "grpc", "rpc.method": f"{SERVICE}/{facts.route}"}
    )
    return {
        **where,
        "gen_ai.operation.name": "chat" if "chat" in facts.route else "text_completion",
        "gen_ai.provider.name": "attend",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": facts.prompt_tokens,
        "gen_ai.usage.output_tokens": facts.generation_tokens,
        "gen_ai.response.finish_reasons": [answer.reason.value for answer in facts.answers],
        "attend.request_id": facts.request_id,
        "attend.outcome": facts.outcome,
        **({"error.type": facts.outcome} if facts.outcome in FAILED else {}),
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
