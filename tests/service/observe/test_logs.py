"""Log lines: one for each record, JSON where a collector reads them, and never a caller's text."""

import asyncio
import contextlib
import fcntl
import gc
import itertools
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
import time
import weakref

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attend.service.access.keys import Entry, KeyRing, Limits, digest_of, write_keys
from attend.service.grpc_api.reading import address_of
from attend.service.observe import logs
from attend.v1 import generation_pb2 as pb
from tests.conftest import examples
from tests.fakes import CallContext, FakeEngine, Server, build_server


@pytest.fixture
def root():
    logger = logging.getLogger("attend")
    before = logger.handlers[:], logger.level, logger.propagate
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = before


def record(message: str, *args: object, **more) -> logging.LogRecord:
    values = {"name": "attend.test", "level": logging.WARNING, "pathname": "x", "lineno": 1, "exc_info": None} | more
    made = logging.LogRecord(msg=message, args=args, **values)
    made.created, made.msecs = 1_700_000_000.25, 250.0
    return made


def test_what_fails_of_traces_is_a_line_in_our_form(root, tmp_path):
    logs.configure("info", "json", str(tmp_path / "log"))
    exporter = logging.getLogger("opentelemetry.exporter.otlp")
    exporter.warning("Transient error %s", "refused")
    exporter.error("Failed to export %s", "refused")
    logs.close()
    [line] = (tmp_path / "log").read_text().splitlines()
    assert (json.loads(line)["logger"], json.loads(line)["message"]) == (
        "opentelemetry.exporter.otlp",
        "Failed to export refused",
    )


def test_a_json_line_has_time_level_logger_and_message():
    assert json.loads(logs.JsonFormatter().format(record("%s of %d", "one", 3))) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "attend.test",
        "message": "one of 3",
    }


def test_fields_given_as_extra_are_fields_of_the_json_line():
    document = json.loads(logs.JsonFormatter().format(with_extra(tokens=7, seconds=0.25, first=None, place=object)))
    assert (document["tokens"], document["seconds"], document["first"]) == (7, 0.25, None)
    assert document["place"] == "<class 'object'>"


def with_extra(**fields) -> logging.LogRecord:
    made = record("ended")
    vars(made).update(fields)
    return made


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(st.text())
@example("\ud800 from a file name")
@example("two\nlines\r\x1b[31m")
def test_whatever_the_message_holds_the_record_is_one_line_of_json(message):
    line = logs.JsonFormatter().format(record("%s", message))
    assert "\n" not in line
    assert "\r" not in line
    assert json.loads(line)["message"] == message


@pytest.mark.parametrize("style", ["text", "json"])
def test_configured_lines_go_to_standard_error_from_the_level_on(root, capfd, style):
    logs.configure("warning", style)
    logging.getLogger("attend.some").info("quiet")
    logging.getLogger("attend.some").warning("loud")
    logs.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert "loud" in err
    assert "quiet" not in err
    assert err.count("\n") == 1
    assert err.startswith("{") == (style == "json")


def test_lines_go_to_the_end_of_a_file_where_one_is_named(root, capfd, tmp_path):
    (tmp_path / "log").write_text("before\n")
    logs.configure("info", "text", str(tmp_path / "log"))
    logging.getLogger("attend.some").info("after \ud800")
    logs.close()
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first == "before"
    assert second.endswith("INFO attend.some: after \\ud800")
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def pipe():
    """A pipe as a path that lines can be written to, and its reading end; nobody reads it by itself."""
    ours, theirs = os.pipe()
    yield f"/proc/{os.getpid()}/fd/{theirs}", ours
    for end in (ours, theirs):
        with contextlib.suppress(OSError):
            os.close(end)


def room(path: str) -> int:
    """Bytes that fit into the pipe at `path`."""
    with open(path, "wb", buffering=0) as end:
        return fcntl.fcntl(end, fcntl.F_GETPIPE_SZ)


def read_until(end: int, wanted: str) -> str:
    """What can be read from `end`, up to and with the line that holds `wanted`; fails after twenty seconds."""
    text, deadline = "", time.monotonic() + 20
    while wanted not in text:
        ready, _, _ = select.select([end], [], [], deadline - time.monotonic())
        assert ready, text[-1000:]
        text += os.read(end, 1 << 16).decode()
    return text


def test_a_full_pipe_that_nobody_reads_holds_up_no_caller_and_what_it_cost_is_told_when_it_is_read(root, pipe, monkeypatch):
    path, end = pipe
    monkeypatch.setattr(logs, "MAX_LINES", 64)
    logs.configure("info", "text", path)
    dropped, server = logs.lines_dropped(), build_server()

    async def run() -> None:
        async with server.http() as client:
            while logs.lines_dropped() < dropped + 100:
                await client.post("/v1/completions", json={"prompt": "a", "n": 99})
            assert (await client.get("/healthz")).status_code == 200

    calls = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    calls.start()
    calls.join(60)
    assert not calls.is_alive()
    lines = logs.lines_dropped() - dropped

    def told(text: str) -> int:
        return sum(map(int, re.findall(r"WARNING attend.logs: (\d+) log lines were dropped: they could not be written", text)))

    text = ""
    while told(text) < lines:
        text += read_until(end, "lines were dropped")
    assert told(text) == lines
    assert text.count("invalid") <= room(path) // 80 + logs.MAX_LINES


