"""Replicas that are full: HAProxy refuses for them, as long as all of them are and no longer."""

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from contextlib import suppress
from http.client import RemoteDisconnected

import grpc
import pytest

from attend.service.errors import FULL
from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc
from tests.service.runtime.edges import METHODS, PATHS, SECONDS, Edge, in_front
from tests.service.server import Server, running, wait_for


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with in_front(tmp_path_factory.mktemp("edge"), ATTEND_CORS_ORIGINS="https://page.example") as made:
        yield made


def refused_by_edge(answer: tuple) -> bool:
    """True if HAProxy refused by itself, with all that a caller needs; a replica's own refusal is recognised as such."""
    if answer[0] == 429:
        _, headers, body = answer
        assert headers["retry-after"] == "7" and FULL not in headers
        if body == b"replica":
            return False
        error = {"message": "the queue is full", "type": "overloaded_error", "param": None, "code": "queue_full"}
        assert (json.loads(body), headers["x-request-id"]) == ({"error": error}, "mine")
        return True
    code, details, metadata = answer
    assert (code, metadata["retry-after"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "7") and FULL not in metadata
    if details == "replica":
        return False
    assert (details, metadata["x-request-id"]) == ("the queue is full", "mine")
    return True


def test_calls_of_full_replicas_are_refused_without_them(edge: Edge) -> None:
    edge.full(True, True)
    began = time.monotonic()
    answers = [refused_by_edge(edge.post() if turn % 2 else edge.call()) for turn in range(40)]
    spans = 1 + (time.monotonic() - began) / SECONDS
    assert answers.count(False) == edge.num_calls() <= 4 * spans  # each replica is found full anew, once over either transport


@pytest.mark.parametrize("first", [Edge.post, Edge.call])
def test_what_one_transport_has_learned_holds_for_the_other(edge: Edge, first) -> None:
    edge.full(True, True)
    while not refused_by_edge(first(edge)):
        assert edge.num_calls() < 10
    began, calls = time.monotonic(), edge.num_calls()
    others = [refused_by_edge(edge.post()), refused_by_edge(edge.call())]
    assert (all(others) and edge.num_calls() == calls) or time.monotonic() - began > SECONDS / 2, "a slow machine shows nothing"


def test_every_call_that_a_full_queue_refuses_is_refused_and_no_other(edge: Edge) -> None:
    edge.full(True, True)
    refused = 0
    for call, name in [*((edge.post, path) for path in PATHS), *((edge.call, method) for method in METHODS)]:
        while not refused_by_edge(call(name)):
            assert edge.num_calls() < 50
        refused += 1
    assert refused == len(PATHS) + len(METHODS)
    before = edge.num_calls()
    assert edge.post("/tokenize")[2] == b"replica" and edge.call("Tokenize")[1] == "replica"
    assert edge.num_calls() == before + 2


def test_pages_that_may_read_answers_may_read_that_of_a_full_queue(edge: Edge) -> None:
    edge.full(True, True)
    while not refused_by_edge(edge.post()):
        assert edge.num_calls() < 10
    before = edge.num_calls()
    answer = edge.post(origin="https://page.example")
    assert refused_by_edge(answer) and edge.num_calls() == before
    headers = {name.lower(): value for name, value in answer[1].items()}
    assert headers["access-control-allow-origin"] == "https://page.example" and headers["vary"] == "Origin"
    assert headers["access-control-expose-headers"] == "Retry-After, x-should-retry, x-request-id"
    assert edge.post(method="OPTIONS")[0] == 501, "the fake replica knows no OPTIONS"
    assert "access-control-allow-origin" not in map(str.lower, edge.post(origin="https://other.example")[1])


def test_a_call_whose_body_comes_late_is_judged_when_it_is_there(edge: Edge) -> None:
    edge.full(False, False)
    with socket.create_connection(edge.address) as caller:
        caller.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n")
        time.sleep(0.05)
        edge.full(True, True)
        while not refused_by_edge(edge.post()):
            assert edge.num_calls() < 10
        edge.full(False, False)
        caller.sendall(b"{}")
        assert b" 200 " in caller.recv(100)


def test_who_sends_a_large_body_slowly_sees_the_refusal(edge: Edge) -> None:
    edge.full(True, True)
    while not refused_by_edge(edge.post()):
        assert edge.num_calls() < 10
    with socket.create_connection(edge.address) as caller:
        caller.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500000\r\n\r\n")
        for _ in range(50):
            caller.sendall(b" " * 10_000)
            time.sleep(0.005)
        assert b" 429 " in caller.recv(100)


def test_a_clock_that_was_set_back_ends_no_call(edge: Edge) -> None:
    edge.full(False, False)
    in_an_hour = int(time.time() * 1000) + 3_600_000
    for name in ("a1", "b2"):
        edge.command(f"experimental-mode on; set var proc.attend_full_SERVE_REPLICA_app_Attend_{name} int({in_an_hour})")
        assert str(in_an_hour) in edge.command(f"get var proc.attend_full_SERVE_REPLICA_app_Attend_{name}")
    assert edge.post()[0] == 200 and edge.call()[0] == grpc.StatusCode.OK


def test_where_one_replica_has_room_its_calls_are_answered(edge: Edge) -> None:
    edge.full(True, False)
    ends = [edge.post() for _ in range(20)]
    assert {(status, body) for status, _, body in ends} == {(429, b"replica"), (200, b"replica")}
    assert edge.num_calls() == 20
    codes = [edge.call()[0] for _ in range(20)]
    assert {*codes} == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED} and edge.num_calls() == 40


