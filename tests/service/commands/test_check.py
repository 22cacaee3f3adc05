"""`attend check`: a good server passes every check, and whatever a server does wrong fails the check that is named after it."""

import asyncio
import inspect
import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from unittest import mock

import grpc
import pytest
import uvicorn
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from attend.model.errors import SettingError
from attend.model.text.chat import ChatTemplate
from attend.service.access.keys import Entry, KeyRing, digest_of, editing, new_secret
from attend.service.access.quota import Limits
from attend.service.commands import check, cli
from attend.service.commands.check import CHECKS, Result, Target, Unreachable, check_target, run
from attend.service.grpc_api.register import add_generation_service
from attend.service.http_api.app import build_app
from attend.service.http_api.route_deps import RouteDeps
from tests.fakes import CallContext, RayLike, build_server, says
from tests.fakes import FakeEngine as Engine

METADATA: ContextVar[tuple] = ContextVar("METADATA")
"""What came with the RPC under way."""

Bend = Callable[[int, bytes], tuple[int, bytes]]


@dataclass
class Sabotage:
    """What a server does to its own answers: by path for HTTP, by method for gRPC."""

    http: dict[str, Bend] = field(default_factory=dict)
    grpc: dict[str, Callable] = field(default_factory=dict)

    def wrap(self, app):
        """The application with its answers bent; a bent one is sent whole."""

        async def bent(scope, receive, send):
            bend, start, body = self.http.get(scope["path"]), {}, b""

            async def keep(message):
                nonlocal start, body
                if message["type"] == "http.response.start":
                    start = message
                    return
                body += message.get("body", b"")
                if not message.get("more_body"):
                    status, content = bend(start["status"], body)
                    headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
                    await send(start | {"status": status, "headers": headers})
                    await send({"type": "http.response.body", "body": content})

            await app(scope, receive, keep if bend else send)

        return bent


class BentMethods(RayLike):
    """The gRPC methods, some of them replaced."""

    def __init__(self, methods, sabotage: Sabotage) -> None:
        super().__init__(methods)
        self.__dict__["_sabotage"] = sabotage

    def __getattr__(self, name):
        honest, bends = super().__getattr__(name), self._sabotage.grpc

        async def stream(request, context):
            METADATA.set(context.invocation_metadata())
            messages = [message async for message in honest(request, context)]
            for message in bends[name](messages) if name in bends else messages:
                yield message

        async def unary(request, context):
            METADATA.set(context.invocation_metadata())
            answer = await honest(request, context)
            return bends[name](answer) if name in bends else answer

        return stream if inspect.isasyncgenfunction(honest) else unary


@dataclass
class Running:
    """A server on two ports of this machine."""

    http: int
    grpc: int
    sabotage: Sabotage
    key: str = ""

    def probe(self, **changes) -> Target:
        return check_target(f"http://127.0.0.1:{self.http}", changes.get("grpc", f"127.0.0.1:{self.grpc}"), self.key)

    def results(self, **changes) -> dict[str, Result]:
        return {result.name: result for result in run(self.probe(**changes))}


async def serve(app, methods, ports: queue.Queue, done: threading.Event) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    web = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", ws="none"))
    task = asyncio.ensure_future(web.serve([listener]))
    rpcs = grpc.aio.server()
    add_generation_service(methods, rpcs)
    health_pb2_grpc.add_HealthServicer_to_server(methods, rpcs)
    ports.put((listener.getsockname()[1], rpcs.add_insecure_port("127.0.0.1:0")))
    await rpcs.start()
    await asyncio.to_thread(done.wait)
    web.should_exit = True
    await task
    await rpcs.stop(None)


@contextmanager
def running(keys: KeyRing | None = None, key: str = "", template: ChatTemplate | None = None) -> Iterator[Running]:
    """A whole replica with a fake engine, on a thread of its own."""
    replica, sabotage = build_server(Engine(says("return 42"))), Sabotage()

    async def scrape() -> str:
        return replica.metrics.text() + "attend_scrape_replicas_expected 1\nattend_scrape_replicas_answered 1\n"

    deps = RouteDeps(replica.service, replica.metrics, "1.2.3", scrape, lambda: False, template, keys=keys)
    replica.methods.keys = keys
    ports, done = queue.Queue(), threading.Event()
    main = serve(sabotage.wrap(build_app(deps)), BentMethods(replica.methods, sabotage), ports, done)
    thread = threading.Thread(target=asyncio.run, args=(main,))
    thread.start()
    try:
        with mock.patch.object(CallContext, "invocation_metadata", create=True, side_effect=METADATA.get):
            yield Running(*ports.get(timeout=20), sabotage, key)
    finally:
        done.set()
        thread.join(20)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(template=ChatTemplate("{{ messages[0]['content'] }}")) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Running]:
    """A server that asks for a key, of a model without a chat template."""
    path, secret = tmp_path_factory.mktemp("keys") / "keys.json", new_secret()
    with editing(path) as entries:
        entries["me"] = Entry(digest_of(secret.encode()), Limits())
    with running(KeyRing(path), secret) as server:
        yield server


