"""JavaScript clients, unmodified: the packages openai, ai and @anthropic-ai/sdk, of the versions in js/package.json."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.narrow import MODEL
from tests.service.server import Server

FOLDER = Path(__file__).parent / "js"
MODULES = Path(os.environ.get("ATTEND_TEST_NODE_MODULES", FOLDER / "node_modules"))
pytestmark = [
    pytest.mark.ray,
    pytest.mark.clients,
    pytest.mark.skipif(not shutil.which("node") or not MODULES.is_dir(), reason="needs node and its packages"),
]


@pytest.fixture(scope="module")
def told(server: Server, tmp_path_factory) -> dict[str, dict]:
    """What each case says."""
    folder = tmp_path_factory.mktemp("js")
    (folder / "node_modules").symlink_to(MODULES)
    for file in FOLDER.glob("*.*"):
        shutil.copy(file, folder)
    run = subprocess.run(
        ["node", "clients.mjs", server.url, MODEL], cwd=folder, capture_output=True, text=True, timeout=240, check=True
    )
    return {case.pop("name"): case for case in map(json.loads, run.stdout.splitlines())}


def test_every_client_has_the_same_text_whole_and_streamed(told):
    assert len(told) == 7
    assert not {name: case for name, case in told.items() if "error" in case}
    assert len({case[key] for case in told.values() for key in ("whole", "streamed")}) == 1


def test_a_tool_is_called_and_answered_over_every_api(told):
    cases = {name: case for name, case in told.items() if name.startswith("ai, ")}
    assert len(cases) == 4
    assert all(case["steps"] == 2 and case["called"][0] in ("UTC", "CET") for case in cases.values()), cases
