"""What `updates` makes of what callers saw: the judge finds every loss, and a run that was ended goes on."""

import math
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import distributions

import pytest

from attend.service.client.errors import Answer
from loadtest.faults.deaths import Call
from loadtest.server import Address
from tests.deploy import updates
from tests.deploy.callers import Callers, Seen, seen
from tests.deploy.changes import CHANGES, packed

GOOD = Seen(80, (), 0.0, 0.2, 0.3, 12, (), 9, 1, 0, ())
RIGHT = ("ab", (1, 2))


def test_a_change_that_nobody_notices_is_kept():
    assert all(updates.kept(kind, GOOD) for kind in CHANGES)


@pytest.mark.parametrize(
    "loss", [{"wrong": 1}, {"given_up": ("GaveUp",)}, {"again": updates.AGAIN_SECONDS + 0.1}, {"again": math.inf}]
)
def test_no_change_may_lose_a_token_an_answer_or_the_service(loss):
    assert not any(updates.kept(kind, replace(GOOD, **loss)) for kind in CHANGES)


@pytest.mark.parametrize("loss", [{"failed": ("HTTP: refused",)}, {"broken": ("cut",)}])
def test_a_planned_change_cuts_no_stream_and_fails_no_call(loss):
    found = {kind for kind in CHANGES if not updates.kept(kind, replace(GOOD, **loss))}
    assert found == set(updates.PLANNED)


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


def test_a_transport_that_is_silent_for_ever_is_found():
    assert math.isinf(seen(callers([Call(101, 102, "HTTP", "ok")]), 100.0, {RIGHT}).again)


@pytest.mark.parametrize("wrong", [answer((1,)), answer((1, 1, 2)), answer((1, 2), text="abb")])
def test_an_answer_that_lost_or_repeated_a_token_is_found(wrong):
    found = seen(callers(answers=[answer((1, 2)), answer((1, 2), tries=3), wrong]), 100.0, {RIGHT})
    assert (found.answers, found.resumed, found.wrong) == (3, 1, 1)


def test_a_run_that_was_ended_goes_on_where_it_was(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(updates, "OUT", tmp_path / "out/updates.json")
    tries = []

    def fake(one, kind):
        tries.append(kind)
        return 3.0, GOOD

    monkeypatch.setattr(updates, "tried", fake)
    monkeypatch.setattr(updates, "service", lambda folder, through_head: nullcontext())
    first, second, *_ = CHANGES
    assert updates.main(["--kind", first, "--times", "2"]) == 0
    assert updates.main(["--kind", first, second, "--times", "3", "--resume"]) == 0
    assert tries == [first] * 3 + [second] * 3
    assert updates.read_found() == {first: [(3.0, GOOD)] * 3, second: [(3.0, GOOD)] * 3}
    assert "| 3 | 0 of 240 | 0 of 36 | 3 of 27, 0, 0 | 0.30 | 0.20 | 3 |" in capsys.readouterr().out


def test_a_change_that_does_not_end_is_told_and_the_others_are_tried(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(updates, "OUT", tmp_path / "updates.json")
    started = []

    def fake(one, kind):
        if kind == "kill":
            raise RuntimeError("another replica did not come")
        return 3.0, GOOD

    def service(folder, through_head):
        started.append(through_head)
        return nullcontext()

    monkeypatch.setattr(updates, "tried", fake)
    monkeypatch.setattr(updates, "service", service)
    assert updates.main(["--kind", "settings", "kill", "haproxy", updates.APART, "--times", "1"]) == 1
    assert updates.read_found().keys() - {"kill"} == {"settings", "haproxy", updates.APART}
    assert started == [False, False, True]  # a new cluster after the failure, and one whose callers go through the head
    assert "kill: another replica did not come" in capsys.readouterr().err


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
