"""The routes: whole answers and streams, errors in OpenAI's shape with a real status."""

import asyncio
import json
import re

import pytest

from attend.model.engine.request import SlowerPath
from attend.model.errors import EngineFailed, Overloaded, Unavailable
from attend.service.http_api.routes import STALE_SECONDS
from tests.fakes import FakeEngine, Server, build_server, info, says, until
from tests.service.sse import events_of

ROUTE = ("http", "/v1/completions")


def get(server: Server, path: str, method: str = "GET", **more):
    return server.ask(method, path, **more)


def test_a_model_that_is_mistyped_is_told_the_one_that_there_is():
    message = build_server().post({"prompt": "a", "model": "faek"}).json()["error"]["message"]
    assert message.endswith("this server has 'fake': did you mean 'fake'?")
    assert "did you mean" not in build_server().post({"prompt": "a", "model": "gpt-4"}).json()["error"]["message"]


REFUSALS = [
    (Overloaded("the queue is full", 7), 429, "rejected", {"retry-after": "7"}),
    (Unavailable("draining"), 503, "rejected", {"retry-after": "1"}),
    (EngineFailed("SecretError"), 500, "error", {}),
    (ZeroDivisionError("SecretError"), 500, "error", {}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "outcome", "headers"), REFUSALS)
def test_a_failure_before_the_first_token_has_a_status_of_its_own(error, status, outcome, headers, stream):
    engine = FakeEngine()
    engine.refusal = error
    server = build_server(engine)
    answer = server.post({"prompt": "a", "stream": stream})
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert headers.items() <= answer.headers.items()
    assert "Secret" not in answer.text
    assert server.outcomes() == {(*ROUTE, outcome): 1}


def breaks(request) -> int:
    if len(request.output) == 2:
        raise ZeroDivisionError("SecretError")
    return ord("x")


@pytest.mark.parametrize("how", ["a request", "a bug"])
def test_a_failure_in_the_stream_is_an_error_event_and_then_done(how):
    engine = FakeEngine(breaks if how == "a bug" else says("xxxx"))
    engine.broken_after = 2 if how == "a request" else None
    server = build_server(engine)
    answer = server.post({"prompt": "a", "stream": True, "stream_options": {"include_usage": True}})
    *chunks, last = events_of(answer.text)
    assert (answer.status_code, len(chunks), set(last)) == (200, 2, {"error"})
    assert last["error"]["message"] == f"internal error; request id {answer.headers['x-request-id']}"
    assert "Secret" not in answer.text
    assert server.outcomes() == {(*ROUTE, "error"): 1}


async def test_a_drain_ends_a_stream_with_its_reason():
    engine = FakeEngine(held=True)
    server = build_server(engine)

    async with server.http() as client:
        call = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "stream": True}))
        await until(lambda: engine.open)
        engine.release()
        await until(lambda: server.value("attend_generation_tokens_total"))
        engine.drain()
        found = (await call).text
    ends = [event["choices"][0] for event in events_of(found)]
    assert [(end["finish_reason"], end["stop_reason"]) for end in ends] == [(None, None), ("length", "abort")]
    assert server.outcomes() == {(*ROUTE, "abort"): 1}


