"""The README is the specification: what it shows runs, what it lists exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from service.settings import Settings, allowed
from tests.service.server import Server

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def settings_table() -> str:
    """The table of settings as the README has it."""
    rows = ["| setting | default | values | what |", "| --- | --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, "") else str(field.default)
        rows.append(f"| `{name}` | {default} | {allowed(name)} | {field.description} |")
    return "\n".join(rows)


def here(code: str, server: Server) -> str:
    """Code of the README, aimed at a test's server."""
    return code.replace("localhost:8000", f"127.0.0.1:{server.http}").replace("localhost:9000", server.target)


def test_the_readme_lists_every_setting_as_it_is() -> None:
    assert settings_table() in README


def test_every_name_in_the_readmes_tree_exists() -> None:
    tree = README.split("## The house\n")[1].split("\nA request travels")[0]
    parents: dict[int, Path] = {}
    for line in tree.strip("\n").splitlines():
        depth, names = (len(line) - len(line.lstrip()) - 4) // 2, re.match(r"\s+(\S+(?: \S+\.py| \S+/)*)", line)
        assert names is not None
        parent = parents.get(depth - 1, ROOT)
        for name in names[1].split():
            assert (parent / name).exists(), line
        parents[depth] = parent / names[1].split()[0]


def test_every_package_of_the_house_stands_in_the_tree() -> None:
    tree = README.split("## The house\n")[1].split("\nA request travels")[0]
    files = [path for folder in ("model", "service") for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"]
    listed = {path for path in files if path.name in tree or f"{path.parent.name}/" in tree}
    assert set(files) == listed


def test_every_verb_that_the_readme_names_is_in_the_makefile() -> None:
    verbs = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:`|^ *)make (\w+)", README, re.MULTILINE)) <= verbs


@pytest.mark.ray
@pytest.mark.parametrize("code", blocks("python"))
def test_the_readmes_python_runs_and_prints_text(code: str, server: Server) -> None:
    done = subprocess.run([sys.executable, "-c", here(code, server)], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 20


@pytest.mark.ray
def test_the_readmes_curl_answers_with_text(server: Server) -> None:
    commands = [*blocks("sh"), *re.findall(r"^    (curl .*)$", README, re.MULTILINE)]
    assert len(commands) == 2
    for command in commands:
        done = subprocess.run(["bash", "-c", here(command, server)], capture_output=True, text=True, timeout=120)
        assert '"text":"' in done.stdout, done.stderr


@pytest.mark.ray
def test_every_route_in_the_readme_answers(server: Server) -> None:
    for route in re.findall(r"`(/[\w./]*)`|`GET (/[\w./]*)`", README.split("## HTTP")[1].split("Fields of")[0]):
        path = "".join(route)
        assert server.get(path)[0] in (200, 405), path
