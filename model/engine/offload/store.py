"""Blocks in files of a folder that is bounded in bytes. Plain files and bytes: no torch, no tokens.

A record is one block of one KV cache group, under the digest of its text. A file holds the records of one write, and never
changes: a table of digests, groups and checksums (CRC-32), then the records. It is written under another name and renamed, so
that a process that dies while it writes leaves nothing that counts. A file that is cut, or whose table does not match, is
never used, and a record whose checksum differs is not either.

Processes may share a folder: each reads what the others have written (`refresh`), and removes the files that were used the
longest ago, whoever wrote them, where there are more bytes than allowed. Other files are neither read nor removed.
"""

import os
import re
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from attend.model.errors import SettingError

MAGIC = b"attendKV"
HEAD = struct.Struct("<8sII")
"""MAGIC, the number of records, and the checksum of the table."""
ENTRY = struct.Struct("<16sII")
"""A record's digest, its group, and its checksum."""
NAME = re.compile(r"kv-[0-9a-f]{16}-[0-9a-f]{16}\.bin")
UNFINISHED = re.compile(r"\.kv-[0-9a-f]{16}-[0-9a-f]{16}\.tmp")
STALE_SECONDS = 600.0
"""Age of a file that nobody goes on writing."""

Key = tuple[bytes, int]
"""The digest of a text, 16 bytes, and a KV cache group."""
Bytes = bytes | bytearray | memoryview


class Place(NamedTuple):
    """Where a record lies."""

    path: Path
    start: int
    checksum: int


