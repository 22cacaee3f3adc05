"""`make faults` itself: its judge is strict, its figures are what callers saw, and a run that was ended goes on."""

import asyncio
import json
import math
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest

from loadtest.faults import __main__ as faults
from loadtest.faults import judge, trial
from loadtest.faults.attack import ATTACKS, KEYS, Attack, sensible
from loadtest.faults.deaths import DEATHS, Call, Calls, open_to_others
from loadtest.faults.judge import Measure
from loadtest.faults.neighbours import NeighbourOptions, Neighbours, Observation
from loadtest.faults.target import Target
from loadtest.faults.trial import Setting, Trial
from loadtest.server import Address

NOBODY = NeighbourOptions("http://127.0.0.1:1", "127.0.0.1:1", {}, {}, {})


@pytest.fixture(autouse=True)
def kept_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "OUT", tmp_path / "faults.json")


def seen(**other):
    usual = {"took": 2.0, "events": 2000, "gaps": [0.01, 0.05], "chats": [0.02], "refusals": [0.004], "probes": [0.01]}
    return Observation(**usual | other)


def missed(measures):
    return [each.what for each in measures if not each.within_limit]


def judged(found):
    return missed([*judge.streams(seen(), found, may_refuse=False), *judge.refusals(found)])


@pytest.mark.parametrize(
    ("found", "what"),
    [
        ({"events": 490}, ["streams slower, times"]),
        ({"gaps": [0.01] * 200 + [0.26]}, ["largest gap"]),
        ({"gaps": [0.01] * 90 + [0.2] * 10}, ["p99 gap"]),
        ({"gaps": [], "events": 0}, ["streams slower, times", "p99 gap", "largest gap"]),
        ({"chats": [0.02, 2.1]}, ["longest chat"]),
        ({"chats": []}, ["longest chat"]),
        ({"turned_away": 1}, ["turned away"]),
        ({"failed": ["a stream was cut"]}, ["broken"]),
        ({"lost_probes": ["/healthz: 429"]}, ["probes lost"]),
        ({"refusals": [0.004, 0.06, 0.07]}, ["limited key refused, median"]),
        ({"refusals": []}, ["limited key refused, median"]),
    ],
)
def test_what_a_neighbour_notices_is_not_kept(found, what):
    assert judged(seen(**found)) == what


def test_memory_files_and_the_time_until_an_answer_are_limited():
    assert missed(judge.server(1 << 20, 3, 0.1, 10.0)) == []
    assert missed(judge.server(1 << 30, 30, math.inf, 10.0)) == ["memory", "open files left", "answering again"]


def test_a_stream_that_is_silent_counts_as_a_gap_although_no_message_ends_it():
    neighbours = Neighbours(None, NOBODY)
    neighbours.waiting[0] = "gaps", time.monotonic() - 7
    assert neighbours.take().longest_gap() >= 7
    assert neighbours.take().longest_gap() < 7  # it goes on from the last look


def call(began, ended, transport, result="ok"):
    return Call(began, ended, transport, result)


def seen_of(*calls):
    found = Calls(None)
    found.completed += calls
    return {each.what: each for each in found.measures_after(100.0, again=5.0)}


def test_a_fault_ends_with_the_first_answer_of_the_slower_transport():
    seen = seen_of(call(101, 103, "HTTP"), call(102, 103, "gRPC", "refused"), call(103, 104, "gRPC"))
    assert seen["answering again"].value == 4
    assert seen["answering again"].within_limit


def test_a_call_that_was_under_way_at_the_fault_counts_as_long_as_it_hung():
    seen = seen_of(call(99, 128, "HTTP", "refused"), call(101, 101.5, "HTTP"), call(101, 101.5, "gRPC"))
    assert seen["longest call"].value == 29
    assert not seen["longest call"].within_limit


def test_what_a_call_ends_in_is_told_apart_by_shape():
    answers = [
        (200, {}, b"{}", "ok"),
        (503, {"retry-after": "1"}, b'{"error": {"message": "no replica"}}', "refused"),
        (503, {}, b'{"error": {"message": "no replica"}}', "503 in another shape"),
        (500, {}, b"Internal Server Error", "500 in another shape"),
        (500, {}, b'{"error": {"message": "internal error"}}', "500"),
    ]
    server = asyncio.new_event_loop()
    pending = iter(answers)

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        status, headers, body, _ = next(pending)
        lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()
        writer.close()

    listening = server.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    port = listening.sockets[0].getsockname()[1]
    thread = threading.Thread(target=server.run_forever)
    thread.start()
    try:
        calls = Calls(Target(Address(f"http://127.0.0.1:{port}", ""), None, "", {}))
        assert [calls.over_http() for _ in answers] == [wanted for *_, wanted in answers]
    finally:
        server.call_soon_threadsafe(listening.close)
        server.call_soon_threadsafe(server.stop)
        thread.join()
        server.close()


