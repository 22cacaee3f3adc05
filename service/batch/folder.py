"""The folder of files and batches: checks of where it is, and paths in it."""

import fcntl
import os
import re
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attend.model.errors import SettingError
from attend.service.batch_settings import BATCH_FOLDER

SUBFOLDER = "attend-batch"
"""Of `batch_folder`, which a cluster may hand out with any owner and mode: this one is the user's alone."""
REMOTE = re.compile(r"nfs\d?|cifs|smb\w*|ceph|afs|gpfs|lustre|ocfs2|gfs2|fuse\.(?!fuse-overlayfs).*")
"""File systems that other machines write too: their locks, the database's and the runner's, may hold on one machine alone."""
MOUNT_ESCAPE = re.compile(r"\\(\d{3})")


class Folder:
    """The paths. Raises SettingError where the folder cannot be used."""

    def __init__(self, parent: Path) -> None:
        self.root = parent.absolute() / SUBFOLDER
        for path in (self.root, self.files, self.parts):
            _make(path)
        if (kind := file_system(self.root)) and REMOTE.fullmatch(kind):
            raise SettingError(
                f"{BATCH_FOLDER}: {str(self.root)!r} is on a network file system ({kind}): it must be on a local disk"
            )

    @property
    def database(self) -> Path:
        """Path of the SQLite database of files and batches."""
        return self.root / "state.sqlite3"

    @property
    def files(self) -> Path:
        """Where the files of callers are, under their ids."""
        return self.root / "files"

    @property
    def parts(self) -> Path:
        """Where the answers of unfinished batches are."""
        return self.root / "parts"

    def file(self, file_id: str) -> Path:
        """Of a file whose id the database knows."""
        return self.files / file_id

    def part(self, batch_id: str) -> Path:
        """Of the answers of a batch that has not ended."""
        return self.parts / batch_id

    def lock_runner(self) -> int | None:
        """A file whose lock says which process has the lines computed; None where another has it. Raises OSError.

        The kernel frees it with the process.
        """
        handle = os.open(self.root / "runner", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        return handle


def opener(path: str, flags: int) -> int:
    """For `open`: a link is not followed, and no writer of a pipe waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _make(path: Path) -> None:
    """Make a folder of ours, or check the one that is there: what another user may change, or led to by a link, is refused."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise SettingError(f"{BATCH_FOLDER}: {str(path)!r} cannot be written to: {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode):
        raise SettingError(f"{BATCH_FOLDER}: {str(path)!r} is a link: it must be a folder itself")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or found.st_uid not in (0, os.geteuid()):
        raise SettingError(f"{BATCH_FOLDER}: other users may write to {str(path)!r}: only this user may")
    if not os.access(path, os.W_OK | os.X_OK):
        raise SettingError(f"{BATCH_FOLDER}: {str(path)!r} cannot be written to: Permission denied")


def file_system(path: Path) -> str:
    """The kind of file system that a folder is on; empty where that is not known."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
        own = path.resolve()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        left, _, right = line.partition(" - ")
        if len(fields := left.split()) < 5 or not right:
            continue
        place = Path(MOUNT_ESCAPE.sub(lambda found: chr(int(found[1], 8)), fields[4]))
        if own.is_relative_to(place) and len(place.parts) >= best:
            best, kind = len(place.parts), right.split()[0]
    return kind


VERSION = 3
BUSY_SECONDS = 10.0
"""How long a process waits for another one's transaction."""
TABLES = (
    """CREATE TABLE IF NOT EXISTS files (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, bytes INTEGER NOT NULL,
        created INTEGER NOT NULL, expires INTEGER NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
        ready INTEGER NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS files_owner ON files (owner)",
    """CREATE TABLE IF NOT EXISTS batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, endpoint TEXT NOT NULL,
        input_file TEXT NOT NULL, status TEXT NOT NULL, created INTEGER NOT NULL, expires INTEGER NOT NULL,
        total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
        model TEXT NOT NULL DEFAULT '', output_file TEXT, error_file TEXT, metadata TEXT NOT NULL DEFAULT '{}',
        times TEXT NOT NULL DEFAULT '{}', errors TEXT NOT NULL DEFAULT '[]', ended INTEGER,
        charged INTEGER NOT NULL DEFAULT 0, usage TEXT NOT NULL DEFAULT '[]', identity TEXT NOT NULL DEFAULT '')""",
    "CREATE INDEX IF NOT EXISTS batches_owner ON batches (owner)",
    "CREATE INDEX IF NOT EXISTS batches_status ON batches (status)",
)


def open_database(folder: Folder) -> sqlite3.Connection:
    """A connection for one thread at a time. Raises SettingError where the file is no database of ours."""
    path = folder.database
    try:
        found = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        found.row_factory = sqlite3.Row
        with transaction(found):
            version = found.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, VERSION):
                raise SettingError(f"{BATCH_FOLDER}: {str(path)!r} is of another version of Attend: it has format {version}")
            for table in TABLES:
                found.execute(table)
            found.execute(f"PRAGMA user_version = {VERSION}")
    except (sqlite3.Error, OSError) as error:
        raise SettingError(f"{BATCH_FOLDER}: {str(path)!r} cannot be used: {error}") from error
    return found


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of the block or nothing of it, beside other processes."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk may have ended it
            connection.execute("ROLLBACK")
        raise
