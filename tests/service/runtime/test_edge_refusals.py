"""What HAProxy itself says to a caller: each refusal in the shape of the API that was called, or as a status of gRPC."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import cast

import grpc
import pytest

from attend.service.contract.answers import Error
from attend.service.http_api.problems import in_anthropics
from attend.service.observe.edge import haproxy_facts
from attend.service.runtime.edge import MAX_FIELDS, READABLE_FIELDS
from tests.service.runtime.edges import SECONDS, Edge, in_front
from tests.service.server import wait_for

ERRORS, OPEN = 20, 20
ORIGIN = "https://page.example"
VARIABLES = {
    "ATTEND_API_KEYS_FILE": "keys.json",
    "ATTEND_MAX_ERRORS_PER_SECOND": str(ERRORS),
    "ATTEND_MAX_CONNECTIONS_PER_SOURCE": "3",
    "ATTEND_CORS_ORIGINS": ORIGIN,
}
OPENAI, ANTHROPIC = "/v1/completions", "/v1/messages"
PATHS = (OPENAI, ANTHROPIC, "/v1/%6Dessages/count_tokens", "/v1/messagesx")
GOOD = "Authorization: Bearer good"
Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    limits = {"open": OPEN, "body_seconds": 1, "header_seconds": 2}
    with in_front(tmp_path_factory.mktemp("edge"), limits, server_seconds=1, **VARIABLES) as made:
        yield made


@pytest.fixture
def quiet(edge: Edge) -> Iterator[Edge]:
    """The same, which knows nothing of callers before, and whose replicas are well."""
    for table in ("attend_errors", "attend_guesses", "attend_open"):
        edge.command(f"clear table {table}")
    yield edge
    was_full = any(replica.full for replica in edge.replicas)
    for replica in edge.replicas:
        replica.full, replica.spent, replica.judge = False, "", lambda *_: 200
    if was_full:
        time.sleep(1.5 * SECONDS)


def post(path: str, *headers: str, length: int = 2) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "X-Request-Id: mine", f"Origin: {ORIGIN}", *headers]).encode() + b"\r\n\r\n{}"


def told(answer: Answer, status: int, code: str, kind: str, path: str, **headers: str) -> None:
    """Check that HAProxy refused by itself with all that the application would have said beside it."""
    got, fields, body = answer
    document = json.loads(body)
    assert (got, fields["content-type"], fields["x-request-id"]) == (status, "application/json", "mine")
    error = {"message": document["error"]["message"], "type": kind, "param": None, "code": code}
    expected: object = {"error": error}
    if path not in (OPENAI, "/v1/messagesx"):
        expected = in_anthropics(cast(Error, {"error": error}), status, "mine")
    assert document == expected
    assert {name: fields.get(name) for name in headers} == headers
    assert (fields["access-control-allow-origin"], fields["vary"]) == (ORIGIN, "Origin")


# Over HTTP


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_two_keys(quiet: Edge, path: str, name: str) -> None:
    [answer] = quiet.send(post(path, f"{name}: Bearer good", f"{name}: Bearer bad"))
    told(answer, 401, "invalid_api_key", "authentication_error", path, **{"www-authenticate": "Bearer"})


@pytest.mark.parametrize("path", PATHS)
def test_a_version_that_is_none(quiet: Edge, path: str) -> None:
    [answer] = quiet.send(post(path, GOOD).replace(b"HTTP/1.1", b"HTTP/9.9"))
    told(answer, 505, "invalid_request", "invalid_request_error", path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("count", [MAX_FIELDS + 1, 300, READABLE_FIELDS - 10])
def test_too_many_headers(quiet: Edge, count: int, path: str) -> None:
    fields = ["X-Many: a"] * (count - post(path, GOOD).count(b": "))
    [answer] = quiet.send(post(path, GOOD, *fields))
    told(answer, 431, "request_too_large", "invalid_request_error", path, connection="close")


def test_as_many_headers_as_may_be(quiet: Edge) -> None:
    sent = post(OPENAI, GOOD).replace(b"X-Request-Id: mine\r\n", b"")  # the id that HAProxy gives it is none of them
    for each in (sent, post(OPENAI, GOOD)):
        [answer] = quiet.send(each.replace(b"\r\n\r\n", b"\r\nX: a" * (MAX_FIELDS - each.count(b": ")) + b"\r\n\r\n"))
        assert answer[0] == 431 and b"Too many headers" in answer[2], "of the replica, which takes a hundred with ours"


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_does_not_come(quiet: Edge, path: str) -> None:
    [answer] = quiet.send(post(path, GOOD, length=3))
    told(answer, 408, "request_timeout", "invalid_request_error", path)


@pytest.mark.parametrize("path", PATHS)
def test_a_key_that_makes_too_many_errors(quiet: Edge, path: str) -> None:
    for replica in quiet.replicas:
        replica.judge = lambda *_: 404
    answers = quiet.send(*[post(path, GOOD)] * (10 * ERRORS))
    told(answers[-1], 429, "too_many_errors", "rate_limit_error", path, **{"retry-after": "10"})


@pytest.mark.parametrize("path", PATHS)
def test_keys_that_are_guessed(quiet: Edge, path: str) -> None:
    for replica in quiet.replicas:
        replica.judge = lambda *_: 401
    answers = quiet.send(*[post(path, f"Authorization: Bearer {number}") for number in range(10 * ERRORS)])
    told(answers[-1], 429, "too_many_errors", "rate_limit_error", path, **{"retry-after": "10"})


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
def test_a_key_that_has_used_up_its_requests(quiet: Edge, path: str) -> None:
    for replica in quiet.replicas:
        replica.spent = "Bearer good"
    answers = quiet.send(*[post(path, GOOD)] * 10)
    refused = next(answer for answer in reversed(answers) if answer[2] != b"replica")
    told(refused, 429, "rate_limit_exceeded", "rate_limit_error", path, **{"retry-after": "1"})


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
def test_replicas_that_are_full(quiet: Edge, path: str) -> None:
    for replica in quiet.replicas:
        replica.full = True
    found: list[Answer] = []
    assert wait_for(lambda: found.append(quiet.send(post(path, GOOD))[0]) or found[-1][2] != b"replica")
    told(found[-1], 429, "queue_full", "overloaded_error", path, **{"retry-after": "7"})


@pytest.mark.parametrize("path", PATHS)
def test_too_many_connections(quiet: Edge, path: str) -> None:
    held = [socket.create_connection(quiet.address, 5) for _ in range(3)]
    try:
        found: list[Answer] = []
        assert wait_for(lambda: found.append(quiet.send(post(path, GOOD))[0]) or found[-1][0] == 429)
        told(found[-1], 429, "too_many_connections", "rate_limit_error", path, **{"retry-after": "1"})
    finally:
        for each in held:
            each.close()


def test_a_page_without_a_key_too_often(quiet: Edge) -> None:
    page = f"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine\r\nOrigin: {ORIGIN}\r\n\r\n".encode()
    told(quiet.send(*[page] * 3 * OPEN)[-1], 429, "too_many_requests", "rate_limit_error", OPENAI, **{"retry-after": "1"})


def ends(*_: object) -> int:
    """A replica that closes the connection without an answer."""
    raise ConnectionError


def sleeps(*_: object) -> int:
    """One that does not answer in time."""
    time.sleep(3)
    return 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("judge", "status", "code", "kind", "headers"),
    [
        (ends, 503, "unavailable", "unavailable_error", {"retry-after": "1"}),
        (sleeps, 504, "deadline_exceeded", "timeout_error", {"x-should-retry": "false"}),
    ],
)
def test_a_replica_that_ends_or_does_not_answer(
    quiet: Edge, judge: Callable[..., int], status: int, code: str, kind: str, headers: dict[str, str], path: str
) -> None:
    for replica in quiet.replicas:
        replica.judge = judge
    [answer] = quiet.send(post(path, GOOD))
    told(answer, status, code, kind, path, **headers)


@pytest.mark.parametrize("path", PATHS)
def test_no_replica(path: str, gone: Edge) -> None:
    [answer] = gone.send(post(path, GOOD))
    told(answer, 503, "unavailable", "unavailable_error", path, **{"retry-after": "1"})


@pytest.fixture(scope="module")
def gone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """HAProxy whose replicas are down."""
    with in_front(tmp_path_factory.mktemp("gone"), ATTEND_CORS_ORIGINS=ORIGIN) as made:
        for replica in made.replicas:
            replica.stop()
        assert wait_for(lambda: made.send(post(OPENAI, GOOD))[0][0] == 503, 10)
        assert wait_for(lambda: made.call()[1] == "no replica can take the request now", 10)
        yield made


# What is no HTTP. HAProxy refuses it before it has a request, by a text that is constant in its program (`h1_send_error` of
# mux_h1.c in 2.8): a configuration can make it empty, and nothing else. service/OPERATION.md says what was tried.

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
END = b"Connection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(b"hello\r\n\r\n", 400, id="text"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, id="a handshake of TLS"),
        pytest.param(b"GET /v1/models\r\n", 400, id="HTTP/0.9"),
        pytest.param(HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400, id="an unknown coding"),
        pytest.param(HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, id="two lengths"),
        pytest.param(HEAD + b"Content-Length: -1\r\n\r\n{}", 400, id="a negative length"),
        pytest.param(HEAD + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n{}", 400, id="a length without end"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, id="a chunk without a length"),
        pytest.param(HEAD + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n", 400, id="a long header"),
        pytest.param(HEAD + b"X-Many: a\r\n" * READABLE_FIELDS + b"\r\n", 400, id="thousands of headers"),
        pytest.param(HEAD + b"X Y: 1\r\n\r\n", 400, id="a space in a header's name"),
        pytest.param(HEAD + b"X-Y : 1\r\n\r\n", 400, id="a space before a colon"),
        pytest.param(HEAD + b"X-Y: a\0b\r\n\r\n", 400, id="a NUL"),
        pytest.param(HEAD + b"Host: y\r\n\r\n", 400, id="two hosts"),
        pytest.param(b"G@T /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 400, id="a bad method"),
        pytest.param(b"GET /v1/\x01 HTTP/1.1\r\nHost: x\r\n\r\n", 400, id="a bad target"),
        pytest.param(HEAD + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n", 400, id="a websocket without a key"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ", 408, id="a head that does not end"),
    ],
)
def test_what_is_no_http_reaches_no_replica_and_ends_the_connection(quiet: Edge, sent: bytes, status: int) -> None:
    before = quiet.num_calls()
    answer = exchanged(quiet, sent)
    assert answer.startswith(b"HTTP/1.1 %d " % status) and answer.count(b"HTTP/1.") == 1
    assert quiet.num_calls() == before


def test_a_connection_that_sends_nothing_is_closed_without_a_word(quiet: Edge) -> None:
    """Browsers open connections ahead, and take what comes on one for the answer to their next request."""
    assert exchanged(quiet, b"") == b""


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        pytest.param(
            HEAD.replace(b"\r", b"") + b"Content-Length: 2\nConnection: close\n\n{}", b"replica", id="bare line feeds"
        ),
        pytest.param(HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n" + END + b"{}", b"replica", id="one length twice"),
        pytest.param(b"GET http://x/v1/models HTTP/1.1\r\nHost: x\r\n" + END, b"replica", id="an absolute target"),
    ],
)
def test_what_is_nearly_http_is_put_right_for_the_replica(quiet: Edge, sent: bytes, body: bytes) -> None:
    assert exchanged(quiet, sent).endswith(b"\r\n\r\n" + body)


def exchanged(edge: Edge, sent: bytes) -> bytes:
    """All that comes back until HAProxy closes the connection."""
    with socket.create_connection(edge.address, 10) as caller:
        caller.sendall(sent)
        return b"".join(iter(lambda: caller.recv(65536), b""))


# Over gRPC


def status(answer: tuple[grpc.StatusCode, str, dict[str, str]]) -> tuple[grpc.StatusCode, str, str | None, str | None]:
    code, details, metadata = answer
    return code, details, metadata.get("x-request-id"), metadata.get("retry-after")


@pytest.mark.parametrize(
    ("service", "method"),
    [("attend.v1.GenerationService", "Generate"), ("grpc.health.v1.Health", "Check"), ("no.Service", "Any")],
)
def test_no_replica_over_grpc(gone: Edge, service: str, method: str) -> None:
    expected = (grpc.StatusCode.UNAVAILABLE, "no replica can take the request now", "mine", "1")
    assert status(gone.call(method, service)) == expected


def counted(edge: Edge) -> tuple[float, float]:
    """Errors over gRPC that callers got, and those of them that a replica sent."""
    known = haproxy_facts("127.0.0.1", edge.stats_port, 5)
    return known["grpc_errors"], known["grpc_replica_errors"]


def test_errors_over_grpc_are_counted_by_who_sent_them_and_refusals_and_probes_are_not(tmp_path) -> None:
    judged = {"Generate": grpc.StatusCode.INTERNAL, "Embed": grpc.StatusCode.INVALID_ARGUMENT}
    with in_front(tmp_path) as edge:
        for replica in edge.replicas:
            replica.statuses = judged
        for method, code in (*judged.items(), ("Chat", grpc.StatusCode.OK)):
            assert status(edge.call(method))[0] is code
        assert counted(edge) == (1, 1)
        for replica in edge.replicas:
            replica.stop()
        assert wait_for(lambda: status(edge.call())[1] == "no replica can take the request now", 10)
        before = counted(edge)
        assert before[0] > 1 and before[1] == 1
        assert status(edge.call("Check", "grpc.health.v1.Health"))[0] is grpc.StatusCode.UNAVAILABLE
        assert counted(edge) == before
        edge.call()
        assert counted(edge) == (before[0] + 1, 1)


def test_a_status_has_the_content_type_of_grpc(gone: Edge) -> None:
    """Many clients take an answer without it for none of gRPC."""
    names = {":method": "POST", ":scheme": "http", ":path": "/attend.v1.GenerationService/Generate", ":authority": "x"}
    fields = {**names, "content-type": "application/grpc", "te": "trailers"}
    block = b"".join(b"\0%c%b%c%b" % (len(k), k.encode(), len(v), v.encode()) for k, v in fields.items())
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
    with socket.create_connection(("127.0.0.1", gone.grpc_port), 10) as caller:
        caller.sendall(preface + len(block).to_bytes(3, "big") + bytes.fromhex("010500000001") + block)
        got = b""
        while not (b"no replica" in got and b"application/grpc" in got):
            more = caller.recv(65536)
            assert more, got
            got += more


@pytest.mark.parametrize("count", [150, 300])
def test_many_fields_of_metadata_are_the_replicas_to_judge(quiet: Edge, count: int) -> None:
    """With HAProxy's own limit, 101, the first was INTERNAL, and the second ended all calls of its connection."""
    method = quiet.channel.unary_unary("/attend.v1.GenerationService/Generate")
    call = method.future(b"", metadata=[(f"x-{number}", "a") for number in range(count)], timeout=10)
    assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_too_many_connections_over_grpc(quiet: Edge) -> None:
    held = [socket.create_connection(quiet.address, 5) for _ in range(3)]
    expected = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many connections from your address", "mine", "1")
    try:
        with quiet.another_channel() as late:
            assert wait_for(lambda: status(replace(quiet, channel=late).call()) == expected)
    finally:
        for each in held:
            each.close()


