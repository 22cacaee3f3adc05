"""`attend check`: an end-to-end check of a running server, over HTTP, gRPC and its metrics, as a caller sees it.

Every check is a function that raises `CheckFailed`, or `CheckSkipped`, with a sentence. They run in order, and later ones use
what earlier ones have learned: the greedy answer to one prompt must be the same whichever way it is asked for.
"""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from attend.service.commands.long_checks import CHECKS as LONG_CHECKS
from attend.service.commands.probe import (
    MAX_TOKENS,
    OPENAI_ERROR,
    PROMPT,
    SECONDS,
    CheckFailed,
    CheckSkipped,
    Probe,
    Reply,
    Unreachable,
    beginning_of,
    check_target,
    require,
)
from attend.service.commands.report import printer
from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc

SETTLE_SECONDS = 5.0
"""How long the metrics may take to show a call that is over."""
REQUEST = pb.GenerateRequest(text=PROMPT, max_tokens=MAX_TOKENS, temperature=0)
NO_TEMPLATE = "no chat template, and a refusal that says so"
NOBODY = "attend-check-no-such-name"

Outcome = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check."""

    name: str
    outcome: Outcome
    milliseconds: float
    detail: str


def alive(probe: Probe) -> str:
    """The process answers, and its engine moves."""
    probe.get("/healthz").check()
    return "alive"


def ready(probe: Probe) -> str:
    """The server takes requests: /readyz answers 200."""
    probe.get("/readyz").check()
    return "ready"


def version(probe: Probe) -> str:
    """The server's version, model, device and dtype."""
    facts = probe.get("/version").json()
    probe.model, probe.about = facts["model"], f"{facts['device']}, {facts['dtype']}"
    if probe.is_grpc_guessed and probe.grpc_target is not None and "grpc_port" in facts:
        probe.grpc_target = f"{probe.grpc_target.rpartition(':')[0]}:{facts['grpc_port']}"
    return f"version {facts['version']}, {facts['model']} ({facts['family']}), {probe.about}"


def replicas(probe: Probe) -> str:
    """Every replica is on the metrics page."""
    probe.counters = _counters(probe.get("/metrics"))
    names = ("attend_scrape_replicas_expected", "attend_scrape_replicas_answered")
    expected, answered = (int(probe.counters.get((name,), 0)) for name in names)
    several = ("attend_models_memory_budget_bytes",) in probe.counters  # models, of which none may be loaded yet
    require(expected == answered and (expected > 0 or several), f"{answered} of {expected} replicas answered the scrape")
    return f"{answered} of {expected} replicas answered"


def models(probe: Probe) -> str:
    """The model is listed, and found by its name."""
    data = probe.get("/v1/models").json()["data"]
    listed = next((one for one in data if one["id"] == probe.model), data[0])
    require(listed["id"] == probe.model, f"/v1/models lists {listed['id']!r}, but /version says {probe.model!r}")
    require(probe.get(f"/v1/models/{listed['id']}").json() == listed, "/v1/models/{id} and /v1/models differ")
    error = probe.get(f"/v1/models/{NOBODY}").error(404)
    require(error["code"] == "model_not_found", f"an unknown model has the code {error['code']!r}")
    others = f", and {len(data) - 1} more" if len(data) > 1 else ""
    return f"{listed['id']}, {listed.get('max_model_len', 'not yet known how many')} tokens{others}"


def completion(probe: Probe) -> str:
    """A whole answer over HTTP."""
    document = probe.post("/v1/completions", probe.greedy()).json()
    (choice,) = document["choices"]
    require(choice["finish_reason"] in ("stop", "length"), f"the finish_reason is {choice['finish_reason']!r}")
    probe.text, probe.usage = choice["text"], document["usage"]
    tokens = probe.usage["completion_tokens"]
    require(0 < tokens <= MAX_TOKENS, f"completion_tokens is {tokens}, asked for {MAX_TOKENS} at most")
    probe.count("http", "/v1/completions", tokens)
    return f"{tokens} tokens: {beginning_of(choice['text'].encode())}"


