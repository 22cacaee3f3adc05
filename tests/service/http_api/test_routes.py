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
    async def call():
        async with server.http() as client:
            return await client.request(method, path, **more)

    return asyncio.run(call())


def test_a_whole_answer_is_one_object():
    server = build_server(FakeEngine(says("café 😀")))
    answer = server.post({"prompt": "abc", "max_tokens": 50, "seed": 3, "model": "fake"})
    document = answer.json()
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert document["choices"] == [
        {"index": 0, "text": "café 😀", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert document["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 11,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert (document["model"], document["seed"], document["system_fingerprint"]) == ("fake", 3, "fp_fake")
    assert server.outcomes() == {(*ROUTE, "stop"): 1}


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/completion", "did you mean /v1/completions?"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/api/generate", "/docs has the routes"),
        ("/" + "v" * 9999, "/docs has the routes"),
    ],
)
def test_a_path_that_is_no_route_is_told_the_one_that_it_resembles(path, told):
    answer = get(build_server(), path, "POST", json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith(f": Not Found: {told}")
    hidden = get(build_server(expose_docs=False), path, "POST", json={}).json()["error"]["message"]
    assert "/docs" not in hidden


def test_a_method_that_a_route_does_not_take_is_told_the_one_that_it_takes():
    answer = get(build_server(), "/v1/completions", "GET")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"].endswith(": it takes POST")


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


def test_a_deadline_before_the_first_token_is_504_and_not_to_be_retried():
    server = build_server(FakeEngine(held=True))
    answer = server.post({"prompt": "a", "deadline_ms": 1, "stream": True})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert server.outcomes() == {(*ROUTE, "deadline"): 1}


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


BAD = [  # one of each kind; test_body.py has the syntax, test_limits.py the limits, test_parity.py what both transports refuse
    (b"", 400, "JSON"),
    (b"[]", 400, "object"),
    (b'{"prompt":"a","prompt":"b"}', 400, "prompt"),
    (b'{"prompt":"a","temperature":NaN}', 400, "NaN"),
    ({}, 400, "prompt is required"),
    ({"prompt": None}, 400, "prompt is required"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": ["a", 1]}, 400, "prompt"),
    ({"prompt": "a" * 200}, 400, "maximum context length is 128 tokens"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 3.0}, 400, "max_tokens must be an integer"),
    ({"prompt": "a", "temperature": 2.1}, 400, "temperature"),
    ({"prompt": "a", "temperature": 10**399}, 400, "temperature"),
    ({"prompt": ["a"] * 65, "n": 2}, 400, "128"),
    ({"prompt": "a", "best_of": 3}, 400, "best_of"),
    ({"prompt": "a", "stop": ""}, 400, "stop"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"prompt": "a", "suffix": "x"}, 400, "no tokens to fill in the middle"),
    ({"prompt": "a", "logprobs": 6}, 400, "logprobs must be an integer from 0 to 5"),
    ({"prompt": "a", "tools": []}, 400, "tools is not supported: it is a field of POST /v1/chat"),
    ({"prompt": "a", "model": "gpt-4"}, 404, "gpt-4"),
    (b'{"prompt":"' + b"a" * (1 << 20) + b'"}', 413, "1048576"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "status", "words"), BAD)
def test_a_bad_body_is_refused_in_openais_shape_and_counted_as_invalid(body, status, words, stream):
    engine = FakeEngine()
    server = build_server(engine)
    answer = server.post(body | {"stream": stream} if isinstance(body, dict) and "stream_options" not in body else body)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] is None or error["param"] in error["message"] or error["param"] == "model"
    assert server.outcomes() == {(*ROUTE, "invalid"): 1}
    assert not engine.requests


@pytest.mark.parametrize("code", ["context_length_exceeded"])
def test_a_too_long_prompt_has_openais_code(code):
    assert build_server().post({"prompt": "a" * 128}).json()["error"]["code"] == code


def test_the_served_model_is_listed_and_found_and_no_other():
    server = build_server()
    (listed,) = get(server, "/v1/models").json()["data"]
    assert listed == get(server, "/v1/models/fake").json()
    assert (listed["id"], listed["object"], listed["owned_by"], listed["max_model_len"]) == ("fake", "model", "attend", 128)
    for name in ("other", "org/other", "fake/"):
        missing = get(server, f"/v1/models/{name}")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"
        assert missing.json()["error"]["param"] == "model"


