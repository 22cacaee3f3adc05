"""What stands in front of the replicas: limits on heads, bodies and slow callers, and who gets hurt by a bad caller."""

import http.client
import json
import socket
import time

import grpc
import pytest

from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc
from tests.service.framing import misread
from tests.service.server import Server, wait_for

pytestmark = pytest.mark.ray
ASK = {"prompt": "def f(x):", "max_tokens": 4, "temperature": 0}
LONG = {**ASK, "max_tokens": 900, "ignore_eos": True}
FOREVER = pb.StoppingCriteria(ignore_eos=True)
WAIT_SECONDS = 45.0


class Wire:
    """A connection on which a test says exactly what it wants."""

    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.http), timeout=WAIT_SECONDS)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> "Wire":
        self.socket.sendall(data)
        return self

    def answer(self) -> tuple[int, bytes]:
        """(status, body) of the answer."""
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        return response.status, response.read()


def post(body: dict | bytes, *headers: str, version: str = "1.1", length: int | None = None) -> bytes:
    """A completion request as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST /v1/completions HTTP/{version}",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(data) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def error_of(body: bytes) -> dict:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def idle(server: Server) -> bool:
    return server.metric("attend_requests_running") == server.metric("attend_requests_waiting") == 0


@pytest.mark.parametrize("encoding", ["sized", "chunked"])
def test_a_caller_that_leaves_within_its_body_leaves_nothing_behind(server: Server, encoding: str) -> None:
    head = post(b"", length=5000)
    request = head if encoding == "sized" else head.replace(b"Content-Length: 5000", b"Transfer-Encoding: chunked") + b"fff\r\n"
    for _ in range(20):
        with Wire(server) as wire:
            wire.send(request + b'{"prompt":"')
    assert wait_for(lambda: idle(server))
    with Wire(server) as wire:
        assert wire.send(post(ASK)).answer()[0] == 200


def test_a_body_over_1_mib_is_refused_before_it_is_sent(server: Server) -> None:
    with Wire(server) as wire:
        status, body = wire.send(post(b"{", length=(1 << 20) + 1)).answer()
    assert status == 413
    assert error_of(body)["code"] == "request_too_large"


@pytest.mark.parametrize("packets", [1, 2])
@pytest.mark.parametrize("end", ["half-closed", "closed"])
def test_a_caller_that_ends_its_side_has_hung_up(server: Server, end: str, packets: int) -> None:
    """A closed and a half-closed connection look the same from here, and nobody may be waiting for 900 tokens."""
    head, separator, body = post(LONG, "X-Request-Id: mine").partition(b"\r\n\r\n")
    before = server.metric("attend_requests_total", outcome="abort")
    with Wire(server) as wire:
        wire.send(head + separator + (body if packets == 1 else b""))
        if packets == 2:
            time.sleep(0.05)
            wire.send(body)
        assert wait_for(lambda: not idle(server))
        if end == "half-closed":
            wire.socket.shutdown(socket.SHUT_WR)
            status, body = wire.answer()
            assert status == 400
            assert "ended early" in error_of(body)["message"]
    assert wait_for(lambda: idle(server))
    assert wait_for(lambda: server.metric("attend_requests_total", outcome="abort") == before + 1)


def test_large_metadata_costs_its_own_call_alone(server: Server) -> None:
    with grpc.insecure_channel(server.target) as channel:
        stub = rpc.GenerationServiceStub(channel)
        neighbour = stub.GenerateStream(pb.GenerateRequest(text="def f(x):", max_tokens=200, stopping=FOREVER), timeout=60)
        next(neighbour)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Generate(pb.GenerateRequest(text="a"), metadata=[("x-large", "a" * 100_000)], timeout=30)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "metadata" in refused.value.details()
        assert list(neighbour)[-1].outputs[0].finish_info.num_output_tokens == 200
        assert neighbour.code() is grpc.StatusCode.OK


def test_haproxy_and_the_replica_read_odd_framing_alike(server: Server) -> None:
    assert misread(server.http, haproxy=True) == []
