"""`attend bench gpu` without a GPU: whatever is slow, missing or wrong, and whenever it is ended, what was measured is kept."""

import ast
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from loadtest.bench import gpu
from loadtest.bench.contestant import OURS, TREE, Contestant, PeerError
from loadtest.bench.on_gpu import answers, clocks, here, laws, rates
from loadtest.bench.on_gpu.answers import OUTPUT, Answer
from loadtest.bench.on_gpu.clocks import Clocks
from loadtest.bench.on_gpu.rates import GPU_WORKS, Work
from loadtest.bench.on_gpu.session import Session
from loadtest.bench.shapes import parameters
from tests.model.net.triton.test_triton import LAWS
from tests.service.server import wait_for

H100 = {"torch": "2.11", "triton": "3.6", "device": "H100", "devices": 1, "kernel": "compiled, and right"}
MINUTES, END = 9, 540 - gpu.RESERVE
RIGHT = {"backend": "triton", "dtype": "bfloat16", "recorded": True, "tokens": 72, "other": 1, "margin": 0.01, "allowed": 0.1}


class World:
    """A machine in virtual time, on which nothing runs: seconds of each part by words in its name, of contestants by shape."""

    def __init__(self, monkeypatch, tmp_path, facts=None):
        self.now, self.facts, self.wrong = 0.0, facts or H100, []
        self.seconds: dict[str, float] = {}
        """By the last module or the first test of a command; a contestant's start by `PEER SHAPE`."""
        self.order: list[str] = []
        self.missing: dict[str, str] = {}
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(gpu, "Session", lambda end, path: Session(end, path, clock=lambda: self.now))
        monkeypatch.setattr(Session, "listen", lambda _: None)
        monkeypatch.setattr(gpu, "run", self.run)
        monkeypatch.setattr(laws, "run", self.run)
        monkeypatch.setattr(
            rates, "Contestant", lambda peer, folder, log, **more: Fake(self, f"{peer} {folder.name}", more["left"])
        )
        monkeypatch.setattr(here, "missing", lambda: self.missing)
        monkeypatch.setattr(here, "plain", lambda: {"gpu": "H100"})
        self.json, self.words = tmp_path / "gpu.jsonl", ["--folder", str(tmp_path / "logs"), "--minutes", str(MINUTES)]

    def spend(self, name, usual, left):
        """True if it was done in its time."""
        taken = min(self.seconds.get(name, usual), max(0.0, left()))
        self.now += taken
        self.order.append(name)
        return taken >= self.seconds.get(name, usual)

    def run(self, command, log, left, more=None):
        words = [str(word) for word in command]
        log.write_text("")
        if told := (more or {}).get("BENCH_REPORT"):
            name = next(Path(word).stem for word in words if word.startswith("tests/"))
            done = self.spend(name, 20, left)
            Path(told).write_text(json.dumps({"outcome": "passed", "test": "a", "why": ""}) + "\n")
            return 0 if done else None
        name = words[2].split(".")[-1]
        done = self.spend(name, 10, left)
        printed = {"here": self.facts, "answers": RIGHT | {"wrong": self.wrong}, "speed": {"bytes": 3e12, "flops": 7e14}}[name]
        log.write_text(json.dumps(printed) + "\n" if done else "")
        return 0 if done else None

    def main(self, *words):
        """The exit code, and all that was filed."""
        with pytest.raises(SystemExit) as ended:
            gpu.main([*self.words, "--json", str(self.json), *words])
        return ended.value.code, [json.loads(line) for line in self.json.read_text().splitlines()]


class Fake:
    """A contestant in virtual time."""

    def __init__(self, world, name, left):
        self.world, self.name, self.left = world, name, left
        self.facts = {"name": name, "backend": "triton", "recorded": True}
        if not world.spend(name, 30, left):
            raise PeerError("gave no answer in its time")

    def __call__(self, requests, prompt, output):
        seconds = 0.01 * output + 1e-5 * requests * prompt
        if not self.world.spend("a run", seconds, self.left):
            raise PeerError("gave no answer in its time")
        return seconds

    def close(self):
        pass