class BlockStore:
    """The records of one model's layout in a folder that others may share."""

    def __init__(self, folder: Path, layout: str, sizes: Sequence[int], most_bytes: int) -> None:
        """`layout`: 16 hexadecimal digits, the same for records that can be used for each other. `sizes`: bytes of a record of
        each group. Raises SettingError where the folder cannot be written to, or has no room for one record.
        """
        self.folder, self.sizes, self.most_bytes = folder, tuple(sizes), most_bytes
        self.num_bytes = 0
        """Of all files in the folder that are ours, of other layouts too."""
        self.num_errors = 0
        """Files and records that were no good, or could not be read or written."""
        self._prefix = f"kv-{layout}-"
        self._places: dict[Key, Place] = {}
        self._files: dict[str, list[Key]] = {}
        self._changed = -1
        self._lock = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / f".kv-{layout}-{secrets.token_hex(8)}.tmp"
            probe.touch(mode=0o600)
            probe.unlink()
        except OSError as error:
            raise SettingError(f"kv_disk_folder {str(folder)!r} cannot be written to: {error.strerror}") from error
        if most_bytes < max(self.sizes) + HEAD.size + ENTRY.size:
            raise SettingError(f"kv_disk_bytes is {most_bytes}, but one block takes {max(self.sizes)}: raise it")
        self.refresh()

    def __len__(self) -> int:
        return len(self._places)

    def has(self, key: Key) -> bool:
        """Whether a record is there. Another process may remove it at any time."""
        return key in self._places

    def refresh(self) -> None:
        """Learn what other processes have written and removed since the last time."""
        with suppress(OSError), self._lock:
            changed = self.folder.stat().st_mtime_ns
            if changed == self._changed:
                return
            self._changed = changed
            found = {}
            for entry in os.scandir(self.folder):
                with suppress(FileNotFoundError):
                    if NAME.fullmatch(entry.name):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size
                    elif UNFINISHED.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > STALE_SECONDS:
                        os.unlink(entry.path)
            self.num_bytes = sum(found.values())
            for name in self._files.keys() - found.keys():
                self._forget(name)
            for name in sorted(found.keys() - self._files.keys()):
                if name.startswith(self._prefix):
                    self._learn(name, found[name])

    def _learn(self, name: str, size: int) -> None:
        """Read the table of a file."""
        path = self.folder / name
        try:
            with path.open("rb") as file:
                magic, count, checksum = HEAD.unpack(file.read(HEAD.size))
                table = file.read(count * ENTRY.size) if magic == MAGIC else b""
            entries = [(digest, group, crc) for digest, group, crc in ENTRY.iter_unpack(table)]
            ends = HEAD.size + len(table) + sum(self.sizes[group] for _, group, _ in entries)
            good = magic == MAGIC and len(entries) == count and zlib.crc32(table) == checksum and ends == size
        except (struct.error, IndexError):
            good = False
        except OSError:
            return
        if not good:
            self.num_errors += 1
            self._remove(name, size)
            return
        self._enter(name, entries)

    def _enter(self, name: str, entries: Sequence[tuple[bytes, int, int]]) -> None:
        start, keys = HEAD.size + len(entries) * ENTRY.size, []
        for digest, group, checksum in entries:
            if (digest, group) not in self._places:
                self._places[digest, group] = Place(self.folder / name, start, checksum)
                keys.append((digest, group))
            start += self.sizes[group]
        self._files[name] = keys

    def _forget(self, name: str) -> None:
        for key in self._files.pop(name, ()):
            del self._places[key]

    def _remove(self, name: str, size: int) -> None:
        self._forget(name)
        with suppress(OSError):
            (self.folder / name).unlink()
            self.num_bytes -= size

    def write(self, records: Sequence[tuple[Key, Bytes]]) -> int:
        """Write a file of these records, and remove old ones where there are too many bytes. Returns its bytes. Raises OSError,
        and leaves nothing then.
        """
        entries = [(digest, group, zlib.crc32(data)) for (digest, group), data in records]
        table = b"".join(ENTRY.pack(*entry) for entry in entries)
        size = HEAD.size + len(table) + sum(len(data) for _, data in records)
        mark = secrets.token_hex(8)
        unfinished, name = self.folder / f".{self._prefix}{mark}.tmp", f"{self._prefix}{mark}.bin"
        self._make_room(size)
        try:
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(HEAD.pack(MAGIC, len(entries), zlib.crc32(table)) + table)
                for _, data in records:
                    file.write(data)
            unfinished.rename(self.folder / name)
        except OSError:
            self.num_errors += 1
            with suppress(OSError):
                unfinished.unlink()
            raise
        with self._lock:
            self._enter(name, entries)
            self.num_bytes += size
        return size

    def _make_room(self, size: int) -> None:
        """Remove the files that were used the longest ago until so many bytes more are allowed."""
        if self.num_bytes + size <= self.most_bytes:
            return
        files = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                if NAME.fullmatch(entry.name):
                    about = entry.stat(follow_symlinks=False)
                    files.append((about.st_mtime_ns, entry.name, about.st_size))
        with self._lock:
            self.num_bytes = sum(size for _, _, size in files)
            for _, name, length in sorted(files):
                if self.num_bytes + size <= self.most_bytes:
                    break
                self._remove(name, length)

    def read(self, keys: Sequence[Key]) -> list[bytes | None]:
        """Some records, None for those that are gone or no good. Their files count as used now."""
        places = [self._places.get(key) for key in keys]
        found: list[bytes | None] = [None] * len(keys)
        for path in dict.fromkeys(place.path for place in places if place is not None):
            try:
                with path.open("rb", buffering=0) as file:
                    for at, (key, place) in enumerate(zip(keys, places, strict=True)):
                        if place is not None and place.path == path:
                            found[at] = self._record(file.fileno(), place, self.sizes[key[1]])
                os.utime(path)
            except OSError:  # another process has removed it, or the disk fails
                self.num_errors += path.exists()
        bad = {place.path for place, data in zip(places, found, strict=True) if place is not None and data is None}
        with self._lock:
            for path in bad:  # what was written with a bad record may be no good either
                with suppress(OSError):
                    self._remove(path.name, path.stat().st_size)
                self._forget(path.name)
        return found

    def _record(self, file: int, place: Place, size: int) -> bytes | None:
        data = os.pread(file, size, place.start)
        if len(data) == size and zlib.crc32(data) == place.checksum:
            return data
        self.num_errors += 1
        return None