def test_attacks_are_left_out_where_they_make_no_sense():
    names = ["wrong keys", "slow grammars of a limited key", "guessed prompts", "a hog", "replica killed"]
    assert [sensible(names, keys) for keys in KEYS] == [
        ["wrong keys", "slow grammars of a limited key", "guessed prompts", "a hog"],
        ["wrong keys", "a hog"],
        ["a hog"],
    ]


@pytest.fixture
def tried(monkeypatch):
    """What was tried where; nothing is started."""
    found = []

    def pretend(setting, names, seconds, note):
        for name in sensible(names, setting.keys):
            found.append((str(setting), name))
            note(name, [Measure("largest gap", 1.0, "ms", 5.0)])

    monkeypatch.setattr(faults, "try_attacks", pretend)
    for name in list(DEATHS):
        monkeypatch.setitem(DEATHS, name, lambda name=name: found.append(name) or [Measure("answering again", 1.0, "s", 5.0)])
    return found


def test_a_run_that_was_ended_goes_on_where_it_was(tried, capsys):
    first, second, *_ = DEATHS
    assert faults.main(["--only", first, "a hog", "--serve", "ray"]) == 0
    assert faults.main(["--resume", "--only", first, second, "a hog", "--serve", "ray", "--keys", "each"]) == 0
    assert tried == [("ray, a key each", "a hog"), first, second]
    assert json.loads(faults.OUT.read_text()).keys() == {"ray, a key each", "deaths"}
    assert "answering again 1 s (at most 5)" in capsys.readouterr().out


def test_a_limit_that_was_missed_is_the_exit_code(monkeypatch):
    name = next(iter(DEATHS))
    monkeypatch.setitem(DEATHS, name, lambda: [Measure("answering again", math.inf, "s", 5.0)])
    assert faults.main(["--only", name]) == 3


def test_a_socket_that_any_user_can_write_to_is_found_and_one_behind_a_closed_folder_is_not():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / "admin.sock"
        listener.bind(str(path))

        def found(folder_mode, mode):
            Path(folder).chmod(folder_mode)
            path.chmod(mode)
            return open_to_others(path)

        assert found(0o755, 0o666)
        assert not found(0o755, 0o600)
        assert not found(0o700, 0o666)


class Stub:
    """What a trial asks of a server and its neighbours."""

    def __init__(self, stretches):
        self.keys, self.stretches = {"open": "a"}, iter(stretches)

    def processes(self):
        return []

    def pids(self, what):
        return []

    def ready(self, seconds):
        return True

    def take(self):
        return next(self.stretches)


@pytest.fixture
def short(monkeypatch):
    for name in ("SETTLE_SECONDS", "FILES_SECONDS", "START_SECONDS"):
        monkeypatch.setattr(trial, name, 0.0)


def tried_once(monkeypatch, name, stretches, keys="each"):
    async def nothing(target, name, seconds):
        return [Measure("the attacker's calls", 0)]

    monkeypatch.setattr(trial, "_attack", nothing)
    one = Stub(stretches)
    with asyncio.Runner() as runner:
        made = Trial(one, one, runner, Setting("single", keys), 0.0, seen())
        measures, fit = made.attack(name)
    return missed(measures), fit


def test_a_trial_judges_the_attack_its_end_and_what_is_after_it(monkeypatch, short):
    before, during, ending, start = (seen() for _ in range(4))
    assert tried_once(monkeypatch, "a hog", [before, during, ending, start, seen()]) == ([], True)
    bad = [before, during, seen(failed=["a chat: 500"]), start, seen(turned_away=1)]
    assert tried_once(monkeypatch, "a hog", bad) == (["broken", "broken afterwards"], True)


def test_only_a_hog_of_the_same_owner_may_have_others_refused(monkeypatch, short):
    def stretches():
        return [seen(), seen(turned_away=3), seen(), seen(), seen()]

    assert tried_once(monkeypatch, "a hog", stretches(), "each")[0] == ["turned away"]
    assert tried_once(monkeypatch, "a hog", stretches(), "shared")[0] == []
    assert tried_once(monkeypatch, "refused bodies", stretches(), "shared")[0] == ["turned away"]


@pytest.mark.parametrize(("ends", "what"), [(True, ["calls without an end"]), (False, [])])
def test_an_attack_that_should_be_done_and_is_not_has_checked_nothing(monkeypatch, ends, what):
    async def waits(a):
        await asyncio.Event().wait()

    monkeypatch.setitem(ATTACKS, "waits", Attack("", waits, ends=ends))
    monkeypatch.setattr(trial, "END_SECONDS", 0.05)
    monkeypatch.setattr(trial, "LEAST_SECONDS", 0.0)
    target = Target(Address("http://127.0.0.1:1", "127.0.0.1:1"), None, "", {})
    assert missed(asyncio.run(trial._attack(target, "waits", 0.05))) == what


def test_a_server_that_does_not_get_over_it_is_not_fit_for_the_next_attack(monkeypatch, short):
    assert tried_once(monkeypatch, "a hog", [seen(), seen(), seen(), seen(), seen(events=3)])[1] is False
