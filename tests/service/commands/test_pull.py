"""`attend pull`: what is downloaded, where it lies, and what is wrong with a name."""

import shutil
import threading

import pytest

from attend.model.errors import CheckpointError, SettingError
from attend.service.commands.pull import pull
from attend.service.settings import Settings
from tests.service.runtime.test_hub import WEIGHTS, at, server, source  # noqa: F401 - a hub of its own

MODEL = Settings(model="hf://org/tiny")


@pytest.fixture
def hub(at):  # noqa: F811
    return at


def test_a_checkpoint_is_downloaded_once_and_its_place_is_printed(hub, server, capsys):  # noqa: F811
    pull(MODEL, None)
    first = capsys.readouterr()
    pull(MODEL, None)
    again = capsys.readouterr()
    assert first.out == again.out and "/cache/" in first.out
    assert first.err.splitlines()[-1] == "To serve it: attend serve hf://org/tiny"
    assert "Downloaded" in first.err and "was downloaded before: nothing is missing" in again.err
    assert server.downloads[WEIGHTS] == 1


def test_a_copy_is_a_folder_of_files(hub, tmp_path, capsys):
    pull(MODEL, tmp_path / "a b" / "copy")
    done = capsys.readouterr()
    folder = tmp_path / "a b" / "copy"
    assert done.out == f"{folder}\n" and done.err.endswith(f"attend serve '{folder}'\n")
    assert {"config.json", WEIGHTS, "tokenizer.json"} <= {path.name for path in folder.iterdir() if not path.is_symlink()}


def test_weights_take_their_space_once_and_a_small_file_may_be_edited(hub, tmp_path):
    place = hub.fetch()
    folder = tmp_path / "model"
    pull(MODEL, folder)
    assert (folder / WEIGHTS).samefile(place / WEIGHTS)
    assert not (folder / "config.json").samefile(place / "config.json")


def test_the_folder_appears_when_it_is_whole(hub, tmp_path, monkeypatch):
    """Pods that wait for it look for its name alone; what a killed process left is not taken for it."""
    target, seen = tmp_path / "model", []
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial/rest.safetensors").touch()
    copy = shutil.copyfile
    monkeypatch.setattr("shutil.copyfile", lambda *words: seen.append(target.exists()) or copy(*words))
    pull(MODEL, target)
    assert seen and not any(seen)
    assert {path.name for path in target.iterdir()} == {path.name for path in hub.fetch().iterdir()}
    assert not (tmp_path / ".model.partial").exists()


def test_two_at_once_write_one_folder(hub, server, tmp_path):  # noqa: F811
    """The second waits for the first, over the same file system, whatever each one's cache is."""
    failed: list[BaseException] = []

    def one() -> None:
        try:
            pull(MODEL, tmp_path / "model")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert failed == [] and server.downloads[WEIGHTS] == 1
    assert (tmp_path / "model" / WEIGHTS).is_file()


def test_what_cannot_be_pulled_is_a_sentence(hub, tmp_path):
    with pytest.raises(CheckpointError, match=r"hf://org/none was not found on .*check the name, and set HF_TOKEN"):
        pull(Settings(model="hf://org/none"), None)
    with pytest.raises(SettingError, match="is here already: `attend pull` takes hf://ORG/NAME"):
        pull(Settings(model=str(tmp_path)), None)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file cannot be written: .*has what was downloaded"):
        pull(MODEL, tmp_path / "file")
