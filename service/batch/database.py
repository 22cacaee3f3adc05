"""The SQLite database of files and batches: opening it, and its tables."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from attend.model.errors import SettingError
from attend.service.batch.folder import Folder
from attend.service.batch_settings import BATCH_FOLDER

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