def test_an_exception_holds_no_frame_while_its_line_waits(root, pipe):
    class Big:
        pass

    def fail() -> weakref.ref:
        big = Big()
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("attend.some").exception("failed")
        return weakref.ref(big)

    path, end = pipe
    logs.configure("info", "text", path)
    logging.getLogger("attend.some").info("x" * room(path))
    kept = fail()
    gc.collect()
    assert kept() is None
    assert "ValueError: why" in read_until(end, "ValueError: why")


STUCK = """
import logging, os
from attend.service.observe import logs
ours, theirs = os.pipe()
logs.CLOSE_SECONDS = 0.2
logs.configure("info", "text", f"/proc/{os.getpid()}/fd/{theirs}")
for place in range(5000):
    logging.getLogger("attend.some").info("x" * 100)
print("ends")
"""


def test_a_process_ends_though_nobody_takes_its_lines():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == ("ends\n", "")


def test_a_line_that_cannot_be_written_is_counted_as_dropped(root, capfd):
    dropped = logs.lines_dropped()
    logs.configure("info", "text", "/dev/full")
    logging.getLogger("attend.some").info("nowhere")
    logs.close()
    assert logs.lines_dropped() == dropped + 1
    assert capfd.readouterr() == ("", "")


def test_a_pipe_that_does_not_wait_gets_whole_lines(root, pipe):
    """Whoever shares standard error may have told it not to wait."""
    path, end = pipe
    logs.configure("info", "text", path)
    os.set_blocking(root.handlers[0].writer.descriptor, False)
    logging.getLogger("attend.some").info("x" * 3 * room(path))
    assert len(read_until(end, "\n")) > 3 * room(path)


def test_a_named_pipe_without_a_reader_is_a_warning_on_standard_error(root, capfd, tmp_path):
    """To open it for writing would wait for a reader for ever."""
    os.mkfifo(tmp_path / "log")
    logs.configure("info", "json", str(tmp_path / "log"))
    logs.close()
    assert "log lines go to standard error: [Errno 6]" in json.loads(capfd.readouterr().err)["message"]


@pytest.mark.parametrize("failure", ["engine", "bug"])
def test_a_failed_call_is_logged_with_its_id_and_without_its_prompt(caplog, failure):
    engine = FakeEngine()
    engine.broken_after = 0 if failure == "engine" else None
    engine.failure = ZeroDivisionError("inside") if failure == "bug" else None
    build_server(engine).post({"prompt": "my secret prompt"}, headers={"x-request-id": "id-77"})
    assert "id-77" in caplog.text
    assert "my secret prompt" not in caplog.text
    assert {one.levelname for one in caplog.records if one.name.startswith("attend")} == {"ERROR"}


FORGED = "x\n2026-01-01 CRITICAL attend: all is lost"


def raises_after_one(request) -> int:
    if request.output:
        raise ZeroDivisionError
    return 1


def test_a_request_id_from_a_body_cannot_write_a_log_line_of_its_own(caplog):
    body = {"prompt": "a", "stream": True, "request_id": FORGED}
    with caplog.at_level(logging.INFO, "attend"):
        build_server(FakeEngine(raises_after_one)).post(body)
    assert caplog.records
    assert not any("\n" in one.getMessage() for one in caplog.records)


CALL = {"request_id": "id-5", "transport": "http", "route": "/v1/completions"}


def ended_calls(caplog) -> list[dict]:
    """The lines of the calls that have ended, as JSON."""
    lines = [logs.JsonFormatter().format(one) for one in caplog.records if one.name == "attend.requests"]
    return [json.loads(line) for line in lines]


def test_a_call_that_ends_is_one_line_with_its_numbers_as_fields(caplog):
    clock = itertools.count(0, 0.5).__next__
    with caplog.at_level(logging.INFO, "attend"):
        build_server(clock=clock).post({"prompt": "ab", "max_tokens": 3}, headers={"x-request-id": "id-5"})
    [line] = ended_calls(caplog)
    assert line.items() >= (CALL | {"outcome": "length", "prompt_tokens": 2, "generation_tokens": 3}).items()
    assert 0 < line["first_token_seconds"] < line["seconds"]
    assert line["message"].startswith("http /v1/completions id-5: length, 2 prompt tokens, 3 tokens, ")