def stream(probe: Probe) -> str:
    """The same answer as events, to its last one."""
    reply = probe.post("/v1/completions", probe.greedy(stream=True, stream_options={"include_usage": True}))
    reply.check()
    require(reply.content_type.startswith("text/event-stream"), f"the content type is {reply.content_type!r}")
    lines = [line.removeprefix("data: ") for line in reply.body.decode().split("\n") if line.startswith("data:")]
    require(lines[-1:] == ["[DONE]"], "the stream does not end with [DONE]: it was cut")
    events = [json.loads(line) for line in lines[:-1]]
    failures = [event["error"] for event in events if "error" in event]
    require(not failures, f"the stream holds an error: {failures[:1]}")
    probe.count("http", "/v1/completions", events[-1]["usage"]["completion_tokens"])
    _same(probe, "".join(choice["text"] for event in events for choice in event["choices"]))
    require(events[-1]["usage"] == probe.usage, f"the usage is {events[-1]['usage']}, that of the whole answer {probe.usage}")
    return f"{len(events)} events, [DONE], the same text"


def chat(probe: Probe) -> str:
    """A chat, or the refusal of a model that has no template for it."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    document = _converse(probe, "/v1/chat/completions", body)
    if document is None:
        return NO_TEMPLATE
    message = document["choices"][0]["message"]
    require(message["role"] == "assistant" and isinstance(message["content"], str), f"the message is {message}")
    probe.count("http", "/v1/chat/completions", document["usage"]["completion_tokens"])
    return f"{document['usage']['completion_tokens']} tokens: {beginning_of(message['content'].encode())}"


def responses(probe: Probe) -> str:
    """OpenAI's Responses API answers."""
    document = _converse(probe, "/v1/responses", {"input": "Hello", "max_output_tokens": 4, "temperature": 0})
    if document is None:
        return NO_TEMPLATE
    require(document["status"] in ("completed", "incomplete"), f"the status is {document['status']!r}")
    probe.count("http", "/v1/responses", document["usage"]["output_tokens"])
    return f"{document['usage']['output_tokens']} tokens, {document['status']}"


