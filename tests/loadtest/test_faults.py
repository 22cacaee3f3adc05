"""`make faults` itself: its judge is strict, its figures are what callers saw, and a run that was ended goes on."""

import asyncio
import json
import math
import os
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest

from loadtest.faults import __main__ as faults
from loadtest.faults.attacks import ATTACKS
from loadtest.faults.deaths import DEATHS, Call, Calls, open_to_others
from loadtest.faults.measure import Measure
from loadtest.faults.neighbours import Neighbours, Seen
from loadtest.faults.target import Target
from loadtest.server import Address


@pytest.fixture(autouse=True)
def kept_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "OUT", tmp_path / "faults.json")


def quiet(**seen):
    return Seen(gaps=[0.01, 0.05], firsts=[0.1], refusals=[0.004]) if not seen else Seen(**seen)


def broken(measures):
    return [each.what for each in measures if not each.kept]


def test_an_attack_that_nobody_notices_is_kept():
    assert broken(faults.judged(quiet(), quiet(), "9 400")) == []


@pytest.mark.parametrize(
    ("seen", "what"),
    [
        (Seen(gaps=[0.01, 0.26], refusals=[0.004]), "largest gap"),
        (Seen(gaps=[], refusals=[0.004]), "largest gap"),
        (Seen(gaps=[0.01], refusals=[0.004, 0.06, 0.07]), "limited key refused, median"),
        (Seen(gaps=[0.01], refusals=[]), "limited key refused, median"),
        (Seen(gaps=[0.01], refusals=[0.004], failed=["a stream was cut"]), "broken"),
    ],
)
def test_what_a_neighbour_notices_is_not_kept(seen, what):
    assert broken(faults.judged(quiet(), seen, "")) == [what]


def test_a_gap_may_be_three_times_that_of_a_noisy_quiet_stretch():
    noisy = quiet(gaps=[0.2], refusals=[0.004])
    assert broken(faults.judged(noisy, Seen(gaps=[0.59], refusals=[0.004]), "")) == []
    assert broken(faults.judged(noisy, Seen(gaps=[0.61], refusals=[0.004]), "")) == ["largest gap"]


def test_a_stream_that_is_silent_counts_as_a_gap_although_no_message_ends_it():
    neighbours = Neighbours(None, "http://127.0.0.1:1", {}, {})
    neighbours.waiting[0] = "gaps", time.monotonic() - 7
    assert neighbours.take().longest_gap() >= 7
    assert neighbours.take().longest_gap() < 7  # it goes on from the last look


def call(began, ended, transport, result="ok"):
    return Call(began, ended, transport, result)


def seen_of(*calls):
    found = Calls(None)
    found.done += calls
    return {each.what: each for each in found.after(100.0, again=5.0)}


def test_a_fault_ends_with_the_first_answer_of_the_slower_transport():
    seen = seen_of(call(101, 103, "HTTP"), call(102, 103, "gRPC", "refused"), call(103, 104, "gRPC"))
    assert seen["answering again"].value == 4
    assert seen["answering again"].kept


def test_a_transport_that_never_answers_again_is_not_kept():
    seen = seen_of(call(101, 103, "HTTP"), call(101, 102, "gRPC", "refused"))
    assert math.isinf(seen["answering again"].value)
    assert not seen["answering again"].kept


def test_a_call_that_was_under_way_at_the_fault_counts_as_long_as_it_hung():
    seen = seen_of(call(99, 128, "HTTP", "refused"), call(101, 101.5, "HTTP"), call(101, 101.5, "gRPC"))
    assert seen["longest call"].value == 29
    assert not seen["longest call"].kept


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


def test_nobody_reads_the_servers_lines_while_reading_is_cleared():
    read, write = os.pipe()
    target = Target(Address("", ""), None, "", {})
    reader = threading.Thread(target=target.read_lines, args=(read,))
    target.reading.set()
    reader.start()
    os.write(write, b"one\ntwo\n")
    os.close(write)
    reader.join(10)
    assert target.lines == ["one", "two"]


def test_a_run_that_was_ended_goes_on_where_it_was(monkeypatch, capsys):
    tried = []
    for name in list(DEATHS):
        monkeypatch.setitem(DEATHS, name, lambda name=name: tried.append(name) or [Measure("answering again", 1.0, "s", 5.0)])
    first, second, *_ = DEATHS
    assert faults.main(["--only", first]) == 0
    assert faults.main(["--resume", "--only", first, second]) == 0
    assert tried == [first, second]
    assert json.loads(faults.OUT.read_text()).keys() == {first, second}
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


def test_every_fault_says_what_it_is(capsys):
    assert faults.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ATTACKS) + len(DEATHS)
    assert all(line.split(": ", 1)[1] for line in lines)