@pytest.mark.parametrize(
    ("behave", "code", "details", "after"),
    [
        ("ends", grpc.StatusCode.UNAVAILABLE, "the replica ended before it answered", "1"),
        ("sleeps", grpc.StatusCode.DEADLINE_EXCEEDED, "the replica did not answer in time", None),
    ],
)
def test_a_replica_that_ends_or_does_not_answer_over_grpc(
    tmp_path, behave: str, code: grpc.StatusCode, details: str, after: str | None
) -> None:
    with in_front(tmp_path, server_seconds=1) as edge, Held(edge, behave):
        assert status(edge.call()) == (code, details, "mine", after)


class Held:
    """Sockets in the place of gRPC replicas that speak HTTP/2 up to the call, and then end or sleep."""

    def __init__(self, edge: Edge, behave: str) -> None:
        self.behave = behave
        self.sockets = []
        for replica in edge.replicas:
            replica.grpc.stop(0).wait()
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", replica.grpc_port))
            listener.listen()
            self.sockets.append(listener)
            threading.Thread(target=self.serve, args=(listener,), daemon=True).start()

    def __enter__(self) -> None:
        """Nothing to wait for: HAProxy has seen no replica down."""

    def __exit__(self, *_: object) -> None:
        for each in self.sockets:
            each.close()

    def serve(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the listener is closed at the end
            while True:
                caller, _ = listener.accept()
                threading.Thread(target=self.answer, args=(caller,), daemon=True).start()

    def answer(self, caller: socket.socket) -> None:
        with caller, suppress(OSError):
            if caller.recv(65536):  # nothing comes from a health check
                caller.sendall(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
                time.sleep(0.2 if self.behave == "ends" else 3)
