"""Triton is chosen to interpret or to compile when it is imported: so each way has a process of its own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]
LAWS = [
    f"tests/model/net/triton/{name}.py"
    for name in (
        "smoke_laws",
        "laws",
        "decoder_laws",
        "delta_laws",
        "sampling_laws",
        "codes_laws",
        "ranks_laws",
        "startup_laws",
    )
]
pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(900),  # a minute, where nothing else runs
]


def run(*arguments, **environment):
    """Run Python here; a failure shows what it printed."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=given | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_laws_hold_in_the_interpreter(request):
    """With `--cases`: as many of each as of other tests, and so the same ones again."""
    most, seed = (request.config.getoption(name) for name in ("--cases", "--cases-seed"))
    cases = ("--cases", str(most), "--cases-seed", seed) if most else ()
    one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    plugins = ("-p", "no:cacheprovider", "-p", "tests.model.net.triton.interpreting")
    run("pytest", "-q", *cases, *plugins, *LAWS, TRITON_INTERPRET="1", **one_thread)


def test_after_the_warm_up_no_step_compiles_a_kernel_or_waits_for_the_device(tmp_path):
    run("tests.model.net.triton.recompiles", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_the_laws_hold_on_a_gpu():
    run("pytest", "-q", "-p", "no:cacheprovider", *LAWS)
