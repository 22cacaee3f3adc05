"""`attend check`: an end-to-end check of a running server, over HTTP, gRPC and its metrics, as a caller sees it.

Every check is a function that raises `Failed`, or `Skipped`, with a sentence. They run in order, and later ones use what
earlier ones have learned: the greedy answer to one prompt must be the same whichever way it is asked for.
"""

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from model.errors import SettingError
from protos.attend.v1 import generation_pb2 as pb
from protos.attend.v1 import generation_pb2_grpc as rpc

SECONDS = 60.0
"""How long one call may take."""
SETTLE_SECONDS = 5.0
"""How long the metrics may take to show a call that is over."""
GRPC_PORT = 9000
PROMPT = "def fibonacci(n):\n"
MAX_TOKENS = 16
REQUEST = pb.GenerateRequest(text=PROMPT, max_tokens=MAX_TOKENS, temperature=0)
NOBODY = "attend-check-no-such-name"

Outcome = Literal["ok", "failed", "skipped"]


class Failed(Exception):
    """A check failed. The sentence says what the server did."""


class Skipped(Exception):
    """There is nothing to check. The sentence says why."""


class Unreachable(Exception):
    """No server answers at the URL."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check."""

    name: str
    outcome: Outcome
    milliseconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer, with its whole body."""

    status: int
    content_type: str
    body: bytes

    def check(self, status: int = 200) -> None:
        """Raise Failed for any other status than `status`."""
        _require(self.status == status, f"the status is {self.status}, expected {status}: {_shown(self.body)}")

    def json(self, status: int = 200) -> Any:
        """The body as JSON; the status as in `check`."""
        self.check(status)
        return json.loads(self.body)

    def error(self, status: int) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        error: dict[str, Any] = self.json(status)["error"]
        _require(set(error) == {"message", "type", "param", "code"}, f"the error is not in OpenAI's shape: {_shown(self.body)}")
        return error


@dataclass(slots=True)
class Probe:
    """A server under check, and what earlier checks have learned of it."""

    url: str
    grpc_target: str | None
    """HOST:PORT; None leaves gRPC out."""
    key: str | None = None
    model: str = ""
    about: str = ""
    text: str | None = None
    """The greedy answer to PROMPT, once it is known."""
    usage: dict[str, int] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    """Calls made that were answered, by (transport, route)."""
    tokens: int = 0
    """Tokens received."""
    counters: dict[tuple[str, ...], float] = field(default_factory=dict)
    """The metrics before the first call."""

    def get(self, path: str, *, key: str | None = None) -> Reply:
        """GET, with the key of the probe unless another is given; an empty one sends none."""
        return self._send(urllib.request.Request(self.url + path), self.key if key is None else key)

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        """POST of a JSON object, the model's name with it once it is known."""
        data = json.dumps(({"model": self.model} if self.model else {}) | body).encode()
        return self._send(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}), self.key)

    def greedy(self, **more: Any) -> dict[str, Any]:
        """The body that asks for the greedy answer."""
        return {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0} | more

    def count(self, transport: str, route: str, tokens: int) -> None:
        """Remember a call that was answered with so many tokens."""
        self.calls[transport, route] = self.calls.get((transport, route), 0) + 1
        self.tokens += tokens

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A gRPC channel, encrypted where the URL is; SSL_CERT_FILE counts as for HTTP. Raises Skipped without gRPC."""
        if self.grpc_target is None:
            raise Skipped("gRPC is left out")
        roots = "".join(map(ssl.DER_cert_to_PEM_cert, ssl.create_default_context().get_ca_certs(binary_form=True)))
        safe = grpc.ssl_channel_credentials(roots.encode() or None) if self.url.startswith("https:") else None
        with grpc.secure_channel(self.grpc_target, safe) if safe else grpc.insecure_channel(self.grpc_target) as channel:
            yield channel

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of each RPC."""
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()

    def _send(self, request: urllib.request.Request, key: str | None) -> Reply:
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            answer = urllib.request.urlopen(request, timeout=SECONDS)
        except urllib.error.HTTPError as error:  # any status from 400 on
            answer = error
        with answer:
            return Reply(answer.status, answer.headers.get("content-type", ""), answer.read())


def alive(probe: Probe) -> str:
    """The process answers, and its engine moves."""
    probe.get("/healthz").check()
    return "alive"


def ready(probe: Probe) -> str:
    """It takes requests."""
    probe.get("/readyz").check()
    return "ready"