@pytest.mark.parametrize("path", ["/healthz", "/health"])
def test_health_is_the_step_threads_heartbeat(path):
    server = build_server()
    server.engine.age = STALE_SECONDS - 0.1
    assert get(server, path).status_code == 200
    server.engine.age = STALE_SECONDS
    assert get(server, path).status_code == 503
    server.engine.age = float("inf")
    assert get(server, path).status_code == 503


def test_a_draining_replica_is_alive_but_not_ready_and_refuses():
    server = build_server()
    assert get(server, "/readyz").status_code == 200
    server.engine.drain()
    assert get(server, "/readyz").status_code == 503
    assert get(server, "/healthz").status_code == 200
    refused = server.post({"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")


def test_a_full_queue_is_429_and_not_unready():
    server = build_server()
    server.engine.refusal = Overloaded("the queue is full")
    assert server.post({"prompt": "a"}).status_code == 429
    assert get(server, "/readyz").status_code == 200


def test_version_and_metrics_tell_what_runs():
    server = build_server()
    version = get(server, "/version").json()
    assert (version["version"], version["model"], version["system_fingerprint"]) == ("1.2.3", "fake", "fp_fake")
    metrics = get(server, "/metrics")
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "attend_requests_total{" in metrics.text


def test_version_and_metrics_tell_why_a_slower_path_serves():
    plain, slow = build_server(), build_server(FakeEngine(info=info(slower_path=SlowerPath("block_size", "blocks of 16"))))
    assert get(plain, "/version").json()["slower_path"] is None
    assert get(slow, "/version").json()["slower_path"] == "blocks of 16"
    assert plain.value("attend_slower_path_info", reason="none") == 0
    assert slow.value("attend_slower_path_info", reason="block_size") == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/chat/completion", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models/fake", 405),
        ("POST", "/healthz", 405),
    ],
)
def test_the_routers_own_errors_have_openais_shape(method, path, status):
    answer = get(build_server(), path, method)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert path in answer.json()["error"]["message"]
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "methods"),
    [
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


def test_the_docs_are_off_together():
    for path in ("/openapi.json", "/docs"):
        assert get(build_server(), path).status_code == 200
        assert get(build_server(expose_docs=False), path).status_code == 404


def test_a_request_without_an_id_gets_a_new_one_that_its_answer_carries():
    server = build_server()
    one, two = server.post({"prompt": "a"}), server.post({"prompt": "a"})
    assert one.headers["x-request-id"] != two.headers["x-request-id"]
    assert one.json()["id"] == f"cmpl-{one.headers['x-request-id']}"
    assert get(server, "/nothing").headers["x-request-id"]
    assert server.post(b"").headers["x-request-id"]


def test_a_given_id_is_used_and_left_to_serve_to_send_back():
    answer = build_server().post({"prompt": "a"}, headers={"x-request-id": "mine-7"})
    assert answer.json()["id"] == "cmpl-mine-7"
    assert "x-request-id" not in answer.headers
    assert build_server().post({"prompt": "a", "request_id": "body-8"}).json()["id"] == "cmpl-body-8"


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


def test_capacity_tells_the_load_and_refuses_what_it_does_not_know():
    server = build_server()
    server.post({"prompt": "abc", "max_tokens": 5})

    async def get(query):
        async with server.http() as client:
            return await client.get("/v1/capacity" + query)

    told = asyncio.run(get("?prompt_tokens=10&max_tokens=20")).json()
    assert told["replicas"] == {"expected": 1, "answered": 1}
    assert (told["running"], told["waiting"], told["free_blocks"]) == (0, 0, 64)
    assert (told["fits"], told["estimated_wait_seconds"]) == (True, 0)
    assert asyncio.run(get("?max_tokens=200")).json()["fits"] is False
    doubled = "?prompt_tokens=1&prompt_tokens=1"
    for query, param in (("?max_tokens=x", "max_tokens"), ("?model=a", "model"), (doubled, "prompt_tokens")):
        reply = asyncio.run(get(query))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
