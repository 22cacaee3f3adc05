"""Traces: one tree for each call, told in OpenTelemetry's words, part of the caller's own trace, and never in the way."""

import asyncio
import logging
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from attend.model.engine.request import FinishReason, Times
from attend.model.errors import SettingError
from attend.service.observe import tracing
from attend.service.observe.tracing import AnswerFacts, CallFacts, Tracer
from attend.v1 import generation_pb2 as pb
from tests.fakes import MODEL, CallContext, build_server
from tests.service.server import wait_for

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from opentelemetry.trace import SpanKind, StatusCode  # noqa: E402

NOW = 1_700_000_000_000_000_000
HANG_SECONDS = 30
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def call(**changes) -> CallFacts:
    """A completion of two seconds whose answer waited 0.25 s, was prefilled in 0.5 s and decoded in 1 s."""
    facts = {
        "transport": "http",
        "route": "/v1/completions",
        "request_id": "id-7",
        "outcome": "stop",
        "seconds": 2.0,
        "first_token": 0.875,
        "prompt_tokens": 5,
        "generation_tokens": 9,
        "answers": (AnswerFacts(0, 1.875, Times(0.25, 0.5, 1.0, 3), FinishReason.STOP),),
    }
    return CallFacts(**{**facts, **changes})


def spans_of(facts: CallFacts):
    """(trace id, spans by name, root last) that a call makes."""
    memory = InMemorySpanExporter()
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace_id = Tracer(provider, "served", clock=lambda: NOW).record(facts)
    return trace_id, memory.get_finished_spans()


def test_a_call_is_a_server_span_with_the_times_of_its_answer_below():
    trace_id, (*children, root) = spans_of(call())
    assert root.kind is SpanKind.SERVER
    assert root.parent is None
    assert (root.start_time, root.end_time) == (NOW - 2_000_000_000, NOW)
    assert {format(span.context.trace_id, "032x") for span in (root, *children)} == {trace_id}
    assert {span.parent.span_id for span in children} == {root.context.span_id}
    moments = [(span.name, span.start_time - root.start_time, span.end_time - root.start_time) for span in children]
    assert moments == [
        ("queue", 125_000_000, 375_000_000),
        ("prefill", 375_000_000, 875_000_000),
        ("decode", 875_000_000, 1_875_000_000),
    ]
    assert [(event.name, event.timestamp - root.start_time) for event in root.events] == [("first token", 875_000_000)]


def test_the_root_says_what_was_asked_and_used():
    _, (*children, root) = spans_of(call())
    assert root.name == "POST /v1/completions"
    assert dict(root.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "attend",
        "gen_ai.request.model": "served",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.response.finish_reasons": ("stop",),
        "attend.request_id": "id-7",
        "attend.outcome": "stop",
    }
    assert [dict(span.attributes) for span in children] == [
        {"attend.answer": 0},
        {"attend.answer": 0, "attend.cached_tokens": 3},
        {"attend.answer": 0},
    ]


@pytest.mark.parametrize("outcome", ["stop", "length", "deadline", "abort", "error", "rejected", "invalid"])
def test_only_an_error_of_ours_is_an_error_and_only_calls_without_an_answer_name_one(outcome):
    _, (root,) = spans_of(call(outcome=outcome, answers=(), first_token=None))
    assert (root.status.status_code is StatusCode.ERROR) == (outcome == "error")
    assert root.attributes.get("error.type") == (outcome if outcome in ("error", "rejected", "invalid") else None)
    assert root.attributes["attend.outcome"] == outcome
    assert not root.events


def test_a_callers_trace_goes_on():
    trace_id, (*_, root) = spans_of(call(context={"traceparent": PARENT, "tracestate": "vendor=1"}))
    assert trace_id == PARENT.split("-")[1]
    assert format(root.parent.span_id, "016x") == PARENT.split("-")[2]
    assert root.parent.is_remote
    assert root.context.trace_state.get("vendor") == "1"


@pytest.mark.parametrize("parent", ["", "rubbish", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\ud800", PARENT + "\n\n"])
def test_a_context_that_cannot_be_read_begins_a_new_trace(parent):
    trace_id, (*_, root) = spans_of(call(context={"traceparent": parent}))
    assert root.parent is None
    assert int(trace_id, 16)


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "/v1/traces"])
def test_an_endpoint_that_is_no_url_is_a_setting_error(endpoint):
    with pytest.raises(SettingError, match="otel_endpoint must begin with http"):
        tracing.check_endpoint(endpoint)


