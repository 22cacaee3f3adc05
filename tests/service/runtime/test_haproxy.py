"""HAProxy with our lines: configurations that it takes, and what becomes of each request before two fake replicas."""

import json
import resource
import socket
import subprocess
import time
from collections.abc import Iterator

import grpc
import pytest

from attend.service.contract.routes import BATCH_CREATE, CHAT, COMPLETIONS, MESSAGES, RESPONSES, SERVICE, UPLOAD
from attend.service.http_api.body import BODY_SECONDS, MAX_BYTES
from attend.service.runtime import haproxy
from attend.service.runtime.supervisor import write_edge
from tests.service.runtime.edges import Edge, in_front, ray_config
from tests.service.server import wait_for

PORTS = {"http": 1, "grpc": 2, "http_proxy": 3, "grpc_proxy": 4}
TWO = {"a": (5, 6), "b": (7, 8)}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
POST = HEAD + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
SHAPE = {"message", "type", "param", "code"}


@pytest.mark.parametrize("prefixed", ["1", "0"])
@pytest.mark.parametrize(
    "applications",
    [
        pytest.param({"default": TWO}, id="two replicas"),
        pytest.param({}, id="no application"),
        pytest.param({"default": {}}, id="no replica"),
        pytest.param({"default": TWO, "other": TWO}, id="two applications"),
    ],
)
def test_haproxy_takes_what_is_made_of_rays_file(applications, prefixed, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTEND_PREFIX_ROUTING", prefixed)
    config = ray_config(tmp_path, PORTS, applications, {"other": "/other"}, stats_port=9, metrics_port=10)
    done = subprocess.run([write_edge(tmp_path), "-c", "-f", config, "-q"], capture_output=True, text=True)
    assert done.returncode == 0 and "[ALERT]" not in done.stderr
    text = config.read_text()
    assert text.count("\nserver SERVE_REPLICA-") == 4 * len(applications) * bool(applications.get("default"))
    assert text.count("SERVE_PROXY_ACTOR") == 1, "but for its list of applications, Serve's own proxy would hold calls"
    assert " mode 600 level admin" in text and " mode 666 " not in text
    assert text.count("check tcp-ut") + text.count("track grpc-") == text.count("\nserver ")


def test_the_binary_runs_as_ray_wants_it_and_its_error_is_rays_to_read(tmp_path, monkeypatch):
    binary = tmp_path / "binary"
    binary.write_text('#!/bin/sh\necho "$@"\n')
    binary.chmod(0o755)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(binary))
    config = ray_config(tmp_path, PORTS, {"default": TWO}, stats_port=9, metrics_port=10)
    words = ["-db", "-f", str(config), "-dR", "-sf", "7"]
    done = subprocess.run([write_edge(tmp_path), *words], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.split(), done.stderr) == (words, "")
    config.unlink()
    done = subprocess.run([write_edge(tmp_path), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "haproxy.cfg" in done.stderr


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("    nbthread 4", "    lua-load-per-thread x.lua"),
        ("listen stats", "listen others"),
        (" mode 666 ", " mode 644 "),
        ("    server SERVE_REPLICA-a 127.0.0.1:5 check", "    server SERVE_REPLICA-a 127.0.0.1:5 weight 3 check"),
    ],
)
@pytest.mark.parametrize("style", ["text", "json"])
def test_what_is_not_known_of_rays_file_starts_nothing_and_is_told(line, other, style, tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("ATTEND_LOG_FILE", str(log))
    monkeypatch.setenv("ATTEND_LOG_FORMAT", style)
    config = ray_config(tmp_path, PORTS, {"default": TWO}, stats_port=9, metrics_port=10)
    text = config.read_text()
    assert line in text
    config.write_text(text.replace(line, other, 1))
    done = subprocess.run([write_edge(tmp_path), "-db", "-f", config], capture_output=True, text=True)
    told = "Ray's configuration of HAProxy has a "
    assert done.returncode == 1 and done.stderr.startswith(f"attend: {told}") and "not understood: " in done.stderr
    [found] = log.read_text().splitlines()
    message = json.loads(found)["message"] if style == "json" else found.partition(" ERROR attend.edge: ")[2]
    assert message.startswith(f"HAProxy is not started with its next configuration: {told}")


@pytest.mark.parametrize("files", [256, 1024, 20_000, 1 << 20, resource.RLIM_INFINITY])
def test_haproxy_gets_no_more_connections_than_files_may_be_open(files, monkeypatch):
    monkeypatch.setattr(haproxy.resource, "getrlimit", lambda kind: (files, files))
    most = haproxy.connection_limit()
    assert 8 <= most <= haproxy.MAX_CONNECTIONS
    assert files in (256, resource.RLIM_INFINITY) or most * haproxy.FILES_PER_CONNECTION + haproxy.SPARE_FILES <= files


def test_the_lines_name_our_routes_and_limits():
    rules = "\n".join(haproxy.prefix_rules(["a", "b"], grpc=False) + haproxy.prefix_rules(["a", "b"], grpc=True))
    assert f"path_end {COMPLETIONS.path}\n" in rules and f"path_end {CHAT.path} {MESSAGES.path}\n" in rules
    assert f"path_end {RESPONSES.path}\n" in rules
    for route in (COMPLETIONS, CHAT):
        assert f"path {' '.join(f'/{SERVICE}/{rpc}' for rpc in route.rpcs)}\n" in rules
    assert f"path_end {UPLOAD.path} {BATCH_CREATE.path} " in haproxy.HTTP_BACKEND
    assert f"time {BODY_SECONDS:g}s unless {{ req.hdr(content-length) -m int gt {MAX_BYTES} }}" in haproxy.HTTP_FRONTEND


# What becomes of a request


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with in_front(tmp_path_factory.mktemp("edge"), timeout_server_s=1) as made:
        yield made


@pytest.fixture
def edge(started: Edge) -> Edge:
    """The same, with replicas that answer and know of no call before."""
    for replica in started.replicas:
        replica.judge = lambda *_: 200
        replica.calls.clear()
        replica.headers.clear()
        replica.forwarded.clear()
    return started


def ends(*_: object) -> int:
    """A replica that ends before it answers."""
    raise ConnectionError


def sleeps(*_: object) -> int:
    """One that does not answer in time."""
    time.sleep(3)
    return 200


def error_of(answer: tuple[int, dict[str, str], bytes]) -> dict[str, str]:
    error = json.loads(answer[2])["error"]
    assert set(error) == SHAPE and answer[1]["content-type"] == "application/json"
    return error


@pytest.mark.parametrize(
    ("judge", "status", "code", "kind", "headers"),
    [
        (ends, 503, "unavailable", "unavailable_error", {"retry-after": "1"}),
        (sleeps, 504, "deadline_exceeded", "timeout_error", {"x-should-retry": "false"}),
    ],
)
def test_a_replica_that_ends_or_does_not_answer_is_an_error_that_sdks_read(edge, judge, status, code, kind, headers):
    for replica in edge.replicas:
        replica.judge = judge
    [answer] = edge.send(POST)
    assert answer[0] == status and answer[1].items() >= headers.items()
    assert (error_of(answer)["code"], error_of(answer)["type"]) == (code, kind)


@pytest.mark.parametrize(("path", "tries"), [("/v1/completions", 2), ("/v1/batches", 1), ("/v1/files", 1)])
def test_what_creates_is_tried_once_and_all_else_once_more_where_a_replica_dies(edge, path, tries):
    for replica in edge.replicas:
        replica.judge = ends
    assert edge.post(path)[0] == 503
    assert edge.num_calls() == tries


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (POST.replace(b"HTTP/1.1", b"HTTP/9.9"), 505, "invalid_request"),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x:1\r\n\r\n", 404, "not_found"),
    ],
)
def test_what_is_refused_before_a_replica_has_our_shape(edge, request_bytes, status, code):
    [answer] = edge.send(request_bytes)
    assert (answer[0], error_of(answer)["code"], edge.num_calls()) == (status, code, 0)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, id="HTTP/2"),
        pytest.param(b"hello\r\n\r\n", 400, id="text"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, id="a handshake of TLS"),
        pytest.param(HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400, id="an unknown coding"),
        pytest.param(HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, id="two lengths"),
        pytest.param(HEAD + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n", 400, id="a long header"),
        pytest.param(HEAD + b"X-Many: a\r\n" * 4096 + b"\r\n", 400, id="thousands of headers"),
        pytest.param(HEAD + b"Host: y\r\n\r\n", 400, id="two hosts"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ", 408, id="a head that does not end"),
    ],
)
def test_what_is_no_http_1_reaches_no_replica_and_ends_the_connection(edge, sent, status):
    answer = exchanged(edge, sent)
    assert answer.startswith(b"HTTP/1.1 %d " % status) and answer.count(b"HTTP/1.") == 1
    assert edge.num_calls() == 0