def test_a_replica_is_asked_again_after_a_moment(edge: Edge) -> None:
    edge.full(True, True)
    while not refused_by_edge(edge.post()):
        pass
    for replica in edge.replicas:
        replica.full = False
    freed = time.monotonic()
    assert wait_for(lambda: edge.post()[0] == 200, 5)
    assert time.monotonic() - freed < 3 * SECONDS
    assert edge.call()[0] == grpc.StatusCode.OK


def test_a_dead_replica_has_no_room_and_where_all_are_dead_nobody_is_told_to_come_again_soon(edge: Edge) -> None:
    """The last test: it ends the replicas."""
    edge.full(True, False)
    edge.replicas[1].stop()

    def refused() -> bool:
        with suppress(RemoteDisconnected):  # until its death is known, calls for it fail
            return any(answer[0] == 429 and refused_by_edge(answer) for answer in [edge.post() for _ in range(3)])
        return False

    assert wait_for(refused, 10)
    edge.replicas[0].stop()
    assert wait_for(lambda: edge.post()[0] == 503, 10)
    assert wait_for(lambda: edge.call()[:2] == (grpc.StatusCode.UNAVAILABLE, "no replica can take the request now"), 10)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--max-batch-requests", "1", "--max-queued-requests", "1", "--num-threads", "1")
    with running(tmp_path_factory.mktemp("small") / "log", *flags) as server:
        yield server


def over_http(server: Server, max_tokens: int) -> tuple[int, str, dict[str, str]]:
    """(status, code, headers) of a completion."""
    data = json.dumps({"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, "", dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["code"], dict(error.headers)


def over_grpc(server: Server, *, stream: bool) -> tuple[int, str, dict[str, str]]:
    """The same of a Generate or GenerateStream, with HTTP's status."""
    ask = pb.GenerateRequest(text="a", max_tokens=4)
    with grpc.insecure_channel(server.target) as channel:
        stub = rpc.GenerationServiceStub(channel)
        try:
            _ = list(stub.GenerateStream(ask)) if stream else stub.Generate(ask)
        except grpc.RpcError as error:
            status = 429 if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else 500
            return status, "queue_full", {**dict(error.initial_metadata()), **dict(error.trailing_metadata())}
        return 200, "", {}


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize("way", ["http", "grpc", "grpc stream"])
def test_a_full_replica_is_asked_ten_times_a_second_and_answers_as_soon_as_it_has_room(small: Server, way: str) -> None:
    def ask() -> tuple[int, str, dict[str, str]]:
        return over_http(small, 4) if way == "http" else over_grpc(small, stream=way == "grpc stream")

    def refused() -> tuple[float, float]:
        by_edge = small.metric("attend_edge_refusals_total", transport=way.split()[0])
        return small.metric("attend_requests_rejected_total", reason="queue"), by_edge

    before = refused()
    with futures.ThreadPoolExecutor(2) as pool:
        long = [pool.submit(over_http, small, 900) for _ in range(2)]
        assert wait_for(lambda: small.metric("attend_requests_waiting") == 1)
        answers: list[tuple[int, str, dict[str, str]]] = []
        began = time.monotonic()
        while (took := time.monotonic() - began) < 4 * SECONDS or (took < 30 * SECONDS and refused()[1] == before[1]):
            answers.append(ask())  # where a machine is so slow that each call finds the moment over, until one does not
        spans = 1 + (time.monotonic() - began) / SECONDS
        assert {answer[:2] for answer in answers} == {(429, "queue_full")}
        assert all(int(headers["retry-after"]) >= 1 and FULL not in headers for *_, headers in answers)
        assert wait_for(lambda: refused() >= before and sum(refused()) == sum(before) + len(answers))
        by_replica, by_edge = (now - then for now, then in zip(refused(), before, strict=True))
        assert 1 <= by_replica <= 2 * spans and by_edge >= 1
        assert [call.result()[0] for call in long] == [200, 200]
    assert wait_for(lambda: ask()[0] == 200, 3 * SECONDS)
