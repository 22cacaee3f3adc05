"""Batches in the SQLite database."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from attend.service.batch.files import OUTPUT, Files
from attend.service.batch.folder import transaction
from attend.service.batch.rows import BATCH_ID, OPEN, WINDOW_SECONDS, Batch, Counts, new_batch_id
from attend.service.errors import NotThere, QuotaReached, StorageFailed
from attend.service.records import TokenUsage

MAX_ERRORS = 50
"""Of a batch that are kept and told."""
_SELECT = (
    "SELECT id, owner, endpoint, input_file, status, created, expires, model, output_file, error_file, metadata, times, errors,"
    " identity, total, completed, failed, usage FROM batches"
)
_OPEN = ", ".join(f"'{status}'" for status in OPEN)


def problem(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """An error of a batch, as OpenAI writes it. Lines count from 1."""
    return {"code": code, "line": line, "message": message, "param": param}


class Ending(NamedTuple):
    """How a batch ends: `completed`, `failed`, `expired` or `cancelled`; `left` where the next runner goes on with it."""

    status: str
    errors: tuple[dict[str, Any], ...] = ()
    rest: tuple[str, str] | None = None
    """Code and message of the lines that were not computed, where the answers of the others are kept."""


EXPIRED = Ending("expired", rest=("batch_expired", "This request could not be executed before the completion window expired."))
CANCELLED = Ending("cancelled", rest=("batch_cancelled", "This request was not executed before the batch was cancelled."))


def other_model(before: str, now: str) -> Ending:
    """One batch has the answers of one model: of another one that is served now none is added."""
    message = f"the batch was begun with {before}, and this server has {now}: send the lines of the error file again"
    return Ending(
        "failed",
        (problem("model_changed", message),),
        ("batch_failed", "This request was not executed, since another model is served now."),
    )


class Batches:
    """For one thread at a time, that of `files`. Only the runner changes a batch, but for `cancel`."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._connection = files.connection

    def create(self, owner: str, input_file: str, endpoint: str, metadata: Mapping[str, str]) -> Batch:
        """A new batch of a file of this owner. Raises NotThere and QuotaReached."""
        now, most = int(self.files.clock()), self.files.limits.batch_key_files
        batch_id, times = new_batch_id(), json.dumps({"created": now})
        with transaction(self._connection):
            self.files.file(owner, input_file)
            (count,) = self._connection.execute("SELECT COUNT(*) FROM batches WHERE owner = ?", (owner,)).fetchone()
            if count >= most:
                hours = self.files.limits.batch_retention_hours
                raise QuotaReached(f"you may have at most {most} batches of the last {hours:g} hours, and have {count}")
            self._connection.execute(
                "INSERT INTO batches (id, owner, endpoint, input_file, status, created, expires, metadata, times)"
                " VALUES (?, ?, ?, ?, 'validating', ?, ?, ?, ?)",
                (batch_id, owner, endpoint, input_file, now, now + WINDOW_SECONDS, json.dumps(dict(metadata)), times),
            )
        return self.batch(owner, batch_id)

    def batch(self, owner: str, batch_id: str) -> Batch:
        """A batch of this owner. Raises NotThere."""
        found = None
        if BATCH_ID.fullmatch(batch_id):
            found = self._connection.execute(f"{_SELECT} WHERE id = ? AND owner = ?", (batch_id, owner)).fetchone()
        if found is None:
            raise NotThere(f"batch_id: there is no batch {batch_id[:64]!r}", "batch_id")
        return _batch(found)

    def list_batches(self, owner: str, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Batches of this owner, the newest first, and whether there are more. Raises NotThere for an unknown `after`."""
        if after is not None:
            self.batch(owner, after)
        rows, more = self.files.page(f"{_SELECT} WHERE owner = ?", (owner,), "batches", after, limit)
        return [_batch(row) for row in rows], more

    def cancel(self, owner: str, batch_id: str) -> Batch:
        """Have a batch end soon; one that has ended stays as it is. Raises NotThere."""
        with transaction(self._connection):
            batch = self.batch(owner, batch_id)
            if batch.status in ("validating", "in_progress"):
                self._set(batch, "cancelling")
        return self.batch(owner, batch_id)

    # For the runner

    def open_batches(self) -> list[tuple[str, str, int]]:
        """(id, owner, end of its window) of each batch that has not ended, as they were created."""
        sql = f"SELECT id, owner, expires FROM batches WHERE status IN ({_OPEN}) ORDER BY number"
        return [tuple(row) for row in self._connection.execute(sql).fetchall()]

    def save(self, progress: Mapping[str, tuple[Counts, int]]) -> dict[str, tuple[str, QuotaReached | StorageFailed | None]]:
        """Write down how far these batches are, and charge the bytes of their answers.

        Returns the status of each, and why so many bytes are too many where they are: then they are not charged.
        """
        found: dict[str, tuple[str, QuotaReached | StorageFailed | None]] = {}
        with transaction(self._connection):
            for batch_id, (counts, size) in progress.items():
                sql = "SELECT owner, status, charged FROM batches WHERE id = ?"
                owner, status, charged = self._connection.execute(sql, (batch_id,)).fetchone()
                refusal = None
                try:
                    self.files.check_room(owner, max(0, size - charged))
                except (QuotaReached, StorageFailed) as error:
                    refusal, size = error, charged
                self._connection.execute(
                    "UPDATE batches SET completed = ?, failed = ?, usage = ?, charged = ? WHERE id = ? AND ended IS NULL",
                    (counts.completed, counts.failed, json.dumps(counts.usage), size, batch_id),
                )
                found[batch_id] = status, refusal
        return found

    def begin(self, batch: Batch, total: int) -> bool:
        """Its input is good, and its model is known: it is in progress. False where it is cancelled."""
        with transaction(self._connection):
            if self._status(batch.id) != "validating":
                return False
            sql = "UPDATE batches SET total = ?, model = ?, identity = ? WHERE id = ?"
            self._connection.execute(sql, (total, batch.model, batch.identity, batch.id))
            self._set(batch, "in_progress")
        return True

    def finalize(self, batch: Batch, size: int) -> bool:
        """All of its lines are answered, as it may say already. False where it is cancelled.

        Raises QuotaReached or StorageFailed where its answers, of so many bytes, are too many.
        """
        with transaction(self._connection):
            sql = "SELECT status, charged FROM batches WHERE id = ?"
            status, charged = self._connection.execute(sql, (batch.id,)).fetchone()
            if status not in ("in_progress", "finalizing"):
                return False
            self.files.check_room(batch.owner, max(0, size - charged))
            self._connection.execute("UPDATE batches SET charged = ? WHERE id = ?", (max(size, charged), batch.id))
            self._set(batch, "finalizing")
        return True

    def end(
        self,
        batch: Batch,
        status: str,
        counts: Counts,
        errors: Sequence[dict[str, Any]] = (),
        output: tuple[str, int] | None = None,
        failures: tuple[str, int] | None = None,
    ) -> None:
        """The end of a batch, with the files of its answers and of its errors, (id, bytes) each, which lie in their places."""
        with transaction(self._connection):
            ids = [made and self._keep(batch, made, name) for made, name in ((output, "output"), (failures, "error"))]
            total, completed, failed, usage = counts
            self._connection.execute(
                "UPDATE batches SET output_file = ?, error_file = ?, total = ?, completed = ?, failed = ?, usage = ?,"
                " errors = ?, charged = 0, ended = ? WHERE id = ?",
                (
                    *(*ids, total, completed, failed, json.dumps(usage), json.dumps(list(errors)[:MAX_ERRORS])),
                    *(int(self.files.clock()), batch.id),
                ),
            )
            self._set(batch, status)
        with suppress(FileNotFoundError):
            self.files.folder.part(batch.id).unlink()

    def numbers(self) -> tuple[dict[str, int], float]:
        """How many batches have each status, and how many seconds the oldest waits that none has begun."""
        counts = dict(self._connection.execute("SELECT status, COUNT(*) FROM batches GROUP BY status").fetchall())
        (oldest,) = self._connection.execute("SELECT MIN(created) FROM batches WHERE status = 'validating'").fetchone()
        return counts, 0.0 if oldest is None else max(0.0, self.files.clock() - oldest)

    def _keep(self, batch: Batch, made: tuple[str, int], name: str) -> str:
        now = int(self.files.clock())
        row = *made, batch.owner, now, now + int(self.files.retention), f"{batch.id}_{name}.jsonl", OUTPUT
        sql = "INSERT INTO files (id, bytes, owner, created, expires, filename, purpose, ready) VALUES (?, ?, ?, ?, ?, ?, ?, 1)"
        self._connection.execute(sql, row)
        return made[0]

    def _status(self, batch_id: str) -> str:
        (status,) = self._connection.execute("SELECT status FROM batches WHERE id = ?", (batch_id,)).fetchone()
        return str(status)

    def _set(self, batch: Batch, status: str) -> None:
        (times,) = self._connection.execute("SELECT times FROM batches WHERE id = ?", (batch.id,)).fetchone()
        times = json.dumps({**json.loads(times), status: int(self.files.clock())})
        self._connection.execute("UPDATE batches SET status = ?, times = ? WHERE id = ?", (status, times, batch.id))


def _batch(row: Any) -> Batch:
    fields = dict(row)
    for name in ("metadata", "times", "errors"):
        fields[name] = json.loads(fields[name])
    usage = TokenUsage(*json.loads(fields.pop("usage")))
    counts = Counts(fields.pop("total"), fields.pop("completed"), fields.pop("failed"), usage)
    return Batch(**fields, counts=counts)
