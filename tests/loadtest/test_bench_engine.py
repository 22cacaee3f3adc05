"""The contestants of the engine benchmark, their turns and their table; peers that compute nothing."""

import argparse
import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from loadtest import server
from loadtest.bench import engine, gate
from loadtest.bench.contestant import TREE, Contestant, PeerError, start_all
from loadtest.bench.figures import Comparison, take_turns
from loadtest.bench.machine import Neighbours
from loadtest.bench.shapes import AT_ONCE, LONG, OUTPUT, PROMPT
from loadtest.server import Address
from tests.service.server import wait_for

PEERS = Path("loadtest/bench/peers")
COUNTS = """
def start(folder, threads):
    print("libraries print what they like")
    return {"name": "counts"}, lambda prompts, output: sum(output for prompt in prompts if len(prompt))
"""
FALLS = """
def start(folder, threads):
    def generate(prompts, output):
        raise MemoryError("no room")
    return {"name": "falls"}, generate
"""
DRAWS = """
import time

def start(folder, threads):
    def generate(prompts, output, do_sample=False):
        time.sleep(0.2 if do_sample else 0)
        return len(prompts) * output
    return {"name": "Attend", "samples": True}, generate
"""
SHORT = """
def start(folder, threads):
    return {"name": "short"}, lambda prompts, output: 1
"""


@pytest.fixture
def tree(tmp_path):
    """A source tree with the child of ours and adapters that compute nothing."""
    folder = tmp_path / PEERS
    folder.mkdir(parents=True)
    (folder / "child.py").write_text((TREE / PEERS / "child.py").read_text())
    for name, text in (("counts", COUNTS), ("falls", FALLS), ("draws", DRAWS), ("short", SHORT)):
        (folder / f"{name}.py").write_text(text)
    return tmp_path


def contestant(name, tree):
    return Contestant(name, tree, tree / f"{name}.log", tree=tree)


def stopped(process):
    """True if it stands still within a second: a signal takes effect at once, but not in no time."""
    return wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, 1.0)


def test_a_contestant_answers_with_seconds_and_stands_still_between_its_turns(tree):
    with start_all([lambda: contestant("counts", tree)]) as (one,):
        assert one.name == "counts" and one.facts["load_seconds"] >= 0
        assert stopped(one.process)
        assert 0 < one(2, 8, 4) < 10
        assert stopped(one.process)
    assert one.process.poll() == -signal.SIGKILL


def test_a_contestant_draws_where_it_is_asked_to(tree):
    with start_all([lambda: contestant("draws", tree)]) as (one,):
        assert one(1, 8, 4) < 0.2 <= one(1, 8, 4, do_sample=True)
    assert engine.read_flags(["--sampled"]).peers == {}
    assert list(engine.read_flags(["--sampled", "--peer", "transformers"]).peers) == ["transformers"]


def test_the_gate_compares_draws_too(tree, monkeypatch):
    """The times of an adapter that computes nothing are its own."""
    options = argparse.Namespace(base="HEAD~1", pairs=6)
    with start_all([partial(contestant, "draws", tree)] * 2) as both:
        neighbours = Neighbours()
        monkeypatch.setattr(gate, "CELLS", {"W1": lambda run: 1 / run(1, 8, 4), gate.SAMPLED: gate.CELLS[gate.SAMPLED]})
        found = gate.compare_both(both, options, neighbours)
    assert [each.what for each in found] == ["W1", "W2 sampled"]
    joined = gate.join_comparisons("int8 ", [found[0], found[0]])
    assert joined.what == "int8 W1" and all(len(values) == gate.PAIRS for values in joined.values.values())


@pytest.mark.parametrize(("name", "reason"), [("falls", "MemoryError: no room"), ("absent", "FileNotFoundError")])
def test_a_contestant_that_ends_says_why(tree, name, reason):
    with pytest.raises(PeerError, match=reason), start_all([lambda: contestant(name, tree)]) as (one,):
        one(1, 8, 4)


def test_a_stopped_contestant_dies_with_the_process_that_started_it(tree):
    code = f"""
import os, sys
from pathlib import Path
from loadtest.bench.contestant import Contestant
tree = Path({str(tree)!r})
print(Contestant("counts", tree, tree / "log", tree=tree).process.pid, flush=True)
os._exit(0)
"""
    pid = int(subprocess.run([sys.executable, "-c", code], cwd=TREE, check=True, capture_output=True, text=True).stdout)
    assert wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("path", sorted((TREE / PEERS).glob("*.py")), ids=lambda path: path.stem)
