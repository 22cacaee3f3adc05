"""`attend check`: an end-to-end check of a running server, over HTTP, gRPC and its metrics, as a caller sees it.

Every check is a function that raises `CheckFailed`, or `CheckSkipped`, with a sentence. They run in order, and later ones use
what earlier ones have learned: the greedy answer to one prompt must be the same whichever way it is asked for.
"""

import json
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import grpc
import httpx2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from attend.model.errors import SettingError
from attend.service.commands.report import printer
from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc

SECONDS = 60.0
"""How long one call may take."""
SETTLE_SECONDS = 5.0
"""How long the metrics may take to show a call that is over."""
MAX_TOKENS = 16
GREEDY = {"prompt": "def fibonacci(n):\n", "max_tokens": MAX_TOKENS, "temperature": 0}
HELLO = [{"role": "user", "content": "Hello"}]
UNKNOWN = "attend-check-no-such-name"
OPENAI_ERROR = {"message", "type", "param", "code"}

PAGES = 8  # looks at the metrics before the first call, each by a new connection: so the pods behind an address are found

Outcome = Literal["ok", "failed", "skipped"]
Counters = dict[tuple[str, ...], float]


class CheckFailed(Exception):
    """A check failed. The sentence says what the server did."""


class CheckSkipped(Exception):
    """There is nothing to check. The sentence says why."""


class Unreachable(Exception):
    """No server answers at the URL, or one that would fail every check for one reason."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check."""

    name: str
    outcome: Outcome
    milliseconds: float
    detail: str


