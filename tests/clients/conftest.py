"""The servers that the clients talk to. A file here runs wherever its client is installed; `make test-clients` installs all."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.narrow import PYTHON, Narrow
from tests.service.conftest import server
from tests.service.server import running

__all__ = ["narrow", "server"]

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "LITELLM_LOCAL_MODEL_COST_MAP"):
    os.environ[name] = "true"  # before a client is imported: none of them may call out


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Narrow]:
    """One server that is easily full, for all tests of a full server."""
    folder = tmp_path_factory.mktemp("narrow")
    file = str(folder / "keys.json")
    add = [PYTHON, "-m", "attend.service.commands.cli", "keys", "add", "tester", "--file", file]
    key = subprocess.run(add, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    with running(Path(folder / "log"), *Narrow.FLAGS, "--api-keys-file", file) as server:
        yield Narrow(server, key)