def test_a_connection_that_sends_nothing_is_closed_without_a_word(edge):
    """Browsers open connections ahead, and take what comes on one for the answer to their next request."""
    assert exchanged(edge, b"") == b""


def exchanged(edge: Edge, sent: bytes) -> bytes:
    """All that comes back until HAProxy closes the connection."""
    with socket.create_connection(edge.address, 15) as caller:
        caller.sendall(sent)
        return b"".join(iter(lambda: caller.recv(65536), b""))


@pytest.mark.parametrize(
    ("headers", "is_kept"),
    [
        (["X-Request-Id: good"], True),
        ([], False),
        (["X-Request-Id: evil id"], False),
        (["X-Request-Id: good, other"], False),
        (["X-Request-Id: good", "x-request-id: good"], False),
        (["X-Request-Id: " + "a" * 129], False),
    ],
)
def test_a_replica_gets_the_callers_id_where_there_is_one_and_it_is_plain(edge, headers, is_kept):
    edge.send(POST.replace(b"\r\n", "\r\n".join(["", *headers, ""]).encode(), 1))
    [got] = [values for replica in edge.replicas for values in replica.headers]
    assert [value for name, value in got if name == "x-request-id"] == ["good"] * is_kept


FORGED = (("203.0.113.5",), ("192.0.2.1", "203.0.113.5"), ())


