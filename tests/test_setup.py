"""What `make serve` installs: no tools of tests, and torch's build for CPUs where there is no GPU."""

import os
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from tests.conftest import commit, thinned
from tests.deploy.manifests import constraint

ROOT = Path(__file__).parents[1]
INDEX = "https://download.pytorch.org/whl/cpu"


def make(*words: str) -> str:
    """What make says. Its own variables, as of the run that started this one, are not handed on."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(["make", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False).stdout


def test_serving_installs_no_tools_of_tests_and_testing_does(tmp_path):
    serve, check = (make("-n", f"VENV={tmp_path / 'venv'}", verb) for verb in ("serve", "check"))
    assert "--editable ." in serve and "--group" not in serve
    assert "--group check" in check
    assert re.findall(r"\d of \d", serve) == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]


def test_a_python_that_is_too_old_is_refused_in_a_sentence(tmp_path):
    old = tmp_path / "python"
    old.write_text(
        f"#!/bin/sh\nshift\nexec {sys.executable} -c \"import sys; sys.version_info = (3, 10); sys.version = '3.10.9 x'; $1\""
    )
    old.chmod(0o755)
    env = {**os.environ, "MAKEFLAGS": ""}
    words = ["make", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}", "serve"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.stderr.startswith(f"Attend needs Python 3.11 to 3.13; {old} is 3.10.9: make PYTHON=python3.12")
    assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has an NVIDIA GPU")
@pytest.mark.parametrize(
    ("configured", "pytorchs", "asked", "says"),
    [(0, 0, [None], ""), (1, 0, [None, INDEX], ""), (1, 1, [None, INDEX], "the one with CUDA comes in its place")],
    ids=["where pip is configured", "on PyTorch's index", "nowhere"],
)
def test_torchs_build_for_cpus_is_looked_for(tmp_path, configured, pytorchs, asked, says):
    told, pip, more = tmp_path / "told", tmp_path / "pip", tmp_path / "more.mk"
    pip.write_text(f'#!/bin/sh\necho "$@" >> {told}\ncase "$*" in *extra-index*) exit {pytorchs};; esac\nexit {configured}\n')
    pip.chmod(0o755)
    more.write_text(f"only-torch:\n\t$(call install_torch,{tmp_path},constraints.txt)\n")
    said = make("-s", "-f", "Makefile", "-f", str(more), "only-torch")
    calls = told.read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in calls] == [f"torch=={constraint('torch')}+cpu"] * len(asked)
    assert [next(iter(re.findall(r"--extra-index-url (\S+)", line)), None) for line in calls] == asked
    assert f"torch {constraint('torch')} for CPUs" in said
    assert says in said and ("CUDA" in said) == bool(says)


def test_every_case_has_its_turn_and_a_seed_has_the_same_cases():
    item = namedtuple("Item", "nodeid")
    items = [item(name) for name in ("a::alone", *(f"a::many[{case}]" for case in range(40)))]

    def cases(seed: str, of=items) -> list[str]:
        return sorted(item.nodeid for item in thinned(of, 2, seed))

    turns = [cases(f"commit {turn}") for turn in range(300)]
    assert turns == [cases(f"commit {turn}", items[::-1]) for turn in range(300)], "xdist's workers choose alike"
    assert all(len(turn) == 3 and "a::alone" in turn for turn in turns)
    assert {name for turn in turns for name in turn} == {item.nodeid for item in items}


def test_a_run_says_how_to_run_its_cases_again():
    command = [sys.executable, "-m", "pytest", "--co", "-n", "0", "--cases", "1", __file__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"\ncases: at most 1 of each test, those of --cases 1 --cases-seed {commit()}\n" in done.stdout