def test_an_adapter_can_be_read_where_nothing_is_installed(path):
    """Its own packages are imported when it starts; Attend's nowhere but in the adapter of Attend."""
    code = f"import runpy, sys; sys.path.append({str(path.parent)!r}); runpy.run_path({str(path)!r})"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, cwd="/")
    assert path.stem == "attend" or not {"from attend", "from loadtest"} & {
        " ".join(line.split()[:2]).partition(".")[0] for line in path.read_text().splitlines() if line.split()
    }


def test_the_works_are_tokens_a_second_of_what_they_say():
    asked = []

    def run(requests, prompt, output):
        asked.append((requests, prompt, output))
        return 0.5 + 0.01 * output

    assert engine.w1(run) == pytest.approx(100)
    assert engine.w2(run) == pytest.approx(AT_ONCE * OUTPUT / 1.78)
    assert engine.w3(run) == pytest.approx(LONG / 0.51)
    assert asked == [(1, PROMPT, 1), (1, PROMPT, OUTPUT), (AT_ONCE, PROMPT, OUTPUT), *[(1, LONG, 1)] * 3]


def test_every_work_is_measured_in_turns():
    turns = []

    def contestant(name, pace):
        def run(requests, prompt, output):
            turns.append(name)
            return pace * requests * (prompt + 10 * output)

        return run

    found = list(engine.compare({"a": contestant("a", 1e-3), "b": contestant("b", 2e-3)}, 2, Neighbours()))
    assert [each.what for each in found] == ["W1", "W2", "W3"]
    assert all(each.ratio("b").values == (2.0, 2.0) for each in found)
    assert engine.row("S", "int8", Comparison("W1", "tokens/s", {"Attend": [80.0], "one": [40.0]})) == [
        *("S", "int8", "W1", "80"),
        "one: 40, 2.00 (2.00 to 2.00)",
    ]


def test_behind_a_context_decodes_are_measured_without_prompts_and_a_context_once():
    asked = []

    def run(requests, prompt, output, *, depth=0):
        asked.append((requests, prompt, output, depth))
        return 0.5 + 0.01 * output

    works = engine.plan([0, 4096], [1, 16], 5)
    assert [(list(some), turns, warm_up) for some, turns, warm_up in works] == [
        (["prompt at 0"], 1, 0),
        (["1 at once at 0", "16 at once at 0"], 5, 1),
        (["prompt at 4096"], 1, 0),
        (["1 at once at 4096", "16 at once at 4096"], 5, 1),
    ]
    found = [work(run) for some, *_ in works[2:] for work in some.values()]
    assert found == pytest.approx([(4096 + PROMPT) / 0.51, 100, 16 * 100])
    rows = [(requests, PROMPT, output, 4096) for requests in (1, 16) for output in (1, 1, OUTPUT)]
    assert asked == [(1, PROMPT, 1, 4096), *rows]


def test_all_prompts_have_the_same_context_which_begins_as_a_shorter_one_does():
    child = importlib.import_module("loadtest.bench.peers.child")
    long, short = child.prompts(3, 8, 40), child.prompts(2, 8, 16)
    assert {tuple(prompt[:40]) for prompt in long} == {tuple(long[0][:40])}
    assert short[0][:16] == long[0][:16]
    assert [prompt[-8:] for prompt in long[:2]] == [prompt[-8:] for prompt in short] == child.prompts(2, 8)
    assert len({tuple(prompt) for prompt in long}) == 3


DEEP = """
import time

def start(folder, threads):
    def generate(prompts, output):
        time.sleep(99 if {hangs} and len(prompts) > 1 and len(prompts[0]) > 200 else 0.001 * output)
        assert {most} > len(prompts[0]), "too long"
        return len(prompts) * output
    return {{"name": {name!r}}}, generate
"""
COMMAND = """
import sys
from functools import partial
from pathlib import Path
from loadtest.bench import engine
from loadtest.bench.contestant import Contestant
tree = Path(sys.argv[1])
engine.Contestant = partial(Contestant, tree=tree)
engine.write_shape = lambda *_: tree
engine.FOLDER = tree
engine.is_installed = lambda *_: True
engine.main(sys.argv[2:])
"""