def messages(probe: Probe) -> str:
    """Anthropic's Messages API answers."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    if not probe.model:
        raise CheckSkipped("the model's name is not known")
    document = _converse(probe, "/v1/messages", body)
    if document is None:
        return NO_TEMPLATE
    require(document["role"] == "assistant", f"the role is {document['role']!r}")
    probe.count("http", "/v1/messages", document["usage"]["output_tokens"])
    return f"{document['usage']['output_tokens']} tokens, {document['stop_reason']}"


def _converse(probe: Probe, route: str, body: dict[str, Any]) -> Any:
    """The answer to a conversation; None for the refusal of a model that has no template for it."""
    reply = probe.post(route, body)
    if reply.status == 400 and reply.json(400)["error"]["code"] == "no_chat_template":
        return None
    return reply.json()


def rerank(probe: Probe) -> str:
    """Documents by their scores, or the refusal of a model that gives none."""
    reply = probe.post("/v1/rerank", {"query": PROMPT, "documents": ["a", PROMPT]})
    if reply.status == 400 and reply.error(400)["param"] == "model":
        return "no scores, and a refusal that says so"
    document = reply.json()
    found = {result["index"]: result["relevance_score"] for result in document["results"]}
    require(set(found) == {0, 1}, f"the results are {document['results']}")
    require([*found.values()] == sorted(found.values(), reverse=True), "the results do not come by their scores")
    probe.count("http", "/v1/rerank", 0)
    return f"{document['usage']['total_tokens']} tokens, scores {', '.join(f'{score:.3f}' for score in found.values())}"


def tokens(probe: Probe) -> str:
    """A text becomes tokens, and these the same text."""
    text = "naïve = {'π': 3.14}  # 你好\n"
    told = probe.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    require(told["count"] == len(told["tokens"]), f"count is {told['count']}, but there are {len(told['tokens'])} tokens")
    back = probe.post("/detokenize", {"tokens": told["tokens"]}).json()["prompt"]
    require(back.strip() == text.strip(), f"{text!r} comes back as {back!r}")
    return f"{told['count']} tokens and back"


def refusal(probe: Probe) -> str:
    """A bad request is refused by its field."""
    error = probe.post("/v1/completions", probe.greedy(max_tokens="many")).error(400)
    require(error["param"] == "max_tokens", f"the error names {error['param']!r}, not 'max_tokens'")
    return str(error["message"])


def keys(probe: Probe) -> str:
    """A call without a key, or with a wrong one, is refused."""
    if not probe.key:
        raise CheckSkipped("no API key was given")
    for key in ("", NOBODY):
        probe.get("/v1/models", key=key).error(401)
    if probe.grpc_target is not None:
        with probe.channel() as channel:
            call = _stub(channel).GetServerInfo.future(pb.GetServerInfoRequest(), timeout=SECONDS)
            require(call.code() == grpc.StatusCode.UNAUTHENTICATED, f"an RPC without a key ends with {call.code().name}")
    return "refused without a key, and with a wrong one"


def grpc_health(probe: Probe) -> str:
    """The standard health service."""
    with probe.channel() as channel:
        told = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(told.status)
    require(name == "SERVING", f"the status is {name}")
    return str(name)


def grpc_generate(probe: Probe) -> str:
    """The same answer over gRPC, whole."""
    with probe.channel() as channel:
        told = _stub(channel).Generate(REQUEST, timeout=SECONDS, metadata=probe.metadata())
    (output,) = told.outputs
    probe.count("grpc", "Generate", output.num_tokens)
    _same(probe, output.text)
    return f"{output.num_tokens} tokens, the same text"


def grpc_stream(probe: Probe) -> str:
    """The same answer over gRPC, streamed."""
    with probe.channel() as channel:
        messages = _stub(channel).GenerateStream(REQUEST, timeout=SECONDS, metadata=probe.metadata())
        outputs = [output for message in messages for output in message.outputs]
    require(bool(outputs) and outputs[-1].HasField("finish_info"), "the stream ends without a finish_info")
    probe.count("grpc", "GenerateStream", outputs[-1].num_tokens)
    _same(probe, "".join(output.text for output in outputs))
    return f"{len(outputs)} messages, the same text"


def metrics(probe: Probe) -> str:
    """Every call that was made, and every token that was received, is counted."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (missing := _missing_counts(probe)) and time.monotonic() < deadline:
        time.sleep(0.1)
    require(not missing, "; ".join(missing))
    return f"{sum(probe.calls.values())} calls and {probe.tokens} tokens are counted"


def _missing_counts(probe: Probe) -> list[str]:
    """By how much the counters are below what was sent. Others may call too, so counters may be higher."""
    now = _counters(probe.get("/metrics"))
    wanted: dict[tuple[str, ...], int] = {("attend_requests_total", *where): calls for where, calls in probe.calls.items()}
    wanted["attend_generation_tokens_total",] = probe.tokens
    moved = {name: now.get(name, 0) - probe.counters.get(name, 0) for name in wanted}
    return [f"{' '.join(n)} moved by {moved[n]:g}, expected {wanted[n]} or more" for n in wanted if moved[n] < wanted[n]]


CHECKS: dict[str, Callable[[Probe], str]] = {
    "health": alive,
    "readiness": ready,
    "version": version,
    "replicas": replicas,
    "models": models,
    "completion": completion,
    "stream": stream,
    "chat": chat,
    "responses": responses,
    "messages": messages,
    "rerank": rerank,
    "tokenize": tokens,
    "bad request": refusal,
    "API key": keys,
    "gRPC health": grpc_health,
    "gRPC Generate": grpc_generate,
    "gRPC GenerateStream": grpc_stream,
    "metrics": metrics,
}


