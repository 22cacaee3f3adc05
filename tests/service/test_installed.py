"""Attend as strangers install it: from its sdist, without the tree, in a folder whose files are never imported.

A checkpoint that was downloaded may hold a `model.py`, and a project of the user's a `service/` of its own.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest

from attend.model.config import DEFAULT_MODEL
from attend.model.net.native import library
from attend.model.text import grammar
from attend.model.text.grammar import GrammarSpec
from attend.service.runtime.supervisor import absolute_search_path
from attend.service.settings import Settings
from tests.deploy import images
from tests.deploy.containers import needs_namespaces
from tests.service.server import Server, running

ROOT = Path(__file__).parents[2]
FOLDERS = ("model", "service", "protos")
FILES = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "CHANGELOG.md",
    "LICENSE",
    "NOTICE",
    "README.md",
    "constraints.txt",
    "tests/test_documents.py",
)
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
ABOUT = "attend_server-0.1.0.dist-info"
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
    for name in ("attend", "http_api", "runtime"):  # packages, which come before modules of their name
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(CODE)
    return folder


class Installed(NamedTuple):
    sdist: Path
    wheels: list[Path]
    """Of the tree, made without a compiler, and of the sdist, made with one and installed."""
    told: str
    """What the build without a compiler said."""
    python: Path

    @property
    def script(self) -> Path:
        return self.python.with_name("attend")


def build(kind: str, tree: Path, programs: Path) -> tuple[Path, str]:
    """What the build backend makes of a tree, in its folder `dist`, with these programs alone; and what it said."""
    code = f"import setuptools.build_meta as backend; backend.build_{kind}('dist')"
    env = {**os.environ, "PATH": str(programs), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True, check=True)
    return next((tree / "dist").glob("*.tar.gz" if kind == "sdist" else "*.whl")), done.stderr


@pytest.fixture(scope="module")
def compilers(tmp_path_factory):
    """A folder whose `c++` gives the library of this tree, which set-up has compiled: it takes half a minute."""
    if not library.library_path().is_file():
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("compilers")
    (folder / "c++").write_text(f'#!/bin/sh\nfor last; do :; done\nexec /bin/cp {library.library_path()} "$last"\n')
    (folder / "c++").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory, compilers):
    """What the tree packs, and an environment that has it and the tests' other packages."""
    folder = tmp_path_factory.mktemp("installed")
    tree = folder / "tree"
    for name in ("attend", *FOLDERS):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in FILES:
        (tree / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    nothing = tmp_path_factory.mktemp("nothing")
    sdist, _ = build("sdist", tree, nothing)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    pure, told = build("wheel", tree, nothing)
    native, _ = build("wheel", folder / sdist.name.removesuffix(".tar.gz"), compilers)
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    install = ["install", "--no-deps", "--no-index", "--no-compile", "--quiet", str(native)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # else a tree there counts as installed
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], env=env, check=True)
    [site] = (folder / "venv/lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # as a path alone: no .pth of theirs, so not the tree
    return Installed(sdist, [pure, native], told, python)


def test_the_sdist_is_whole_and_has_no_tests(installed):
    with tarfile.open(installed.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "constraints.txt", "pyproject.toml", "setup.py"} <= names
    assert {"attend/README.md", "attend/py.typed"} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_the_wheel_is_that_of_the_sdist_and_holds_every_file_of_the_folders(installed):
    found = []
    for path in installed.wheels:
        with zipfile.ZipFile(path) as wheel:
            found.append({each.filename: each.CRC for each in wheel.infolist()})
    [name] = found[1].keys() - found[0].keys()
    assert name == f"attend/model/net/native/{library.library_name()}"
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {f"{ABOUT}/WHEEL", f"{ABOUT}/RECORD"}
    tree = installed.wheels[0].parents[1]
    files = {f"attend/{path.relative_to(tree)}" for name in FOLDERS for path in (tree / name).rglob("*") if path.is_file()}
    assert {name for name in files if not name.endswith(".md")} - found[0].keys() == set()
    assert {name.partition("/")[0] for name in found[0]} == {"attend", ABOUT}


def test_the_images_build_the_same_wheel_from_what_they_copy(installed, tmp_path):
    """So what runs installed runs in the images for CPUs and GPUs, which hold it and nothing else of the tree."""
    images.lay_out("code", tmp_path)
    copied, _ = build("wheel", tmp_path, tmp_path)
    names = [set(zipfile.ZipFile(path).namelist()) for path in (copied, installed.wheels[0])]
    assert names[0] == names[1]


def test_the_wheel_is_for_this_platform_where_it_holds_the_native_decoder_and_pure_where_it_does_not(installed):
    pure, native = installed.wheels
    assert pure.name.endswith("-py3-none-any.whl")
    assert re.search(r"-py3-none-linux_(?!.*-)", native.name)
    assert "no C++ compiler: this wheel has no native decoder" in installed.told


LOADED = """
import atexit, pathlib, sys

def loaded():
    words = pathlib.Path("/proc/self/maps").read_text().split()
    print(*sorted({word for word in words if "/decoder-" in word or "omp" in word.rpartition("/")[2]}), sep="\\n")

atexit.register(loaded)
sys.argv = ["attend", "generate", "def f", "--max-tokens", "2", "--device", "cpu"]
from attend.service.commands.main import main
main()
"""


def generated(installed, folder, **environment):
    """The libraries of the native decoder and of OpenMP that `attend generate` has loaded at its end, and what it said."""
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **environment}
    command = [installed.python, "-P", "-c", LOADED]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=True)
    loaded = [Path(line) for line in done.stdout.splitlines() if line.startswith("/")]
    return sorted(loaded, key=lambda path: path.name), done.stderr.splitlines()