@pytest.mark.parametrize("how", ["no exporter", "no package at all"])
def test_missing_packages_are_a_sentence_with_the_cure(monkeypatch, how):
    def find(name):
        if how == "no package at all":
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(tracing, "find_spec", find)
    tracing.check_endpoint("")
    with pytest.raises(SettingError, match=r"pip install 'attend-server\[otel\]'"):
        tracing.open_tracer("http://collector:4318", "m", version="1", replica="r")


def test_without_an_endpoint_nothing_is_imported():
    imported = "any('opentelemetry' in name for name in sys.modules)"
    code = f"import sys; from attend.service.observe import tracing; tracing.check_endpoint(''); print({imported})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


class Collector(HTTPServer):
    """Takes what an exporter sends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.taken: list[tuple[str, bytes]] = []
        self.wait = threading.Event()
        self.wait.set()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.wait.wait(HANG_SECONDS)
        self.server.taken.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def collector():
    exporter = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    pytest.importorskip(exporter, reason="opentelemetry-exporter-otlp-proto-http is not installed")
    server = Collector()
    yield server
    server.wait.set()
    assert wait_for(lambda: not any(thread.name.startswith("OtelBatch") for thread in threading.enumerate()), 60)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("end", ["/", "/v1/traces"])
def test_spans_reach_a_collector_by_otlp_with_the_names_of_service_and_replica(collector, monkeypatch, end):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    tracer = tracing.open_tracer(collector.url + end, "served", version="1.2.3", replica="r1")
    trace_id = tracer.record(call())
    tracer.close()
    [(path, body)] = collector.taken
    assert path == "/v1/traces"
    [group] = ExportTraceServiceRequest.FromString(body).resource_spans
    resource = {pair.key: pair.value.string_value for pair in group.resource.attributes}
    assert resource["service.name"] == "attend"
    assert resource["service.version"] == "1.2.3"
    assert resource["service.instance.id"] == "r1"
    assert resource["deployment.environment.name"] == "lab"
    spans = [span for scope in group.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == ["POST /v1/completions", "decode", "prefill", "queue"]
    assert {span.trace_id.hex() for span in spans} == {trace_id}


def test_a_collector_that_hangs_holds_up_neither_a_call_nor_the_end(collector):
    collector.wait.clear()
    tracer = tracing.open_tracer(collector.url, "served", version="1", replica="r")
    started = time.monotonic()
    for _ in range(600):  # more spans than a queue holds
        tracer.record(call())
    assert time.monotonic() - started < HANG_SECONDS / 2
    started = time.monotonic()
    tracer.close()
    assert time.monotonic() - started < HANG_SECONDS / 2


def traced():
    """A server without Ray, and the spans that it makes."""
    memory, server = InMemorySpanExporter(), build_server()
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    server.metrics.tracer = Tracer(provider, MODEL)
    return server, memory


def test_an_http_call_is_one_tree_in_its_callers_trace_and_its_log_line_names_it(caplog):
    server, memory = traced()
    with caplog.at_level(logging.INFO, "attend"):
        server.post({"prompt": "ab", "max_tokens": 3}, headers={"traceparent": PARENT, "x-request-id": "id-5"})
    *children, root = memory.get_finished_spans()
    assert [span.name for span in children] == ["queue", "prefill", "decode"]
    assert format(root.context.trace_id, "032x") == PARENT.split("-")[1] == caplog.records[-1].trace_id
    assert root.attributes["attend.request_id"] == "id-5"
    assert root.attributes["gen_ai.usage.output_tokens"] == 3


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_a_grpc_call_is_one_tree_in_its_callers_trace(method):
    server, memory = traced()
    context = CallContext()
    context.metadata = [("traceparent", PARENT), ("authorization", "Bearer secret")]

    async def run():
        request = pb.GenerateRequest(text="ab", max_tokens=3, temperature=1, sampling=pb.SamplingParameters(n=2))
        answer = getattr(server.methods, method)(request.SerializeToString(), context)
        return await answer if method == "Generate" else [piece async for piece in answer]

    asyncio.run(run())
    *children, root = memory.get_finished_spans()
    assert root.name.endswith(f"/{method}")
    assert format(root.parent.span_id, "016x") == PARENT.split("-")[2]
    assert len(children) == 6
    assert not any("secret" in str(span.attributes) for span in (root, *children))


def test_a_refused_call_and_one_whose_caller_leaves_are_traced_too():
    server, memory = traced()
    server.post({"prompt": "a", "n": 99})
    with pytest.raises(asyncio.CancelledError), server.metrics.open("http", "/v1/completions").outcome():
        raise asyncio.CancelledError
    assert [span.attributes["attend.outcome"] for span in memory.get_finished_spans()] == ["invalid", "abort"]