@dataclass(slots=True)
class Target:
    """A server under check, and what earlier checks have learned of it."""

    url: str
    grpc_target: str | None
    """HOST:PORT, or :PORT until the server has said it; None leaves gRPC out."""
    key: str
    client: httpx2.Client
    model: str = ""
    dtype: str = ""
    text: str | None = None
    """The greedy answer, once it is known."""
    usage: dict[str, int] = field(default_factory=dict)
    calls: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By how much counters must have moved: those of calls by transport and route, and that of generated tokens."""
    counters: dict[str, Counters] = field(default_factory=dict)
    """The metrics before the first call, by replica."""

    def send(self, path: str, body: dict[str, Any] | None = None, *, key: str | None = None, **headers: str) -> httpx2.Response:
        """GET, or POST of a body with the model's name, with the given key or else the target's."""
        key = self.key if key is None else key
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        named = None if body is None else ({"model": self.model} if self.model else {}) | body
        return self.client.request("GET" if body is None else "POST", self.url + path, json=named, headers=headers)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of an answer with status 200. Raises CheckFailed for another."""
        return expect(self.send(path, body), 200).json()

    def count(self, transport: str, route: str, tokens: int) -> None:
        """Remember a call that was answered, and how many tokens it gave."""
        self.calls.update({("attend_requests_total", transport, route): 1, ("attend_generation_tokens_total",): tokens})

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A gRPC channel, encrypted where the URL is; SSL_CERT_FILE counts as for HTTP. Raises CheckSkipped without gRPC."""
        if self.grpc_target is None:
            raise CheckSkipped("gRPC is left out")
        roots = "".join(map(ssl.DER_cert_to_PEM_cert, ssl.create_default_context().get_ca_certs(binary_form=True)))
        safe = grpc.ssl_channel_credentials(roots.encode() or None) if self.url.startswith("https:") else None
        with grpc.secure_channel(self.grpc_target, safe) if safe else grpc.insecure_channel(self.grpc_target) as channel:
            yield channel

    def same(self, text: str) -> None:
        """Raise CheckFailed for another text than that of the whole answer."""
        if self.text is None:
            raise CheckSkipped("there is no whole answer to compare with")
        hint = "" if self.dtype == "float32" else " (outside float32 a near-tie may be decided otherwise under load)"
        require(text == self.text, f"the text is {text!r}, but that of the whole answer {self.text!r}{hint}")


def check_target(url: str, grpc_target: str | None, key: str | None) -> Target:
    """The server to check. gRPC is at the URL's host, at the port that /version names, unless given; "none" leaves it out.

    Raises SettingError.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise SettingError(f"URL {url[:128]!r} cannot be used: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise SettingError(f"URL must be as http://HOST:PORT; got {url[:128]!r}")
    if key and not (key.isascii() and key.isprintable()):
        raise SettingError("the API key must be printable ASCII characters")
    path = parts.path.rstrip("/").removesuffix("/v1")  # clients of OpenAI's API have it in their base URL
    client = httpx2.Client(timeout=SECONDS, verify=ssl.create_default_context())
    where = None if grpc_target == "none" else grpc_target or f"{f'[{host}]' if ':' in host else host}:"
    return Target(f"{parts.scheme}://{parts.netloc}{path}", where, key or "", client)


def require(holds: bool, otherwise: str) -> None:
    """Raise CheckFailed with a sentence unless something holds."""
    if not holds:
        raise CheckFailed(otherwise)


def expect(answer: httpx2.Response, status: int) -> httpx2.Response:
    """An answer of this status; from 400 on it must hold OpenAI's error."""
    require(answer.status_code == status, f"the status is {answer.status_code}, expected {status}: {answer.text[:120]!r}")
    if status >= 400:
        require(set(answer.json()["error"]) == OPENAI_ERROR, f"the error is not in OpenAI's shape: {answer.text[:120]!r}")
    return answer


def ready(target: Target) -> str:
    """The process lives, and takes requests."""
    for path in ("/healthz", "/readyz"):
        expect(target.send(path), 200)
    return "alive and ready"


def version(target: Target) -> str:
    """The server's version, model, device and dtype."""
    facts = target.ask("/version")
    target.model, target.dtype = facts["model"], facts["dtype"]
    if target.grpc_target is not None and target.grpc_target.endswith(":"):
        target.grpc_target += str(facts["grpc_port"])
    return f"version {facts['version']}, {facts['model']} ({facts['family']}), {facts['device']}, {facts['dtype']}"


def replicas(target: Target) -> str:
    """Every replica is on the metrics page."""
    for _ in range(PAGES):
        target.counters |= (page := _page(target))
    names = ("attend_scrape_replicas_expected", "attend_scrape_replicas_answered")
    expected, answered = (int(page[""].get((name,), 0)) for name in names)
    several = ("attend_models_memory_budget_bytes",) in page[""]  # models, of which none may be loaded yet
    require(expected == answered and (expected > 0 or several), f"{answered} of {expected} replicas answered the scrape")
    more = len(target.counters) - len(page)  # pods of a Deployment know nothing of each other
    return f"{answered} of {expected} replicas answered" + (f", {more} more in other pods" if more else "")


def models(target: Target) -> str:
    """The model is listed, and found by its name."""
    listed = {one["id"]: one for one in target.ask("/v1/models")["data"]}
    require(target.model in listed, f"/v1/models lists {', '.join(listed)}, but /version says {target.model!r}")
    require(target.ask(f"/v1/models/{target.model}") == listed[target.model], "/v1/models/{id} and /v1/models differ")
    expect(target.send(f"/v1/models/{UNKNOWN}"), 404)
    return ", ".join(listed)


def completion(target: Target) -> str:
    """A whole answer over HTTP."""
    document = target.ask("/v1/completions", GREEDY)
    [choice] = document["choices"]
    require(choice["finish_reason"] in ("stop", "length"), f"the finish_reason is {choice['finish_reason']!r}")
    target.text, target.usage = choice["text"], document["usage"]
    tokens = target.usage["completion_tokens"]
    require(0 < tokens <= MAX_TOKENS, f"completion_tokens is {tokens}, asked for {MAX_TOKENS} at most")
    target.count("http", "/v1/completions", tokens)
    return f"{tokens} tokens: {choice['text']!r}"


def stream(target: Target) -> str:
    """The same answer as events, to its last one."""
    body = GREEDY | {"stream": True, "stream_options": {"include_usage": True}}
    lines = expect(target.send("/v1/completions", body), 200).text.split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    require(data[-1:] == ["[DONE]"], "the stream does not end with [DONE]: it was cut")
    events = [json.loads(line) for line in data[:-1]]
    failures = [event["error"] for event in events if "error" in event]
    require(not failures, f"the stream holds an error: {failures[:1]}")
    target.count("http", "/v1/completions", events[-1]["usage"]["completion_tokens"])
    target.same("".join(choice["text"] for event in events for choice in event["choices"]))
    require(events[-1]["usage"] == target.usage, f"the usage is {events[-1]['usage']}, that of the whole answer {target.usage}")
    return f"{len(events)} events, [DONE], the same text"


def check_conversation(route: str, body: dict[str, Any], role: Callable[[Any], Any], count: str) -> Callable[[Target], str]:
    """A check of one API of conversations: `role` finds the role of its answer, `count` is the name of its number of tokens."""

    def check(target: Target) -> str:
        answer = target.send(route, body | {"temperature": 0})
        if answer.status_code == 400 and answer.json()["error"].get("code") == "no_chat_template":
            return "no chat template, and a refusal that says so"
        document = expect(answer, 200).json()
        require(role(document) == "assistant", f"the answer is {answer.text[:120]!r}")
        target.count("http", route, document["usage"][count])
        return f"{document['usage'][count]} tokens"

    return check


def refusal(target: Target) -> str:
    """A bad request is refused by its field."""
    error = expect(target.send("/v1/completions", GREEDY | {"max_tokens": "many"}), 400).json()["error"]
    require(error["param"] == "max_tokens", f"the error names {error['param']!r}, not 'max_tokens'")
    return str(error["message"])


def keys(target: Target) -> str:
    """A call without a key, or with a wrong one, is refused."""
    if not target.key:
        raise CheckSkipped("no API key was given")
    for key in ("", UNKNOWN):
        expect(target.send("/v1/models", key=key), 401)
    if target.grpc_target is not None:
        with target.channel() as channel:
            call = _stub(channel).GetServerInfo.future(pb.GetServerInfoRequest(), timeout=SECONDS)
            require(call.code() == grpc.StatusCode.UNAUTHENTICATED, f"an RPC without a key ends with {call.code().name}")
    return "refused without a key, and with a wrong one"


def grpc_health(target: Target) -> str:
    """The standard health service."""
    with target.channel() as channel:
        told = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(told.status)
    require(name == "SERVING", f"the status is {name}")
    return str(name)


def check_rpc(method: str) -> Callable[[Target], str]:
    """A check of an RPC: its outputs hold the same answer."""

    def check(target: Target) -> str:
        request = pb.GenerateRequest(text=GREEDY["prompt"], max_tokens=MAX_TOKENS, temperature=0)  # type: ignore[arg-type]
        metadata = (("authorization", f"Bearer {target.key}"),) if target.key else ()
        with target.channel() as channel:
            told = getattr(_stub(channel), method)(request, timeout=SECONDS, metadata=metadata)
            outputs = [output for message in ([told] if method == "Generate" else told) for output in message.outputs]
        require(bool(outputs) and outputs[-1].HasField("finish_info"), "the answer ends without a finish_info")
        target.count("grpc", method, outputs[-1].num_tokens)
        target.same("".join(output.text for output in outputs))
        return f"{outputs[-1].num_tokens} tokens, the same text"

    return check


def metrics(target: Target) -> str:
    """Every call that was made, and every token that was received, is counted. Others may call too: counters may be higher."""
    deadline = time.monotonic() + SETTLE_SECONDS
    now: dict[str, Counters] = {}
    while True:
        now |= _page(target)
        moved = {name: _increase(name, target.counters, now) for name in target.calls}
        lacking = [name for name, least in target.calls.items() if moved[name] < least]
        if not lacking or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if lacking and now.keys() != target.counters.keys():
        raise CheckSkipped("calls went to several pods, each of which counts its own, and not all of them were met again")
    told = (f"{' '.join(name)} moved by {moved[name]:g}, expected {target.calls[name]} or more" for name in lacking)
    require(not lacking, "; ".join(told))
    return f"{target.calls['attend_generation_tokens_total',]} tokens and their calls are counted"


CHECKS: dict[str, Callable[[Target], str]] = {
    "ready": ready,
    "version": version,
    "replicas": replicas,
    "models": models,
    "completion": completion,
    "stream": stream,
    "chat": check_conversation(
        "/v1/chat/completions",
        {"messages": HELLO, "max_tokens": 4},
        lambda document: document["choices"][0]["message"]["role"],
        "completion_tokens",
    ),
    "responses": check_conversation(
        "/v1/responses",
        {"input": "Hello", "max_output_tokens": 4},
        lambda document: "assistant" if document["status"] in ("completed", "incomplete") else None,
        "output_tokens",
    ),
    "messages": check_conversation(
        "/v1/messages", {"messages": HELLO, "max_tokens": 4}, lambda document: document["role"], "output_tokens"
    ),
    "bad request": refusal,
    "API key": keys,
    "gRPC health": grpc_health,
    "gRPC Generate": check_rpc("Generate"),
    "gRPC GenerateStream": check_rpc("GenerateStream"),
    "metrics": metrics,
}


def show(url: str, grpc_target: str | None, key: str | None, *, as_json: bool) -> int:
    """Print the results, line by line or as one JSON object: status 0, or 1 if a check failed or no server answers."""
    target, results, reason = check_target(url, grpc_target, key), [], None
    write = printer(silent=as_json)
    try:
        for result in run(target):
            results.append(result)
            write(result.outcome, f"{result.milliseconds:.0f} ms", result.name, result.detail)
    except Unreachable as error:
        reason = str(error)
        write("failed", "", "connection", reason)
    is_well = reason is None and all(result.outcome != "failed" for result in results)
    if as_json:
        document = {"ok": is_well, "url": target.url, "grpc": target.grpc_target, "error": reason}
        print(json.dumps(document | {"checks": [asdict(result) for result in results]}))
    return 0 if is_well else 1


def run(target: Target) -> Iterator[Result]:
    """The results, one by one. Raises Unreachable."""
    with target.client:
        try:
            _require_server(target)
        except httpx2.HTTPError as error:
            raise Unreachable(f"no server answers at {target.url}: {error}") from error
        for name, check in CHECKS.items():
            started = time.perf_counter()
            outcome, detail = _try_check(check, target)
            yield Result(name, outcome, round((time.perf_counter() - started) * 1000, 1), detail)


def _require_server(target: Target) -> None:
    """Raise Unreachable, with the reason, for what is no Attend server, a server that ends, and one whose key is not given."""
    answer = target.send("/version")
    try:
        is_ours = "system_fingerprint" in answer.json() or set(answer.json()["error"]) == OPENAI_ERROR
    except (ValueError, LookupError, TypeError):
        is_ours = False
    if not is_ours:
        raise Unreachable(f"what answers at {target.url} is no Attend server")
    if target.send("/readyz").content == b"draining\n":
        raise Unreachable(f"{target.url} is draining: it takes no new calls, and ends")
    if target.send("/v1/models").status_code == 401:
        raise Unreachable(f"{target.url} does not take this key" if target.key else f"{target.url} needs a key: --key KEY")


def _try_check(check: Callable[[Target], str], target: Target) -> tuple[Outcome, str]:
    try:
        return "ok", check(target)
    except (CheckSkipped, CheckFailed) as why:
        return "skipped" if isinstance(why, CheckSkipped) else "failed", str(why)
    except grpc.RpcError as error:
        return "failed", f"{error.code().name}: {error.details()}"
    except httpx2.HTTPError as error:
        return "failed", str(error) or type(error).__name__
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return "failed", f"the answer has another shape than expected: {type(error).__name__}: {error}"


def _stub(channel: grpc.Channel) -> Any:
    return rpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code


def _increase(name: tuple[str, ...], before: dict[str, Counters], now: dict[str, Counters]) -> float:
    return sum(now.get(replica, counted).get(name, 0) - counted.get(name, 0) for replica, counted in before.items())


def _page(target: Target) -> dict[str, Counters]:
    """The samples of a metrics page by replica, summed over models and outcomes; what is of no replica is of ""."""
    found: dict[str, Counters] = {"": {}}
    for family in text_string_to_metric_families(expect(target.send("/metrics", Connection="close"), 200).text):
        for sample in family.samples:
            labels = [sample.labels[label] for label in ("transport", "route") if label in sample.labels]
            sums = found.setdefault(sample.labels.get("replica", ""), {})
            sums[(sample.name, *labels)] = sums.get((sample.name, *labels), 0.0) + sample.value
    return found