def show(url: str, grpc_target: str | None, key: str | None, *, long: bool, as_json: bool) -> int:
    """Print the results, line by line or as one JSON object: status 0, or 1 if a check failed or no server answers."""
    probe, results, reason = check_target(url, grpc_target, key), [], None
    write = printer(silent=as_json)
    try:
        for result in run(probe, long=long):
            results.append(result)
            write(result.outcome, f"{result.milliseconds:.0f} ms", result.name, result.detail)
    except Unreachable as error:
        reason = str(error)
        write("failed", "", "connection", reason)
    is_well = reason is None and all(result.outcome != "failed" for result in results)
    if as_json:
        document = {"ok": is_well, "url": probe.url, "grpc": probe.grpc_target, "error": reason}
        print(json.dumps(document | {"checks": [asdict(result) for result in results]}))
    return 0 if is_well else 1


def run(probe: Probe, *, long: bool = False) -> Iterator[Result]:
    """The results, one by one; with `long` those of long_checks.py last.

    Raises Unreachable if no server answers, or one that would fail every check for one reason.
    """
    try:
        _require_server(probe)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"no server answers at {probe.url}: {_reason(error)}") from error
    for name, check in (CHECKS | (LONG_CHECKS if long else {})).items():
        started = time.perf_counter()
        outcome, detail = _try_check(check, probe)
        yield Result(name, outcome, round((time.perf_counter() - started) * 1000, 1), detail)


def _require_server(probe: Probe) -> None:
    """Raise Unreachable, with the reason, for what is no Attend server, a server that ends, and one whose key is not given."""
    if not any(_is_ours(probe.get(path)) for path in ("/healthz", "/version")):
        raise Unreachable(f"what answers at {probe.url} is no Attend server")
    if probe.get("/readyz").body == b"draining\n":
        raise Unreachable(f"{probe.url} is draining: it takes no new calls, and ends")
    if probe.get("/v1/models").status == 401:
        raise Unreachable(f"{probe.url} does not take this key" if probe.key else f"{probe.url} needs a key: --key KEY")


def _is_ours(reply: Reply) -> bool:
    """True if an answer to /healthz or /version is one that Attend, or HAProxy in front of it, gives."""
    if reply.body in (b"ok\n", b"the engine is stuck\n"):
        return True
    try:
        document = json.loads(reply.body)
        return "system_fingerprint" in document or set(document["error"]) == OPENAI_ERROR
    except (ValueError, LookupError, TypeError):
        return False


def _try_check(check: Callable[[Probe], str], probe: Probe) -> tuple[Outcome, str]:
    try:
        return "ok", check(probe)
    except (CheckSkipped, CheckFailed) as why:
        return "skipped" if isinstance(why, CheckSkipped) else "failed", str(why)
    except grpc.RpcError as error:
        return "failed", f"{error.code().name}: {error.details()}"
    except (OSError, http.client.HTTPException) as error:
        return "failed", _reason(error)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return "failed", f"the answer has another shape than expected: {type(error).__name__}: {error}"


def _stub(channel: grpc.Channel) -> Any:
    return rpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code


def _same(probe: Probe, text: str) -> None:
    if probe.text is None:
        raise CheckSkipped("there is no whole answer to compare with")
    hint = " (outside float32 a near-tie may be decided otherwise under load)" if "float32" not in probe.about else ""
    require(text == probe.text, f"the text is {text!r}, but that of the whole answer {probe.text!r}{hint}")


def _counters(reply: Reply) -> dict[tuple[str, ...], float]:
    """The samples of a metrics page, summed over models, replicas and outcomes."""
    reply.check()
    sums: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            labels = [sample.labels[label] for label in ("transport", "route") if label in sample.labels]
            sums[(sample.name, *labels)] = sums.get((sample.name, *labels), 0.0) + sample.value
    return sums


def _reason(error: Exception) -> str:
    cause = getattr(error, "reason", error)
    return (cause.strerror if isinstance(cause, OSError) else None) or str(cause) or type(cause).__name__
