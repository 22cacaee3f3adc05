"""A prefix outlives the process: over a stop."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.service.server import Server, running

PROMPT = "def area(width, height):\n    return width * height\n\n\n" * 14
FLAGS = ("--single", "--dtype", "float32")

pytestmark = pytest.mark.ray


def asked(server: Server, prompt: str = PROMPT, salt: str = "") -> tuple[str, int]:
    """The text, and how many tokens of the prompt were not computed."""
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0} | ({"cache_salt": salt} if salt else {})
    found: dict[str, Any] = server.post("/v1/completions", **body)[2]
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a server that was stopped, and what it answered."""
    folder = tmp_path_factory.mktemp("written")
    with running(folder / "first", *FLAGS, "--kv-disk-folder", str(folder / "kv")) as server:
        text, cached = asked(server)
        assert cached == 0
        server.stop()
    assert list((folder / "kv/attend-kv").glob("kv-*.bin")), "what was drained is written"
    return folder / "kv", text


def test_after_a_stop_and_a_start_a_prompt_is_not_computed_again(written: tuple[Path, str], tmp_path: Path) -> None:
    kept, text = written
    shutil.copytree(kept, tmp_path / "kv")
    with running(tmp_path / "second", *FLAGS, "--kv-disk-folder", str(tmp_path / "kv")) as server:
        assert asked(server, salt="another") == (text, 0), "a prefix is shared within its salt alone"
        again, cached = asked(server)
        assert again == text and cached > 150
        assert server.metric("attend_kv_disk_read_tokens_total") == cached
        longer, cached = asked(server, PROMPT + "def volume(")
        assert cached > 150
        assert asked(server, PROMPT + "def volume(", salt="a third") == (longer, 0), "the same as computed"
