"""The commands of the documents run, page by page and one after the other, as they stand there."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.models import MODELS, lacking
from tests.service.document_blocks import HUB, PAGES, ROOT, TABLE, Command, Elsewhere, NotRun, Run, commands
from tests.service.server import Server, running
from tests.test_documents import defines


def to_run(page: str, *, long: bool) -> list[tuple[Command, Run]]:
    return [(each, each.how) for each in commands(page) if isinstance(each.how, Run) and each.how.long == long]


@pytest.mark.parametrize("page", PAGES)
def test_it_is_known_of_every_command_how_it_is_run(page: str) -> None:
    assert [each.code for each in commands(page) if each.how is None] == []
    assert [words for words in TABLE.get(page, {}) if not any(words in each.code for each in commands(page))] == []


@pytest.mark.parametrize("page", PAGES)
def test_what_is_run_elsewhere_is_there_and_the_page_says_why_it_is_not_run(page: str) -> None:
    for how in TABLE.get(page, {}).values():
        if isinstance(how, Elsewhere):
            path, _, name = how.where.partition("::")
            assert defines(path, name) if name else (ROOT / path).is_file(), how
        if isinstance(how, NotRun):
            assert how.reason in " ".join((ROOT / page).read_text(encoding="utf-8").split()), how


def test_an_unknown_command_is_seen_in_a_fence_and_in_an_indented_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tests.service.document_blocks.ROOT", tmp_path)
    monkeypatch.setitem(TABLE, "new.md", {"first": Run("")})
    (tmp_path / "new.md").write_text(
        "a\n\n```sh\nfirst\n```\n\n    attend serve \\\n        --x\n    other words\n\nb\n\n```sh\nlast\n```\n"
    )
    found = commands("new.md")
    assert [(each.code, each.how is None) for each in found] == [
        ("first\n", False),
        ("attend serve          --x\n", True),
        ("last\n", True),
    ]


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What the pages start with `attend serve --single hf://...`."""
    (begun,) = {each.code for page in PAGES for each in commands(page) if f"attend serve --single {HUB}" in each.code}
    log = tmp_path_factory.mktemp("chat") / "log"
    with running(log, *real(begun).split()[2:]) as server:
        yield server


def real(code: str) -> str:
    """Code with the real model's file for its name in the hub."""
    return code.replace(HUB, str(MODELS["smollm2"].path))


def run(command: Command, how: Run, server: Server, folder: Path) -> None:
    """Run a command against a test's server, in a test's folder."""
    code = real(command.code).replace("/tmp/attend-tutorial", str(folder))
    for names, address in ((r"(localhost|127\.0\.0\.1):8000", f"127.0.0.1:{server.http}"), ("localhost:9000", server.target)):
        code = re.sub(names, address, code)
    words = [sys.executable, "-c", code] if command.language == "python" else ["bash", "-c", f"set -e -o pipefail\n{code}"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path}
    where = folder if command.code.startswith("openssl") else ROOT
    done = subprocess.run(words, input=how.stdin, capture_output=True, text=True, timeout=120, cwd=where, env=env)
    assert done.returncode == 0, (code, done.stdout, done.stderr)
    assert command.language != "python" or done.stderr == "", (code, done.stderr)
    assert re.search(how.says, done.stdout or done.stderr, re.MULTILINE), (code, done.stdout, done.stderr)


@pytest.mark.ray
@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page, long=False)])
def test_the_commands_of_a_page_run_in_their_order(page: str, server: Server, tmp_path: Path) -> None:
    for command, how in to_run(page, long=False):
        if not how.chats and HUB not in command.code:
            run(command, how, server, tmp_path)


@pytest.mark.ray
@pytest.mark.skipif(bool(lacking("smollm2")), reason=lacking("smollm2"))
@pytest.mark.parametrize("page", ["README.md", "TUTORIAL.md"])
def test_the_commands_of_a_chat_model_run(page: str, chatting: Server, tmp_path: Path) -> None:
    for command, how in to_run(page, long=False):
        if how.chats or HUB in command.code:
            run(command, how, chatting, tmp_path)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page, long=True)])
def test_the_long_commands_of_a_page_run(page: str, server: Server, tmp_path: Path) -> None:
    for command, how in to_run(page, long=True):
        run(command, how, server, tmp_path)
