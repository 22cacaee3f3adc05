"""Coding agents, unmodified: each is asked for what stands in a file, calls its own tool, and says what it read.

The model is scripted (`scripted.py`); requests, streams, tools and errors are those of a real session.
"""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.service.server import free_port, wait_for

MODULES = Path(os.environ.get("ATTEND_TEST_AGENTS", "/nowhere"))
PYTHON = os.environ.get("ATTEND_TEST_PYTHON", sys.executable)
WORD = "marzipan"
ASK = "What is the secret word in note.txt?"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not MODULES.is_dir(), reason="needs node and its packages: make test-agents"),
]


@dataclass
class Scripted:
    """The server, the folder with the note, and what the server said of each call."""

    url: str
    folder: Path
    log: Path

    def calls(self) -> list[dict]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def run(self, name: str, *words: str, **variables: str) -> str:
        """What an agent prints."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        own = {"HOME": str(home), "PATH": os.environ["PATH"], "IS_SANDBOX": "1"} | variables
        command = [str(MODULES / ".bin" / name), *words]
        run = subprocess.run(
            command, cwd=self.folder, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=110
        )
        assert run.returncode == 0, (run.stdout, run.stderr)
        return run.stdout


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Scripted]:
    (tmp_path / "note.txt").write_text(f"the secret word is {WORD}\n")
    port, log = free_port(), tmp_path / "calls.log"
    words = [PYTHON, "-m", "tests.clients.agents.scripted", str(port), str(tmp_path / "note.txt"), WORD]
    with log.open("w") as out, subprocess.Popen(words, stdout=out) as process:
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            try:
                return bool(urllib.request.urlopen(f"{url}/healthz", timeout=5).status == 200)
            except (urllib.error.URLError, OSError):
                return False

        assert wait_for(ready, 60)
        try:
            yield Scripted(url, tmp_path, log)
        finally:
            process.terminate()


def judged(scripted: Scripted, said: str, path: str) -> list[dict]:
    """The calls of a session that read the note and said so; none failed."""
    assert WORD in said
    made = [call for call in scripted.calls() if call["path"] == path]
    assert len(made) >= 2
    assert {call["status"] for call in made} == {200}
    return made


def test_qwen_code_over_chats(scripted):
    variables = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{scripted.url}/v1", "OPENAI_MODEL": "fake"}
    said = scripted.run("qwen", "--auth-type", "openai", "-y", "-p", ASK, **variables)
    judged(scripted, said, "/v1/chat/completions")


def test_opencode_over_chats(scripted):
    options = {"baseURL": f"{scripted.url}/v1", "apiKey": "none"}
    models = {"fake": {"name": "fake", "limit": {"context": 1_000_000, "output": 32_000}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "attend", "options": options, "models": models}
    config = {"provider": {"attend": provider}, "model": "attend/fake", "small_model": "attend/fake"}
    (scripted.folder / "opencode.json").write_text(json.dumps(config))
    judged(scripted, scripted.run("opencode", "run", "-m", "attend/fake", ASK), "/v1/chat/completions")


def test_codex_over_responses(scripted):
    folder = scripted.folder / "home" / ".codex"
    folder.mkdir(parents=True)
    provider = f'[model_providers.attend]\nname = "attend"\nbase_url = "{scripted.url}/v1"\nwire_api = "responses"\n'
    (folder / "config.toml").write_text(f'model = "fake"\nmodel_provider = "attend"\n{provider}')
    said = scripted.run("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASK)
    made = judged(scripted, said, "/v1/responses")
    assert "prompt_cache_key" in made[0]["x-attend-ignored"]


def test_claude_code_over_messages(scripted):
    variables = {
        "ANTHROPIC_BASE_URL": scripted.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "fake",
        "ANTHROPIC_SMALL_FAST_MODEL": "fake",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    made = judged(scripted, scripted.run("claude", "-p", ASK, "--allowedTools", "Read", **variables), "/v1/messages")
    assert "system.x-anthropic-billing-header" in made[0]["x-attend-ignored"]
