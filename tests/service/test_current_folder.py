"""What lies in the folder that a command is typed in is never imported, by any process that the command starts.

A checkpoint that was downloaded may hold a `model.py`, and a project of the user's a `service/` of its own.
"""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from model import grammar
from model.config import DEFAULT_MODEL
from model.grammar import GrammarSpec
from service.runtime.supervisor import absolute_search_path
from service.settings import Settings
from tests.service.server import Server, installed_command, running

MODULES = (
    *("model", "service", "protos", "attend", "loadtest", "sitecustomize", "usercustomize"),
    *("ray", "torch", "numpy", "grpc", "fastapi", "starlette", "uvicorn", "pydantic", "typer", "rich", "jinja2", "orjson"),
    *("llguidance", "tokenizers", "safetensors", "gguf", "prometheus_client"),
    *("random", "json", "logging", "asyncio", "socket", "subprocess"),
)
CODE = """import os
with open(os.environ["ATTEND_TEST_RAN"], "a") as file:
    file.write(__file__ + "\\n")
raise ImportError("code of the current folder ran")
"""
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The file in which planted code writes that it ran. No variable of this test run's helps Python to find modules."""
    file = tmp_path / "ran"
    file.touch()
    monkeypatch.setenv("ATTEND_TEST_RAN", str(file))
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)
    return file


@pytest.fixture
def hostile(tmp_path, ran):
    """A checkpoint with code beside it, under the names of what Attend imports."""
    folder = tmp_path / "hostile"
    shutil.copytree(DEFAULT_MODEL, folder)
    for name in MODULES:
        (folder / f"{name}.py").write_text(CODE)
    for name in ("http_api", "runtime"):  # packages, which come before modules of their name
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(CODE)
    return folder


def attend(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, installed_command(), *words], cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )


def test_the_planted_code_would_run(hostile, ran):
    for words in (["-c", "import llguidance"], ["-m", "model"]):
        assert subprocess.run([sys.executable, *words], cwd=hostile, capture_output=True, check=False).returncode
    assert {Path(line).stem for line in ran.read_text().splitlines()} >= {"llguidance", "model"}


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--help"], 0),
        (["generate", "def f", "--model", ".", "--max-tokens", "2"], 0),
        (["explain", "def f", "--model", "."], 0),
        (["inspect", "."], 0),
        (["keys", "add", "alice", "--file", "keys.json"], 0),
        (["check", "http://127.0.0.1:9"], 1),
        (["replay", "../answer.json", "--model", "."], 0),
        (["quality", ".", "--bytes", "6000", "--quantize", "int8"], 0),
        (["train", "--help"], 0),
        (["bench", "single", "--help"], 0),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_no_command_runs_code_of_the_folder_that_it_is_typed_in(hostile, ran, words, status):
    if words[0] == "replay":
        request = {"model": "hostile", "prompt": "def f", "max_tokens": 2, "temperature": 0, "seed": 1}
        done = attend(hostile, "generate", "def f", "--model", ".", "--max-tokens", "2", "--seed", "1", "--json")
        (hostile.parent / "answer.json").write_text(json.dumps({"request": request, "response": json.loads(done.stdout)}))
    done = attend(hostile, *words)
    assert ran.read_text() == ""
    assert done.returncode == status, done.stdout + done.stderr


def test_children_of_a_benchmark_import_the_source_tree(hostile, ran):
    main = "lambda: sys.exit(subprocess.run([sys.executable, '-m', 'loadtest.bench.single', '--help']).returncode)"
    code = f"""import subprocess, sys
from types import SimpleNamespace
from service.commands import bench
bench.importlib.import_module = lambda name: SimpleNamespace(main={main})
bench.run("single", [])"""
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=hostile, capture_output=True, text=True, check=False)
    assert (ran.read_text(), done.returncode) == ("", 0), done.stderr


def test_the_probe_of_a_grammar_imports_nothing_of_the_current_folder(hostile, ran, monkeypatch):
    monkeypatch.chdir(hostile)
    assert grammar._probed(GrammarSpec("json_schema", json.dumps(SCHEMA)))
    assert ran.read_text() == ""


def serves(server: Server, key: str) -> None:
    """A call that takes the tokenizer, the engine and the probe of a grammar."""
    ask = {"prompt": "{", "max_tokens": 40, "temperature": 0, "structured_outputs": {"json": SCHEMA}}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(ask).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.load(answer)["choices"][0]["text"].startswith("{")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{server.url}/v1/models", timeout=30)


@pytest.mark.ray
@pytest.mark.parametrize("flags", [["--single"], ["--tensor-parallel", "2"]], ids=["single", "ranks"])
def test_a_server_runs_nothing_of_its_folder_and_finds_the_files_that_it_names_there(hostile, ran, tmp_path, flags):
    key = attend(hostile, "keys", "add", "alice", "--file", "keys.json").stdout.split()[-1]
    words = [".", *flags, "--api-keys-file", "keys.json", "--log-file", "log.txt"]
    with running(tmp_path / "log", *words, folder=hostile) as server:
        serves(server, key)
        server.stop()
    assert (ran.read_text(), server.process.returncode) == ("", 0)
    assert "/v1/completions" in (hostile / "log.txt").read_text()


def test_relative_paths_of_settings_start_from_the_folder_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = dict.fromkeys(("model", "adapters_folder", "api_keys_file", "tls_cert", "tls_key", "log_file"), "a/b")
    found = Settings(**paths, adapter="one=a,two=/b").with_absolute_paths()
    assert {getattr(found, name) for name in paths} == {str(tmp_path / "a" / "b")}
    assert found.adapter == f"one={tmp_path / 'a'},two=/b"
    assert found.name == Settings(**paths).name


@pytest.mark.parametrize("model", ["", "hf://org/name", "hf://org/name/file.gguf@main"])
def test_what_is_no_path_stays(model):
    assert Settings(model=model).with_absolute_paths() == Settings(model=model)


def test_a_search_path_means_the_same_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "a", "/b"]))
    assert absolute_search_path() == {"PYTHONPATH": os.pathsep.join([str(tmp_path / "a"), "/b"])}
    monkeypatch.delenv("PYTHONPATH")
    assert absolute_search_path() == {}
