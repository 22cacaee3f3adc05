"""`attend bench gpu` without a GPU: whatever is slow or wrong, and whenever it is ended, what was measured is kept."""

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

import pytest
import torch

from loadtest.bench import gpu
from loadtest.bench.contestant import OURS, TREE, Contestant, PeerError
from loadtest.bench.on_gpu import answers, rates
from loadtest.bench.on_gpu.answers import OUTPUT, Answer
from loadtest.bench.on_gpu.rates import Work
from loadtest.bench.shapes import parameters
from tests.model.net.triton.test_triton import LAWS
from tests.service.server import wait_for


@pytest.mark.parametrize(("below", "wrong"), [(0.0, 0), (0.19, 0), (0.21, OUTPUT), (math.nan, OUTPUT)])
def test_a_token_is_wrong_where_rounding_does_not_explain_its_score(below, wrong):
    exact = torch.tensor([[1.0 - below, 1.0, -3.0]] * OUTPUT)
    found = answers.verdict([Answer([1], [0] * OUTPUT)], [exact], [torch.nan_to_num(exact) + 0.1] if wrong else [exact + 0.1])
    assert (len(found["wrong"]), found["tokens"]) == (wrong, OUTPUT)


def test_an_answer_that_ends_too_soon_is_wrong():
    exact = torch.tensor([[0.0, 1.0]] * (OUTPUT - 1))
    assert answers.verdict([Answer([1], [1] * (OUTPUT - 1))], [exact], [exact])["wrong"]


def test_a_decode_is_measured_without_prompts_and_the_second_time():
    asked = []

    def timed(requests, prompt, output):
        asked.append((requests, prompt, output))
        return (1.0 + 0.5 * (output - 1)) * (10 if asked.count(asked[-1]) == 1 else 1)

    assert [work.rate(timed) for work in (Work(4, 100, 8), Work(2, 100))] == [4 * 8 / 4.0, 200 / 1.0]
    assert asked == [*[(4, 100, 1)] * 2, *[(4, 100, 9)] * 2, *[(2, 100, 1)] * 2]


def test_a_decode_cannot_be_faster_than_its_bytes_nor_a_prompt_than_its_products():
    speed = {"bytes": 4.3e12, "flops": 790e12}
    assert Work(1, 0, 1).limit("llama-8b", speed) == pytest.approx(4.3e12 / (2 * parameters("llama-8b")), rel=1e-4)
    assert Work(256, 960, 128).limit("llama-8b", speed) == pytest.approx(
        256 * 4.3e12 / (15.01e9 + 256 * 1024 * 131072), rel=0.01
    )
    attention = 4 * 8192 / 2 * 4096 * 32
    assert Work(1, 8192).limit("llama-8b", speed) == pytest.approx(790e12 / (2 * 6.98e9 + attention), rel=0.01)


def test_the_laws_name_files_and_tests_that_exist_and_leave_out_none_of_the_kernels():
    named = {what: [word for word in words if word.startswith("tests/")] for what, words in gpu.LAWS.items()}
    assert all((TREE / path).exists() for paths in (*named.values(), gpu.SMOKE_LAWS) for path in paths)
    assert set(LAWS) <= {path for paths in (*named.values(), gpu.SMOKE_LAWS) for path in paths}
    for what, words in gpu.LAWS.items():
        for path in named[what] if words[-1] in ("on_a_gpu", "on_gpus") else ():
            names = [node.name for node in ast.walk(ast.parse((TREE / path).read_text())) if isinstance(node, ast.FunctionDef)]
            assert any(words[-1] in name for name in names), path


@pytest.fixture
def tree(tmp_path):
    """Attend that answers at once, a peer that does not start, one that hangs, and a part of the bench that takes no time."""
    folder = tmp_path / "loadtest/bench/peers"
    folder.mkdir(parents=True)
    (folder / "child.py").write_bytes((TREE / "loadtest/bench/peers/child.py").read_bytes())
    (folder / "attend.py").write_text(ATTEND)
    (folder / "transformers.py").write_text("import time\ndef start(*_): time.sleep(99)\n")
    (folder / "hangs.py").write_text("import time\ndef start(*_): return {'name': 'hangs'}, lambda *_: time.sleep(99)\n")
    (tmp_path / "part.py").write_text(PART)
    return tmp_path