def version(probe: Probe) -> str:
    """What runs there."""
    facts = probe.get("/version").json()
    probe.model, probe.about = facts["model"], f"{facts['device']}, {facts['dtype']}"
    return f"version {facts['version']}, {facts['model']} ({facts['family']}), {probe.about}"


def replicas(probe: Probe) -> str:
    """Every replica is on the metrics page."""
    probe.counters = _counters(probe.get("/metrics"))
    names = ("attend_scrape_replicas_expected", "attend_scrape_replicas_answered")
    expected, answered = (int(probe.counters.get((name,), 0)) for name in names)
    _require(0 < expected == answered, f"{answered} of {expected} replicas answered the scrape")
    return f"{answered} of {expected} replicas answered"


def models(probe: Probe) -> str:
    """The model is listed, found by its name, and no other is."""
    (listed,) = probe.get("/v1/models").json()["data"]
    _require(listed["id"] == probe.model, f"/v1/models lists {listed['id']!r}, but /version says {probe.model!r}")
    _require(probe.get(f"/v1/models/{listed['id']}").json() == listed, "/v1/models/{id} and /v1/models differ")
    error = probe.get(f"/v1/models/{NOBODY}").error(404)
    _require(error["code"] == "model_not_found", f"an unknown model has the code {error['code']!r}")
    return f"{listed['id']}, {listed['max_model_len']} tokens"


def completion(probe: Probe) -> str:
    """A whole answer."""
    document = probe.post("/v1/completions", probe.greedy()).json()
    (choice,) = document["choices"]
    _require(choice["finish_reason"] in ("stop", "length"), f"the finish_reason is {choice['finish_reason']!r}")
    probe.text, probe.usage = choice["text"], document["usage"]
    tokens = probe.usage["completion_tokens"]
    _require(0 < tokens <= MAX_TOKENS, f"completion_tokens is {tokens}, asked for {MAX_TOKENS} at most")
    probe.count("http", "/v1/completions", tokens)
    return f"{tokens} tokens: {_shown(choice['text'].encode())}"


def stream(probe: Probe) -> str:
    """The same answer as events, to its last one."""
    reply = probe.post("/v1/completions", probe.greedy(stream=True, stream_options={"include_usage": True}))
    reply.check()
    _require(reply.content_type.startswith("text/event-stream"), f"the content type is {reply.content_type!r}")
    lines = [line.removeprefix("data: ") for line in reply.body.decode().split("\n") if line.startswith("data:")]
    _require(lines[-1:] == ["[DONE]"], "the stream does not end with [DONE]: it was cut")
    events = [json.loads(line) for line in lines[:-1]]
    failures = [event["error"] for event in events if "error" in event]
    _require(not failures, f"the stream holds an error: {failures[:1]}")
    probe.count("http", "/v1/completions", events[-1]["usage"]["completion_tokens"])
    _same(probe, "".join(choice["text"] for event in events for choice in event["choices"]))
    _require(events[-1]["usage"] == probe.usage, f"the usage is {events[-1]['usage']}, that of the whole answer {probe.usage}")
    return f"{len(events)} events, [DONE], the same text"