def raw_call(server: Server, *messages: dict, then=None) -> list[dict]:
    """Call the application as a server does; `then()` decides when the caller leaves."""
    scope = {
        "type": "http", "asgi": {"spec_version": "2.3"}, "http_version": "1.1", "method": "POST", "path": "/v1/completions",
        "raw_path": b"/v1/completions", "query_string": b"", "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    sent: list[dict] = []
    coming = list(messages)

    async def receive() -> dict:
        if coming:
            return coming.pop(0)
        await until(then or (lambda: False))
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(server.app(scope, receive, send))
    return sent


def test_a_caller_who_leaves_a_stream_frees_its_requests_and_is_an_abort():
    engine = FakeEngine(held=True)
    server = build_server(engine)
    engine.release()
    body = json.dumps({"prompt": "a", "n": 2, "stream": True}).encode()
    sent = raw_call(
        server,
        {"type": "http.request", "body": body, "more_body": False},
        then=lambda: server.value("attend_generation_tokens_total"),
    )
    assert sent[0]["status"] == 200
    assert not engine.open
    assert len(engine.aborted) == 2
    assert server.outcomes() == {(*ROUTE, "abort"): 1}


def test_a_caller_who_leaves_before_the_end_of_the_body_is_an_abort_and_no_bug(caplog):
    server = build_server()
    raw_call(
        server,
        {"type": "http.request", "body": b'{"prompt"', "more_body": True},
        {"type": "http.disconnect"},
        then=lambda: True,
    )
    assert server.outcomes() == {(*ROUTE, "abort"): 1}
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


BAD = [  # one of each kind: the contract's tests have the rest
    (b"", 400, "JSON"),
    ({"prompt": "a", "temperature": 2.1}, 400, "temperature"),
    ({"prompt": "a", "model": "gpt-4"}, 404, "gpt-4"),
    (b'{"prompt":"' + b"a" * (1 << 20) + b'"}', 413, "1048576"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "status", "words"), BAD)
def test_a_bad_body_is_refused_in_openais_shape_and_counted_as_invalid(body, status, words, stream):
    engine = FakeEngine()
    server = build_server(engine)
    answer = server.post(body | {"stream": stream} if isinstance(body, dict) else body)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] is None or error["param"] in error["message"] or error["param"] == "model"
    assert server.outcomes() == {(*ROUTE, "invalid"): 1}
    assert not engine.requests


@pytest.mark.parametrize("path", ["/healthz", "/health"])
def test_health_is_the_step_threads_heartbeat(path):
    server = build_server()
    server.engine.age = STALE_SECONDS - 0.1
    assert get(server, path).status_code == 200
    server.engine.age = STALE_SECONDS
    assert get(server, path).status_code == 503
    server.engine.age = float("inf")
    assert get(server, path).status_code == 503


def test_a_draining_replica_is_alive_and_not_ready():
    server = build_server()
    assert get(server, "/readyz").status_code == 200
    server.engine.drain()
    assert [get(server, path).status_code for path in ("/readyz", "/healthz")] == [503, 200]


def test_version_and_metrics_tell_why_a_slower_path_serves():
    plain, slow = build_server(), build_server(FakeEngine(info=info(slower_path=SlowerPath("block_size", "blocks of 16"))))
    assert get(plain, "/version").json()["slower_path"] is None
    assert get(slow, "/version").json()["slower_path"] == "blocks of 16"
    assert plain.value("attend_slower_path_info", reason="none") == 0
    assert slow.value("attend_slower_path_info", reason="block_size") == 1


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/completions", "POST"),
        ("/v1/files", "POST, GET"),
        ("/v1/files/a", "GET, DELETE"),
        ("/v1/files/a/content", "GET"),
        ("/static/page.css", "GET, HEAD"),
        ("/healthz", "GET, HEAD"),
        ("/health", "GET, HEAD"),
        ("/readyz", "GET, HEAD"),
    ],
)
def test_a_method_that_a_path_does_not_take_is_told_all_that_it_takes(path, methods):
    answer = get(build_server(), path, "PUT")
    assert {*answer.headers["allow"].split(", ")} == {*methods.split(", ")}
    assert answer.json()["error"]["message"].endswith(f": it takes {answer.headers['allow']}")


async def test_of_two_ids_neither_is_the_calls():
    server = build_server()

    async with server.http() as client:
        ids = [("x-request-id", "mine"), ("x-request-id", "other")]
        answer = await client.post("/v1/completions", json={"prompt": "a"}, headers=ids)
    assert answer.json()["id"] not in ("cmpl-mine", "cmpl-other")


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "a\tb", "é".encode()])
def test_an_id_that_is_not_plain_is_not_used(given):
    assert re.fullmatch(
        r"cmpl-[0-9a-f]{32}", build_server().post({"prompt": "a"}, headers={"x-request-id": given}).json()["id"]
    )
