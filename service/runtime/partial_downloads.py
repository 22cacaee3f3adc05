"""Resumes downloads of the hub whose process was killed, which huggingface_hub does not.

huggingface_hub writes a large file to `blobs/SHA256.RANDOM.incomplete`, under a lock of that hash, and renames it when it is
whole.
"""

import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

NAME = re.compile(r"([0-9a-f]{64})\.[0-9a-f]{8}\.incomplete")
AT_ONCE = 8
"""Files that go on at the same time: as many as the library downloads."""


class Partial(NamedTuple):
    """The part of a file that an ended process has downloaded."""

    name: str
    """The file's name in its repository."""
    path: Path
    length: int
    """Bytes of it that are on disk."""

    @property
    def blob(self) -> Path:
        """Where it goes when it is whole; its name is the SHA-256."""
        return self.path.with_name(self.path.name.partition(".")[0])


def find_partials(home: Path, sums: Mapping[str, str | None]) -> list[Partial]:
    """The longest beginning of each file of these names and SHA-256, in the folder of its repository in the cache."""
    names = {digest: name for name, digest in sums.items() if digest}
    begun: dict[str, Partial] = {}
    for path in home.glob("blobs/*.incomplete"):
        match = NAME.fullmatch(path.name)
        if match is None or match[1] not in names:
            continue
        with path.open("rb") as file:
            one = Partial(names[match[1]], path, _length(file))
        if one.length > 0 and (one.name not in begun or begun[one.name].length < one.length):
            begun[one.name] = one
    return list(begun.values())


def complete_downloads(
    repository: str, commit: str, partials: Collection[Partial], sizes: Mapping[str, int], say: Callable[[str], None]
) -> None:
    """Download what these files lack. One that another process writes to is left alone, one that is damaged is removed: the
    library downloads those. Raises what the library raises.
    """
    from huggingface_hub import constants

    if not partials or constants.is_offline_mode():  # of that the library tells
        return

    def go_on(one: Partial) -> None:
        _go_on(repository, commit, one, sizes[one.name], say)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(go_on, partials))


def _go_on(repository: str, commit: str, one: Partial, size: int, say: Callable[[str], None]) -> None:
    from filelock import FileLock, Timeout
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    home = one.path.parent.parent
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / home.name / f"{one.blob.name}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=0):
            if one.blob.exists() or not one.path.exists():
                return
            say(f"Resuming {one.name}: {one.length / 1e9:.2f} of {size / 1e9:.2f} GB are on disk")
            with one.path.open("r+b") as file:
                file.truncate(one.length)
                file.seek(one.length)
                url = hf_hub_url(repository, one.name, revision=commit, endpoint=constants.ENDPOINT)
                http_get(url, file, resume_size=one.length, headers=build_hf_headers(), expected_size=size)
            if sha256(one.path) == one.blob.name:
                one.path.rename(one.blob)
            else:
                one.path.unlink()
    except (Timeout, NotImplementedError):  # the file system has no locks: nobody can tell whether it is written to
        return


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _length(file: BinaryIO) -> int:
    """Bytes up to the first hole: hf_xet may write the parts of a file in any order."""
    try:
        return os.lseek(file.fileno(), 0, os.SEEK_HOLE)
    except OSError:  # an empty file
        return 0