def command(tree, *words, hangs=False):
    """`attend bench engine` on contestants that compute nothing; llama.cpp takes contexts of less than 200 tokens."""
    texts = {"attend": ("Attend", hangs, 9999), "llamacpp": ("llama.cpp", False, 200), "openvino": ("OpenVINO", False, 9999)}
    for name, (shown, stops, most) in texts.items():
        (tree / PEERS / f"{name}.py").write_text(DEEP.format(name=shown, hangs=stops, most=most))
    words = [*("--shape", "S", "--pairs", "1", "--json", str(tree / "found.json")), *words]
    with (tree / "out").open("wb") as out:
        return subprocess.Popen([sys.executable, "-c", COMMAND, str(tree), *words], stdout=out, stderr=out, cwd=TREE)


def filed(tree):
    """The works of the rows in the file, in their order."""
    rows = json.loads((tree / "found.json").read_text())["table"].splitlines()[2:]
    return [row.split(" | ")[2] for row in rows], rows


def test_rows_of_depths_are_printed_in_order_and_an_early_end_keeps_them(tree):
    process = command(tree, "--depth", "300,0", "--peer", "openvino", hangs=True)
    before = ["prompt at 0", "1 at once at 0", "8 at once at 0", "prompt at 300", "1 at once at 300"]
    try:
        assert wait_for(lambda: "| 1 at once at 300 |" in (tree / "out").read_text() or process.poll() is not None, 60)
        assert process.poll() is None, (tree / "out").read_text()
    finally:
        process.terminate()
    process.wait(30)
    works, rows = filed(tree)
    assert works == before
    assert all(row in (tree / "out").read_text() for row in rows)


def test_who_cannot_run_a_shape_or_a_depth_is_left_out_with_a_sentence(tree):
    peers = ("--peer", "llamacpp,openvino,transformers", "--weights", "int8")
    assert command(tree, "--depth", "0,100,32768", *peers).wait(60) == 0
    said = (tree / "out").read_text()
    assert "32768 is left out: S has 32768 positions" in said
    assert "transformers is left out" in said
    assert "llama.cpp is left out from prompt at 100 on" in said and "too long" in said
    works, rows = filed(tree)
    assert works == [f"{work} at {depth}" for depth in (0, 100) for work in ("prompt", "1 at once", "8 at once")]
    assert [("llama.cpp:" in row, "OpenVINO:" in row) for row in rows] == [(True, True)] * 3 + [(False, True)] * 3


def test_within_a_time_who_is_slow_has_fewer_turns_and_the_quotients_are_those_of_the_same_turns():
    turns = []

    def contestant(name, seconds):
        async def run():
            turns.append(name)
            await asyncio.sleep(seconds)
            return float(turns.count(name))

        return run

    found = asyncio.run(take_turns({"a": contestant("a", 0.0), "b": contestant("b", 0.05)}, 9, seconds=0.4))
    assert len(found["a"]) == 9 and 1 <= len(found["b"]) <= 3
    assert Comparison("x", "s", found).ratio("b").values == (1.0,) * len(found["b"])
    assert len(asyncio.run(take_turns({"c": contestant("c", 0.05)}, 9, seconds=0.01))["c"]) == 1


def test_marked_processes_are_found_whoever_their_parent_is():
    environment = os.environ | {server.MARK: "here"}
    script = f"{sys.executable} -c 'import time; time.sleep(60)' >/dev/null & echo $!"
    pid = int(subprocess.run(["sh", "-c", script], env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout)
    try:
        assert wait_for(lambda: [each.pid for each in server.Server(Address("", ""), None, "here").processes()] == [pid])
        assert not server.Server(Address("", ""), None, "there").processes()
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("words", [["--at-once", "4"], ["--depth", "0", "--at-once", "0,4"]], ids=" ".join)
def test_streams_without_a_depth_and_no_streams_are_errors(words, capsys):
    with pytest.raises(SystemExit):
        engine.read_flags(words)
    assert "--at-once" in capsys.readouterr().err.splitlines()[-1]


BENCHMARKS = sorted(path.stem for path in (TREE / "loadtest/bench").glob("*.py") if "\ndef main(" in path.read_text())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_option_of_a_benchmark_is_explained(name, monkeypatch):
    parsers = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda parser, words=None: parsers.append(parser) or sys.exit(0))
    with pytest.raises(SystemExit):
        importlib.import_module(f"loadtest.bench.{name}").main([])
    (parser,) = parsers
    assert [action.dest for action in parser._actions if not action.help] == []
    assert f"attend bench {name}" in parser.format_help()
