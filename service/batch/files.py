"""Storage of callers' files: quotas are charged before a byte is written."""

import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from attend.model.errors import InvalidRequest
from attend.service.batch.folder import Folder, open_database, transaction
from attend.service.batch.rows import BATCH_ID, FILE_ID, OPEN, File, new_file_id
from attend.service.batch_settings import BatchSettings
from attend.service.errors import NotThere, QuotaReached, StorageFailed

Clock = Callable[[], float]
INPUT, OUTPUT = "batch", "batch_output"
"""Values of a file's `purpose`: an upload, and what a batch wrote."""
UPLOAD_SECONDS = 3600
"""An upload that has not ended by then has lost its process."""
_FILE = "id, owner, bytes, created, expires, filename, purpose"
_OPEN = ", ".join(f"'{status}'" for status in OPEN)


class Files:
    """For one thread at a time. Whose caller an `owner` is, `rows.py` says. Raises sqlite3.Error where the disk is full."""

    def __init__(self, limits: BatchSettings, clock: Clock = time.time) -> None:
        self.limits = limits
        self.retention = limits.batch_retention_hours * 3600
        self.folder = Folder(Path(limits.batch_folder))
        self.clock = clock
        self.connection = open_database(self.folder)
        self._strays_at = 0.0

    def close(self) -> None:
        """Close the database."""
        self.connection.close()

    def reserve(self, owner: str, size: int) -> str:
        """The id of a file of at most so many bytes, which are charged from now on. Nobody sees it before `finish`.

        Raises QuotaReached, or StorageFailed where all owners together have too much.
        """
        file_id, now = new_file_id(), int(self.clock())
        with transaction(self.connection):
            (count,) = self._one("SELECT COUNT(*) FROM files WHERE owner = ?", owner)
            if count >= self.limits.batch_key_files:
                raise QuotaReached(f"you may keep at most {self.limits.batch_key_files} files, and have {count}: delete some")
            self.check_room(owner, size)
            self.connection.execute(
                f"INSERT INTO files ({_FILE}, ready) VALUES (?, ?, ?, ?, ?, '', '', 0)",
                (file_id, owner, size, now, now + UPLOAD_SECONDS),
            )
        return file_id

    def check_room(self, owner: str, size: int) -> None:
        """Raise QuotaReached or StorageFailed where so many bytes more are too many. Within a transaction."""
        (own,) = self._one(
            "SELECT (SELECT COALESCE(SUM(bytes), 0) FROM files WHERE owner = ?1)"
            " + (SELECT COALESCE(SUM(charged), 0) FROM batches WHERE owner = ?1)",
            owner,
        )
        if own + size > self.limits.batch_key_bytes:
            limit = f"your files and batches may have at most {self.limits.batch_key_bytes} bytes together"
            raise QuotaReached(f"{limit}: they have {own}, and {size} more do not fit")
        total = self.total_bytes()
        if total + size > self.limits.batch_bytes:
            raise StorageFailed("the server's storage of files is full (batch_bytes): try again later")

    def total_bytes(self) -> int:
        """Bytes that are charged to all owners."""
        (total,) = self._one(
            "SELECT (SELECT COALESCE(SUM(bytes), 0) FROM files) + (SELECT COALESCE(SUM(charged), 0) FROM batches)"
        )
        return int(total)

    def finish(self, file_id: str, size: int, filename: str, expires_after: int | None = None) -> File:
        """The file has come, and is an input from now on. It lives as long as all do, or for fewer seconds."""
        now = int(self.clock())
        seconds = min(self.retention, expires_after or self.retention)
        with transaction(self.connection):
            changed = self.connection.execute(
                "UPDATE files SET bytes = ?, filename = ?, purpose = ?, created = ?, expires = ?, ready = 1"
                " WHERE id = ? AND ready = 0",
                (size, filename, INPUT, now, now + int(seconds), file_id),
            )
            if changed.rowcount != 1:
                raise StorageFailed("the upload took too long: send it again")
        (owner,) = self._one("SELECT owner FROM files WHERE id = ?", file_id)
        return self.file(owner, file_id)

    def drop(self, file_id: str) -> None:
        """Forget a file that was reserved or is too old; its bytes are free again."""
        self.connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
        with suppress(FileNotFoundError):
            self.folder.file(file_id).unlink()

    def drop_unknown(self, file_ids: Iterable[str]) -> None:
        """Delete what lies under these ids, but for files that somebody has."""
        for file_id in file_ids:
            if not self._knows("files", file_id):
                self.folder.file(file_id).unlink(missing_ok=True)

    def file(self, owner: str, file_id: str) -> File:
        """A file of this owner. Raises NotThere."""
        found = None
        if FILE_ID.fullmatch(file_id):
            sql = f"SELECT {_FILE} FROM files WHERE id = ? AND owner = ? AND ready = 1"
            found = self.connection.execute(sql, (file_id, owner)).fetchone()
        if found is None:
            raise NotThere(f"file_id: there is no file {file_id[:64]!r}", "file_id")
        return File(*found)

    def list_files(
        self, owner: str, after: str | None, limit: int, purpose: str | None = None, *, newest_first: bool = True
    ) -> tuple[list[File], bool]:
        """Files of this owner, and whether there are more. Raises NotThere for an unknown `after`."""
        if after is not None:
            self.file(owner, after)
        sql = f"SELECT {_FILE} FROM files WHERE owner = ? AND ready = 1 AND purpose = COALESCE(?, purpose)"
        rows, more = self.page(sql, (owner, purpose), "files", after, limit, newest_first=newest_first)
        return [File(*row) for row in rows], more

    def page(
        self, sql: str, values: tuple[object, ...], table: str, after: str | None, limit: int, *, newest_first: bool = True
    ) -> tuple[list[sqlite3.Row], bool]:
        """Rows of a query beyond that of the id `after`, and whether there are more."""
        beyond, order = ("<", "DESC") if newest_first else (">", "ASC")
        if after is not None:
            sql, values = f"{sql} AND number {beyond} (SELECT number FROM {table} WHERE id = ?)", (*values, after)
        rows = self.connection.execute(f"{sql} ORDER BY number {order} LIMIT ?", (*values, limit + 1)).fetchall()
        return rows[:limit], len(rows) > limit

    def delete(self, owner: str, file_id: str) -> None:
        """Delete a file. Raises NotThere, and InvalidRequest where a batch still reads it."""
        self.file(owner, file_id)
        with transaction(self.connection):
            sql = f"SELECT id, status FROM batches WHERE input_file = ? AND status IN ({_OPEN})"
            if (reader := self.connection.execute(sql, (file_id,)).fetchone()) is not None:
                raise InvalidRequest(
                    f"file_id: {file_id} is the input of {reader['id']}, which is {reader['status']}: cancel that first",
                    "file_id",
                )
            self.connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
        with suppress(FileNotFoundError):
            self.folder.file(file_id).unlink()

    def sweep(self) -> None:
        """Delete what is too old, and what nobody knows."""
        now = self.clock()
        sql = f"SELECT id FROM files WHERE expires < ? AND id NOT IN (SELECT input_file FROM batches WHERE status IN ({_OPEN}))"
        for (file_id,) in self.connection.execute(sql, (now,)).fetchall():
            self.drop(file_id)
        ended = now - self.retention
        self.connection.execute(f"DELETE FROM batches WHERE status NOT IN ({_OPEN}) AND ended < ?", (ended,))
        if now >= self._strays_at:
            self._strays_at = now + UPLOAD_SECONDS
            self._sweep_strays(now)

    def _sweep_strays(self, now: float) -> None:
        """Delete what a process left that died between two steps. What has no name of ours is no file of ours."""
        kinds = ((self.folder.files, FILE_ID, "files", "1"), (self.folder.parts, BATCH_ID, "batches", f"status IN ({_OPEN})"))
        for folder, name, table, condition in kinds:
            for path in folder.iterdir():
                with suppress(FileNotFoundError):
                    old = name.fullmatch(path.name) and path.lstat().st_mtime < now - UPLOAD_SECONDS
                    if old and not self._knows(table, path.name, condition):
                        path.unlink()

    def _knows(self, table: str, name: str, condition: str = "1") -> bool:
        return self.connection.execute(f"SELECT 1 FROM {table} WHERE id = ? AND {condition}", (name,)).fetchone() is not None

    def _one(self, sql: str, *values: object) -> sqlite3.Row:
        row: sqlite3.Row = self.connection.execute(sql, values).fetchone()
        return row
