"""Blocks in files of a folder that is bounded in bytes. Plain files and bytes: no torch, no tokens.

A record is one block of one KV cache group, under the digest of its text. A file holds the records of one write, and never
changes: a table of digests, groups and checksums (CRC-32), then the records. It is written under another name and renamed, so
that a process that dies while it writes leaves nothing that counts. A file that is cut, or whose table does not match, is
never used, and a record whose checksum differs is not either: such files are removed. An error of the disk removes nothing.

Processes of one user may share a folder: each reads what the others have written, and removes the files that were used the
longest ago, whoever wrote them, where there are more bytes than allowed. `refresh` looks for what the others did: between two
calls of it a folder may hold more than allowed, by what they wrote. Files with other names are neither read nor removed.
"""

import errno
import logging
import os
import re
import secrets
import stat
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from attend.model.errors import SettingError

log = logging.getLogger("attend.offload")

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
    """Where a record lies: file, offset in bytes, and checksum."""

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
        """Bytes of all our files in the folder, of other layouts too."""
        self.num_errors = 0
        """Files and records that were no good, or could not be read or written."""
        self._prefix = f"kv-{layout}-"
        self._places: dict[Key, Place] = {}
        self._files: dict[str, list[Key]] = {}
        self._used: set[Path] = set()
        self._changed = -1
        self._lock = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = folder.stat()
            probe = self._new_name(".tmp")
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            probe.unlink()
        except OSError as error:
            raise SettingError(f"kv_disk_folder: {str(folder)!r} cannot be written to: {error.strerror}") from error
        if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise SettingError(
                f"kv_disk_folder: other users may write to {str(folder)!r}, and its files are trusted: chmod 700"
            )
        if most_bytes < max(self.sizes) + HEAD.size + ENTRY.size:
            raise SettingError(f"kv_disk_bytes is {most_bytes}, but one block takes {max(self.sizes)}: raise it")
        self.refresh()

    def _new_name(self, ending: str) -> Path:
        return self.folder / f"{'.' if ending == '.tmp' else ''}{self._prefix}{secrets.token_hex(8)}{ending}"

    def __len__(self) -> int:
        return len(self._places)

    def has(self, key: Key) -> bool:
        """True if a record is there. Another process may remove it at any time."""
        return key in self._places

    def note_use(self, key: Key) -> None:
        """Note that a record's text is in use, so that its file is removed later than others."""
        place = self._places.get(key)
        if place is not None:
            self._used.add(place.path)

    def refresh(self) -> None:
        """Learn what other processes have written and removed since the last time, and tell them which files are in use."""
        used, self._used = self._used, set()
        for path in used:
            with suppress(OSError):
                os.utime(path)
        with self._lock:
            try:
                changed = self.folder.stat().st_mtime_ns
                if changed != self._changed:
                    self._scan()
                self._changed = changed
            except FileNotFoundError:  # somebody has removed the folder: `write` makes it again
                for name in list(self._files):
                    self._forget(name)
                self.num_bytes = 0
            except OSError:
                self.num_errors += 1

    def _scan(self) -> None:
        found = {}
        self.num_bytes = 0
        for entry in os.scandir(self.folder):
            with suppress(OSError):
                about = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(about.st_mode):
                    continue
                if UNFINISHED.fullmatch(entry.name) and time.time() - about.st_mtime > STALE_SECONDS:
                    os.unlink(entry.path)
                elif NAME.fullmatch(entry.name) or UNFINISHED.fullmatch(entry.name):
                    self.num_bytes += about.st_size
                    found[entry.name] = about.st_size
        for name in self._files.keys() - found.keys():
            self._forget(name)
        for name in sorted(found.keys() - self._files.keys()):
            if name.startswith(self._prefix):
                self._learn(name)

    def _learn(self, name: str) -> None:
        """Read the table of a file into the index. A damaged file is removed."""
        path, entries = self.folder / name, []
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                magic, count, checksum = HEAD.unpack(file.read(HEAD.size))
                good = magic == MAGIC and HEAD.size + count * ENTRY.size <= size
                table = file.read(count * ENTRY.size) if good else b""
            entries = list(ENTRY.iter_unpack(table))
            good = good and zlib.crc32(table) == checksum
            good = good and HEAD.size + len(table) + sum(self.sizes[group] for _, group, _ in entries) == size
        except (struct.error, IndexError):
            good = False
        except OSError as error:
            self.num_errors += error.errno != errno.ENOENT
            return
        if good:
            self._enter(name, entries)
        else:
            self._discard(name)

    def _discard(self, name: str) -> None:
        """Remove a damaged file."""
        self.num_errors += 1
        log.warning("%s is damaged, and is removed", self.folder / name)
        with suppress(OSError):
            self._remove(name, (self.folder / name).stat().st_size)

    def _enter(self, name: str, entries: Sequence[tuple[bytes, int, int]]) -> None:
        path, start, keys = self.folder / name, HEAD.size + len(entries) * ENTRY.size, []
        for digest, group, checksum in entries:
            if (digest, group) not in self._places:
                self._places[digest, group] = Place(path, start, checksum)
                keys.append((digest, group))
            start += self.sizes[group]
        self._files[name] = keys

    def _forget(self, name: str) -> None:
        for key in self._files.pop(name, ()):
            del self._places[key]

    def _remove(self, name: str, size: int) -> None:
        """Raises OSError where it cannot be removed."""
        self._forget(name)
        (self.folder / name).unlink(missing_ok=True)
        self.num_bytes -= size

    def remove(self, keys: Sequence[Key]) -> None:
        """Remove the files that have these records."""
        with self._lock:
            for name in {place.path.name for key in keys if (place := self._places.get(key)) is not None}:
                with suppress(OSError):
                    self._remove(name, (self.folder / name).stat().st_size)

    def write(self, records: Sequence[tuple[Key, Bytes]]) -> int:
        """Write a file of these records, and remove old ones where there are too many bytes. Returns its bytes. Raises OSError,
        and leaves nothing then.
        """
        entries = [(digest, group, zlib.crc32(data)) for (digest, group), data in records]
        table = b"".join(ENTRY.pack(*entry) for entry in entries)
        size = HEAD.size + len(table) + sum(len(data) for _, data in records)
        unfinished, path = self._new_name(".tmp"), self._new_name(".bin")
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._make_room(size)
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(HEAD.pack(MAGIC, len(entries), zlib.crc32(table)) + table)
                for _, data in records:
                    file.write(data)
            unfinished.rename(path)
        except OSError:
            self.num_errors += 1
            with suppress(OSError):
                unfinished.unlink()
            raise
        with self._lock:
            self._enter(path.name, entries)
            self.num_bytes += size
        return size

    def _make_room(self, size: int) -> None:
        """Remove the files that were used the longest ago until so many bytes more are allowed."""
        if self.num_bytes + size <= self.most_bytes:
            return
        self.refresh()
        files = []
        for entry in os.scandir(self.folder):
            with suppress(OSError):
                about = entry.stat(follow_symlinks=False)
                if NAME.fullmatch(entry.name) and stat.S_ISREG(about.st_mode):
                    files.append((about.st_mtime_ns, entry.name, about.st_size))
        with self._lock:
            for _, name, length in sorted(files):
                if self.num_bytes + size <= self.most_bytes:
                    break
                with suppress(OSError):
                    self._remove(name, length)

    def read(self, keys: Sequence[Key]) -> list[bytes | None]:
        """Some records, None for those that are gone or no good."""
        places = [self._places.get(key) for key in keys]
        found: list[bytes | None] = [None] * len(keys)
        for path in dict.fromkeys(place.path for place in places if place is not None):
            try:
                with path.open("rb", buffering=0) as file:
                    for at, (key, place) in enumerate(zip(keys, places, strict=True)):
                        if place is not None and place.path == path:
                            found[at] = self._record(file.fileno(), place, self.sizes[key[1]])
                self._used.add(path)
            except OSError as error:
                self.num_errors += error.errno != errno.ENOENT  # which another process, or somebody, has removed
                with self._lock:
                    self._forget(path.name)
        return found

    def _record(self, file: int, place: Place, size: int) -> bytes | None:
        data = os.pread(file, size, place.start)
        if len(data) == size and zlib.crc32(data) == place.checksum:
            return data
        with self._lock:  # what was written with a bad record may be no good either
            self._discard(place.path.name)
        return None
