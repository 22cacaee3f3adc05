"""Where files may be kept, and what is refused before the server listens."""

import sqlite3

import pytest

from attend.model.errors import SettingError
from attend.service.batch import folder
from attend.service.batch.files import Files
from attend.service.batch_settings import BatchSettings
from attend.service.runtime.models.run import run
from attend.service.settings import Settings


def test_a_folder_that_cannot_be_used_is_refused_by_the_settings_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"^batch_folder: '.*/file/attend-batch' cannot be written to: Not a directory$"):
        Files(BatchSettings(batch_folder=str(tmp_path / "file")))
    (tmp_path / "open" / "attend-batch").mkdir(parents=True)
    (tmp_path / "open" / "attend-batch").chmod(0o777)
    with pytest.raises(SettingError, match="other users may write to"):
        Files(BatchSettings(batch_folder=str(tmp_path / "open")))


@pytest.mark.parametrize("name", ["attend-batch", "attend-batch/files", "attend-batch/parts"])
def test_a_link_in_place_of_a_folder_is_refused_and_nothing_is_made_behind_it(tmp_path, name):
    (tmp_path / "own").mkdir()
    place = tmp_path / name
    place.parent.mkdir(mode=0o700, exist_ok=True)
    place.symlink_to(tmp_path / "own")
    with pytest.raises(SettingError, match=f"{name}' is a link"):
        Files(BatchSettings(batch_folder=str(tmp_path)))
    assert not [*(tmp_path / "own").iterdir()]


def test_a_network_file_system_is_refused_by_name(tmp_path, monkeypatch):
    for kind in ("nfs4", "cifs", "smb3", "ceph", "fuse.sshfs"):
        monkeypatch.setattr(folder, "file_system", lambda path, kind=kind: kind)
        with pytest.raises(SettingError, match=rf"network file system \({kind}\)"):
            Files(BatchSettings(batch_folder=str(tmp_path)))
    for kind in ("ext4", "xfs", "overlay", "tmpfs", ""):
        monkeypatch.setattr(folder, "file_system", lambda path, kind=kind: kind)
        Files(BatchSettings(batch_folder=str(tmp_path))).close()


def test_the_file_system_of_a_folder_is_that_of_its_nearest_mount(tmp_path):
    assert folder.file_system(tmp_path)
    assert folder.file_system(folder.Path("/proc/self")) == "proc"


def test_a_database_that_is_none_of_ours_is_refused(tmp_path):
    Files(BatchSettings(batch_folder=str(tmp_path))).close()
    path = tmp_path / "attend-batch" / "state.sqlite3"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(SettingError, match="of another version of Attend: it has format 9"):
        Files(BatchSettings(batch_folder=str(tmp_path)))
    for name in ("state.sqlite3", "state.sqlite3-wal", "state.sqlite3-shm"):
        (tmp_path / "attend-batch" / name).unlink(missing_ok=True)
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(SettingError, match=r"state.sqlite3' cannot be used: file is not a database"):
        Files(BatchSettings(batch_folder=str(tmp_path)))


def test_several_models_keep_no_files():
    with pytest.raises(SettingError, match="batch_folder is for a server of one model"):
        run(Settings(models="models.yaml", batch_folder="kept"))