@pytest.fixture
def world(monkeypatch, tmp_path):
    return World(monkeypatch, tmp_path)


def measured(lines, who, shape="8B"):
    return [line["work"] for line in lines if line["kind"] == "figure" and (line["who"], line["shape"]) == (who, shape)]


STARTS = {f"{who} {shape}": 100.0 for who in (OURS, gpu.PEER) for shape in gpu.ON_GPU}
TESTS = {"smoke_laws": 1e6, "test_graphs": 1e6, "laws": 1e6}
TROUBLES = {
    "none": {},
    "each start takes 100 s": STARTS,
    "no law ends": TESTS,
    "no peer starts": {name: math.inf for name in STARTS if not name.startswith(OURS)},
    "answers do not end": {"answers": math.inf},
    "all of that": STARTS | TESTS | {"answers": math.inf, "speed": math.inf, "here": 59.0},
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_whatever_is_slow_ours_is_measured_before_any_peer_and_all_ends_in_time(world, trouble, capsys):
    world.seconds = TROUBLES[trouble]
    code, lines = world.main()
    assert world.now <= END
    assert measured(lines, OURS) == [work.name for work in GPU_WORKS]
    begun = [name for name in world.order if name.split()[0] in (OURS, gpu.PEER)]
    assert begun[0] == f"{OURS} 8B"
    if trouble == "none":
        assert begun == [*(f"{OURS} {shape}" for shape in gpu.ON_GPU), *(f"{gpu.PEER} {shape}" for shape in gpu.ON_GPU)]
        assert world.order[:4] == ["here", "answers", "answers", "smoke_laws"]
        assert world.order[-1] == "laws"
    held = {line["what"] for line in lines if line["kind"] == "law" and not line["cut"]}
    assert trouble in ("no law ends", "all of that") or held == {law.what for law in (laws.SMOKE, laws.STEPS, *laws.WIDE)}
    assert code == (3 if world.seconds else 0)
    printed = capsys.readouterr().out
    assert lines[-1]["kind"] == "end"
    assert lines[-1]["table"] in printed
    assert "| 8B | decode of 1 at 1024 |" in lines[-1]["table"]
    assert all("when" in line and "facts" in line for line in lines)
    assert lines[-1]["facts"]["gpu"] == "H100"


SMOKE_TROUBLES = {
    "none": {},
    "no law ends": {"smoke_laws": math.inf},
    "answers do not end": {"answers": math.inf},
    "all of that": {"smoke_laws": math.inf, "answers": math.inf, "speed": math.inf, "here": 19.0},
}


@pytest.mark.parametrize("trouble", SMOKE_TROUBLES)
def test_a_smoke_run_has_a_decode_and_a_prompt_of_8b_within_90_seconds(world, trouble):
    """Of a start that takes 17 seconds, whatever else goes wrong."""
    world.words = world.words[:2]
    world.seconds = {f"{OURS} 8B": 17.0} | SMOKE_TROUBLES[trouble]
    code, lines = world.main("--smoke")
    assert world.now <= 60 * gpu.SMOKE_MINUTES * 0.9
    assert measured(lines, OURS) == ["decode of 1 at 1024", "prompt of 8192"]
    assert {name.split()[0] for name in world.order} <= {"here", "answers", "smoke_laws", "speed", OURS, "a"}
    assert code == (0 if trouble == "none" else 3)
    if trouble == "none":
        kinds = [line["kind"] for line in lines]
        assert kinds == ["here", "here", "answers", "law", "speed", "start", "figure", "figure", "end"]


def test_a_wrong_answer_stands_first_in_the_table_and_fails_the_run_which_goes_on(world):
    world.wrong = ["prompt 0, token 3: 5, not 9, whose score is 2.1 higher"]
    code, lines = world.main()
    assert code == 3
    assert lines[-1]["table"].strip().startswith("WRONG answers of the shipped model")
    assert measured(lines, OURS)


def test_attend_by_another_way_than_triton_with_recorded_steps_is_a_failure(world, monkeypatch):
    monkeypatch.setitem(RIGHT, "recorded", False)
    code, lines = world.main("--no-laws")
    assert code == 3
    assert not any(line["right"] for line in lines if line["kind"] == "answers")


@pytest.mark.parametrize("name", ["triton", "pytest", "transformers", "xdist"])
def test_what_is_missing_is_named_with_what_it_is_for_and_what_needs_it_alone_is_left_out(world, name):
    world.missing = {name: here.NEEDED[name]}
    code, lines = world.main()
    [line] = [line for line in lines if line["kind"] == "missing"]
    assert line["what"] == name
    left_out = {line["what"] for line in lines if line["kind"] == "failed"}
    assert (code, len(left_out) > 0) == ((0, False) if name == "xdist" else (3, True))
    assert bool(measured(lines, OURS)) == (name != "triton")
    assert bool(measured(lines, gpu.PEER)) == (name != "transformers")
    assert any(line["kind"] == "speed" for line in lines)


@pytest.mark.parametrize(
    ("facts", "missing", "why"),
    [
        (H100, {"torch": ""}, "torch is missing"),
        ({"torch error": "OSError: libcudart"}, {}, "torch OSError: libcudart"),
        ({"torch": "2.11", "no device": "driver too old"}, {}, "torch 2.11 sees no CUDA device: driver too old"),
    ],
)
def test_where_nothing_can_run_it_ends_at_once_with_a_sentence(world, facts, missing, why):
    world.facts, world.missing = facts, missing
    code, lines = world.main()
    assert code == 2
    assert f"nothing can run here: {why}" in lines[-1]["table"]
    assert (world.order, world.now) == (["here"], 10)


def test_a_compiler_that_compiles_nothing_costs_only_what_needs_triton(world):
    world.facts = H100 | {"kernel error": "PTXASError: no ptxas"}
    code, lines = world.main()
    assert code == 3
    assert "triton compiles no kernel: PTXASError: no ptxas" in lines[-1]["table"]
    assert measured(lines, gpu.PEER)
    assert not measured(lines, OURS)


def test_a_fault_of_a_part_costs_no_other_part(world, monkeypatch):
    monkeypatch.setattr(gpu, "weigh", lambda *_: 1 // 0)
    code, lines = world.main()
    assert code == 3
    assert [line["why"].split(":")[0] for line in lines if line["kind"] == "failed"] == ["ZeroDivisionError"]
    assert measured(lines, OURS)


def test_neither_a_full_disk_nor_a_reader_who_has_left_ends_a_run(tmp_path, monkeypatch):
    session = Session(60, tmp_path / "no folder" / "gpu.jsonl")

    def gone(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    session.note("figure", "shown", value=1)
    assert session.of("figure")[0]["value"] == 1


# answers


def scored(rows):
    return torch.tensor(rows, dtype=torch.float32)


@pytest.mark.parametrize(("below", "wrong"), [(0.0, 0), (0.19, 0), (0.21, OUTPUT)])
def test_another_token_is_wrong_where_its_score_is_lower_than_rounding_explains(below, wrong):
    exact = scored([[1.0 - below, 1.0, -3.0]] * OUTPUT)
    found = answers.verdict([Answer([1], [0] * OUTPUT)], [exact], [exact + 0.1])
    assert (len(found["wrong"]), found["tokens"]) == (wrong, OUTPUT)
    assert found["margin"] == pytest.approx(below)


@pytest.mark.parametrize("output", [[], [1] * (OUTPUT - 1)])
def test_an_answer_that_ends_too_soon_is_wrong(output):
    exact = scored([[0.0, 1.0]] * max(1, len(output)))
    assert answers.verdict([Answer([1], output)], [exact], [exact])["wrong"]


def test_scores_that_are_not_finite_excuse_nothing():
    exact = scored([[math.nan, 1.0]] * OUTPUT)
    assert len(answers.verdict([Answer([1], [0] * OUTPUT)], [exact], [exact])["wrong"]) == OUTPUT


# rates


def test_a_decode_is_measured_without_prompts_and_a_prompt_without_decodes_each_the_second_time():
    asked = []

    def timed(requests, prompt, output):
        asked.append((requests, prompt, output))
        return (1.0 + 0.5 * (output - 1)) * (10 if asked.count(asked[-1]) == 1 else 1)

    assert [work.rate(timed) for work in (Work(4, 100, 8), Work(2, 100))] == [4 * 8 / 4.0, 200 / 1.0]
    assert asked == [*[(4, 100, 1)] * 2, *[(4, 100, 9)] * 2, *[(2, 100, 1)] * 2]
    with pytest.raises(PeerError, match="decode of 1 at 9: 4 more tokens took no longer"):
        Work(1, 9, 4).rate(lambda *_: 1.0)


def test_a_decode_cannot_be_faster_than_its_bytes_nor_a_prompt_than_its_products():
    speed = {"bytes": 4.3e12, "flops": 790e12}
    assert Work(1, 0, 1).limit("8B", speed) == pytest.approx(4.3e12 / (2 * parameters("8B")), rel=1e-4)
    assert Work(256, 960, 128).limit("8B", speed) == pytest.approx(256 * 4.3e12 / (15.01e9 + 256 * 1024 * 131072), rel=0.01)
    attention = 4 * 8192 / 2 * 4096 * 32
    assert Work(1, 8192).limit("8B", speed) == pytest.approx(790e12 / (2 * 6.98e9 + attention), rel=0.01)


def test_a_row_says_what_was_not_measured():
    session = Session(60)
    for who, work, value in [(OURS, "a", 200.0), (gpu.PEER, "a", 100.0), (OURS, "b", 50.0), (gpu.PEER, "c", 9.0)]:
        session.note("figure", "", shape="Q", work=work, who=who, value=value, limit=400.0 if work == "a" else None)
    assert rates.rows(session) == [
        ["Q", "a", "200.0", "50% of 400", "transformers: 100.0, 2.00"],
        ["Q", "b", "50.0", "not known", "nobody"],
        ["Q", "c", "not measured", "not known", "transformers: 9.0"],
    ]


SEEN = [(1980.0, 2619.0, 650.5, 61.0), (1755.0, 2619.0, 699.5, 66.0)]


def nvml(readings):
    """A pynvml that tells these, one after the other, and then the last again and again."""
    told, last = iter(readings), []

    def clock(one, which):
        assert one == "the first"
        if which == "sm":
            last[:] = [next(told, (last or [None])[0])]
        return last[0][0 if which == "sm" else 1]

    return SimpleNamespace(
        NVML_CLOCK_SM="sm",
        NVML_CLOCK_MEM="mem",
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex={0: "the first"}.__getitem__,
        nvmlDeviceGetHandleByUUID={"GPU-7": "the first"}.__getitem__,
        nvmlDeviceGetClockInfo=clock,
        nvmlDeviceGetPowerUsage=lambda one: 1000 * last[0][2],
        nvmlDeviceGetTemperature=lambda one, which: last[0][3],
    )


@pytest.mark.parametrize("visible", ["", "GPU-7", "0,1"])
def test_clocks_are_watched_while_something_is_measured(monkeypatch, visible):
    monkeypatch.setitem(sys.modules, "pynvml", nvml([SEEN[0], *SEEN]))
    monkeypatch.setattr(clocks, "EVERY", 0.01)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with Clocks() as found:
        assert wait_for(lambda: len(found._seen) > 2)
    assert found.told["by"] == "nvidia-ml-py"
    assert found.told["sm"] == [1755.0, 1755.0, 1980.0]
    assert "sm 1755 MHz (1755 to 1980), memory 2619 MHz, power " in found.summary


def test_without_nvml_the_program_of_the_driver_is_asked_and_without_either_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with Clocks() as found:
        pass
    assert (found.told, found.summary) == ({"by": clocks.NOBODY}, f"clocks: {clocks.NOBODY}")
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\nprint('1980, 2619, 650.50, 61')\n")
    program.chmod(0o755)
    with Clocks() as found:
        assert wait_for(lambda: found._seen)
    assert (found.told["by"], found.told["power"]) == ("nvidia-smi", [650.5] * 3)
    program.write_text(f"#!{sys.executable}\nprint('[N/A], 2619, 650.50, 61')\n")
    with Clocks() as found:
        pass
    assert found.told == {"by": clocks.NOBODY}
    with Clocks(watching=False) as found:
        pass
    assert (found.told, found.summary) == ({}, "")


# laws


def test_the_laws_name_files_and_tests_that_exist_and_leave_out_none_of_the_kernels():
    named = {
        law: [word for word in law.words if word.startswith("tests/")]
        for law in (laws.SMOKE, laws.STEPS, laws.RANKS, *laws.WIDE)
    }
    assert all((TREE / path).exists() for paths in named.values() for path in paths)
    assert set(LAWS) <= {path for paths in named.values() for path in paths}
    for law in (laws.STEPS, laws.RANKS):
        for path in named[law]:
            names = [node.name for node in ast.walk(ast.parse((TREE / path).read_text())) if isinstance(node, ast.FunctionDef)]
            assert any(law.words[-1] in name for name in names), path


def test_outcomes_are_known_though_the_tests_are_cut(tmp_path, monkeypatch):
    """Warnings fail nothing there: libraries of a GPU warn of things that no CPU has shown."""
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:  # of the worker that runs this test
        monkeypatch.delenv(name)
    tests = tmp_path / "test_slow.py"
    tests.write_text(
        "import time, warnings\ndef test_warns(): warnings.warn('new')\ndef test_no(): assert 0\n"
        "def test_slow(): time.sleep(99)\n"
    )
    session = Session(time.monotonic() + 120)
    told = tmp_path / "slow-laws.jsonl"
    law = laws.Law("slow laws", (str(tests), "-c", str(TREE / "pyproject.toml")), 1, 60)
    laws.hold(session, law, tmp_path, lambda: 0.0 if told.is_file() and told.read_text().count("\n") == 2 else session.left)
    [line] = session.of("law")
    assert (line["passed"], line["failed"], line["cut"]) == (1, 1, True)
    assert "test_no: assert 0" in session.of("failed")[0]["why"]


# processes


def gone(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


def test_a_contestant_that_does_not_start_or_answer_in_its_time_is_ended(tmp_path):
    folder = tmp_path / "loadtest/bench/peers"
    folder.mkdir(parents=True)
    (folder / "child.py").write_bytes((TREE / "loadtest/bench/peers/child.py").read_bytes())
    (folder / "never.py").write_text("import time\ndef start(*_): time.sleep(99)\n")
    (folder / "hangs.py").write_text("import time\ndef start(*_): return {'name': 'hangs'}, lambda *_: time.sleep(99)\n")
    begun = time.monotonic()
    with pytest.raises(PeerError, match="gave no answer in its time"):
        Contestant("never", tmp_path, tmp_path / "log", tree=tmp_path, left=lambda: begun + 1 - time.monotonic())
    hangs = Contestant("hangs", tmp_path, tmp_path / "log", tree=tmp_path)
    hangs.left = lambda: 0.0
    with pytest.raises(PeerError, match="gave no answer in its time"):
        hangs(1, 1, 1)
    hangs.close()
    assert hangs.process.poll() is not None


COMMAND = """
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from loadtest.bench import gpu
from loadtest.bench.contestant import Contestant
from loadtest.bench.on_gpu import here, laws, rates, session
tree = Path(sys.argv[1])
gpu.module = lambda name, *words: [sys.executable, tree / "part.py", name]
rates.Contestant = partial(Contestant, tree=tree)
here.missing = dict
laws.INTERPRETED = None
laws.SMOKE = laws.Law("slow laws", (str(tree / "test_slow.py"),), 1, 60)
plan = gpu.plan
gpu.plan = lambda *given: [replace(part, least=part.least / 50) for part in plan(*given)]
gpu.main(["--device", "cpu", "--shape", "S", "--folder", str(tree / "logs"), "--json", str(tree / "gpu.jsonl"), *sys.argv[2:]])
"""
PART = """
import json, sys
print("libraries print what they like, {also this")
print(json.dumps({"here": {}, "speed": {"bytes": 1e9, "flops": 1e9}, "answers": {"backend": "native", "dtype": "bfloat16",
    "recorded": False, "tokens": 1, "other": 0, "margin": 0, "allowed": 0, "wrong": []}}[sys.argv[1]]))
print("{ and at their end")
"""
ATTEND = """
import time
def start(folder, threads):
    def generate(prompts, output):
        time.sleep(0.01 + 0.002 * output)
        return len(prompts) * output
    return {"name": "Attend"}, generate
"""


@pytest.fixture
def started(tmp_path):
    """Starts the command with parts that take no time, Attend that answers, a peer that does not start, and slow laws."""
    folder = tmp_path / "loadtest/bench/peers"
    folder.mkdir(parents=True)
    (folder / "child.py").write_bytes((TREE / "loadtest/bench/peers/child.py").read_bytes())
    (folder / "attend.py").write_text(ATTEND)
    (folder / "transformers.py").write_text("import time\ndef start(*_): time.sleep(99)\n")
    (tmp_path / "part.py").write_text(PART)
    (tmp_path / "test_slow.py").write_text("import time\ndef test_slow(): time.sleep(99)\n")

    def start(*words):
        command = [sys.executable, "-c", COMMAND, str(tmp_path), *words]
        return subprocess.Popen(command, cwd=TREE, stdout=subprocess.PIPE, text=True, start_new_session=True)

    return start


def filed(tmp_path):
    return [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]


def left_behind(tmp_path):
    """Processes that were started by a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path] if str(tmp_path) in path.read_text() and not gone(int(path.parent.name)) else []
        except OSError:
            continue
    return found


def test_at_the_end_of_its_time_a_table_and_every_row_are_there_and_nothing_runs(started, tmp_path):
    """A peer hangs at its start, and a law is slow."""
    process = started("--minutes", "0.4", "--no-laws")
    printed, _ = process.communicate(timeout=120)
    lines = filed(tmp_path)
    assert process.returncode == 3
    assert measured(lines, OURS, "S") == [work.name for work in rates.CPU_WORKS]
    assert lines[-1]["table"] in printed
    assert "gave no answer in its time" in lines[-1]["table"]
    assert wait_for(lambda: not left_behind(tmp_path))


@pytest.mark.parametrize(
    ("number", "when"),
    [
        (signal.SIGTERM, "Here"),  # while it looks
        (signal.SIGINT, "right answers of shape S"),  # in the slow laws
        (signal.SIGTERM, "S, decode of 1"),  # while ours is measured
        (signal.SIGHUP, "S, prompt"),  # while the peer starts
    ],
)
def test_whenever_a_signal_comes_the_table_and_the_rows_so_far_are_there(started, tmp_path, number, when):
    process = started(*([] if when.startswith("right") else ["--no-laws"]))
    guard = threading.Timer(120, process.kill)
    guard.start()
    printed: list[str] = []
    with process:
        for line in process.stdout:
            printed.append(line)
            if line.startswith(when):
                time.sleep(0.3)  # into what comes next
                os.kill(process.pid, number)
                break
        begun = time.monotonic()
        printed += process.stdout
    assert time.monotonic() - begun < 25  # what comes next would take 50 s
    guard.cancel()
    assert process.returncode == 3
    lines = filed(tmp_path)
    assert (lines[-1]["kind"], lines[-1]["ended_by"]) == ("end", number.name)
    assert lines[-1]["table"] in "".join(printed)
    assert len(measured(lines, OURS, "S")) == sum("attend: " in line and "tokens/s" in line for line in printed)
    assert all(f"| {work} |" in lines[-1]["table"] for work in measured(lines, OURS, "S"))
    assert wait_for(lambda: not left_behind(tmp_path))


# a bare machine

BARE = """
import importlib.abc, importlib.metadata, sys
class Lacks(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"gguf", "llguidance", "pydantic", "orjson", "ray", "fastapi", "httptools"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Lacks())
version = importlib.metadata.version
def lacks(name):
    if name == "attend-server":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = lacks
"""
ENGINE = """
import sys
sys.path[0] = "loadtest/bench/peers"
from pathlib import Path
import child
del sys.path[0]  # a peer's adapter may have the name of a package
import attend.model
assert Path(attend.model.__file__).is_relative_to(Path.cwd()), attend.model.__file__
facts, generate = child.adapter("attend").start(sys.argv[1], 1)
assert facts["version"] == "a tree that is not installed", facts
assert generate([[5, 6, 7]], 4) == 4
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-W", "default", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A copy of the tree without git and without what is built, and its environment: the packages that a GPU machine has."""
    tree = tmp_path_factory.mktemp("bare")
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.png", "*.svg")
    for name in ("attend", "loadtest", "model", "tests/model", "tests/gpu"):
        shutil.copytree(TREE / name, tree / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "tests/__init__.py", "tests/conftest.py"):
        shutil.copy(TREE / name, tree / name)
    (tree / "sitecustomize.py").write_text(BARE)
    return tree, os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def test_a_tree_that_is_not_installed_computes_and_has_its_laws_without_the_packages_of_the_service(bare, tmp_path):
    tree, environment = bare
    (tmp_path / "dummy").mkdir()
    config = {"model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    (tmp_path / "dummy/config.json").write_text(json.dumps(config))
    paths = [word for law in (laws.SMOKE, laws.STEPS) for word in law.words if word.startswith("tests/")]
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "dummy"), *paths]
    more = {"BENCH_LOAD": "dummy", "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=tree, env=environment | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_smoke_run_goes_through_on_a_machine_with_nothing_but_torch(bare, tmp_path):
    tree, environment = bare
    words = ["--device", "cpu", "--smoke", "--no-laws", "--minutes", "4", "--folder", tmp_path, "--json", tmp_path / "rows"]
    command = [sys.executable, "-m", "loadtest.bench.gpu", *map(str, words)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [line["right"] for line in lines if line["kind"] == "answers"] == [True]
    assert measured(lines, OURS, "S") == [work.name for work in rates.CPU_SMOKE]
    assert lines[-1]["facts"]["commit"].startswith("no git")


def test_the_command_imports_no_package_before_it_has_said_what_is_here(tmp_path):
    code = "import sys, loadtest.bench.gpu; print(sorted({'torch', 'numpy', 'psutil', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=TREE, capture_output=True, text=True).stdout == "[]\n"


def test_a_tree_without_git_is_known_by_its_code(tmp_path, monkeypatch):
    monkeypatch.setattr(here, "TREE", tmp_path)
    (tmp_path / "model").mkdir()
    names = set()
    for text in ("a", "b"):
        (tmp_path / "model/a.py").write_text(text)
        names.add(here.commit())
    assert len(names) == 2
    assert all(name.startswith("no git") for name in names)
