"""deploy/README.md, word for word: what helm and kubectl do without a cluster is run, and outputs are those of the page."""

import os
import re
import shlex
import subprocess

import pytest

from tests.deploy import render
from tests.deploy.manifests import ROOT
from tests.deploy.test_chart import notes
from tests.service.document_blocks import Client, Command, NotRun, Run, commands, outputs
from tests.service.server import running

pytestmark = pytest.mark.skipif(not render.can_render() and not os.environ.get("CI"), reason=render.MISSING)
PAGE = "deploy/README.md"
TEXT = (ROOT / PAGE).read_text()
CLIENTS = [each for each in commands(PAGE) if isinstance(each.how, Client)]
OUTPUTS = outputs(PAGE)


def said(pattern: str, text: str) -> bool:
    """True if a text is an output of the page, in which `...` stands for anything and spaces for any number of them."""
    lines = (r"\s+".join(map(re.escape, line.split())) for line in pattern.strip().splitlines())
    return bool(re.fullmatch(r"\s+".join(lines).replace(re.escape("..."), r"(?s:.*?)"), text.strip()))


def clients_part(code: str) -> list[str]:
    """The command with nothing sent: helm renders, kubectl makes the objects."""
    program, *words = shlex.split(code.replace("\\\n", " "))
    if program == "helm":
        assert words[0] in ("install", "upgrade")
        return [render.program("helm"), "template", *(word for word in words[1:] if word != "--reset-then-reuse-values")]
    if "apply" in words:
        return [render.program("kubectl"), "kustomize", words[-1]]
    return [render.program("kubectl"), *words, "--dry-run=client"]


@pytest.fixture
def folder(tmp_path):
    """The tree's deploy/, and the files that the page tells to write."""
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    values = TEXT.partition("with `my-model.yaml`")[2].partition("\n\n")[2].partition("\n\n")[0]
    (tmp_path / "my-model.yaml").write_text("".join(f"{line[4:]}\n" for line in values.splitlines()))
    (tmp_path / "FILE").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("command", CLIENTS, ids=lambda each: each.code.strip()[:60])
def test_the_clients_part_of_a_command_runs(command: Command, folder):
    words = [word.replace("$HF_TOKEN", "hf_x") for word in clients_part(command.code)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(command.how.says, done.stdout), done.stdout
    if words[0].endswith("kubectl") and command.code in OUTPUTS:
        assert said(OUTPUTS[command.code], done.stdout.replace(" (dry run)", ""))


@pytest.mark.parametrize("code", [each.code for each in CLIENTS if "helm install attend" in each.code and each.code in OUTPUTS])
def test_what_helm_prints_is_on_the_page_and_in_its_commands(code, folder, tmp_path):
    words = shlex.split(code)
    files = [words[at + 1] for at, word in enumerate(words) if word == "--values"]
    sets = tuple(
        f'{name}="{value}"' for name, value in (words[at + 1].split("=") for at, w in enumerate(words) if w == "--set")
    )
    (tmp_path / "notes").mkdir()
    printed = notes(tmp_path / "notes", *sets, files=[folder / file for file in files])
    assert said(OUTPUTS[code], f"NAME: attend\nNOTES:\n{printed}"), printed


def test_every_output_is_of_a_command_that_is_run():
    assert OUTPUTS
    how = {each.code: each.how for each in commands(PAGE)}
    assert all(isinstance(how[code], (Run, Client)) for code in OUTPUTS)


def test_what_a_server_answers_is_on_the_page(tmp_path):
    """Of one process; the image runs it with Ray."""
    with running(tmp_path / "log", "--single") as server:
        for code in (code for code in OUTPUTS if code.startswith(("curl", "attend"))):
            words = code.replace("localhost:8000", f"127.0.0.1:{server.http}")
            env = {**os.environ, "PATH": f"{os.path.dirname(render.program('helm'))}:{os.environ['PATH']}"}
            done = subprocess.run(["bash", "-c", words], env=env, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0 and said(OUTPUTS[code], done.stdout), (code, done.stdout)


def test_the_page_names_what_was_not_run():
    [row] = [line for line in TEXT.splitlines() if line.startswith("| no test runs")]
    named = re.findall("`([^`]+)`", row)
    steps = TEXT.partition("## From nothing to an answer")[2].partition("\n## A day")[0]
    missing = [
        each.code for each in commands(PAGE) if isinstance(each.how, NotRun) and each.code.strip() in steps.replace("\\\n", " ")
    ]
    for code in missing:
        assert any(all(word in code for word in name.split()) for name in named), code
    assert all(any(all(word in code for word in name.split()) for code in missing) for name in named), named


def test_a_folder_without_a_namespace_is_applied_into_one_that_is_named():
    """Else its objects land in `default`."""
    pages = [*(ROOT / "deploy").rglob("*.md"), *(ROOT / "deploy").rglob("*.yaml"), ROOT / "README.md"]
    commands = re.findall(r"kubectl apply[^`\n]*-k +(\S+?)[`\s]", "\n".join(page.read_text() for page in pages))
    named = re.findall(r"kubectl apply (?:--namespace|-n) \S+ -k +(\S+?)[`\s]", "\n".join(page.read_text() for page in pages))
    bare = [folder for folder in commands if folder.startswith("deploy/") and folder not in named]
    for folder in bare:
        objects = render.render(folder.removeprefix("deploy/"))
        assert all("namespace" in item["metadata"] for item in objects if item["kind"] != "Namespace"), folder
    assert "deploy/base/standalone" in named
