"""`attend bench gpu` without a GPU: what is lost costs no other part, and the shares are of what the device can do."""

import sys
import threading
import time

import pytest

from loadtest.bench import gpu
from loadtest.bench.contestant import OURS, PeerError
from loadtest.bench.engine import parameters
from loadtest.bench.gpu import PEER, Session, roofline, rows, works


@pytest.fixture
def session():
    return Session(time.monotonic() + 60)


@pytest.mark.parametrize(("code", "why"), [("import sys; sys.exit('lost')", "lost"), ("while True: pass", "longer than")])
def test_a_part_that_fails_or_does_not_end_is_noted_and_the_rest_goes_on(session, code, why):
    assert session.run("first", [sys.executable, "-c", code], 1) is None
    assert session.run("second", [sys.executable, "-c", "print(2)"], 30) == "2\n"
    [lost] = session.failed
    assert lost.startswith("first: ") and why in lost


def test_a_decode_is_measured_without_prompts_and_a_prompt_without_decodes():
    asked = []

    def run(requests, prompt, output):
        asked.append((requests, prompt, output))
        return 1.0 + 0.5 * (output - 1)

    found = {name: work(run) for name, work in works(100, 8, (1, 4), 2).items()}
    assert found == {"decode of 1": 1 * 8 / 4.0, "decode of 4": 4 * 8 / 4.0, "2 prompts": 200 / 1.0}
    assert asked[:2] == [(1, 100, 1), (1, 100, 9)]


def test_a_decode_cannot_be_faster_than_its_bytes_nor_a_prompt_than_its_products():
    speed = {"bytes": 4.3e12, "flops": 790e12}
    assert roofline("8B", "decode of 1", 0, 0, speed) == pytest.approx(4.3e12 / (2 * parameters("8B")))
    of_256 = 256 * 4.3e12 / (15.01e9 + 256 * 1024 * 131072)
    assert roofline("8B", "decode of 256", 1024, 0, speed) == pytest.approx(of_256, rel=0.01)
    assert roofline("8B", "16 prompts", 1024, 0, speed) == pytest.approx(790e12 / (2 * 6.98e9), rel=0.01)


def test_a_row_says_what_was_not_measured():
    found = {"decode of 1": {OURS: 200.0, PEER: 100.0}, "decode of 64": {OURS: 50.0}, "16 prompts": {PEER: 9.0}}
    assert list(rows("Q", found, dict.fromkeys(found, 400.0))) == [
        ["Q", "decode of 1", "200", "50% of 400", "100, 2.00"],
        ["Q", "decode of 64", "50", "12% of 400", "not measured"],
    ]


class Dead:
    """A contestant that starts, and hangs at its first work until it is killed."""

    def __init__(self, *_):
        self.process, self.killed = self, threading.Event()

    def kill(self):
        self.killed.set()

    def __call__(self, *_):
        assert self.killed.wait(30)
        raise PeerError("ended")

    def close(self):
        pass


def test_a_contestant_that_hangs_is_killed_and_the_next_one_runs(session, monkeypatch, tmp_path):
    class Quick(Dead):
        def __call__(self, requests, prompt, output):
            return float(output)

    monkeypatch.setattr(gpu, "Contestant", lambda peer, *_: Quick() if peer == PEER else Dead())
    monkeypatch.setattr(gpu, "write_shape", lambda *_: tmp_path)
    found = gpu.measured(session, "S", [OURS, PEER], works(10, 8, (1,), 2), tmp_path, 2)
    assert found == {"decode of 1": {PEER: 1.0}, "2 prompts": {PEER: 20.0}}
    assert [each.split(":")[0] for each in session.failed] == [f"S, {OURS}"]


def test_the_laws_name_tests_that_exist():
    for words in gpu.LAWS.values():
        assert (gpu.TREE / words[0]).is_file()