@pytest.fixture
def bent(server, monkeypatch) -> Iterator[Running]:
    """The server, honest again afterwards."""
    monkeypatch.setattr(check, "SETTLE_SECONDS", 0.2)
    yield server
    server.sabotage.http.clear()
    server.sabotage.grpc.clear()


def outcomes(results: dict[str, Result], outcome: str) -> set[str]:
    return {name for name, result in results.items() if result.outcome == outcome}


def test_a_good_server_passes_every_check(server):
    results = server.results()
    assert list(results) == list(CHECKS)
    assert outcomes(results, "ok") == set(CHECKS) - {"API key"}, results
    assert "return 42" in results["completion"].detail
    assert "tokens and their calls" in results["metrics"].detail
    assert all(result.milliseconds >= 0 and result.detail for result in results.values())


def test_a_guarded_server_passes_every_check_with_its_key(guarded):
    results = guarded.results()
    assert outcomes(results, "ok") == set(CHECKS), results
    assert all("no chat template" in results[name].detail for name in ("chat", "responses", "messages"))


@pytest.mark.parametrize(("key", "told"), [("", "needs a key: --key KEY"), ("another", "does not take this key")])
def test_without_the_key_one_line_says_that_it_lacks_and_nothing_is_checked(guarded, key, told):
    words = ["check", f"http://127.0.0.1:{guarded.http}", "--grpc", f"127.0.0.1:{guarded.grpc}", "--key", key]
    done = CliRunner().invoke(cli.app, words)
    assert (done.exit_code, len(done.stdout.splitlines())) == (1, 1)
    assert f"http://127.0.0.1:{guarded.http} {told}" in done.stdout


def test_a_server_that_drains_is_said_to_and_nothing_is_checked(bent):
    bent.sabotage.http["/readyz"] = lambda *_: (503, b"draining\n")
    with pytest.raises(Unreachable, match="is draining"):
        bent.results()


@pytest.mark.parametrize("answer", [b"<html>Not Found</html>", b"[]", b'{"error":{"code":404}}', b""])
def test_what_is_no_attend_server_is_said_to_be_none(bent, answer):
    """As a file server, nginx, or another engine."""
    bent.sabotage.http |= dict.fromkeys(("/version",), lambda *_: (404, answer))
    with pytest.raises(Unreachable, match="is no Attend server"):
        bent.results()


def test_grpc_can_be_left_out_and_is_said_to_be(server):
    results = server.results(grpc="none")
    assert outcomes(results, "skipped") == {"API key", "gRPC health", "gRPC Generate", "gRPC GenerateStream"}
    assert not outcomes(results, "failed")


@pytest.mark.parametrize(("asked", "told"), [(None, "127.0.0.1:4711"), ("other:1", "other:1"), ("none", None)])
def test_the_server_says_where_its_grpc_is_unless_it_is_given(bent, asked, told):
    bent.sabotage.http["/version"] = with_text('"grpc_port":9000', '"grpc_port":4711')
    target = check_target(f"http://127.0.0.1:{bent.http}", asked, None)
    with target.client:
        check.version(target)
    assert target.grpc_target == told


def with_status(status: int) -> Bend:
    return lambda _, body: (status, body)


def with_text(old: str, new: str) -> Bend:
    return lambda status, body: (status, body.replace(old.encode(), new.encode()))


def frozen() -> Bend:
    """A page that never changes after its first look."""
    pages: list[bytes] = []

    def bend(status: int, body: bytes) -> tuple[int, bytes]:
        pages.append(body)
        return status, pages[0]

    return bend


def streams(bend: Bend) -> Bend:
    """Only what is streamed."""
    return lambda status, body: bend(status, body) if b"data:" in body else (status, body)


COMPLETIONS = "/v1/completions"
WRONGS = [
    ("ready", "/healthz", with_status(503)),
    ("ready", "/readyz", with_status(503)),
    ("version", "/version", with_text('"version"', '"edition"')),
    ("replicas", "/metrics", with_text("answered 1", "answered 0")),
    ("models", "/v1/models", with_text('"id":"fake"', '"id":"other"')),
    ("models", "/v1/models/fake", with_text("owned_by", "owner")),
    ("models", f"/v1/models/{check.UNKNOWN}", with_status(200)),
    ("completion", COMPLETIONS, lambda status, body: (500 if body.startswith(b'{"id"') else status, body)),
    ("stream", COMPLETIONS, streams(with_text("data: [DONE]\n\n", ""))),
    ("stream", COMPLETIONS, streams(with_text('"text":"2"', '"text":"3"'))),
    ("stream", COMPLETIONS, streams(with_text("data: [DONE]", 'data: {"error":{"message":"cut"}}\n\ndata: [DONE]'))),
    ("chat", "/v1/chat/completions", with_status(500)),
    ("chat", "/v1/chat/completions", with_text("assistant", "user")),
    ("responses", "/v1/responses", with_status(500)),
    ("responses", "/v1/responses", with_text("incomplete", "lost")),
    ("messages", "/v1/messages", with_status(500)),
    ("messages", "/v1/messages", with_text("assistant", "user")),
    ("bad request", COMPLETIONS, lambda status, body: (200 if status == 400 else status, body)),
    ("bad request", COMPLETIONS, with_text('"param":"max_tokens"', '"param":null')),
    ("metrics", "/metrics", frozen()),
]


