"""A download whose process was killed goes on where it ended, checked by its SHA-256; the hub is a server on loopback."""

import hashlib
import random
import signal

import filelock
import pytest
from huggingface_hub import constants

from attend.model.errors import CheckpointError
from attend.service.runtime import partial_downloads
from tests.service.hub_server import COMMIT
from tests.service.runtime.test_hub import SECONDS, WEIGHTS, at, child, server, sharded, source, wait_for  # noqa: F401 - a hub

MODEL = "hf://org/tiny"
BEGUN = 12_288


def begin(at, server, content: bytes, length: int, name: str = WEIGHTS):  # noqa: F811
    """A partial file as the library names it, of a repository that was never downloaded whole."""
    digest = hashlib.sha256(server.files[name]).hexdigest()
    path = at.cache / "models--org--tiny/blobs" / f"{digest}.0a1b2c3d.incomplete"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content[:length])
    return path


def asked(server, name: str = WEIGHTS) -> list[str]:  # noqa: F811
    """The ranges in which a file was asked for."""
    start = f"GET /org/tiny/resolve/{COMMIT}/{name}"
    return [line.removeprefix(start).strip() for line in server.asked if line.startswith(start)]


def test_a_killed_download_goes_on(server, tmp_path):  # noqa: F811
    """SIGKILL in the middle of the weights; the next process asks for the rest alone."""
    server.files[WEIGHTS] = whole = random.Random(0).randbytes(24_000_000)  # the library writes ten million bytes at once
    server.held_after = size = 21_000_000
    first = child(server, tmp_path, "pull", MODEL)
    wait_for(lambda: f"HELD {WEIGHTS}" in server.asked)
    blobs = tmp_path / "hub/models--org--tiny/blobs"
    try:
        wait_for(lambda: any(path.stat().st_size for path in blobs.glob("*.incomplete")))
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    [left] = blobs.glob("*.incomplete")
    kept = left.stat().st_size
    assert 0 < kept <= size
    out, err = child(server, tmp_path, "pull", MODEL, str(tmp_path / "model")).communicate(timeout=SECONDS)
    assert f"Resuming {WEIGHTS}: " in err, err
    assert asked(server) == ["", f"bytes={kept}-"]
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == whole
    assert out == f"{tmp_path / 'model'}\n" and not list(blobs.glob("*.incomplete"))


def test_who_waits_for_a_download_that_is_killed_goes_on_with_it(server, tmp_path):  # noqa: F811
    """Two pods, one claim: the kernel frees the lock of the one that dies."""
    server.files[WEIGHTS] = whole = random.Random(1).randbytes(24_000_000)
    server.held_after = 21_000_000
    words = ("pull", MODEL, str(tmp_path / "model"))
    first = child(server, tmp_path, *words)
    try:
        wait_for(lambda: any(path.stat().st_size for path in (tmp_path / "hub").glob("*/blobs/*.incomplete")))
        second = child(server, tmp_path, *words)
        assert second.stderr.readline() == f"Another process is downloading {MODEL}: waiting for it\n"
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    _, err = second.communicate(timeout=SECONDS)
    assert second.returncode == 0 and f"Resuming {WEIGHTS}: " in err, err
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == whole
    assert len(asked(server)) == 2 and asked(server)[1].startswith("bytes=")


def test_the_rest_is_asked_for_and_room_for_it_alone(at, server, source, monkeypatch):  # noqa: F811
    whole = server.files[WEIGHTS]
    begin(at, server, whole, BEGUN)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("", (), {"free": len(whole) - BEGUN}))
    folder = at.fetch()
    assert (folder / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    assert asked(server) == [f"bytes={BEGUN}-"]
    assert at.said[1] == f"Resuming {WEIGHTS}: 0.00 of 0.00 GB are on disk"


def test_a_damaged_beginning_is_downloaded_anew_in_the_same_run(at, server):  # noqa: F811
    whole = server.files[WEIGHTS]
    begin(at, server, b"!" + whole[1:], BEGUN)
    assert (at.fetch() / WEIGHTS).read_bytes() == whole
    assert asked(server) == [f"bytes={BEGUN}-", ""]


def test_one_that_another_process_writes_to_is_left_alone(at, server):  # noqa: F811
    """hf download holds the lock of the hash while it writes."""
    path = begin(at, server, server.files[WEIGHTS], BEGUN)
    one = partial_downloads.Partial(WEIGHTS, path, BEGUN)
    lock = at.cache / ".locks/models--org--tiny" / f"{one.blob.name}.lock"
    lock.parent.mkdir(parents=True)
    with filelock.FileLock(lock):
        partial_downloads.complete_downloads("org/tiny", COMMIT, [one], {WEIGHTS: len(server.files[WEIGHTS])}, at.said.append)
    assert (asked(server), at.said, path.stat().st_size) == ([], [], BEGUN)


def test_offline_the_reason_is_told_and_the_beginning_kept(at, server, monkeypatch):  # noqa: F811
    at.fetch()
    path = next((at.cache / "models--org--tiny/snapshots").glob(f"*/{WEIGHTS}"))
    path.resolve().unlink()
    path.unlink()
    begun = begin(at, server, server.files[WEIGHTS], BEGUN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"is not in the cache .*, and HF_HUB_OFFLINE is set$"):
        at.fetch()
    assert begun.stat().st_size == BEGUN
