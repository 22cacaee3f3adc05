"""The tutorial's commands run, one after the other, as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.server import Server

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "TUTORIAL.md").read_text(encoding="utf-8")
SERVE, *COMMANDS = re.findall(r"```sh\n(.*?)```", TUTORIAL, re.DOTALL)
SAYS = {
    "attend check": r"ok .*",
    'fibonacci(n):", "max_tokens": 48': r'"text":".+"',
    "import os": r"data: \[DONE\]",
    "cmp ": r"\A\Z",
    '{"choice"': r'"text":"(True|False|None)"',
    "logprobs": r'"top_logprobs":\[\{("[^"]*":-?[\d.e-]+,?){3}',
    "v1/attention": r'"weights":\[\[1\.0\],',
    "attend explain": r"range",
    "--show": r"probability of each token",
    "metrics": r"attend_generation_tokens_total\{",
    "locust": r"TTFT +(HTTP|GRPC)",
    "cp -r": r"\A\Z",
    "attend inspect": r"qwen3",
    "--model /tmp": r"\S",
    "--quantize int4 --max": r"\S",
    "attend quality": r"int4",
}
"""What each command shows, by words of it: a pattern in its two outputs."""


def here(code: str, server: Server, folder: Path) -> str:
    """Commands of the tutorial, aimed at a test's server and folder."""
    for name, address in (("localhost:8000", f"127.0.0.1:{server.http}"), ("localhost:9000", server.target)):
        code = code.replace(name, address)
    return code.replace("/tmp/attend-tutorial", str(folder))


def test_the_tutorial_serves_as_the_makefile_does() -> None:
    assert SERVE == "make serve\n"
    assert "\t$(BIN)/attend serve $(ARGS)\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_it_is_known_what_each_command_shows() -> None:
    assert [sum(words in code for code in COMMANDS) for words in SAYS] == [1] * len(SAYS)
    assert [sum(words in code for words in SAYS) for code in COMMANDS] == [1] * len(COMMANDS)


@pytest.mark.long
@pytest.mark.ray
def test_the_tutorials_commands_run_in_their_order(server: Server, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for code in COMMANDS:
        command = f"set -e -o pipefail\n{here(code, server, tmp_path)}"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=90, cwd=ROOT, env={**os.environ, "PATH": path}
        )
        assert done.returncode == 0, (code, done.stdout, done.stderr)
        (says,) = [pattern for words, pattern in SAYS.items() if words in code]
        assert re.search(says, done.stdout + done.stderr, re.MULTILINE), (code, done.stdout, done.stderr)
