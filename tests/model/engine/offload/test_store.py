"""Files of blocks: what was written is read, what is cut, changed or another's is not, and the folder keeps its bound."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path

import pytest

from attend.model.engine.offload import store as module
from attend.model.engine.offload.store import BlockStore
from attend.model.errors import SettingError

LAYOUT, OTHER = "0" * 16, "1" * 16
SIZES = (64, 24)


def opened(folder: Path, layout: str = LAYOUT, most_bytes: int = 1 << 20) -> BlockStore:
    return BlockStore(folder, layout, SIZES, most_bytes)


def record(name: object, group: int = 0):
    digest = blake2b(repr(name).encode(), digest_size=16).digest()
    return (digest, group), blake2b(digest + bytes([group]), digest_size=64).digest()[: SIZES[group]]


def test_records_are_read_back_by_this_process_and_the_next(tmp_path):
    records = [record("a"), record("a", 1), record("b"), record("c", 1)]
    first = opened(tmp_path)
    first.write(records[:3])
    first.write(records[3:])
    for store in (first, opened(tmp_path)):
        assert store.read([key for key, _ in records]) == [data for _, data in records]
        assert all(store.has(key) for key, _ in records) and len(store) == 4
        assert not store.has(record("b", 1)[0]) and store.read([record("d")[0]]) == [None]
        assert store.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
        assert store.num_errors == 0


def test_another_layout_has_records_of_its_own(tmp_path):
    opened(tmp_path).write([record("a")])
    other = BlockStore(tmp_path, OTHER, (32,), 1 << 20)
    assert not other.has(record("a")[0])
    assert other.num_bytes > 0, "its bytes count"


def test_nobody_else_may_read_what_callers_wrote(tmp_path):
    folder = tmp_path / "new" / "kv"
    opened(folder).write([record("a")])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]


@pytest.mark.parametrize("length", [0, 7, 16, 20, 40, 63, 64, 127, 150, 151, 152])
def test_a_file_that_is_cut_is_never_used(tmp_path, length):
    opened(tmp_path).write([record("a"), record("b", 1)])
    [path] = tmp_path.iterdir()
    assert path.stat().st_size == 152
    path.write_bytes((path.read_bytes() + b"x")[: length + (length == 152)])
    store = opened(tmp_path)
    assert len(store) == 0 and store.num_errors == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("at", range(0, 152, 5))
def test_a_changed_byte_is_never_given_out(tmp_path, at):
    """Of the records of a file whose one byte was changed, none is read wrong, and the file goes."""
    records = [record("a"), record("b", 1)]
    opened(tmp_path).write(records)
    [path] = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    store = opened(tmp_path)
    found = store.read([key for key, _ in records])
    assert all(some in (None, data) for some, (_, data) in zip(found, records, strict=True))
    assert None in found and store.num_errors == 1
    assert not list(tmp_path.iterdir()) and len(store) == 0


def test_files_of_others_are_neither_read_nor_removed(tmp_path):
    names = ["notes.txt", "kv-0.bin", f"kv-{LAYOUT}-{'0' * 16}.bin.bak", f"KV-{LAYOUT}-{'0' * 16}.bin"]
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 1000)
    (tmp_path / f"kv-{LAYOUT}-{'a' * 16}.bin").mkdir()  # of no use, and not ours either
    store = opened(tmp_path, most_bytes=400)
    for turn in range(10):
        store.write([record(turn)])
    assert {*names} < {path.name for path in tmp_path.iterdir()}


def test_the_folder_stays_within_its_bound_and_keeps_what_was_used_last(tmp_path):
    store = opened(tmp_path, most_bytes=5 * 104)
    for turn in range(5):
        store.write([record(turn)])
        os.utime(max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns), (turn, turn))
    store.read([record(0)[0]])  # used now
    store.write([record(5)])
    store.write([record(6)])
    assert [store.has(record(turn)[0]) for turn in range(7)] == [True, False, False, True, True, True, True]
    assert store.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir()) == 5 * 104


def test_processes_that_share_a_folder_find_each_others_files_and_share_the_bound(tmp_path):
    one, two = opened(tmp_path, most_bytes=400), opened(tmp_path, most_bytes=400)
    one.write([record("a")])
    assert not two.has(record("a")[0])
    two.refresh()
    assert two.read([record("a")[0]]) == [record("a")[1]]
    for turn in range(6):
        time.sleep(0.002)  # a file system's clock may be coarse
        two.write([record(turn)])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 400
    assert one.read([record("a")[0]]) == [None], "it is gone"
    one.refresh()
    assert not one.has(record("a")[0]) and one.has(record(5)[0]) and one.num_errors == 0


def test_records_that_two_files_hold_are_read_from_either_and_none_is_damaged(tmp_path):
    """Whichever file a record is learned from, those behind it in the other file are where they are."""
    one, two = opened(tmp_path), opened(tmp_path)
    records = [record("a"), record("a", 1), record("b"), record("b", 1), record("c")]
    one.write(records[:3])
    two.write(records[1:])
    two.write(records)  # again, all known
    for store in (one, two, opened(tmp_path)):
        store.refresh()
        assert store.read([key for key, _ in records]) == [data for _, data in records]
        assert store.num_errors == 0 and store.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 3


def test_a_use_counts_once_and_not_at_each_later_look(tmp_path):
    """A text that was in use once would else be kept for ever."""
    store = opened(tmp_path)
    store.write([record("a")])
    [path] = tmp_path.iterdir()
    for use, now in ((store.note_use, True), (lambda key: store.read([key]), True), (lambda key: None, False)):
        use(record("a")[0])
        os.utime(path, (0, 0))
        store.refresh()
        assert (path.stat().st_mtime > 0) == now


def test_a_process_that_dies_while_it_writes_leaves_nothing_that_counts(tmp_path):
    code = (
        "import os, sys, time; from attend.model.engine.offload import store; from pathlib import Path\n"
        "s = store.BlockStore(Path(sys.argv[1]), '0' * 16, (1 << 20,), 1 << 30)\n"
        "s.write([((b'a' * 16, 0), b'1' * (1 << 20))])\n"
        "real = os.fdopen\n"
        "def fdopen(*given):\n"
        "    file = real(*given, 0)\n"
        "    print('writes', flush=True)\n"
        "    file.write(b'x' * 100); time.sleep(60); return file\n"
        "os.fdopen = fdopen\n"
        "s.write([((b'b' * 16, 0), b'2' * (1 << 20))])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"writes\n"
        time.sleep(0.1)
        child.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.iterdir())) == 2
    store = BlockStore(tmp_path, LAYOUT, (1 << 20,), 1 << 30)
    assert store.read([(b"a" * 16, 0), (b"b" * 16, 0)]) == [b"1" * (1 << 20), None]
    [unfinished] = tmp_path.glob(".kv-*")
    os.utime(unfinished, (0, 0))
    BlockStore(tmp_path, LAYOUT, (1 << 20,), 1 << 30)
    assert not unfinished.exists(), "nobody goes on writing it"


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    store = opened(tmp_path)
    store.write([record("a")])

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, data):
            if len(data) == SIZES[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.file.write(data)

    real = os.fdopen
    monkeypatch.setattr(module.os, "fdopen", lambda *given: Full(real(*given)))
    with pytest.raises(OSError, match="No space"):
        store.write([record("b")])
    assert len(list(tmp_path.iterdir())) == 1 and store.num_errors == 1 and not store.has(record("b")[0])
    monkeypatch.undo()
    store.write([record("b")])
    assert store.read([record("b")[0]]) == [record("b")[1]]


def test_a_folder_that_cannot_be_used_is_named_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"^kv_disk_folder: '.*/file/kv' cannot be written to: Not a directory$"):
        opened(tmp_path / "file" / "kv")
    with pytest.raises(SettingError, match=r"^kv_disk_bytes is 70, but one block takes 64: raise it$"):
        opened(tmp_path, most_bytes=70)


def test_a_head_that_promises_more_than_the_file_has_takes_no_memory(tmp_path):
    opened(tmp_path).write([record("a")])
    [path] = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[8:12] = b"\xff" * 4
    path.write_bytes(data)
    store = opened(tmp_path)
    assert len(store) == 0 and store.num_errors == 1 and not path.exists()


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE, errno.ESTALE])
def test_an_error_of_the_disk_removes_nothing(tmp_path, monkeypatch, error):
    store = opened(tmp_path)
    store.write([record("a")])
    real = Path.open

    def broken(path, *given, **more):
        if path.suffix == ".bin":
            raise OSError(error, os.strerror(error))
        return real(path, *given, **more)

    monkeypatch.setattr(Path, "open", broken)
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
    store.write([record("a")])
    shutil.rmtree(folder)
    store.refresh()
    assert len(store) == 0 and store.num_bytes == 0
    store.write([record("b")])
    assert store.read([record("b")[0]]) == [record("b")[1]]


def test_what_is_no_file_stops_nobody(tmp_path):
    os.mkfifo(tmp_path / f"kv-{LAYOUT}-{'a' * 16}.bin")
    (tmp_path / f".kv-{LAYOUT}-{'b' * 16}.tmp").mkdir()
    os.utime(tmp_path / f".kv-{LAYOUT}-{'b' * 16}.tmp", (0, 0))
    store = opened(tmp_path)
    store.write([record("a")])
    assert opened(tmp_path).read([record("a")[0]]) == [record("a")[1]]


def test_what_an_ended_process_left_unfinished_counts(tmp_path):
    (tmp_path / f".kv-{OTHER}-{'a' * 16}.tmp").write_bytes(bytes(1000))
    assert opened(tmp_path).num_bytes == 1000


def test_a_text_that_is_in_use_goes_last_though_nobody_reads_it(tmp_path):
    """It is in memory: its file is what the next process needs first."""
    store = opened(tmp_path, most_bytes=3 * 104)
    for turn in range(3):
        store.write([record(turn)])
        os.utime(max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns), (turn, turn))
    store.note_use(record(0)[0])
    store.write([record(3)])
    assert [store.has(record(turn)[0]) for turn in range(4)] == [True, False, True, True]


def test_records_are_removed_with_their_file(tmp_path):
    store = opened(tmp_path)
    store.write([record("a"), record("b")])
    store.write([record("c")])
    store.remove([record("b")[0], record("d")[0]])
    assert [store.has(record(name)[0]) for name in "abc"] == [False, False, True] and len(list(tmp_path.iterdir())) == 1
