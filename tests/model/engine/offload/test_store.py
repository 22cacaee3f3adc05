"""Files of blocks: what was written is read, what is cut, changed or another's is not, and the folder keeps its bound."""

import errno
import os
import shutil
import time
from hashlib import blake2b
from pathlib import Path

import pytest

from attend.model.engine.offload.store import BlockStore
from attend.model.errors import SettingError

LAYOUT, OTHER = "0" * 16, "1" * 16
SIZES = (64, 24)


def opened(folder: Path, layout: str = LAYOUT, most_bytes: int = 1 << 20) -> BlockStore:
    return BlockStore(folder, layout, SIZES, most_bytes)


def record(name: object, group: int = 0):
    digest = blake2b(repr(name).encode(), digest_size=16).digest()
    return (digest, group), blake2b(digest + bytes([group]), digest_size=64).digest()[: SIZES[group]]


def test_blocks_are_read_back_by_this_process_and_the_next(tmp_path):
    records = [record("a"), record("a", 1), record("b"), record("c", 1)]
    first = opened(tmp_path)
    for each in (*records, records[0]):
        first.write(*each)
    for store in (first, opened(tmp_path)):
        assert store.read([key for key, _ in records]) == [data for _, data in records]
        assert all(store.has(key) for key, _ in records) and len(store) == 4
        assert not store.has(record("b", 1)[0]) and store.read([record("d")[0]]) == [None]
        assert store.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
        assert store.num_errors == 0


def test_another_layout_has_blocks_of_its_own(tmp_path):
    opened(tmp_path).write(*record("a"))
    other = BlockStore(tmp_path, OTHER, (32,), 1 << 20)
    assert not other.has(record("a")[0])
    assert other.num_bytes > 0, "its bytes count"


def test_nobody_else_may_read_what_callers_wrote(tmp_path):
    folder = tmp_path / "new" / "kv"
    opened(folder).write(*record("a"))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]


@pytest.mark.parametrize("change", [*range(0, 68, 5), "empty", "cut", "longer"])
def test_a_file_that_is_cut_or_changed_is_never_used_and_goes(tmp_path, change):
    opened(tmp_path).write(*record("a"))
    [path] = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    assert len(data) == 68
    if isinstance(change, int):
        data[change] ^= 4
    path.write_bytes({"empty": b"", "cut": data[:67], "longer": data + b"x"}.get(change, data))
    store = opened(tmp_path)
    assert store.read([record("a")[0]]) == [None] and store.num_errors == 1
    assert not list(tmp_path.iterdir()) and len(store) == 0


def test_files_of_others_are_neither_read_nor_removed(tmp_path):
    names = ["notes.txt", "kv-0.bin", f"kv-{LAYOUT}-{'0' * 32}-0.bin.bak", f"KV-{LAYOUT}-{'0' * 32}-0.bin"]
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 1000)
    (tmp_path / f"kv-{LAYOUT}-{'a' * 32}-0.bin").mkdir()  # of no use, and not ours either
    os.mkfifo(tmp_path / f"kv-{LAYOUT}-{'b' * 32}-0.bin")
    store = opened(tmp_path, most_bytes=400)
    for turn in range(10):
        store.write(*record(turn))
    assert {*names} < {path.name for path in tmp_path.iterdir()}
    assert opened(tmp_path).read([record(9)[0]]) == [record(9)[1]]


@pytest.mark.parametrize("use", [lambda store, key: store.read([key]), BlockStore.note_use])
def test_the_folder_stays_within_its_bound_and_keeps_what_was_used_last(tmp_path, use):
    """A text that is in memory counts as used: its file is what the next process needs first."""
    store = opened(tmp_path, most_bytes=5 * 68)
    for turn in range(5):
        store.write(*record(turn))
        os.utime(max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns), (turn, turn))
    use(store, record(0)[0])
    store.write(*record(5))
    store.write(*record(6))
    assert [store.has(record(turn)[0]) for turn in range(7)] == [True, False, False, True, True, True, True]
    assert store.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir()) == 5 * 68