def chat(probe: Probe) -> str:
    """A chat, or the refusal of a model that has no template for it."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    reply = probe.post("/v1/chat/completions", body)
    if reply.status == 400 and reply.error(400)["code"] == "no_chat_template":
        return "no chat template, and a refusal that says so"
    document = reply.json()
    message = document["choices"][0]["message"]
    _require(message["role"] == "assistant" and isinstance(message["content"], str), f"the message is {message}")
    probe.count("http", "/v1/chat/completions", document["usage"]["completion_tokens"])
    return f"{document['usage']['completion_tokens']} tokens: {_shown(message['content'].encode())}"


def tokens(probe: Probe) -> str:
    """Text to tokens and back."""
    text = "naïve = {'π': 3.14}  # 你好\n"
    told = probe.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    _require(told["count"] == len(told["tokens"]), f"count is {told['count']}, but there are {len(told['tokens'])} tokens")
    back = probe.post("/detokenize", {"tokens": told["tokens"]}).json()["prompt"]
    _require(back.strip() == text.strip(), f"{text!r} comes back as {back!r}")
    return f"{told['count']} tokens and back"


def refusal(probe: Probe) -> str:
    """A bad request is refused by its field."""
    error = probe.post("/v1/completions", probe.greedy(max_tokens="many")).error(400)
    _require(error["param"] == "max_tokens", f"the error names {error['param']!r}, not 'max_tokens'")
    return str(error["message"])


def keys(probe: Probe) -> str:
    """A call without a key, or with a wrong one, is refused."""
    if not probe.key:
        raise Skipped("no API key was given")
    for key in ("", NOBODY):
        probe.get("/v1/models", key=key).error(401)
    if probe.grpc_target is not None:
        with probe.channel() as channel:
            call = _stub(channel).GetServerInfo.future(pb.GetServerInfoRequest(), timeout=SECONDS)
            _require(call.code() == grpc.StatusCode.UNAUTHENTICATED, f"an RPC without a key ends with {call.code().name}")
    return "refused without a key, and with a wrong one"


def grpc_health(probe: Probe) -> str:
    """The standard health service."""
    with probe.channel() as channel:
        told = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(told.status)
    _require(name == "SERVING", f"the status is {name}")
    return str(name)


def grpc_generate(probe: Probe) -> str:
    """The whole answer again."""
    with probe.channel() as channel:
        told = _stub(channel).Generate(REQUEST, timeout=SECONDS, metadata=probe.metadata())
    (output,) = told.outputs
    probe.count("grpc", "Generate", output.num_tokens)
    _same(probe, output.text)
    return f"{output.num_tokens} tokens, the same text"


def grpc_stream(probe: Probe) -> str:
    """The answer as messages."""
    with probe.channel() as channel:
        messages = _stub(channel).GenerateStream(REQUEST, timeout=SECONDS, metadata=probe.metadata())
        outputs = [output for message in messages for output in message.outputs]
    _require(bool(outputs) and outputs[-1].HasField("finish_info"), "the stream ends without a finish_info")
    probe.count("grpc", "GenerateStream", outputs[-1].num_tokens)
    _same(probe, "".join(output.text for output in outputs))
    return f"{len(outputs)} messages, the same text"


def metrics(probe: Probe) -> str:
    """Every call that was made, and every token that was received, is counted."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (missing := _uncounted(probe)) and time.monotonic() < deadline:
        time.sleep(0.1)
    _require(not missing, "; ".join(missing))
    return f"{sum(probe.calls.values())} calls and {probe.tokens} tokens are counted"


def _uncounted(probe: Probe) -> list[str]:
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
    "tokenize": tokens,
    "bad request": refusal,
    "API key": keys,
    "gRPC health": grpc_health,
    "gRPC Generate": grpc_generate,
    "gRPC GenerateStream": grpc_stream,
    "metrics": metrics,
}


def run(probe: Probe) -> Iterator[Result]:
    """The results, one by one. Raises Unreachable if no server answers."""
    try:
        probe.get("/healthz")
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"no server answers at {probe.url}: {_reason(error)}") from error
    for name, check in CHECKS.items():
        started = time.perf_counter()
        outcome, detail = _tried(check, probe)
        yield Result(name, outcome, round((time.perf_counter() - started) * 1000, 1), detail)


def target(url: str, grpc_target: str | None, key: str | None) -> Probe:
    """The server to check. gRPC is at the URL's host, port 9000, unless given; "none" leaves it out. Raises SettingError."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise SettingError(f"URL {url[:128]!r} cannot be used: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise SettingError(f"URL must be as http://HOST:PORT; got {url[:128]!r}")
    if key and not (key.isascii() and key.isprintable()):
        raise SettingError("the API key must be printable ASCII characters")
    beside = grpc_target or f"{f'[{host}]' if ':' in host else host}:{GRPC_PORT}"
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    return Probe(base, None if grpc_target == "none" else beside, key or None)


def _tried(check: Callable[[Probe], str], probe: Probe) -> tuple[Outcome, str]:
    try:
        return "ok", check(probe)
    except (Skipped, Failed) as why:
        return "skipped" if isinstance(why, Skipped) else "failed", str(why)
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
        raise Skipped("there is no whole answer to compare with")
    hint = " (under load a near-tie may fall otherwise outside float32)" if "float32" not in probe.about else ""
    _require(text == probe.text, f"the text is {text!r}, but that of the whole answer {probe.text!r}{hint}")


def _counters(reply: Reply) -> dict[tuple[str, ...], float]:
    """The samples of a metrics page, summed over models, replicas and outcomes."""
    reply.check()
    sums: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            labels = [sample.labels[label] for label in ("transport", "route") if label in sample.labels]
            sums[(sample.name, *labels)] = sums.get((sample.name, *labels), 0.0) + sample.value
    return sums


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


def _reason(error: Exception) -> str:
    cause = getattr(error, "reason", error)
    return (cause.strerror if isinstance(cause, OSError) else None) or str(cause) or type(cause).__name__


def _shown(body: bytes) -> str:
    text = body[:400].decode(errors="replace")
    return repr(text if len(text) <= 120 else text[:120] + "...")
