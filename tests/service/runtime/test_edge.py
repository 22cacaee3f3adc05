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

KIB = 1024
ASK = {"prompt": "def f(x):", "max_tokens": 4, "temperature": 0}
LONG = {**ASK, "max_tokens": 900, "ignore_eos": True}
FOREVER = pb.StoppingCriteria(ignore_eos=True)
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
WAIT_SECONDS = 45.0


class Wire:
    """A connection on which a test says exactly what it wants."""

    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.http), timeout=WAIT_SECONDS)
        self.reader = self.socket.makefile("rb")

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()
        self.socket.close()

    def send(self, data: bytes) -> "Wire":
        self.socket.sendall(data)
        return self

    def answer(self) -> tuple[int, bytes, http.client.HTTPMessage]:
        """(status, body, headers) of the next answer; whatever follows it on the connection stays there."""
        response = http.client.HTTPResponse(_Held(self.reader))
        response.begin()
        return response.status, response.read(), response.headers

    def rest(self) -> bytes:
        """All that comes until the server closes."""
        return self.reader.read()


class _Held:
    """What http.client takes for a socket, whose file outlives the answers read from it."""

    def __init__(self, file) -> None:
        self.file = file

    def makefile(self, mode: str):
        file = self.file

        class Shared:
            def __getattr__(self, name: str):
                return getattr(file, name)

            def close(self) -> None:
                """The next answer comes from the same file."""

        return Shared()


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


def test_a_head_over_16_kib_is_refused_in_our_shape_with_its_own_id(server: Server) -> None:
    header = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine\r\nX-Long: " + b"a" * 17 * KIB + b"\r\n\r\n"
    target = b"GET /v1/models?" + b"a" * 17 * KIB + b" HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine\r\n\r\n"
    for request in (header, target):
        with Wire(server) as wire:
            status, body, headers = wire.send(request).answer()
            assert status == 431
            assert error_of(body)["code"] == "request_too_large"
            assert headers.get_all("x-request-id") == ["mine"]
            assert wire.send(HEALTH).answer()[0] == 200, "the connection is as good as before"


def test_a_head_that_the_proxy_cannot_hold_is_refused_at_once(server: Server) -> None:
    started = time.monotonic()
    with Wire(server) as wire:
        try:
            wire.send(HEALTH[:-2] + b"X-Long: " + b"a" * 300 * KIB + b"\r\n\r\n")
            assert wire.rest().startswith(b"HTTP/1.1 400 ")
        except ConnectionError:  # it is refused before we have sent all of it
            pass
    assert time.monotonic() - started < 9, "it was cut off for being slow"


def test_pipelined_requests_are_answered_each_and_in_order(server: Server) -> None:
    names = [f"pipe-{number}" for number in range(5)]
    with Wire(server) as wire:
        wire.send(b"".join(post(ASK, f"X-Request-Id: {name}") for name in names))
        answers = [wire.answer() for _ in names]
    assert [status for status, _, _ in answers] == [200] * 5
    assert [headers["x-request-id"] for _, _, headers in answers] == names
    assert len({json.loads(body)["choices"][0]["text"] for _, body, _ in answers}) == 1


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


def test_a_caller_that_asks_before_it_sends_is_told_to_go_on(server: Server) -> None:
    body = json.dumps(ASK).encode()
    with Wire(server) as wire:
        wire.send(post(b"", "Expect: 100-continue", length=len(body)))
        assert wire.socket.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert wire.send(body).answer()[0] == 200


def test_a_body_over_1_mib_is_refused_before_it_is_sent(server: Server) -> None:
    with Wire(server) as wire:
        status, body, _ = wire.send(post(b"{", length=(1 << 20) + 1)).answer()
    assert status == 413
    assert error_of(body)["code"] == "request_too_large"


def test_a_chunked_body_is_refused_once_it_is_over_1_mib(server: Server) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    head = post(b"", length=1).replace(b"Content-Length: 1", b"Transfer-Encoding: chunked")
    with Wire(server) as wire:
        status, body, _ = wire.send(head + chunk * 17).answer()
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
            status, body, _ = wire.answer()
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


def test_metadata_that_the_proxy_cannot_hold_costs_the_connection_alone(server: Server) -> None:
    with grpc.insecure_channel(server.target) as other, grpc.insecure_channel(server.target) as channel:
        stub = rpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Generate(pb.GenerateRequest(text="a"), metadata=[("x-large", "a" * 1_000_000)], timeout=30)
        assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
        for each in (rpc.GenerationServiceStub(other), stub):
            assert each.Generate(pb.GenerateRequest(text="a", max_tokens=2), timeout=30, wait_for_ready=True).outputs


def test_haproxy_and_the_replica_read_odd_framing_alike(server: Server) -> None:
    assert misread(server.http, haproxy=True) == []