def test_the_wheels_native_decoder_serves_with_the_one_openmp_runtime_that_torch_brings(installed, ran, tmp_path):
    (decoder, openmp), told = generated(installed, tmp_path)
    assert decoder.is_relative_to(installed.python.parents[1])
    assert (openmp.parent.name, openmp.parents[1].name) == ("lib", "torch")
    assert told == []
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def without_library(installed, tmp_path):
    """As a pure wheel is installed."""
    [path] = installed.python.parents[1].rglob("decoder-*.so")
    path.rename(tmp_path / "taken")
    yield
    (tmp_path / "taken").rename(path)


def test_a_wheel_without_it_has_it_built_once_and_uses_it(installed, ran, without_library, compilers, tmp_path):
    (decoder, _), told = generated(installed, tmp_path, PATH=str(compilers))
    assert decoder == tmp_path / "cache/attend" / library.library_name()
    assert [line.partition(":")[2].split()[0] for line in told] == ["Building", "Built"]
    assert generated(installed, tmp_path, PATH="/nowhere")[1] == []


def test_without_a_compiler_one_line_names_the_loss(installed, ran, without_library, tmp_path):
    _, [line] = generated(installed, tmp_path, PATH="/nowhere")
    assert "slower than the native decoder" in line
    assert line.endswith("it was not built: install g++, and start again")


def test_an_index_shows_a_description_whose_links_lead_somewhere(installed):
    with zipfile.ZipFile(installed.wheels[1]) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        about = Parser().parsestr(wheel.read(name).decode())
    assert (about["Name"], about["Description-Content-Type"]) == ("attend-server", "text/markdown")
    assert re.search(r"pip install .*\battend-server\b", about.get_payload())
    assert not re.findall(r"\]\((?!https://)[^)]*", about.get_payload())


