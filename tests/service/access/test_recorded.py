"""Every call that needs a key leaves one record, over both transports: a log line and an id; and it is charged."""

import asyncio
import logging
from pathlib import Path

import pytest
from grpc import StatusCode

from attend.service.access.keys import Entry, KeyRing, Limits, digest_of, write_keys
from attend.service.batch.service import BatchService
from attend.service.batch_settings import BatchSettings
from attend.service.contract.routes import OPEN
from attend.service.observe.collectors import MAX_LINES, SECONDS
from attend.v1 import generation_pb2 as pb
from tests.fakes import CallContext, Server
from tests.service.bad_calls import whole_server
from tests.service.http_api.described import LEAST, OTHERS

SECRET = "att_secret"
BEARER = f"Bearer {SECRET}"
BODIES = LEAST | {"/v1/batches/{batch_id}/cancel": {}}
MESSAGES = {
    "Tokenize": pb.TokenizeRequest(text="a"),
    "Detokenize": pb.DetokenizeRequest(token_ids=[97]),
    "GetServerInfo": pb.GetServerInfoRequest(),
}
ENDS = ["ok", "ok", "rejected"]
"""The outcomes of three calls with the key."""
each_route = pytest.mark.parametrize("route", OTHERS)
each_method = pytest.mark.parametrize("method", [*MESSAGES])


@pytest.fixture
def clock() -> list[float]:
    """Seconds, for metrics."""
    return [1000.0]


def with_a_batch(folder: Path) -> BatchService:
    """What keeps a file and a batch of the key."""
    batch_service = BatchService(BatchSettings(batch_folder=str(folder)), 4)
    file_id = batch_service.files.reserve("key ci", 1)
    batch_service.files.folder.file(file_id).write_bytes(b"{")
    batch_service.files.finish(file_id, 1, "l.jsonl")
    batch_service.batches.create("key ci", file_id, "/v1/completions", {})
    return batch_service


@pytest.fixture
def server(tmp_path, clock, caplog) -> Server:
    """A server with one key that may make two calls a minute and one answer at a time, in a minute that does not pass."""
    caplog.set_level(logging.INFO)
    entries = {"ci": Entry(digest_of(SECRET.encode()), Limits(requests_per_minute=2, concurrent=1))}
    write_keys(tmp_path / "keys.json", entries)
    made = whole_server(
        keys=KeyRing(tmp_path / "keys.json", lambda: 1000.0),
        batch_service=(batch_service := with_a_batch(tmp_path / "batches")),
    )
    made.batch_service = batch_service
    made.metrics.failures._clock = lambda: clock[0]
    return made


def http(server: Server, route: str, bearer: str = BEARER) -> tuple[int, str | None]:
    """(status, id) of a call."""
    path = route.replace("{model_id:path}", server.service.model_name)
    if "{file_id}" in path or "{batch_id}" in path:
        kept = server.batch_service.files.connection.execute
        for name in ("file", "batch"):
            table = {"file": "files", "batch": "batches"}[name]
            path = path.replace(f"{{{name}_id}}", kept(f"SELECT id FROM {table}").fetchone()[0])
    headers = {"authorization": bearer, "x-request-id": "mine"}

    answer = server.ask("POST" if route in BODIES else "GET", path, headers=headers, json=BODIES.get(route))
    return answer.status_code, answer.headers.get("x-request-id")


def rpc(server: Server, method: str, bearer: str = BEARER) -> tuple[StatusCode | None, str | None]:
    """(code, id) of a call; the code of one that succeeded is None."""
    context = CallContext()
    context.metadata = [("authorization", bearer), ("x-request-id", "mine")]
    message = MESSAGES.get(method, pb.GenerateRequest(text="a"))
    asyncio.run(getattr(server.methods, method)(message.SerializeToString(), context))
    return context.code, dict(context.trailing).get("x-request-id")


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "attend.requests"]


