"""Batches in the SQLite database. A runner has a batch as long as it has the lock of its part."""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple

from attend.service.batch.database import transaction
from attend.service.batch.files import OUTPUT, Files
from attend.service.batch.results import Part
from attend.service.batch.rows import BATCH_ID, OPEN, WINDOW_SECONDS, Batch, Counts, new_batch_id
from attend.service.errors import NotThere, QuotaReached
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
    """How a batch ends: `completed`, `failed`, `expired` or `cancelled`; `left` where another runner goes on with it."""

    status: str
    errors: tuple[dict[str, Any], ...] = ()
    rest: tuple[str, str] | None = None
    """Code and message of the lines that were not computed, where the answers of the others are kept."""


EXPIRED = Ending("expired", rest=("batch_expired", "This request could not be executed before the completion window expired."))
CANCELLED = Ending("cancelled", rest=("batch_cancelled", "This request was not executed before the batch was cancelled."))
KEY_REMOVED = CANCELLED._replace(errors=(problem("key_removed", "the API key of this batch was removed"),))


def other_model(before: str, now: str) -> Ending:
    """One batch has the answers of one model: of another one that is served now none is added."""
    message = f"the batch was begun with {before}, and this server has {now}: send the lines of the error file again"
    return Ending(
        "failed",
        (problem("model_changed", message),),
        ("batch_failed", "This request was not executed, since another model is served now."),
    )


class Batches:
    """For one thread at a time, that of `files`. Only who has the part of a batch changes it, but for `cancel`."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._connection = files.connection

    def create(self, owner: str, input_file: str, endpoint: str, metadata: Mapping[str, str]) -> Batch:
        """A new batch of a file of this owner. Raises NotThere and QuotaReached."""
        now, most = int(self.files.clock()), self.files.limits.key_files
        batch = Batch(
            new_batch_id(),
            owner,
            endpoint,
            input_file,
            "validating",
            now,
            now + WINDOW_SECONDS,
            metadata=dict(metadata),
            times={"created": now},
        )
        with transaction(self._connection):
            self.files.file(owner, input_file)
            (count,) = self._connection.execute("SELECT COUNT(*) FROM batches WHERE owner = ?", (owner,)).fetchone()
            if count >= most:
                hours = self.files.limits.retention / 3600
                raise QuotaReached(f"you may have at most {most} batches of the last {hours:g} hours, and have {count}")
            self._connection.execute(
                "INSERT INTO batches (id, owner, endpoint, input_file, status, created, expires, metadata, times)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(batch.id, owner, endpoint, input_file, batch.status, now, batch.expires),
                    *(json.dumps(batch.metadata), json.dumps(batch.times)),
                ),
            )
        return batch

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
        sql, values = f"{_SELECT} WHERE owner = ?", [owner]
        if after is not None:
            self.batch(owner, after)
            sql += " AND number < (SELECT number FROM batches WHERE id = ?)"
            values.append(after)
        rows = self._connection.execute(f"{sql} ORDER BY number DESC LIMIT ?", (*values, limit + 1)).fetchall()
        return [_batch(row) for row in rows[:limit]], len(rows) > limit

    def cancel(self, owner: str, batch_id: str) -> Batch:
        """Have a batch end soon; one that has ended stays as it is. Raises NotThere."""
        with transaction(self._connection):
            batch = self.batch(owner, batch_id)
            if batch.status in ("validating", "in_progress"):
                self._set(batch, "cancelling")
        return self.batch(owner, batch_id)

    # For runners

    def owners(self) -> dict[str, int]:
        """Who has batches that have not ended: each owner's first one, as a number that grows."""
        sql = f"SELECT owner, MIN(number) FROM batches WHERE status IN ({_OPEN}) GROUP BY owner"
        return dict(self._connection.execute(sql).fetchall())

    def take(self, owner: str, but: Collection[str], before: float = inf) -> tuple[Batch, Part] | None:
        """A batch of this owner that nobody has and whose window ends before a time; None where there is none.

        It is the caller's until the part is closed, or its process dies. `but`: ids of batches that the caller has. Raises
        OSError.
        """
        failure = None
        sql = f"SELECT id FROM batches WHERE owner = ? AND status IN ({_OPEN}) AND expires < ? ORDER BY number"
        for (batch_id,) in self._connection.execute(sql, (owner, before)).fetchall():
            if batch_id in but:
                continue
            try:
                part = Part(self.files.folder.part(batch_id))
            except BlockingIOError:
                continue
            except OSError as error:  # of this batch alone, or of all
                failure = error
                continue
            row = self._connection.execute(f"{_SELECT} WHERE id = ?", (batch_id,)).fetchone()
            if row is not None and row["status"] in OPEN:
                return _batch(row), part
            part.path.unlink(missing_ok=True)  # it ended a moment ago
            part.close()
        if failure is not None:
            raise failure
        return None

    def save(self, counts: Mapping[str, Counts]) -> dict[str, str]:
        """Write down how far these batches are; returns their statuses."""
        statuses = {}
        with transaction(self._connection):
            for batch_id, found in counts.items():
                self._connection.execute(
                    "UPDATE batches SET completed = ?, failed = ?, usage = ? WHERE id = ? AND ended IS NULL",
                    (found.completed, found.failed, json.dumps(found.usage), batch_id),
                )
                statuses[batch_id] = self._status(batch_id)
        return statuses

    def begin(self, batch: Batch, total: int) -> bool:
        """Its input is good, and its model is known: it is in progress. False where it is cancelled."""
        with transaction(self._connection):
            if self._status(batch.id) != "validating":
                return False
            sql = "UPDATE batches SET total = ?, model = ?, identity = ? WHERE id = ?"
            self._connection.execute(sql, (total, batch.model, batch.identity, batch.id))
            self._set(batch, "in_progress")
        return True

    def finalize(self, batch: Batch) -> bool:
        """All of its lines are answered, as it may say already. False where it is cancelled."""
        with transaction(self._connection):
            if self._status(batch.id) not in ("in_progress", "finalizing"):
                return False
            self._set(batch, "finalizing")
        return True

    def charge(self, batch: Batch, more: int) -> None:
        """Charge bytes of its answers, before they are written. Raises QuotaReached or StorageFailed."""
        with transaction(self._connection):
            self.files.check_room(batch.owner, more)
            self._connection.execute("UPDATE batches SET charged = charged + ? WHERE id = ?", (more, batch.id))

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
            ids = [
                None if made is None else self._keep(batch, made, name)
                for made, name in ((output, "output"), (failures, "error"))
            ]
            total, completed, failed, usage = counts
            self._connection.execute(
                "UPDATE batches SET output_file = ?, error_file = ?, total = ?, completed = ?, failed = ?, usage = ?,"
                " errors = ?, charged = 0, ended = ? WHERE id = ?",
                (
                    *ids,
                    *(total, completed, failed, json.dumps(usage), json.dumps(list(errors)[:MAX_ERRORS])),
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
        file_id, size = made
        now = int(self.files.clock())
        self._connection.execute(
            "INSERT INTO files (id, owner, bytes, created, expires, filename, purpose, ready) VALUES (?, ?, ?, ?, ?, ?, ?, 1)",
            (
                *(file_id, batch.owner, size, now, now + int(self.files.limits.retention)),
                *(f"{batch.id}_{name}.jsonl", OUTPUT),
            ),
        )
        return file_id

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