def test_only_the_package_is_installed(installed, ran):
    code = "import attend, attend.model, attend.service, attend.protos, attend.v1; print(*attend.__path__)"
    done = subprocess.run([installed.python, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(installed.python.parents[1])
    for name in (*FOLDERS, "tests", "loadtest"):
        done = subprocess.run([installed.python, "-P", "-c", f"import {name}"], cwd=ROOT, capture_output=True, check=False)
        assert b"ModuleNotFoundError" in done.stderr, name


def test_stubs_of_a_callers_own_work_where_the_server_is_installed(installed, ran, tmp_path):
    """By the one import that protoc's code uses itself, beside our client and by both names of ours."""
    flags = [f"--{kind}={tmp_path}" for kind in ("python_out", "grpc_python_out")]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *flags, "attend/v1/generation.proto"]
    subprocess.run(protoc, check=True)
    assert (tmp_path / "attend/v1/generation_pb2_grpc.py").is_file()
    call = tmp_path / "call.py"
    call.write_text("""
import grpc
import attend.protos.attend.v1.generation_pb2 as ours
import attend.service.client.grpc
from attend.v1 import generation_pb2 as pb, generation_pb2_grpc as rpc
assert ours.GenerateRequest is pb.GenerateRequest
assert rpc.GenerationServiceStub(grpc.insecure_channel("127.0.0.1:9")).Generate
print(pb.GenerateRequest(text="a").text)
""")
    done = subprocess.run([installed.python, call], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "a\n", done.stderr


def attend(script: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([script, *words], cwd=folder, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--help"], 0),
        (["generate", "def f", "--model", ".", "--max-tokens", "2"], 0),
        (["inspect", "."], 0),
        (["keys", "add", "alice", "--file", "keys.json"], 0),
        (["check", "http://127.0.0.1:9"], 1),
        pytest.param(["quality", ".", "--bytes", "6000", "--quantize", "int8"], 0, marks=pytest.mark.long),
        (["train", "--help"], 0),
        (["bench", "serve", "--help"], 2),  # they come with the tree
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_no_command_runs_code_of_the_folder_that_it_is_typed_in(installed, hostile, ran, words, status):
    done = attend(installed.script, hostile, *words)
    assert ran.read_text() == ""
    assert done.returncode == status, done.stdout + done.stderr


def test_the_probe_of_a_grammar_imports_nothing_of_the_current_folder(hostile, ran, monkeypatch):
    monkeypatch.chdir(hostile)
    assert grammar._probe_source(GrammarSpec("json_schema", json.dumps(SCHEMA)), "compact")
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


def with_keys(script: Path, folder: Path) -> str:
    """Make keys.json in the folder; the key that it holds."""
    return attend(script, folder, "keys", "add", "alice", "--file", "keys.json").stdout.split()[-1]


@pytest.mark.ray
@pytest.mark.long
def test_one_process_of_the_tree_runs_nothing_of_its_folder_and_finds_the_files_that_it_names_there(hostile, ran, tmp_path):
    script = Path(sys.executable).with_name("attend")
    key = with_keys(script, hostile)
    words = [".", "--single", "--api-keys-file", "keys.json", "--log-file", "log.txt"]
    with running(tmp_path / "log", *words, folder=hostile, script=script) as server:
        serves(server, key)
        server.stop()
    assert (ran.read_text(), server.process.returncode) == ("", 0)
    assert "/v1/completions" in (hostile / "log.txt").read_text()


@pytest.mark.ray
@pytest.mark.parametrize(
    "flags",
    [pytest.param(["--single"], id="single"), pytest.param(["--tensor-parallel", "2"], id="ranks", marks=pytest.mark.long)],
)
def test_a_server_runs_nothing_of_a_folder_that_it_may_only_read(installed, hostile, ran, tmp_path, flags):
    needs_namespaces()
    key = with_keys(installed.script, hostile)
    mounted, script = tmp_path / "mounted", tmp_path / "attend"
    mounted.write_text(f'set -e\nmount --bind {hostile} {hostile}\nmount -o remount,bind,ro {hostile}\ncd {hostile}\nexec "$@"')
    script.write_text(f'#!/bin/sh\nexec unshare --mount sh {mounted} {installed.script} "$@"')
    script.chmod(0o755)
    with running(tmp_path / "log", ".", *flags, "--api-keys-file", "keys.json", folder=hostile, script=script) as server:
        serves(server, key)
        server.stop()
    assert (ran.read_text(), server.process.returncode) == ("", 0)


def test_relative_paths_of_settings_start_from_the_folder_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = dict.fromkeys(("model", "adapters_folder", "api_keys_file", "tls_cert", "tls_key", "log_file"), "a/b")
    found = Settings(**paths, adapter="one=a,two=/b").with_absolute_paths()
    assert {getattr(found, name) for name in paths} == {str(tmp_path / "a" / "b")}
    assert found.adapter == f"one={tmp_path / 'a'},two=/b"
    assert found.name == Settings(**paths).name


def test_a_search_path_means_the_same_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "a", "/b"]))
    assert absolute_search_path() == {"PYTHONPATH": os.pathsep.join([str(tmp_path / "a"), "/b"])}
    monkeypatch.delenv("PYTHONPATH")
    assert absolute_search_path() == {}