@pytest.mark.parametrize(("name", "path", "bend"), WRONGS, ids=[f"{name} {i}" for i, (name, *_) in enumerate(WRONGS)])
def test_what_a_server_does_wrong_fails_the_check_of_that_name(bent, name, path, bend):
    bent.sabotage.http[path] = bend
    failed = outcomes(bent.results(), "failed")
    assert name in failed
    assert failed <= {name, "stream", "models"}  # what an earlier failure leaves unknown


def unfinished(answer):
    message = answer[-1] if isinstance(answer, list) else answer
    message.outputs[0].ClearField("finish_info")
    return answer


GRPC_WRONGS = [
    ("gRPC health", "Check", lambda _: health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)),
    ("gRPC Generate", "Generate", unfinished),
    ("gRPC GenerateStream", "GenerateStream", lambda messages: messages[1:]),
    ("gRPC GenerateStream", "GenerateStream", unfinished),
    ("gRPC GenerateStream", "GenerateStream", lambda messages: []),
]


@pytest.mark.parametrize(("name", "method", "bend"), GRPC_WRONGS)
def test_what_a_server_does_wrong_over_grpc_fails_the_check_of_that_name(bent, name, method, bend):
    bent.sabotage.grpc[method] = bend
    assert outcomes(bent.results(), "failed") == {name}


def test_a_server_that_lets_everybody_in_fails_the_check_of_its_key(server):
    probe = server.probe()
    probe.key = "given"
    (result,) = [result for result in run(probe) if result.name == "API key"]
    assert (result.outcome, "401" in result.detail) == ("failed", True)


def test_an_answer_that_breaks_off_is_a_failure_and_not_the_end(bent):
    def cut(status: int, body: bytes) -> tuple[int, bytes]:
        raise RuntimeError("the process died")

    bent.sabotage.http["/v1/messages"] = cut
    results = bent.results()
    assert outcomes(results, "failed") == {"messages"}


@pytest.mark.parametrize(
    ("url", "base", "beside"),
    [
        ("localhost:8000", "http://localhost:8000", "localhost:"),
        ("http://10.0.0.1", "http://10.0.0.1", "10.0.0.1:"),
        ("https://a.example/llm/v1/", "https://a.example/llm", "a.example:"),
        ("http://[::1]:8000", "http://[::1]:8000", "[::1]:"),
    ],
)
def test_grpc_is_looked_for_beside_the_url(url, base, beside):
    probe = check_target(url, None, "")
    assert (probe.url, probe.grpc_target, probe.key) == (base, beside, "")
    assert check_target(url, "other:1", "k").grpc_target == "other:1"
    assert check_target(url, "none", "k").grpc_target is None


@pytest.mark.parametrize("url", ["", "http://", "ftp://a", "http://a:b", "file:///etc/passwd", "http://a:99999", "http://[::1"])
def test_a_url_that_is_none_is_refused_with_a_sentence(url):
    with pytest.raises(SettingError, match="URL"):
        check_target(url, None, None)


def test_a_key_that_cannot_stand_in_a_header_is_refused_without_being_repeated():
    with pytest.raises(SettingError) as caught:
        check_target("http://a", None, "secret\n")
    assert "secret" not in str(caught.value)


def test_the_command_prints_a_line_for_each_check_and_ends_with_zero(server):
    done = CliRunner().invoke(cli.app, ["check", f"127.0.0.1:{server.http}", "--grpc", f"127.0.0.1:{server.grpc}"])
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == len(CHECKS)
    assert all(name in line for name, line in zip(CHECKS, lines, strict=True))
    assert all(line.split()[0] in ("ok", "skipped") for line in lines)


def test_the_command_ends_with_one_where_a_check_fails(bent):
    bent.sabotage.http["/readyz"] = with_status(503)
    words = ["check", f"http://127.0.0.1:{bent.http}", "--grpc", f"127.0.0.1:{bent.grpc}"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 1
    assert [line.split()[3] for line in done.stdout.splitlines() if line.startswith("failed")] == ["ready"]
    done = CliRunner().invoke(cli.app, [*words, "--json"])
    document = json.loads(done.stdout)
    assert (done.exit_code, document["ok"], document["error"]) == (1, False, None)
    assert [one["name"] for one in document["checks"] if one["outcome"] == "failed"] == ["ready"]


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_command_says_in_a_sentence_that_nobody_answers(words):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    done = CliRunner().invoke(cli.app, ["check", url, *words])
    assert done.exit_code == 1
    assert f"no server answers at {url}: " in done.stdout
    assert not words or json.loads(done.stdout)["ok"] is False