@pytest.mark.parametrize("lines", FORGED)
def test_the_address_that_connected_comes_last_whatever_a_caller_writes(edge, lines):
    edge.send(POST.replace(b"\r\n", "\r\n".join(["", *(f"X-Forwarded-For: {line}" for line in lines), ""]).encode(), 1))
    [got] = [values for replica in edge.replicas for values in replica.headers]
    assert [value for name, value in got if name == "x-forwarded-for"] == [*lines, "127.0.0.1"]


@pytest.mark.parametrize("lines", FORGED)
def test_over_grpc_it_comes_last_in_one_line_since_a_server_sees_only_the_last_one(edge, lines):
    method = edge.channel.unary_unary("/attend.v1.GenerationService/Generate")
    method(b"", metadata=tuple(("x-forwarded-for", line) for line in lines), timeout=10)
    got = [values for replica in edge.replicas for values in replica.forwarded if values]
    assert got == [[f"{lines[-1]},127.0.0.1" if lines else "127.0.0.1"]]


@pytest.mark.parametrize("count", [150, 300])
def test_many_fields_of_metadata_are_the_replicas_to_judge(edge, count):
    """With HAProxy's own limit, 101, the first was INTERNAL, and the second ended all calls of its connection."""
    method = edge.channel.unary_unary("/attend.v1.GenerationService/Generate")
    call = method.future(b"", metadata=[(f"x-{number}", "a") for number in range(count)], timeout=10)
    assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)


# Several applications, and none


def test_a_call_reaches_the_replica_of_its_application_and_another_is_not_found(tmp_path):
    with in_front(tmp_path, apart=True) as edge:
        calls = [replica.calls for replica in edge.replicas]
        for place, (name, prefix) in enumerate((("code", "/code"), ("chat", "/code/chat"))):
            assert edge.post(f"{prefix}/v1/completions")[0] == 200
            assert (calls[place].pop(), calls[1 - place]) == (f"{prefix}/v1/completions", []), "Serve tells which is its own"
            assert edge.call(application=name)[0] == grpc.StatusCode.OK
            assert (calls[place].pop(), calls[1 - place]) == ("gRPC", [])
        for path in ("/v1/completions", "/codes/v1/completions", "/"):
            [answer] = edge.send(POST.replace(b"/v1/completions", path.encode()))
            assert (answer[0], error_of(answer)["code"]) == (404, "not_found")
            assert error_of(answer)["message"].endswith("there are /code, /code/chat")
        for metadata in ({}, {"application": "other"}):
            assert edge.call(**metadata)[0] == grpc.StatusCode.NOT_FOUND
        assert edge.num_calls() == 0


def test_without_a_replica_haproxy_is_alive_and_not_ready(tmp_path):
    """While no replica runs, a probe of liveness must not end the pod in which one loads."""
    with in_front(tmp_path) as edge:
        assert edge.post("/readyz", "GET", body=None)[0] == 200
        for replica in edge.replicas:
            replica.stop()
        assert wait_for(lambda: edge.post("/readyz", "GET", body=None)[0] == 503, 10)
        assert edge.post("/healthz", "GET", body=None)[::2] == (200, b"ok\n")
        assert wait_for(lambda: edge.call()[:2] == (grpc.StatusCode.UNAVAILABLE, haproxy.NONE_UP), 10)
        assert edge.call()[2]["retry-after"] == "1"
        assert status_line(edge.grpc_port)


def status_line(port: int) -> bool:
    """True if a status over gRPC has the content-type of it: many clients take no other answer."""
    names = {":method": "POST", ":scheme": "http", ":path": "/attend.v1.GenerationService/Generate", ":authority": "x"}
    fields = {**names, "content-type": "application/grpc", "te": "trailers"}
    block = b"".join(b"\0%c%b%c%b" % (len(k), k.encode(), len(v), v.encode()) for k, v in fields.items())
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
    with socket.create_connection(("127.0.0.1", port), 10) as caller:
        caller.sendall(preface + len(block).to_bytes(3, "big") + bytes.fromhex("010500000001") + block)
        got = b""
        while more := caller.recv(65536):
            got += more
            if b"no replica" in got and b"application/grpc" in got:
                return True
    return False
