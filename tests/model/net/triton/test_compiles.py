"""Every kernel compiles for GPUs of every kind that Attend may meet, within what such a GPU has."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(900),  # 40 seconds each, where nothing else runs
]
ROOT = Path(__file__).parents[4]
if find_spec("triton") is not None:
    from tests.model.net.triton.compiles import ARCHITECTURES
else:
    ARCHITECTURES = {}


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_every_kernel_compiles(capability, tmp_path):
    """In a process of its own: Triton is chosen to compile when it is imported."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.model.net.triton.compiles", str(capability)]
    environment = given | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 95
