"""Log lines: one for each record, JSON where a collector reads them, and never a caller's text."""

import asyncio
import json
import logging
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protos.attend.v1 import generation_pb2 as pb
from service import logs
from tests.fakes import CallContext, FakeEngine, build_server


@pytest.fixture
def root():
    logger = logging.getLogger("attend")
    before = logger.handlers[:], logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before


def record(message: str, *args: object, **more) -> logging.LogRecord:
    values = {"name": "attend.test", "level": logging.WARNING, "pathname": "x", "lineno": 1, "exc_info": None} | more
    made = logging.LogRecord(msg=message, args=args, **values)
    made.created, made.msecs = 1_700_000_000.25, 250.0
    return made


def test_a_json_line_has_time_level_logger_and_message():
    assert json.loads(logs.JsonFormatter().format(record("%s of %d", "one", 3))) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "attend.test",
        "message": "one of 3",
    }


def test_a_json_line_carries_its_exception():
    try:
        raise ValueError("why")
    except ValueError:
        document = json.loads(logs.JsonFormatter().format(record("failed", exc_info=sys.exc_info())))
    assert document["exception"].endswith("ValueError: why")
    assert "Traceback" in document["exception"]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.text())
@example("\ud800 from a file name")
@example("two\nlines\r\x1b[31m")
def test_whatever_the_message_holds_the_record_is_one_line_of_json(message):
    line = logs.JsonFormatter().format(record("%s", message))
    assert "\n" not in line
    assert "\r" not in line
    assert json.loads(line)["message"] == message


@pytest.mark.parametrize("style", ["text", "json"])
def test_configured_lines_go_to_standard_error_from_the_level_on(root, capsys, style):
    logs.configure("warning", style)
    logging.getLogger("attend.some").info("quiet")
    logging.getLogger("attend.some").warning("loud")
    out, err = capsys.readouterr()
    assert out == ""
    assert "loud" in err
    assert "quiet" not in err
    assert err.count("\n") == 1
    assert err.startswith("{") == (style == "json")


def test_configuring_twice_does_not_write_twice(root, capsys):
    logs.configure("info", "text")
    logs.configure("info", "text")
    logging.getLogger("attend.some").info("once")
    assert capsys.readouterr().err.count("once") == 1


@pytest.mark.parametrize("failure", ["engine", "bug"])
def test_a_failed_call_is_logged_with_its_id_and_without_its_prompt(caplog, failure):
    engine = FakeEngine()
    engine.broken_after = 0 if failure == "engine" else None
    engine.failure = ZeroDivisionError("inside") if failure == "bug" else None
    build_server(engine).post({"prompt": "my secret prompt"}, headers={"x-request-id": "id-77"})
    assert "id-77" in caplog.text
    assert "my secret prompt" not in caplog.text
    assert {one.levelname for one in caplog.records if one.name.startswith("attend")} == {"ERROR"}


def test_a_callers_mistake_is_no_error_in_the_log(caplog):
    build_server().post({"prompt": "a", "n": 99})
    build_server().post(b"{")
    assert not [one for one in caplog.records if one.name.startswith("attend") and one.levelno >= logging.WARNING]


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


def test_a_request_id_from_a_message_cannot_write_a_log_line_of_its_own(caplog):
    server, context = build_server(FakeEngine(raises_after_one)), CallContext()
    with caplog.at_level(logging.INFO, "attend"):
        asyncio.run(server.methods.Generate(pb.GenerateRequest(request_id=FORGED, text="a"), context))
    assert context.code is not None
    assert not any("\n" in one.getMessage() for one in caplog.records)
