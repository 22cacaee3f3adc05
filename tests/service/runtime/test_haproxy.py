"""What HAProxy is told: a configuration that it takes, in all forms, and what becomes of each request."""

import json
import resource
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator

import grpc
import pytest

from attend.service.errors import SPENT
from attend.service.observe.edge import haproxy_facts
from attend.service.runtime import certificate_renewal, haproxy
from attend.service.runtime.edge import READY_MS, write_edge
from tests.service.certificates import Authority
from tests.service.runtime.edges import CONFIG, NAMES, SECONDS, Edge, in_front, ray_config
from tests.service.server import wait_for

ERRORS, OPEN = 20, 20
PORTS = {"http": 1, "grpc": 2, "http_proxy": 3, "grpc_proxy": 4}
TWO = {"a": (5, 6), "b": (7, 8)}
KEYS = {"ATTEND_API_KEYS_FILE": "keys.json", "ATTEND_MAX_ERRORS_PER_SECOND": str(ERRORS)}


# A configuration that HAProxy takes


@pytest.mark.parametrize(
    ("applications", "environment"),
    [
        pytest.param({"default": TWO}, {}, id="two replicas"),
        pytest.param({}, {}, id="no application"),
        pytest.param({"default": {}}, {}, id="no replica"),
        pytest.param({"default": TWO, "other": TWO}, {}, id="two applications"),
        pytest.param({"default": TWO}, KEYS, id="keys"),
        pytest.param({"default": TWO}, KEYS | {"ATTEND_MAX_ERRORS_PER_SECOND": "0"}, id="keys without a limit on errors"),
        pytest.param({"default": TWO}, {"ATTEND_MAX_CONNECTIONS_PER_SOURCE": "7"}, id="connections of one address"),
        pytest.param({"default": TWO}, {"ATTEND_CORS_ORIGINS": "*"}, id="every page"),
        pytest.param({"default": TWO}, {"ATTEND_CORS_ORIGINS": 'https://a.example, x"y$z\\'}, id="some pages"),
        pytest.param({"default": TWO}, {"ATTEND_TLS_CERT": "", "ATTEND_TLS_KEY": ""}, id="TLS"),
    ],
)
def test_haproxy_takes_what_is_made_of_rays_file(applications, environment, tmp_path, monkeypatch):
    if "ATTEND_TLS_CERT" in environment:
        environment = dict(zip(environment, map(str, Authority(tmp_path).sign("good")), strict=True))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = ray_config(tmp_path, PORTS, applications, stats_port=9, metrics_port=10)
    done = subprocess.run([write_edge(tmp_path, 75), "-c", "-f", config, "-q"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    text = config.read_text()
    assert ("ssl crt" in text) == ("ATTEND_TLS_CERT" in environment)
    assert text.count("    server SERVE_REPLICA-") == 4 * len(applications) * bool(applications.get("default"))
    assert "SERVE_PROXY_ACTOR-1 127.0.0.1:3" not in text, "Serve's own proxy would hold calls"


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


def test_a_line_of_rays_that_is_not_known_starts_nothing_and_is_named(tmp_path):
    config = ray_config(tmp_path, PORTS, {"default": TWO}, stats_port=9, metrics_port=10)
    config.write_text(config.read_text().replace("    nbthread ", "    lua-load-per-thread x.lua\n    nbthread "))
    done = subprocess.run([write_edge(tmp_path), "-c", "-f", config], capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        done.stderr == "attend: Ray's configuration of HAProxy has a line that is not understood: lua-load-per-thread x.lua\n"
    )


@pytest.mark.parametrize("text", ["", "global\n    maxconn 3\ndefaults\n"])
def test_a_file_without_what_is_needed_is_refused_in_a_sentence(text):
    with pytest.raises(haproxy.NotUnderstood, match="has no line"):
        haproxy.parse_ray_config(text)


@pytest.mark.parametrize("files", [256, 1024, 20_000, 1 << 20, resource.RLIM_INFINITY])
def test_neither_transport_takes_all_connections_however_few_files_may_be_open(files, monkeypatch):
    monkeypatch.setattr(haproxy.resource, "getrlimit", lambda kind: (files, files))
    limits = {"connections": 8192, "http_connections": 6144, "grpc_connections": 1920}
    most, shares = haproxy.connection_limits(limits)
    assert 1 <= shares["grpc"] < shares["http"] and sum(shares.values()) <= most <= 8192
    assert files in (256, resource.RLIM_INFINITY) or most * haproxy.FILES_PER_CONNECTION + haproxy.SPARE_FILES <= files


# A configuration that it does not take


def test_a_failed_reload_is_told_with_haproxys_reason_and_on_the_page_until_one_succeeds(tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("ATTEND_LOG_FILE", str(log))
    with in_front(tmp_path, ATTEND_LOG_FILE=str(log)) as edge:
        assert haproxy_facts("127.0.0.1", edge.stats_port, 5)["reload_ok"] == 1
        (tmp_path / "haproxy.cfg").write_text(CONFIG.format(folder=tmp_path, server_seconds=1, **dict.fromkeys(NAMES, 1)))
        (tmp_path / "haproxy.cfg.j2").write_text((tmp_path / "haproxy.cfg.j2").read_text() + "backend x\n    nonsense here\n")
        words = ["-db", "-f", str(tmp_path / "haproxy.cfg"), "-sf", "1"]
        done = subprocess.run([tmp_path / "haproxy", *words], capture_output=True, text=True, timeout=60)
        reason = "unknown keyword 'nonsense' in 'backend' section"
        assert done.returncode == 1 and reason in done.stderr
        [line] = log.read_text().splitlines()
        assert " ERROR attend.edge: HAProxy is not started with its next configuration: config : parsing [" in line
        assert reason in line
        assert haproxy_facts("127.0.0.1", edge.stats_port, 5)["reload_ok"] == 0
        assert not (tmp_path / "current").exists(), "the one that runs goes on"


def test_a_file_of_rays_that_is_not_understood_is_told_too(tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("ATTEND_LOG_FILE", str(log))
    monkeypatch.setenv("ATTEND_LOG_FORMAT", "json")
    with in_front(tmp_path) as edge:
        text = CONFIG.format(folder=tmp_path, server_seconds=1, **dict.fromkeys(NAMES, 1))
        (tmp_path / "haproxy.cfg").write_text(text.replace("    balance leastconn", "    surprise"))
        done = subprocess.run([tmp_path / "haproxy", "-db", "-f", tmp_path / "haproxy.cfg"], capture_output=True, timeout=60)
        assert done.returncode == 1
        line = json.loads(log.read_text())
        assert (line["level"], line["logger"]) == ("error", "attend.edge")
        assert line["message"].endswith("has a line that is not understood: surprise")
        assert haproxy_facts("127.0.0.1", edge.stats_port, 5)["reload_ok"] == 0


def test_of_a_certificate_haproxy_says_what_is_noted(tmp_path):
    cert, key = map(str, Authority(tmp_path).sign("good", days=1))
    with in_front(tmp_path, ATTEND_TLS_CERT=cert, ATTEND_TLS_KEY=key) as edge:
        told = haproxy_facts("127.0.0.1", edge.stats_port, 5)
        assert told.keys() >= {"reload_ok", "tls_reload_ok", "tls_expiry"}
        assert (told["reload_ok"], told["tls_reload_ok"]) == (1, 1) and 0 < told["tls_expiry"] - time.time() <= 86400
        certificate_renewal.publish(edge.admin, tmp_path / "tls.map", {"ok": "0", "expiry": "7"})
        told = haproxy_facts("127.0.0.1", edge.stats_port, 5)
        assert [told[name] for name in ("reload_ok", "tls_reload_ok", "tls_expiry")] == [1, 0, 7]


# What becomes of a request


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """HAProxy where keys are asked for: `Bearer good...` are known, others are a 401; /wrong... is a 404."""

    def judge(method: str, path: str, key: str | None) -> int:
        if path.startswith("/wrong"):
            return 404
        return 200 if method == "GET" or (key or "").lower().startswith("bearer good") else 401

    with in_front(tmp_path_factory.mktemp("edge"), {"open": OPEN}, **KEYS, ATTEND_MAX_CONNECTIONS_PER_SOURCE="3") as edge:
        for replica in edge.replicas:
            replica.judge = judge
        yield edge


@pytest.fixture
def quiet(keyed: Edge) -> Edge:
    """The same, which knows nothing of callers before."""
    for table in ("attend_errors", "attend_guesses", "attend_open"):
        keyed.command(f"clear table {table}")
    if any(replica.full for replica in keyed.replicas):
        time.sleep(1.5 * SECONDS)
    for replica in keyed.replicas:
        replica.full, replica.spent = False, ""
        replica.calls.clear()
        replica.headers.clear()
    return keyed


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers]).encode() + b"\r\n\r\n"


def post(path: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 2", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n{}"


def code(answer: tuple[int, dict[str, str], bytes]) -> str:
    """Who answered, and what: `replica 200`, or HAProxy's code or text."""
    status, headers, body = answer
    if body == b"replica":
        return f"replica {status}"
    if headers["content-type"] == "application/json":
        return f"{status} {json.loads(body)['error']['code']}"
    return f"{status} {body.decode().strip()}"


@pytest.mark.parametrize(
    ("request_bytes", "verdict"),
    [
        (get("/healthz"), "200 ok"),
        (get("/health"), "200 ok"),
        (get("/healthz?x=1"), "200 ok"),
        (get("/%68ealth%7A"), "200 ok"),
        (get("//healthz"), "replica 200"),
        (get("/./healthz"), "replica 200"),
        (get("/HEALTHZ"), "replica 200"),
        (get("/healthz/"), "replica 200"),
        (get("/%2568ealthz"), "replica 200"),
        (get("/%zz"), "replica 200"),
        (post("/healthz", "Authorization: Bearer good"), "replica 200"),
        (post("/v1/completions", "Authorization: Bearer good"), "replica 200"),
        (post("/v1/completions", "Authorization: Bearer bad"), "replica 401"),
        (post("/v1/completions", "Authorization: Bearer good", "Authorization: Bearer good"), "401 invalid_api_key"),
        (post("/v1/completions", "Authorization: Bearer good", "authorization: Bearer x"), "401 invalid_api_key"),
        (post("/v1/completions", "Authorization: Bearer good, Bearer x"), "replica 200"),
        (get("/v1/models").replace(b"HTTP/1.1", b"HTTP/9.9"), "505 invalid_request"),
        (get("/healthz").replace(b"HTTP/1.1", b"HTTP/9.9"), "505 invalid_request"),
    ],
)
def test_each_request_has_its_verdict(quiet, request_bytes, verdict):
    assert code(quiet.send(request_bytes)[0]) == verdict


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/%63ompletions", "/%76%31/chat/completions", "/v1/embeddings?a=b"])
def test_a_full_queue_refuses_a_path_however_it_is_written(quiet, path):
    for replica in quiet.replicas:
        replica.full = True
    ask = post(path, "Authorization: Bearer good")
    assert wait_for(lambda: code(quiet.send(ask)[0]) == "429 queue_full")


@pytest.mark.parametrize("path", ["/metrics", "/metric%73", "/version"])
def test_pages_without_a_key_are_limited_however_they_are_written(quiet, path):
    verdicts = Counter(code(answer) for answer in quiet.send(*[get(path)] * (3 * OPEN)))
    assert verdicts["429 too_many_requests"] > 0 and verdicts["replica 200"] >= OPEN
    assert code(quiet.send(get("/v1/models"))[0]) == "replica 200"


@pytest.mark.parametrize(
    ("headers", "is_kept"),
    [
        (("X-Request-Id: good",), True),
        ((), False),
        (("X-Request-Id: evil id",), False),
        (("X-Request-Id: good, other",), False),
        (("X-Request-Id: good,evil id <x>",), False),
        (("X-Request-Id: good", "X-Request-Id: evil id <x>"), False),
        (("X-Request-Id: good", "x-request-id: good"), False),
        (("X-Request-Id: " + "a" * 129,), False),
    ],
)
def test_an_id_is_kept_where_there_is_one_and_it_is_plain_and_the_replica_gets_no_other(quiet, headers, is_kept):
    quiet.send(post("/v1/completions", "Authorization: Bearer good", *headers))
    [got] = [values for replica in quiet.replicas for values in replica.headers]
    [seen] = [value for name, value in got if name == "x-request-id"]
    assert (seen == "good") == is_kept
    assert seen.replace("-", "").isalnum()


FORGED = (("203.0.113.5",), ("203.0.113.5, 10.0.0.1",), ("192.0.2.1", "203.0.113.5"), ())


@pytest.mark.parametrize("lines", FORGED)
def test_the_address_that_connected_comes_last_whatever_a_caller_writes(quiet, lines):
    quiet.send(post("/v1/completions", "Authorization: Bearer good", *(f"X-Forwarded-For: {line}" for line in lines)))
    [got] = [values for replica in quiet.replicas for values in replica.headers]
    assert [value for name, value in got if name == "x-forwarded-for"] == [*lines, "127.0.0.1"]


@pytest.mark.parametrize("lines", FORGED)
def test_over_grpc_it_comes_last_in_one_line_since_a_server_sees_only_the_last_one(quiet, lines):
    for replica in quiet.replicas:
        replica.forwarded.clear()
    method = quiet.channel.unary_unary("/attend.v1.GenerationService/Generate")
    method(b"", metadata=tuple(("x-forwarded-for", line) for line in lines), timeout=10)
    got = [values for replica in quiet.replicas for values in replica.forwarded if values]
    assert got == [[f"{lines[-1]},127.0.0.1" if lines else "127.0.0.1"]]


# Errors of callers


def test_refusals_for_want_of_room_are_no_errors_of_the_caller(quiet):
    """A gateway's callers share a header. Each call reaches a replica or is refused for the queue, as without one."""
    for replica in quiet.replicas:
        replica.full = True
    began = time.monotonic()
    answers = quiet.send(*[post("/v1/completions", "Authorization: Bearer good")] * (30 * ERRORS))
    assert {code(answer) for answer in answers} == {"replica 429", "429 queue_full"}
    assert len(answers) > ERRORS * (time.monotonic() - began), "a slow machine shows nothing"


@pytest.mark.parametrize("status", [408, 429, 503])
def test_what_a_server_has_no_room_or_time_for_is_no_error_of_the_caller(quiet, status):
    """Each call reaches a replica, with as many refusals as there are."""
    judges = [replica.judge for replica in quiet.replicas]
    for replica in quiet.replicas:
        replica.judge = lambda *_: status
    try:
        answers = quiet.send(*[post("/v1/completions", "Authorization: Bearer good")] * (10 * ERRORS))
    finally:
        for replica, judge in zip(quiet.replicas, judges, strict=True):
            replica.judge = judge
    assert {code(answer) for answer in answers} == {f"replica {status}"}


def test_a_key_that_has_used_up_its_requests_is_refused_without_a_replica_for_a_moment_and_no_other_key_is(quiet):
    """And it is asked for again: HAProxy says `retry-after: 1`, a replica how long it takes."""
    spent, other = (post("/v1/completions", f"Authorization: Bearer good-{name}") for name in ("spent", "other"))
    for replica in quiet.replicas:
        replica.spent = "Bearer good-spent"
    first, *later = quiet.send(*[spent] * 50)
    assert code(first) == "replica 200"
    assert SPENT not in first[1]
    assert {code(answer) for answer in later} <= {"429 rate_limit_exceeded", "replica 200"}
    refused = [answer for answer in later if answer[0] == 429]
    assert len(refused) >= 40, "only the end of a second lets one through"
    assert {answer[1]["retry-after"] for answer in refused} == {"1"}
    assert code(quiet.send(other)[0]) == "replica 200"
    assert code(quiet.send(get("/v1/models", "Authorization: Bearer good-spent"))[0]) == "replica 200"
    assert code(quiet.send(post("/tokenize", "Authorization: Bearer good-spent"))[0]) == "replica 200"
    for replica in quiet.replicas:
        replica.spent = ""
    time.sleep(2)
    assert {code(answer) for answer in quiet.send(*[spent] * 50)} == {"replica 200"}


def test_a_key_that_makes_too_many_errors_is_refused_and_no_other_key_is(quiet):
    wrong = [post("/wrong", f"Authorization: {scheme} good-1") for scheme in ("Bearer", "bearer", "BEARER", "bEARER")]
    verdicts = Counter(code(answer) for answer in quiet.send(*wrong * 4 * ERRORS))
    assert set(verdicts) == {"replica 404", "429 too_many_errors"}
    assert ERRORS <= verdicts["replica 404"] <= 8 * ERRORS
    assert code(quiet.send(post("/v1/completions", "Authorization: Bearer good-2"))[0]) == "replica 200"


def test_keys_that_are_guessed_are_cut_and_known_ones_behind_the_same_address_are_not(quiet):
    known = post("/v1/completions", "Authorization: Bearer good-known")
    assert code(quiet.send(known)[0]) == "replica 200"
    guesses = [post("/v1/completions", f"Authorization: Bearer guess-{number}") for number in range(20 * ERRORS)]
    verdicts = Counter(code(answer) for answer in quiet.send(*guesses))
    assert set(verdicts) == {"replica 401", "429 too_many_errors"}
    assert verdicts["replica 401"] <= 8 * ERRORS
    assert code(quiet.send(known)[0]) == "replica 200"
    assert code(quiet.send(get("/v1/models"))[0]) == "replica 200", "a page that needs no key"


def test_without_keys_errors_are_nobodys(tmp_path):
    with in_front(tmp_path, ATTEND_MAX_ERRORS_PER_SECOND=str(ERRORS)) as edge:
        for replica in edge.replicas:
            replica.judge = lambda *_: 400
        answers = edge.send(*[post("/v1/completions", "Authorization: Bearer none")] * (10 * ERRORS))
    assert {code(answer) for answer in answers} == {"replica 400"}


# Probes


@pytest.mark.parametrize(
    "flood", [get("/healthz"), get("/readyz"), get("/metrics"), post("/v1/completions", "Authorization: Bearer wrong")]
)
def test_probes_are_answered_beside_any_flood_from_their_address(quiet, flood):
    requests = [flood] * (4 * OPEN)
    for place in range(20, len(requests), 20):
        requests[place : place + 2] = [get("/healthz"), get("/readyz")]
    answers = quiet.send(*requests)
    probes = [answer for request, answer in zip(requests, answers, strict=True) if request in (get("/healthz"), get("/readyz"))]
    assert {status for status, *_ in probes} == {200}


def test_probes_are_answered_on_connections_over_the_limit_of_their_address(quiet):
    held = [socket.create_connection(quiet.address, 5) for _ in range(3)]
    try:
        assert wait_for(lambda: code(quiet.send(get("/v1/models"))[0]) == "429 too_many_connections")
        assert [status for path in ("/healthz", "/readyz") for status, *_ in quiet.send(get(path))] == [200, 200]
        assert quiet.call("Check", "grpc.health.v1.Health")[0] is grpc.StatusCode.OK
    finally:
        for each in held:
            each.close()


def test_a_replica_is_asked_for_readiness_ten_times_a_second_at_most(quiet):
    began = time.monotonic()
    answers = quiet.send(*[get("/readyz")] * 500)
    spans = 1 + (time.monotonic() - began) * 1000 / READY_MS
    assert {status for status, *_ in answers} == {200}
    assert quiet.num_calls() <= 2 * spans


def test_what_is_not_ready_is_told_at_once(quiet):
    assert quiet.send(get("/readyz"))[0][0] == 200
    judges = [replica.judge for replica in quiet.replicas]
    for replica in quiet.replicas:
        replica.judge = lambda *_: 503
    try:
        assert wait_for(lambda: quiet.send(get("/readyz"))[0][0] == 503, 2)
        assert {status for status, *_ in quiet.send(*[get("/readyz")] * 50)} == {503}
    finally:
        for replica, judge in zip(quiet.replicas, judges, strict=True):
            replica.judge = judge
    assert wait_for(lambda: quiet.send(get("/readyz"))[0][0] == 200, 2)


def test_alive_is_not_ready(tmp_path):
    """While no replica runs, a probe of liveness must not end the pod in which one loads."""
    with in_front(tmp_path) as edge:
        for replica in edge.replicas:
            replica.stop()
        assert wait_for(lambda: edge.send(get("/readyz"))[0][0] == 503, 10)
        assert code(edge.send(get("/healthz"))[0]) == "200 ok"
        status, headers, _ = edge.send(get("/v1/models", "Origin: https://page.example"))[0]
        assert status == 503 and "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("given", "origin", "allowed"),
    [("*", "https://x.example", "*"), ("https://a, https://b", "https://b", "https://b")],
)
def test_pages_that_may_call_may_read_what_haproxy_says_itself(given, origin, allowed, tmp_path):
    with in_front(tmp_path, ATTEND_CORS_ORIGINS=given) as edge:
        for replica in edge.replicas:
            replica.stop()
        asked = post("/v1/completions", f"Origin: {origin}")
        assert wait_for(lambda: edge.send(asked)[0][0] == 503, 10)
        status, headers, _ = edge.send(asked)[0]
        assert (status, headers["access-control-allow-origin"], headers["vary"]) == (503, allowed, "Origin")
        assert headers["access-control-expose-headers"] == "Retry-After, x-should-retry, x-request-id"
        assert "access-control-allow-origin" not in edge.send(post("/v1/completions"))[0][1]


@pytest.mark.parametrize(("path", "tries"), [("/v1/completions", 2), ("/v1/batches", 1), ("/v1/files", 1)])
def test_what_is_made_is_asked_for_once_and_all_else_once_more_where_a_replica_dies_before_it_answers(tmp_path, path, tries):
    def dies(*_: object) -> int:
        raise ConnectionResetError

    with in_front(tmp_path) as edge:
        for replica in edge.replicas:
            replica.judge = dies
        assert edge.post(path)[0] == 503
        assert edge.num_calls() == tries