def test_processes_that_share_a_folder_find_each_others_files_and_share_the_bound(tmp_path):
    one, two = opened(tmp_path, most_bytes=300), opened(tmp_path, most_bytes=300)
    one.write(*record("a"))
    assert not two.has(record("a")[0])
    two.refresh()
    assert two.read([record("a")[0]]) == [record("a")[1]]
    for turn in range(10):
        time.sleep(0.002)  # a file system's clock may be coarse
        two.write(*record(turn))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 300
    assert one.read([record("a")[0]]) == [None], "it is gone"
    one.refresh()
    assert not one.has(record("a")[0]) and one.has(record(9)[0]) and one.num_errors == 0


def test_a_use_counts_once_and_not_at_each_later_look(tmp_path):
    """A text that was in use once would else be kept for ever."""
    store = opened(tmp_path)
    store.write(*record("a"))
    [path] = tmp_path.iterdir()
    for use, now in ((store.note_use, True), (lambda key: store.read([key]), True), (lambda key: None, False)):
        use(record("a")[0])
        os.utime(path, (0, 0))
        store.refresh()
        assert (path.stat().st_mtime > 0) == now


def test_a_process_that_dies_while_it_writes_leaves_nothing_that_counts(tmp_path):
    unfinished = tmp_path / f".kv-{'a' * 16}.tmp"
    unfinished.write_bytes(bytes(1000))
    store = opened(tmp_path)
    assert (len(store), store.num_bytes) == (0, 1000)
    os.utime(unfinished, (0, 0))
    opened(tmp_path)
    assert not unfinished.exists(), "nobody goes on writing it"


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    store = opened(tmp_path)
    store.write(*record("a"))

    def full(path, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space"):
        store.write(*record("b"))
    assert len(list(tmp_path.iterdir())) == 1 and store.num_errors == 1 and not store.has(record("b")[0])
    monkeypatch.undo()
    store.write(*record("b"))
    assert store.read([record("b")[0]]) == [record("b")[1]]


def test_a_folder_that_cannot_be_used_is_named_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"^kv_disk_folder: '.*/file/kv' cannot be written to: Not a directory$"):
        opened(tmp_path / "file" / "kv")
    with pytest.raises(SettingError, match=r"^kv_disk_bytes is 67, but one block takes 64: raise it$"):
        opened(tmp_path, most_bytes=67)


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE, errno.ESTALE])
def test_an_error_of_the_disk_removes_nothing(tmp_path, monkeypatch, error):
    store = opened(tmp_path)
    store.write(*record("a"))

    def broken(path):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, "read_bytes", broken)
    assert store.read([record("a")[0]]) == [None] and store.num_errors == 1
    assert not store.has(record("a")[0]), "it is not tried again and again"
    monkeypatch.undo()
    assert opened(tmp_path).read([record("a")[0]]) == [record("a")[1]]


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    """Who writes there may plant keys and values: a checksum tells no author."""
    tmp_path.chmod(0o777)
    with pytest.raises(SettingError, match=r"^kv_disk_folder: other users may write to '.*', and its files are trusted: chmod"):
        opened(tmp_path)


def test_a_folder_that_is_removed_is_made_again(tmp_path):
    folder = tmp_path / "kv"
    store = opened(folder)
    store.write(*record("a"))
    shutil.rmtree(folder)
    store.refresh()
    assert len(store) == 0 and store.num_bytes == 0
    store.write(*record("b"))
    assert store.read([record("b")[0]]) == [record("b")[1]]


def test_blocks_are_removed(tmp_path):
    store = opened(tmp_path)
    for name in "abc":
        store.write(*record(name))
    store.remove([record(name)[0] for name in "abd"])
    assert [store.has(record(name)[0]) for name in "abc"] == [False, False, True] and len(list(tmp_path.iterdir())) == 1
