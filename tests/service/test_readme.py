"""README.md and service/README.md are the specification: what they show runs, what they list is all that there is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.server import Server

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVICE = (ROOT / "service/README.md").read_text(encoding="utf-8")
MODEL = (ROOT / "model/README.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = README) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def section(heading: str) -> str:
    """What stands below a heading of service/README.md, with the smaller headings in it."""
    return re.split(r"^## ", SERVICE.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]


def here(code: str, server: Server) -> str:
    """Code of the README, aimed at a test's server."""
    return code.replace("localhost:8000", f"127.0.0.1:{server.http}").replace("localhost:9000", server.target)


def python(code: str) -> str:
    """What a program prints; it must end well and complain of nothing."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_way_of_a_token_can_be_walked() -> None:
    (code,) = blocks("python", MODEL)
    printed = python(code)
    assert printed.count("weights [6, ") == 6, printed
    assert printed.count("sums to 1.000") == 6, printed
    assert "scores [" in printed and "8192], next token" in printed


@pytest.mark.ray
@pytest.mark.parametrize("code", blocks("python"))
def test_the_readmes_python_runs_and_prints_text(code: str, server: Server) -> None:
    assert len(python(here(code, server))) > 20


@pytest.mark.ray
def test_the_readmes_curl_answers_with_text(server: Server) -> None:
    (command,) = blocks("sh")
    done = subprocess.run(["bash", "-c", here(command, server)], capture_output=True, text=True, timeout=120)
    assert '"text":"' in done.stdout, done.stderr
    assert done.stdout.endswith("data: [DONE]\n\n")


@pytest.mark.ray
def test_every_route_in_the_page_answers(server: Server) -> None:
    routes = re.findall(r"`(/[\w./]*)`|`(?:GET|POST) (/[\w./]*)`", section("HTTP").split("### Fields")[0])
    assert len(routes) > 12
    for route in routes:
        path = "".join(route)
        assert server.get(path)[0] in (200, 405), path