def test_a_contestant_that_does_not_start_or_answer_in_its_time_is_ended(tree):
    begun = time.monotonic()
    with pytest.raises(PeerError, match="gave no answer in its time"):
        Contestant("transformers", tree, tree / "log", tree=tree, left=lambda: begun + 1 - time.monotonic())
    hangs = Contestant("hangs", tree, tree / "log", tree=tree)
    hangs.left = lambda: 0.0
    with pytest.raises(PeerError, match="gave no answer in its time"):
        hangs(1, 1, 1)
    hangs.close()
    assert hangs.process.poll() is not None


COMMAND = """
import sys
from functools import partial
from pathlib import Path
from loadtest.bench import gpu
from loadtest.bench.contestant import Contestant
from loadtest.bench.on_gpu import rates, session
tree = Path(sys.argv[1])
run = session.run
session.run = lambda command, *given: run([sys.executable, tree / "part.py", *command[3:]], *given)
rates.Contestant = partial(Contestant, tree=tree)
gpu.main(["--device", "cpu", "--no-laws", "--folder", str(tree / "logs"), "--json", str(tree / "gpu.jsonl"), *sys.argv[2:]])
"""
PART = """
import json, sys
print("libraries print what they like, {also this")
facts = {"backend": "native", "dtype": "bfloat16", "recorded": False, "wrong": []}
facts |= {"tokens": 1, "other": 0, "margin": 0, "allowed": 0, "torch": "2", "bytes": 1e9, "flops": 1e9}
print(json.dumps(facts))
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


def start(tree, *words):
    command = [sys.executable, "-c", COMMAND, str(tree), *words]
    return subprocess.Popen(command, cwd=TREE, stdout=subprocess.PIPE, text=True, start_new_session=True)


def filed(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(lines):
    return [line["work"] for line in lines if line["kind"] == "figure" and line["who"] == OURS]


def left_behind(tree):
    """Processes that were started by a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, state = (path / "cmdline").read_text(), (path / "stat").read_text().split()[2]
        except OSError:
            continue
        found += [path] if str(tree) in command and state != "Z" else []
    return found


@pytest.mark.parametrize("when", ["S, decode of 1", "S, prompt"])
def test_whenever_a_signal_comes_the_table_and_the_rows_so_far_are_there(tree, when):
    """While ours is measured; while the peer starts, for longer than a test may take."""
    process = start(tree)
    guard = threading.Timer(120, process.kill)
    guard.start()
    with process:
        for line in process.stdout:
            if line.startswith(when):
                time.sleep(0.3)  # into what comes next
                os.kill(process.pid, signal.SIGTERM)
                break
        printed = process.stdout.read()
    guard.cancel()
    lines = filed(tree / "gpu.jsonl")
    assert (process.returncode, lines[-1]["kind"], lines[-1]["ended_by"]) == (3, "end", "SIGTERM")
    assert lines[-1]["table"] in printed and "S, transformers: " in lines[-1]["table"]
    assert measured(lines) and all(f"| {work} |" in lines[-1]["table"] for work in measured(lines))
    assert when == "S, decode of 1" or len(measured(lines)) == len(rates.CPU_WORKS)
    assert wait_for(lambda: not left_behind(tree))


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


@pytest.mark.long
def test_the_smoke_run_goes_through_on_a_machine_with_nothing_but_torch(tmp_path):
    """A copy of the tree without git and without what is built, and the packages that a GPU machine has."""
    tree = tmp_path / "bare"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.png", "*.svg")
    for name in ("attend", "loadtest", "model", "tests/model", "tests/gpu"):
        shutil.copytree(TREE / name, tree / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "tests/__init__.py", "tests/conftest.py"):
        shutil.copy(TREE / name, tree / name)
    (tree / "sitecustomize.py").write_text(BARE)
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    words = ["--device", "cpu", "--smoke", "--no-laws", "--minutes", "4", "--folder", tmp_path, "--json", tmp_path / "rows"]
    command = [sys.executable, "-m", "loadtest.bench.gpu", *map(str, words)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = filed(tmp_path / "rows")
    assert [line["right"] for line in lines if line["kind"] == "answers"] == [True]
    assert measured(lines) == [work.name for work in rates.CPU_WORKS[::2]]
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-W", "default", "-p", "no:cacheprovider"]
    more = {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*collect, *gpu.SMOKE_LAWS], cwd=tree, env=environment | more, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_imports_no_package_before_it_has_said_what_is_here():
    code = "import sys, loadtest.bench.gpu; print(sorted({'torch', 'numpy', 'psutil', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=TREE, capture_output=True, text=True).stdout == "[]\n"
