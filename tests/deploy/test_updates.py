"""What `updates` makes of what callers saw: every loss is found."""

import math
import zipfile
from dataclasses import replace
from importlib.metadata import distributions

import pytest

from attend.service.client.errors import Answer
from loadtest.faults.deaths import Call
from loadtest.server import Address
from tests.deploy import updates
from tests.deploy.callers import Callers, Seen, seen
from tests.deploy.changes import packed

RIGHT = ("ab", (1, 2))


def test_a_planned_change_loses_no_token_no_answer_no_call_and_no_stream():
    good = Seen(80, (), 0.0, 0.2, 0.3, 12, (), 9, 1, 0, ())
    losses = ({"wrong": 1}, {"given_up": ("x",)}, {"again": math.inf}, {"failed": ("x",)}, {"broken": ("x",)})
    assert updates.is_unnoticed(good) and not any(updates.is_unnoticed(replace(good, **loss)) for loss in losses)


def callers(calls=(), answers=(), plain=("ok",)):
    one = Callers(Address("http://127.0.0.1:1", "127.0.0.1:1"))
    one.calls.completed += calls
    one.answers += answers
    one.plain += plain
    return one


def answer(token_ids, text="ab", tries=1):
    return Answer(text, token_ids, 7, "f", "length", None, tries)


def test_what_callers_saw_is_counted_from_the_change_on():
    calls = [
        Call(98, 104, "HTTP", "refused"),  # under way at the change
        Call(100.5, 101, "HTTP", "ok"),
        Call(100.6, 103, "gRPC", "ok"),
        Call(101.5, 101.6, "gRPC", "refused"),
        Call(102, 106, "gRPC", "ok"),
    ]
    found = seen(callers(calls, plain=["ok", "cut"]), 100.0, {RIGHT})
    assert (found.failed, found.last_failure) == (("HTTP: refused", "gRPC: refused"), 1.5)
    assert (found.slowest, found.again) == (6, 3)
    assert (found.streams, found.broken) == (2, ("cut",))


@pytest.mark.parametrize("wrong", [answer((1,)), answer((1, 1, 2)), answer((1, 2), text="abb")])
def test_an_answer_that_lost_or_repeated_a_token_is_found(wrong):
    found = seen(callers(answers=[answer((1, 2)), answer((1, 2), tries=3), wrong]), 100.0, {RIGHT})
    assert (found.answers, found.resumed, found.wrong) == (3, 1, 1)


def test_the_packed_code_is_the_tree_under_another_version(tmp_path):
    path = packed(tmp_path, "99.7")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "out", [name for name in names if "dist-info" in name])
    assert {
        f"attend/{name}" for name in ("service/runtime/deployment.py", "model/params.py", "model/default/config.json")
    } <= set(names)
    [found] = distributions(name="attend-server", path=[str(tmp_path / "out")])
    assert found.version == "99.7"
