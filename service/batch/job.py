"""One batch in a runner: validates its input file, computes its lines, writes its output and error files."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from attend.model.errors import Overloaded
from attend.service.access.caller import BATCHES, Caller
from attend.service.batch.answer_log import AnswerLog, Entry, entry
from attend.service.batch.batches import problem
from attend.service.batch.lines import ENVELOPE, BadLine, Check, Line, Raw, Reader, body_of, read_line
from attend.service.batch.results import DONE, FAILED, LEFT, failed_line, success, write_files
from attend.service.batch.routes import Answer, Routes
from attend.service.batch.rows import Batch, Counts, new_file_id
from attend.service.batch.service import BatchService
from attend.service.errors import QuotaReached, StorageFailed
from attend.service.generation.thread_pools import run_exclusive
from attend.service.records import NO_TOKENS, Arrival

log = logging.getLogger("attend.batch")

T = TypeVar("T")
AGAIN = (429, 503)
"""Statuses of an answer that there was no room for: the line is computed later, however often."""
FEW_TIMES = (500, 504)
"""Statuses that may be another's fault: the line is computed again, TRIES times in all."""
TRIES = 3
MOST_UNWRITTEN = 16
"""Answers of a batch that wait for the disk; no more lines begin meanwhile."""
STUCK_SECONDS = 5.0
"""Between two tries of what the disk did not take."""
LATE_SECONDS = 3600.0
"""How long a batch that is over waits for room for its last answers; and past its window for its files: then it has failed."""
END_TEXTS = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed before the batch was cancelled."),
}


class Ending(NamedTuple):
    """How a batch ends: `completed`, `failed`, `expired` or `cancelled`; `left` where another runner goes on with it."""

    status: str
    errors: tuple[dict[str, Any], ...] = ()


