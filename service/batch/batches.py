"""Batches in the SQLite database. A runner holds a batch by a lease, which it renews."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from attend.service.batch.database import transaction
from attend.service.batch.files import OUTPUT, Files
from attend.service.batch.rows import BATCH_ID, OPEN, WINDOW_SECONDS, Batch, Counts, new_batch_id
from attend.service.errors import NotThere, QuotaReached
from attend.service.records import TokenUsage

LEASE_SECONDS = 10.0
"""A runner that has not beaten for so long has died. One that froze, and goes on, costs nothing: see `results.py`."""
MOST_ERRORS = 50
"""Of a batch that are kept and told."""
_SELECT = (
    "SELECT id, owner, endpoint, input_file, status, created, expires, model, output_file, error_file, metadata, times, errors,"
    " generation, total, completed, failed, usage FROM batches"
)
_OPEN = ", ".join(f"'{status}'" for status in OPEN)


def problem(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """An error of a batch, as OpenAI writes it. Lines count from 1."""
    return {"code": code, "line": line, "message": message, "param": param}


class Batches:
    """For one thread at a time, that of `files`. Only who holds the lease changes a batch, but for `cancel`."""

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

    def take(self, runner: str, batches_per_owner: Mapping[str, int], each: int) -> Batch | None:
        """A batch that nobody works on, for this runner from now on; None where there is none.

        `batches_per_owner`: how many batches it has of each owner, `each` at most: first comes who has the fewest.
        """
        now = self.files.clock()
        with transaction(self._connection):
            sql = f"SELECT id, owner, MIN(number) FROM batches WHERE status IN ({_OPEN}) AND leased_until < ? GROUP BY owner"
            rows = [row for row in self._connection.execute(sql, (now,)) if batches_per_owner.get(row["owner"], 0) < each]
            if not rows:
                return None
            first = min(rows, key=lambda row: (batches_per_owner.get(row["owner"], 0), row["MIN(number)"]))["id"]
            self._connection.execute(
                "UPDATE batches SET runner = ?, leased_until = ?, generation = generation + 1 WHERE id = ?",
                (runner, now + LEASE_SECONDS, first),
            )
            return _batch(self._connection.execute(f"{_SELECT} WHERE id = ?", (first,)).fetchone())

    def beat(self, runner: str, counts: Mapping[str, tuple[int, Counts]]) -> dict[str, str]:
        """Keep the batches {id: (generation, counts)}; the statuses of those that are still this runner's."""
        until, kept = self.files.clock() + LEASE_SECONDS, {}
        with transaction(self._connection):
            for batch_id, (generation, found) in counts.items():
                mine = (batch_id, runner, generation)
                changed = self._connection.execute(
                    "UPDATE batches SET leased_until = ?, completed = ?, failed = ?, usage = ?"
                    " WHERE id = ? AND runner = ? AND generation = ?",
                    (until, found.completed, found.failed, json.dumps(found.usage), *mine),
                )
                if changed.rowcount:
                    sql = "SELECT status FROM batches WHERE id = ?"
                    (kept[batch_id],) = self._connection.execute(sql, (batch_id,)).fetchone()
        return kept

    def leave(self, runner: str) -> None:
        """Another runner may take what this one has."""
        self._connection.execute("UPDATE batches SET runner = NULL, leased_until = 0 WHERE runner = ?", (runner,))

    def begin(self, batch: Batch, total: int, model: str) -> bool:
        """Its input is good: it is in progress. False where it is no longer this runner's, or is cancelled."""
        with transaction(self._connection):
            if self._is_mine(batch) != "validating":
                return False
            self._connection.execute("UPDATE batches SET total = ?, model = ? WHERE id = ?", (total, model, batch.id))
            self._set(batch, "in_progress")
        return True

    def finalize(self, batch: Batch) -> bool:
        """All of its lines are answered, as it may say already. False where another runner has it, or it is cancelled."""
        with transaction(self._connection):
            if self._is_mine(batch) not in ("in_progress", "finalizing"):
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
    ) -> bool:
        """The end of a batch, with the files of its answers and of its errors, (id, bytes) each, which lie in their places.

        False, and without a trace, where it is no longer this runner's.
        """
        with transaction(self._connection):
            if self._is_mine(batch) is None:
                return False
            ids = [
                None if made is None else self._keep(batch, made, name)
                for made, name in ((output, "output"), (failures, "error"))
            ]
            total, completed, failed, usage = counts
            self._connection.execute(
                "UPDATE batches SET output_file = ?, error_file = ?, total = ?, completed = ?, failed = ?, usage = ?,"
                " errors = ?, charged = 0, ended = ?, runner = NULL, leased_until = 0 WHERE id = ?",
                (
                    *ids,
                    *(total, completed, failed, json.dumps(usage), json.dumps(list(errors)[:MOST_ERRORS])),
                    *(int(self.files.clock()), batch.id),
                ),
            )
            self._set(batch, status)
        for _, path in self.files.folder.parts_of(batch.id):
            with suppress(FileNotFoundError):
                path.unlink()
        return True

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

    def _is_mine(self, batch: Batch) -> str | None:
        """The status of a batch that has not been taken again; None of another."""
        sql = f"SELECT status FROM batches WHERE id = ? AND generation = ? AND status IN ({_OPEN})"
        found = self._connection.execute(sql, (batch.id, batch.generation)).fetchone()
        return None if found is None else found["status"]

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