@each_route
def test_a_call_over_http_has_a_line_and_an_id_and_is_charged(server, caplog, route):
    assert [http(server, route)[0] for _ in range(3)] == [200, 200, 429]
    assert [line.split(",")[0] for line in lines(caplog)] == [f"http {route} mine: {outcome}" for outcome in ENDS]
    assert all(", key ci" in line for line in lines(caplog))
    assert server.value("attend_requests_rejected_total", reason="key_requests") == 1
    assert server.outcomes() == {}, "they are no calls that generate"
    assert server.value("attend_request_duration_seconds_count") == 0


@each_method
def test_a_call_over_grpc_has_a_line_and_an_id_and_is_charged(server, caplog, method):
    assert [rpc(server, method) for _ in range(3)] == [(None, "mine"), (None, "mine"), (StatusCode.RESOURCE_EXHAUSTED, "mine")]
    assert [line.split(",")[0] for line in lines(caplog)] == [f"grpc {method} mine: {outcome}" for outcome in ENDS]
    assert all(", key ci" in line for line in lines(caplog))
    assert server.outcomes() == {}


@each_route
def test_a_key_whose_answers_are_all_running_may_still_ask_what_is_served(server, route):
    """Work with texts holds a place of the key's, as an answer does."""
    with server.methods.keys.authenticate(BEARER).admit(1):
        assert http(server, route)[0] == (429 if route in BODIES else 200)
        assert rpc(server, "GetServerInfo")[0] is None


@pytest.mark.parametrize("route", [route.path for route in OPEN])
def test_probes_and_metrics_need_no_key_and_cost_none(server, caplog, route):
    assert {http(server, route)[0] for _ in range(5)} == {200}
    assert lines(caplog) == []
    assert http(server, "/v1/models")[0] == 200


def test_the_document_is_charged_too(server):
    assert [http(server, "/openapi.json")[0] for _ in range(3)] == [200, 200, 429]


# Keys that are not known


@pytest.mark.parametrize("route", [*OTHERS[:1], "/v1/completions"])
def test_a_wrong_key_over_http_is_told_and_counted(server, caplog, route):
    path = "/v1/completions"
    if route == path:
        assert server.post({"prompt": "a"}, headers={"authorization": "Bearer wrong"}).status_code == 401
    else:
        assert http(server, route, "Bearer wrong")[0] == 401
    [line] = lines(caplog)
    assert line.startswith(f"http {route} ") and "status 401, error invalid_api_key" in line
    assert failures(server) == {"http": 1, "grpc": 0}


@pytest.mark.parametrize("method", ["Tokenize", "Generate"])
def test_a_wrong_key_over_grpc_is_told_and_counted(server, caplog, method):
    assert rpc(server, method, "Bearer wrong") == (StatusCode.UNAUTHENTICATED, "mine")
    [line] = lines(caplog)
    assert line.startswith(f"grpc {method} mine: invalid") and "status UNAUTHENTICATED, error invalid_api_key" in line
    assert failures(server) == {"http": 0, "grpc": 1}


def failures(server: Server) -> dict[str, float | None]:
    return {transport: server.value("attend_auth_failures_total", transport=transport) for transport in ("http", "grpc")}


def test_who_guesses_keys_fills_no_disk(server, caplog, clock):
    most = MAX_LINES + 1  # and the line that says that there are no more
    for _ in range(3 * MAX_LINES):
        http(server, "/v1/models", "Bearer wrong")
    assert len(lines(caplog)) == most and "not logged for the rest of this minute" in lines(caplog)[-1]
    assert failures(server)["http"] == 3 * MAX_LINES
    clock[0] += SECONDS - 1
    rpc(server, "Tokenize", "Bearer wrong")
    assert len(lines(caplog)) == most
    clock[0] += 1
    rpc(server, "Tokenize", "Bearer wrong")
    assert len(lines(caplog)) == most + 1
    assert http(server, "/v1/models")[0] == 200 and len(lines(caplog)) == most + 2
