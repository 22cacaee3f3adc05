"""hf:// checkpoints: downloaded once, whole and unharmed, by one process at a time, and served without the hub afterwards.

The hub is a server on loopback. Only `inspect` and `generate` are run here; every verb takes its model from the same function.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.utils import close_session

from attend.model.errors import CheckpointError, SettingError
from attend.model.net.checkpoint import load_decoder
from attend.service.runtime import hub
from attend.service.settings import Settings, read_settings
from tests.model.checkpoints import write_checkpoint, write_letters
from tests.model.net.test_checkpoint import shard
from tests.service.hub_server import COMMIT, HubServer

MODEL = "hf://org/tiny"
WEIGHTS = "model.safetensors"
IGNORED = ("README.md", "consolidated.safetensors", "pytorch_model.bin", "onnx.onnx")
SECONDS = 100.0


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """What the hub holds: a checkpoint, and files that nobody reads."""
    folder = write_letters(write_checkpoint("llama-tied", tmp_path_factory.mktemp("source")))
    for name in IGNORED:
        (folder / name).write_bytes(b"not read")
    return folder


@pytest.fixture
def server(source):
    server = HubServer(source)
    yield server
    server.close()


@pytest.fixture
def at(server, tmp_path, monkeypatch):
    """This process's hub is the server, and its cache is empty."""
    for name, value in {"ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    close_session()
    said: list[str] = []

    def leave() -> None:
        server.close()
        close_session()

    yield SimpleNamespace(
        said=said, cache=tmp_path / "cache", fetch=lambda model=MODEL: hub.fetch_model(model, said.append), leave=leave
    )
    close_session()


def child(server: HubServer, cache: Path, *words: str, **more: str) -> subprocess.Popen:
    """`attend` in a process of its own, with the hub and the cache from the environment."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "ATTEND_", "TRANSFORMERS_"))
    }
    # A busy machine may keep the weights behind the gate for longer than the library waits by itself.
    environment |= {"HF_ENDPOINT": server.url, "HF_HOME": str(cache), "HF_HUB_DOWNLOAD_TIMEOUT": "300", **more}
    command = [sys.executable, "-m", "attend.service.commands.cli", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_download_has_the_files_that_are_read_and_no_others(at, server, source):
    folder = at.fetch()
    names = {path.name for path in source.iterdir()} - set(IGNORED)
    assert {path.name for path in folder.iterdir()} == names
    assert all((folder / name).read_bytes() == (source / name).read_bytes() for name in names)
    assert set(server.downloads) == names
    assert folder.is_relative_to(at.cache)
    assert not scan_cache_dir(at.cache).warnings


@pytest.fixture
def sharded(source, tmp_path) -> dict[str, bytes]:
    """The files of the same checkpoint in two shards."""
    shard(Path(shutil.copytree(source, tmp_path / "sharded")))
    return {path.name: path.read_bytes() for path in (tmp_path / "sharded").iterdir()}


def test_what_is_downloaded_is_not_downloaded_again(at, server):
    first = at.fetch()
    downloads, asked = dict(server.downloads), len(server.asked)
    assert at.fetch() == first
    assert dict(server.downloads) == downloads
    assert len(server.asked) == asked + 1  # what commit the branch is now


def test_without_the_hub_the_cache_is_served(at, server, monkeypatch):
    first = at.fetch()
    server.broken = 503
    assert at.fetch() == first
    server.broken = -1
    assert at.fetch() == first
    at.leave()
    assert at.fetch() == first
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert at.fetch() == first


def test_after_a_failure_the_files_that_are_whole_are_kept(at, server, source, sharded, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.files, server.lost = sharded, max(name for name in sharded if name.endswith(".safetensors"))
    with pytest.raises(CheckpointError, match=r"^hf://org/tiny could not be downloaded: .* answered with status 500$"):
        at.fetch()
    server.lost = None
    assert load_decoder(at.fetch(), torch.float32, "cpu")
    assert set(server.downloads.values()) == {1}


def test_damage_on_the_way_is_found_by_the_hash_and_removed(at, server, source):
    """The size is right, so nothing else would notice."""
    server.spoiled = True
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: the hub names the SHA-256 .* removed"):
        at.fetch()
    server.spoiled = False
    assert (at.fetch() / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()


def test_what_somebody_else_downloaded_is_checked_once(at, monkeypatch):
    folder = at.fetch()
    blob = (folder / WEIGHTS).resolve()
    hashed = []
    digest = hub.sha256
    monkeypatch.setattr(hub, "sha256", lambda path: hashed.append(path) or digest(path))
    at.fetch()
    assert not hashed
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match="is damaged"):
        at.fetch()


def test_the_token_comes_from_the_environment_and_opens_a_gated_repository(at, server, monkeypatch):
    server.token = "secret"
    with pytest.raises(
        CheckpointError, match=rf"^hf://org/tiny is gated: accept its terms at {server.url}/org/tiny, and set HF_TOKEN"
    ):
        at.fetch()
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(CheckpointError, match="is gated"):
        at.fetch()
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert at.fetch().is_dir()


@pytest.mark.parametrize("model", ["", "tiny", "org/tiny/config.json", "org/tiny@", "org/tiny@../x", "org/ti ny", "org/tiny\n"])
def test_a_reference_that_is_none_is_refused_with_the_form(model):
    with pytest.raises(SettingError, match=r"cannot be used: it must be hf://ORG/NAME, hf://ORG/NAME/FILE\.gguf, or one of"):
        read_settings({"model": f"hf://{model}"}, {})


@pytest.mark.parametrize("model", ["hf://org/tiny", "hf://0-a/b_c.d@v1.0", "hf://org/tiny@refs/pr/1"])
def test_a_reference_names_the_model_for_callers(model):
    settings = read_settings({"model": model}, {})
    assert settings.name == model.removeprefix("hf://").partition("@")[0]
    assert settings.model_copy(update={"served_model_name": "mine"}).name == "mine"
    with pytest.raises(AssertionError, match="was not downloaded"):
        settings.folder  # noqa: B018


@pytest.mark.parametrize("model", [MODEL, f"{MODEL}@main", "hf://org/tiny/a.gguf", "hf://org/tiny/a.gguf@main"])
def test_an_application_of_ray_names_the_commit_for_all_its_replicas(at, model):
    """A branch may move before a replica starts that the autoscaler adds."""
    settings = hub.pin_revision(Settings(model=model), at.said.append)
    assert settings.model == f"{model.removesuffix('@main')}@{COMMIT}"
    assert (settings.name, at.said) == ("org/tiny", [])


def test_what_the_hub_does_not_have_is_one_sentence(at, server):
    for model, words in {
        "hf://org/none": rf"hf://org/none was not found on {server.url}: check the name, and set HF_TOKEN if .* private",
        f"{MODEL}@none": "hf://org/tiny@none names a revision that the repository does not have",
    }.items():
        with pytest.raises(CheckpointError, match=f"^{words}$"):
            at.fetch(model)


def test_without_the_hub_and_the_cache_the_reason_is_told(at, server, monkeypatch):
    at.leave()
    with pytest.raises(
        CheckpointError, match=rf"^hf://org/tiny is not in the cache .*, and {server.url} cannot be reached \(.+\)$"
    ):
        at.fetch()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"^hf://org/tiny is not in the cache .*, and HF_HUB_OFFLINE is set$"):
        at.fetch()


def test_a_disk_that_is_too_small_is_told_before_the_download(at, server, monkeypatch):
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: SimpleNamespace(free=len(server.files[WEIGHTS]) - 1))
    with pytest.raises(CheckpointError, match=r"does not fit on the disk of .*: it needs 0.00 GB, and 0.00 GB are free"):
        at.fetch()
    assert WEIGHTS not in server.downloads


def test_a_repository_without_safetensors_is_refused_by_what_it_has(at, server):
    del server.files[WEIGHTS]
    with pytest.raises(CheckpointError) as caught:
        at.fetch()
    assert str(caught.value).startswith("hf://org/tiny has no model.safetensors; pytorch_model.bin is a pickle")


def test_partial_files_of_killed_downloads_are_removed_and_those_of_others_are_not(at, source):
    blobs = at.cache / "models--org--tiny" / "blobs"
    locks = at.cache / ".locks" / "models--org--tiny"
    for folder in (blobs, locks):
        folder.mkdir(parents=True)
    dead, alive = blobs / "a.1234.incomplete", blobs / "b.1234.incomplete"
    for path in (dead, alive):
        path.touch()
    with FileLock(locks / "b.lock"):
        at.fetch()
    assert (dead.exists(), alive.exists()) == (False, True)


@pytest.mark.long
def test_two_downloads_at_once_ask_for_each_file_once(server, tmp_path):
    server.gate = threading.Event()
    children = [child(server, tmp_path, "inspect", MODEL, "--json")]
    wait_for(lambda: server.downloads[WEIGHTS])
    children.append(child(server, tmp_path, "inspect", MODEL, "--json"))
    first = children[1].stderr.readline()
    assert first == "Another process is downloading hf://org/tiny: waiting for it\n"
    server.gate.set()
    told = [json.loads(each.communicate(timeout=SECONDS)[0]) for each in children]
    assert told[0] == told[1]
    assert told[0]["supported"]
    assert server.downloads[WEIGHTS] == 1
    looks = [at for at, line in enumerate(server.asked) if line == "GET /api/models/org/tiny/revision/main"]
    assert looks[0] < server.asked.index(f"SENT {WEIGHTS}") < looks[1], "it did not wait"


def test_ctrl_c_ends_a_download_at_once(server, tmp_path):
    server.gate = threading.Event()
    process = child(server, tmp_path, "inspect", MODEL)
    wait_for(lambda: server.downloads[WEIGHTS])
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGINT
    server.gate.set()


def wait_for(condition) -> None:
    """Until it holds."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@pytest.fixture
def ggufs(source) -> dict[str, bytes]:
    """Files of a repository of GGUF files alone: one, and another in two parts."""
    weights = (source / WEIGHTS).read_bytes()
    parts = {f"large-0000{at}-of-00002.gguf": weights + bytes([at]) for at in (1, 2)}
    return {"small.gguf": weights, **parts, "config.json": (source / "config.json").read_bytes()}


@pytest.mark.parametrize(
    ("named", "taken"),
    [("small.gguf", ["small.gguf"]), ("large-00001-of-00002.gguf", ["large-00001-of-00002.gguf", "large-00002-of-00002.gguf"])],
)
def test_of_a_repository_of_gguf_files_the_one_that_is_named_is_downloaded(at, server, ggufs, named, taken):
    server.files = ggufs
    path = at.fetch(f"{MODEL}/{named}")
    assert path.name == named and {each.name for each in path.parent.glob("*.gguf")} == set(taken)
    assert all((path.parent / name).read_bytes() == ggufs[name] for name in taken)
    assert at.fetch(f"{MODEL}/{named}@{COMMIT}") == path


def test_a_repository_of_gguf_files_asks_for_the_name_of_one(at, server, ggufs):
    server.files = ggufs
    with pytest.raises(CheckpointError) as error:
        at.fetch()
    last = min(name for name in ggufs if name.endswith(".gguf"))
    assert str(error.value) == f"{MODEL} has no model.safetensors; name a GGUF file, as in {MODEL}/{last}"
    with pytest.raises(CheckpointError, match=r"^hf://org/tiny has no other\.gguf$"):
        at.fetch(f"{MODEL}/other.gguf")
