"""Blocks in files of a folder that is bounded in bytes. Plain files and bytes: no torch, no tokens.

A file is one block of one KV cache group, named by the digest of its text: a checksum (CRC-32), then the block. It never
changes. It is written under another name and renamed, so that a process that dies while it writes leaves nothing that counts.
A file that is cut or changed is never used, and removed. An error of the disk removes nothing.

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

from attend.model.errors import SettingError

log = logging.getLogger("attend.offload")

CHECKSUM = struct.Struct("<I")
NAME = re.compile(r"kv-([0-9a-f]{16})-([0-9a-f]{32})-(\d{1,3})\.bin")
UNFINISHED = re.compile(r"\.kv-[0-9a-f]{16}\.tmp")
STALE_SECONDS = 600.0
"""Age of a file that nobody goes on writing."""
SLACK = 16
"""Where there is no room, at least one of so many files is removed: the folder is not looked through for each new one."""

Key = tuple[bytes, int]
"""The digest of a text, 16 bytes, and a KV cache group."""
Bytes = bytes | bytearray | memoryview


class BlockStore:
    """The blocks of one model's layout in a folder that others may share."""

    def __init__(self, folder: Path, layout: str, sizes: Sequence[int], most_bytes: int) -> None:
        """`layout`: 16 hexadecimal digits, the same for blocks that can be used for each other. `sizes`: bytes of a block of
        each group. Raises SettingError where the folder cannot be written to, or has no room for one block.
        """
        self.folder, self.sizes, self.most_bytes = folder, tuple(sizes), most_bytes
        self.num_bytes = 0
        """Bytes of all our files in the folder, of other layouts too."""
        self.num_errors = 0
        """Files that were no good, or could not be read or written."""
        self._layout = layout
        self._known: set[Key] = set()
        self._used: dict[Key, None] = {}
        self._changed = -1
        self._lock = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = folder.stat()
            probe = self._new_name()
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            probe.unlink()
        except OSError as error:
            raise SettingError(f"kv_disk_folder: {str(folder)!r} cannot be written to: {error.strerror}") from error
        if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise SettingError(
                f"kv_disk_folder: other users may write to {str(folder)!r}, and its files are trusted: chmod 700"
            )
        if most_bytes < max(self.sizes) + CHECKSUM.size:
            raise SettingError(f"kv_disk_bytes is {most_bytes}, but one block takes {max(self.sizes)}: raise it")
        self.refresh()

    def __len__(self) -> int:
        return len(self._known)

    def has(self, key: Key) -> bool:
        """True if a block is there. Another process may remove it at any time."""
        return key in self._known

    def note_use(self, key: Key) -> None:
        """Note that a block's text is in use, so that its file is removed later than others."""
        self._used[key] = None

    def _new_name(self) -> Path:
        return self.folder / f".kv-{secrets.token_hex(8)}.tmp"

    def _path(self, key: Key) -> Path:
        return self.folder / f"kv-{self._layout}-{key[0].hex()}-{key[1]}.bin"

    def refresh(self) -> None:
        """Learn what other processes have written and removed since the last time, and tell them which files are in use."""
        used, self._used = self._used, {}
        for key in list(used)[::-1]:  # the beginning of a text last: without it the rest is of no use
            with suppress(OSError):
                os.utime(self._path(key))
        with self._lock:
            try:
                changed = self.folder.stat().st_mtime_ns
                if changed != self._changed:
                    self._scan()
                    self._changed = changed
            except FileNotFoundError:  # somebody has removed the folder: `write` makes it again
                self._known, self.num_bytes = set(), 0
            except OSError:
                self.num_errors += 1

    def _scan(self) -> None:
        known, total = set[Key](), 0
        for entry in os.scandir(self.folder):
            with suppress(OSError):
                if not entry.is_file(follow_symlinks=False):
                    continue
                if (named := NAME.fullmatch(entry.name)) is None:
                    if UNFINISHED.fullmatch(entry.name):
                        about = entry.stat(follow_symlinks=False)
                        total += about.st_size
                        if time.time() - about.st_mtime > STALE_SECONDS:
                            os.unlink(entry.path)
                    continue
                group = int(named[3])
                if named[1] == self._layout and group < len(self.sizes):
                    known.add((bytes.fromhex(named[2]), group))
                    total += CHECKSUM.size + self.sizes[group]
                else:
                    total += entry.stat(follow_symlinks=False).st_size
        self._known, self.num_bytes = known, total

    def remove(self, keys: Sequence[Key]) -> None:
        """Remove the files of some blocks."""
        with self._lock:
            for key in self._known.intersection(keys):
                self._forget(key)
                with suppress(OSError):
                    self._path(key).unlink()

    def _forget(self, key: Key) -> None:
        if key in self._known:
            self._known.discard(key)
            self.num_bytes -= CHECKSUM.size + self.sizes[key[1]]

    def write(self, key: Key, data: Bytes) -> int:
        """Write a block, and remove old ones where there are too many bytes. Returns its bytes. Raises OSError, and leaves
        nothing then.
        """
        size, unfinished = CHECKSUM.size + len(data), self._new_name()
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._make_room(size)
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(CHECKSUM.pack(zlib.crc32(data)))
                file.write(data)
            unfinished.rename(self._path(key))
        except OSError:
            self.num_errors += 1
            with suppress(OSError):
                unfinished.unlink()
            raise
        with self._lock:
            self.num_bytes += 0 if key in self._known else size
            self._known.add(key)
        return size

    def _make_room(self, size: int) -> None:
        """Remove the files that were used the longest ago until so many bytes more are allowed."""
        if self.num_bytes + size <= self.most_bytes:
            return
        self.refresh()
        files = []
        for entry in os.scandir(self.folder):
            with suppress(OSError):
                if (named := NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    files.append((about.st_mtime_ns, entry.name, about.st_size, named))
        with self._lock:
            for at, (_, name, length, named) in enumerate(sorted(files)):
                if self.num_bytes + size <= self.most_bytes and at >= len(files) // SLACK:
                    break
                with suppress(OSError):
                    (self.folder / name).unlink(missing_ok=True)
                    self.num_bytes -= length
                    if named[1] == self._layout:
                        self._known.discard((bytes.fromhex(named[2]), int(named[3])))

    def read(self, keys: Sequence[Key]) -> list[Bytes | None]:
        """Some blocks, None for those that are gone or no good."""
        return [self._read(key) if key in self._known else None for key in keys]

    def _read(self, key: Key) -> Bytes | None:
        path = self._path(key)
        try:
            data = memoryview(path.read_bytes())
        except OSError as error:
            self.num_errors += error.errno != errno.ENOENT  # which another process, or somebody, has removed
            with self._lock:
                self._forget(key)
            return None
        if len(data) == CHECKSUM.size + self.sizes[key[1]] and zlib.crc32(data[4:]) == CHECKSUM.unpack(data[:4])[0]:
            self._used[key] = None
            return data[CHECKSUM.size :]
        self.num_errors += 1
        log.warning("%s is damaged, and is removed", path)
        self.remove([key])
        return None