def keyed_server(tmp_path, *, behind_edge: bool = False) -> Server:
    """A server whose one key is `att_x`, of the name `web`, for two calls a minute."""
    write_keys(tmp_path / "keys.json", {"web": Entry(digest_of(b"att_x"), Limits(requests_per_minute=2))})
    return build_server(keys=KeyRing(tmp_path / "keys.json", lambda: 0.0), behind_edge=behind_edge)


def test_the_line_of_a_call_tells_status_error_key_and_where_it_came_from(caplog, tmp_path):
    server = keyed_server(tmp_path)
    who = {"authorization": "Bearer att_x", "x-forwarded-for": "10.1.2.3"}
    calls = [({"prompt": "a"}, who), ({"prompt": "a", "n": 99}, who), ({"prompt": "a"}, {}), ({"prompt": "a"}, who)]
    with caplog.at_level(logging.INFO, "attend"):
        for body, headers in calls:
            server.post(body, headers=headers)
    lines = ended_calls(caplog)
    assert [(line["status"], line["error"], line["key"], line["forwarded_for"]) for line in lines] == [
        (200, None, "web", "10.1.2.3"),
        (400, "invalid_value", "web", "10.1.2.3"),
        (401, "invalid_api_key", None, None),
        (429, "rate_limit_exceeded", "web", "10.1.2.3"),
    ]
    assert {line["client"] for line in lines} == {"127.0.0.1"}
    told = ", status 429, error rate_limit_exceeded, key web, from 127.0.0.1, for 10.1.2.3"
    assert lines[3]["message"].endswith(told)
    assert "att_x" not in caplog.text


CAME = ["10.9.9.9, 10.1.2.3", "192.0.2.7"]
"""X-Forwarded-For in two lines: what the caller wrote, and what HAProxy added."""


@pytest.mark.parametrize(("behind_edge", "client"), [(True, "192.0.2.7"), (False, "127.0.0.1")])
def test_behind_our_edge_the_client_is_the_address_that_the_edge_saw_and_never_one_that_a_caller_wrote(
    caplog, behind_edge, client
):
    server, context = build_server(behind_edge=behind_edge), CallContext()
    context.metadata = [("x-forwarded-for", one) for one in CAME]

    async def both() -> None:
        async with server.http() as http:
            await http.post("/v1/completions", json={"prompt": "a"}, headers=context.metadata)
        await server.methods.Generate(pb.GenerateRequest(text="a").SerializeToString(), context)

    with caplog.at_level(logging.INFO, "attend"):
        asyncio.run(both())
    told = [(line["client"], line["forwarded_for"]) for line in ended_calls(caplog)]
    if behind_edge:
        assert told == [(client, CAME[0])] * 2
    else:
        assert told == [(client, ",".join(CAME)), ("10.0.0.2", ",".join(CAME))]


def test_behind_our_edge_a_call_that_came_by_another_way_is_its_peers(caplog):
    """A replica that looks at another connects to it directly."""
    with caplog.at_level(logging.INFO, "attend"):
        build_server(behind_edge=True).post({"prompt": "a"})
    [line] = ended_calls(caplog)
    assert (line["client"], line["forwarded_for"]) == ("127.0.0.1", None)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:50000", "10.0.0.1"),
        ("ipv6:%5B2001:db8::1%5D:50000", "2001:db8::1"),
        ("ipv6:[::1]:50000", "::1"),
        ("unix:/run/a:b", "unix:/run/a:b"),
        ("", ""),
    ],
)
def test_the_address_of_a_grpc_peer_is_its_host(peer, address):
    assert address_of(peer) == address


def test_a_header_cannot_write_a_log_line_of_its_own(caplog):
    with caplog.at_level(logging.INFO, "attend"):
        record = build_server().metrics.open("http", "/v1/completions", "id", lambda: [("x-forwarded-for", FORGED)])
        with contextlib.suppress(ValueError), record.errors():
            raise ValueError
    assert not any("\n" in one.getMessage() for one in caplog.records)


@pytest.mark.parametrize(
    ("message", "metadata", "used"),
    [
        ("mine", "theirs", "mine"),
        ("", "theirs", "theirs"),
        ("", "bad id<x>", None),
        ("", "", None),
    ],
)
def test_one_id_is_in_the_metadata_and_in_the_log_of_a_grpc_call(caplog, message, metadata, used):
    server, context = build_server(), CallContext()
    context.metadata = [("x-request-id", metadata)]
    with caplog.at_level(logging.INFO, "attend"):
        asyncio.run(
            server.methods.Generate(pb.GenerateRequest(request_id=message, text="a", max_tokens=1).SerializeToString(), context)
        )
    [line] = ended_calls(caplog)
    assert context.trailing == [("x-request-id", line["request_id"])]
    assert line["request_id"] == used or (used is None and re.fullmatch("[0-9a-f]{32}", line["request_id"]))