@dataclass(slots=True)
class Try:
    """A line, and how often it was computed in vain."""

    raw: Raw
    failures: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """`run` is its life; meanwhile the runner has it compute lines."""

    batch_service: BatchService
    routes: Routes
    batch: Batch
    answers: AnswerLog = field(init=False)
    ready: bool = False
    """Whether there may be lines to compute."""
    running: dict[asyncio.Task[None], Try] = field(default_factory=dict)
    _again: deque[Try] = field(default_factory=deque)
    _reader: Reader | None = None
    _is_read: bool = False
    _over: "asyncio.Future[Ending]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _keeping: set[asyncio.Task[None]] = field(default_factory=set)
    _over_at: float = 0.0

    def __post_init__(self) -> None:
        self.answers = AnswerLog(self.batch_service, self.batch)

    @property
    def most_line(self) -> int:
        """The most bytes of a line of the input file."""
        return self.routes.most_bytes(self.batch.endpoint) + ENVELOPE

    def stop(self, ending: Ending) -> None:
        """Compute no more lines, and end so. The first word counts."""
        self.ready = False
        if not self._over.done():
            self._over.set_result(ending)

    async def run(self) -> None:
        """From the check of its input to its end. Raises nothing."""
        try:
            await self._run()
        finally:
            if self._reader is not None:
                self.batch_service.later(self._reader.close)
            self.answers.close()

    async def _run(self) -> None:
        try:
            await self._prepare()
            ending = await self._over
        except (OSError, StorageFailed) as error:
            ending = self._over.result() if self._over.done() else self._broken(error)
        except Exception:
            log.exception("batch %s failed", self.batch.id)
            ending = Ending("failed", (problem("internal_error", f"internal error; batch {self.batch.id}"),))
        self.ready = False
        self.stop(ending)
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, *self._keeping, return_exceptions=True)
        await self._end(ending)

    async def _retry_storage(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of work that may find the disk full, which pauses the batch. Raises its error once the batch is over."""
        while True:
            try:
                return await work()
            except (OSError, StorageFailed) as error:
                if self._over.done():
                    raise
                if isinstance(error, OSError):
                    self.batch_service.count_failure(error)
                await asyncio.wait([self._over], timeout=STUCK_SECONDS)

    # The beginning

    async def _prepare(self) -> None:
        path = self.batch_service.files.folder.file(self.batch.input_file)
        try:
            self._reader = await self.batch_service.disk(Reader, path, self.most_line)
        except FileNotFoundError:
            return self.stop(
                Ending("failed", (problem("input_file_missing", "the input file is gone", None, "input_file_id"),))
            )
        if self.batch.status == "validating":
            check = await self._check_lines(self._reader)
            if self._over.done():
                return None
            if check.errors:
                return self.stop(Ending("failed", tuple(check.errors)))
            begin = partial(self.batch_service.batches.begin, self.batch, check.total, check.model or "")
            if not await self._retry_storage(partial(self.batch_service.db, begin)):
                return self.stop(Ending("left"))
            self.answers.total = check.total
            await self.batch_service.disk(self._reader.close)
            self._reader = await self.batch_service.disk(Reader, path, self.most_line)
        await self.answers.resume()
        if self.batch.status == "cancelling":
            return self.stop(Ending("cancelled"))
        if self.batch_service.files.clock() >= self.batch.expires:
            return self.stop(Ending("expired"))
        if self.answers.completed + self.answers.failed >= self.answers.total:
            return self.stop(Ending("completed"))
        self.ready = True
        self.batch_service.free.set()
        return None

    async def _check_lines(self, reader: Reader) -> Check:
        """The check of all lines, a few at a time, and never beside the event loop for long."""
        check = Check(
            self.batch.endpoint,
            self.routes.parse,
            self.most_line,
            self.batch_service.limits.lines,
            self.routes.check_model,
            self.routes.strict_fields,
        )
        while not check.is_over and not self._over.done() and (lines := await self.batch_service.disk(reader.some)):
            await _patiently(partial(check.look, lines), sum(len(raw.text) for raw in lines))
        check.end()
        return check

    # The lines

    async def next(self) -> Try | None:
        """A line to compute; None where there is none now."""
        if self._again:
            return self._again.popleft()
        while not self._is_read and self._reader is not None:
            try:
                raw = await self.batch_service.disk(self._reader.next)
            except (OSError, ValueError) as error:  # ValueError: it was closed, since the batch is over
                if self.ready:
                    self.stop(self._broken(error))
                return None
            if raw is None:
                self._is_read = True
            elif not self.answers.has(raw.number):
                return Try(raw)
        self._look()
        return None

    @property
    def has_more(self) -> bool:
        """Whether `next` may find a line."""
        return self.ready and len(self._keeping) < MOST_UNWRITTEN and (bool(self._again) or not self._is_read)

    def start(self, line: Try, caller: Caller, on_answer: Callable[[Answer], None]) -> None:
        """Compute a line, in a task of its own. `on_answer` hears of answers that had no room."""
        task = asyncio.create_task(self._compute(line, caller, on_answer))
        self.running[task] = line
        task.add_done_callback(self._line_ended)

    def _line_ended(self, task: asyncio.Task[None]) -> None:
        line = self.running.pop(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault(line.raw.number, task.exception())
        self.batch_service.free.set()
        self._look()

    def _fault(self, number: int, error: BaseException | None) -> None:
        """Fail the batch for an unexpected exception, which is logged."""
        log.error("line %d of batch %s failed", number, self.batch.id, exc_info=error)
        self.stop(Ending("failed", (problem("internal_error", f"internal error; batch {self.batch.id}", number),)))

    def _look(self) -> None:
        """End the batch as completed once all of its lines are answered."""
        if self._is_read and not (self._again or self.running or self._keeping) and self.ready:
            self.stop(Ending("completed"))

    async def _compute(self, attempt: Try, caller: Caller, on_answer: Callable[[Answer], None]) -> None:
        raw, batch_id = attempt.raw, self.batch.id
        try:
            custom_id, body = await self._read(raw, lambda line: (line.custom_id, body_of(line)))
        except BadLine as error:  # the file was changed after its check
            return self._keep(entry(raw.number, FAILED, failed_line(batch_id, raw.number, "", error.code, str(error))))
        request_id = f"{batch_id}-{raw.number}"
        answer = await self.routes.ask(self.batch.endpoint, body, caller, request_id)
        if answer.status in AGAIN or (answer.status in FEW_TIMES and attempt.failures + 1 < TRIES):
            attempt.failures += answer.status in FEW_TIMES
            self.batch_service.numbers.lines["retried"] += 1
            self._again.append(attempt)
            return on_answer(answer)
        outcome, usage = (DONE, answer.usage) if answer.status == 200 else (FAILED, NO_TOKENS)
        text = success(batch_id, raw.number, custom_id, answer.status, request_id, answer.body)
        return self._keep(entry(raw.number, outcome, text, usage))

    async def _read(self, raw: Raw, take: Callable[[Line], T]) -> T:
        """What `take` makes of a line, beside the event loop. Raises BadLine."""
        read = partial(read_line, raw, self.batch.endpoint, self.routes.parse, self.most_line, strict=self.routes.strict_fields)
        return await _patiently(lambda: take(read()), len(raw.text))

    def _keep(self, answer: Entry) -> None:
        """Write an answer down, whatever becomes of the task that has it."""
        self.answers.unwritten[answer.number] = answer
        task = asyncio.create_task(self._write(answer))
        self._keeping.add(task)

        def answer_written(task: asyncio.Task[None]) -> None:
            self._keeping.discard(task)
            if not task.cancelled() and task.exception() is not None:
                self._fault(answer.number, task.exception())
            self.batch_service.free.set()
            self._look()

        task.add_done_callback(answer_written)

    async def _write(self, answer: Entry) -> None:
        try:
            await self._retry_storage(partial(self.answers.add, answer))
        except QuotaReached as error:
            self.stop(self._broken(error))
        except (OSError, StorageFailed):  # the batch is over: its end tries it again
            pass

    def _broken(self, error: Exception) -> Ending:
        if isinstance(error, QuotaReached):
            return Ending("failed", (problem("storage_limit_reached", str(error)),))
        if isinstance(error, OSError):
            error = self.batch_service.count_failure(error)
        return Ending("failed", (problem("storage_unavailable", f"the batch's files could not be read or written: {error}"),))

    # The end

    async def _end(self, ending: Ending) -> None:
        """Write down how it ended, again and again while the disk is full; from LATE_SECONDS past its window on, as failed."""
        self._over_at = self.batch_service.files.clock()
        while ending.status != "left":
            try:
                if ending.status == "failed":
                    await self.batch_service.db(
                        self.batch_service.batches.end, self.batch, "failed", self.answers.counts, ending.errors
                    )
                else:
                    await self._finish(ending)
                return
            except (OSError, StorageFailed) as error:
                if ending.status == "failed":
                    await self.batch_service.disk(self._make_room)
                elif self._is_late(self.batch.expires):
                    ending = self._broken(error)
                    continue
                elif isinstance(error, OSError):
                    self.batch_service.count_failure(error)
                await asyncio.sleep(STUCK_SECONDS)

    def _is_late(self, end: float) -> bool:
        return self.batch_service.files.clock() >= end + LATE_SECONDS

    async def _finish(self, ending: Ending) -> None:
        """Make its files, and write down that it ended. Where that fails, nothing of them is left."""
        batches, folder = self.batch_service.batches, self.batch_service.files.folder
        failure = None
        if ending.status in END_TEXTS:
            failure = await self._add_rest(*END_TEXTS[ending.status])
        elif not await self.batch_service.db(batches.finalize, self.batch):
            return  # cancelled a moment ago, or another's: whoever takes it next ends it
        parts = [path for _, path in folder.parts_of(self.batch.id)]
        ids = new_file_id(), new_file_id()
        writing = self.batch_service.submit(write_files, parts, *map(folder.file, ids))
        is_known = False
        try:
            sums, files = await asyncio.wrap_future(writing)
            made = [(file_id, file.size) if file.count else None for file_id, file in zip(ids, files, strict=True)]
            counts = Counts(self.answers.total, *sums)
            is_known = await self.batch_service.db(batches.end, self.batch, ending.status, counts, (), *made)
        finally:
            if not is_known:  # a thread may still write them, or the end
                writing.add_done_callback(lambda _: self.batch_service.drop_unknown(ids))
        if failure is not None and is_known:
            missing = self.answers.total - sum(file.count for file in files)
            log.warning("batch %s: %d of its lines are in none of its files: %s", self.batch.id, missing, failure)

    async def _add_rest(self, code: str, message: str) -> Exception | None:
        """Add answers that are not on the disk yet, and an error for each line that was not computed. Why some are missing.

        While there are such answers, and it is not late, it raises OSError or StorageFailed: they are tried again.
        """
        try:
            for answer in [*self.answers.unwritten.values()]:
                await self.answers.add(answer)
            if self.answers.total:  # else its input was never checked
                await self._add_left_lines(code, message)
        except (OSError, QuotaReached, StorageFailed) as error:
            if self.answers.unwritten and not isinstance(error, QuotaReached) and not self._is_late(self._over_at):
                raise
            return self.batch_service.count_failure(error) if isinstance(error, OSError) else error
        return None

    async def _add_left_lines(self, code: str, message: str) -> None:
        path = self.batch_service.files.folder.file(self.batch.input_file)
        reader = await self.batch_service.disk(Reader, path, self.most_line)
        try:
            while lines := await self.batch_service.disk(reader.some):
                for raw in lines:
                    if not self.answers.has(raw.number):
                        with suppress(BadLine):
                            custom_id = await self._read(raw, lambda line: line.custom_id)
                            text = failed_line(self.batch.id, raw.number, custom_id, code, message)
                            await self.answers.add(entry(raw.number, LEFT, text))
        finally:
            await self.batch_service.disk(reader.close)

    def _make_room(self) -> None:
        """Delete the answers of a batch that has failed: on a full disk nothing else can be written before."""
        for _, path in self.batch_service.files.folder.parts_of(self.batch.id):
            with suppress(OSError):
                path.unlink()


async def _patiently(work: Callable[[], T], size: int) -> T:
    """The result of work on lines, in the turn of batches, when there is room for it."""
    while True:
        try:
            return await run_exclusive(work, Arrival(BATCHES, None, size))
        except Overloaded as error:
            await asyncio.sleep(getattr(error, "retry_after", 1))
