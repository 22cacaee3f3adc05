"""One batch in the runner: validates its input file, computes its lines, writes its output and error files."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from attend.model.errors import Overloaded
from attend.service.access.caller import BATCHES, Caller
from attend.service.batch.answers import DONE, FAILED, LEFT, AnswerLog, Entry, failed_line, success, write_files
from attend.service.batch.batches import CANCELLED, EXPIRED, Ending, other_model, problem
from attend.service.batch.lines import ENVELOPE, BadLine, Check, Line, Raw, Reader, body_of, read_line
from attend.service.batch.routes import Answer, Routes
from attend.service.batch.rows import Batch, new_file_id
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
MAX_UNWRITTEN = 16
"""Answers of a batch that wait for the disk; no more lines begin meanwhile."""
STUCK_SECONDS = 5.0
"""Between two tries of what the disk did not take."""


class InputUnreadable(Exception):
    """The input file of a batch cannot be read."""


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
    answers: AnswerLog
    ready: bool = False
    """True if there may be lines to compute."""
    is_paused: bool = False
    """True if no line begins, since all callers together keep too much."""
    running: dict[asyncio.Task[None], Try] = field(default_factory=dict)
    _waiting: deque[Try] = field(default_factory=deque)
    """Lines that were read, and lines to compute again."""
    _unwritten: dict[int, Entry] = field(default_factory=dict)
    """Answers that are not on the disk yet, by their lines."""
    _demand: asyncio.Event = field(default_factory=asyncio.Event)
    _is_read: bool = False
    _over: "asyncio.Future[Ending]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def charge(self) -> int:
        """Bytes of its answers. Each counts twice: at the end it lies in two files for a while."""
        return 2 * self.answers.size

    @property
    def has_more(self) -> bool:
        """True if `next` has a line."""
        return self.ready and not self.is_paused and len(self._unwritten) < MAX_UNWRITTEN and bool(self._waiting)

    def stop(self, ending: Ending) -> None:
        """Compute no more lines, and end so. The first word counts."""
        self.ready = False
        if not self._over.done():
            self._over.set_result(ending)

    def fail(self, code: str, message: str, line: int | None = None) -> None:
        """End as failed, without files."""
        self.stop(Ending("failed", (problem(code, message, line),)))

    async def run(self) -> None:
        """From the check of its input to its end. Raises nothing."""
        reading = None
        try:
            await self._prepare()
            reading = asyncio.create_task(self._read_ahead()) if self.ready else None
            ending = await self._over
            for task in self.running:
                task.cancel()
            await asyncio.gather(*self.running, return_exceptions=True)
            await self._end(ending)
        finally:
            if reading is not None:
                reading.cancel()
            self.batch_service.later(self.batch.owner, self.answers.close)

    async def _persist(self, work: Callable[[], Awaitable[object]]) -> bool:
        """Do work that may find the disk full, which pauses the batch; True once it is done, False once the batch is over."""
        while True:
            try:
                await work()
                return True
            except (OSError, StorageFailed) as error:
                if isinstance(error, OSError):
                    self.batch_service.count_failure(error)
                if self._over.done():
                    return False
                await asyncio.wait([self._over], timeout=STUCK_SECONDS)

    # The beginning

    async def _prepare(self) -> None:
        """Check the input, or go on from where an earlier process was."""
        try:
            if self.batch.status == "validating" and not await self._begin():
                return
            if not await self._persist(partial(self._whole, self.answers.resume)):
                return
        except InputUnreadable as error:
            return self.fail("storage_unavailable", str(error))
        except Exception as error:
            return self._fault(None, error)
        counts = self.answers.counts
        if self.batch.status == "cancelling":
            self.stop(CANCELLED)
        elif self.batch_service.files.clock() >= self.batch.expires:
            self.stop(EXPIRED)
        elif counts.completed + counts.failed >= counts.total:
            self.stop(Ending("completed"))
        self.ready = not self._over.done()

    async def _begin(self) -> bool:
        """Check all lines, a few at a time, and never beside the event loop for long. False where the batch is over."""
        most = self.batch_service.limits.batch_lines
        check = Check(
            self.batch.endpoint,
            self.routes.parse,
            self._most_line,
            most,
            self.routes.check_model,
        )
        async with aclosing(self._lines(most)) as pieces:
            async for lines in pieces:
                if lines:
                    await _patiently(partial(check.look, lines), sum(len(raw.text) for raw in lines))
                if check.is_over or self._over.done():
                    break
        check.end()
        if check.errors:
            self.stop(Ending("failed", tuple(check.errors)))
        if self._over.done():
            return False
        model = check.model or ""
        self.batch = replace(self.batch, model=model, identity=self.routes.identity(model))
        self.answers.counts = self.answers.counts._replace(total=check.total)
        batches = self.batch_service.batches
        return await self._persist(partial(self.batch_service.db, batches.begin, self.batch, check.total))

    @property
    def _most_line(self) -> int:
        """The most bytes of a line of the input file."""
        return self.routes.most_bytes(self.batch.endpoint) + ENVELOPE

    async def _lines(self, max_lines: int | None = None) -> AsyncGenerator[list[Raw]]:
        """The lines of the input file, a few at a time, in turn with other owners'. Raises InputUnreadable."""
        path = self.batch_service.files.folder.file(self.batch.input_file)
        try:
            reader = await self._disk(Reader, path, self._most_line, max_lines)
            try:
                while not reader.is_over:
                    yield await self._disk(reader.some)
            finally:
                self.batch_service.later(self.batch.owner, reader.close)
        except OSError as error:
            reason = self.batch_service.count_failure(error)
            raise InputUnreadable(f"the batch's input file could not be read: {reason}") from error

    async def _disk(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self.batch_service.disk(self.batch.owner, work, *arguments)

    async def _whole(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(self.batch_service.submit(self.batch.owner, work, *arguments))

    # The lines

    async def _read_ahead(self) -> None:
        """Have a few of the lines that are left at hand, so that nobody waits for the reading of another's file."""
        try:
            async with aclosing(self._lines()) as pieces:
                async for lines in pieces:
                    self._waiting += [Try(raw) for raw in lines if not self.answers.has(raw.number)]
                    while self._waiting:
                        self.batch_service.free.set()
                        self._demand.clear()
                        await self._demand.wait()
            self._is_read = True
            self._look()
        except InputUnreadable as error:
            self.fail("storage_unavailable", str(error))
        except Exception as error:
            self._fault(None, error)

    def next(self) -> Try:
        """A line to compute, where there is one."""
        self._demand.set()
        return self._waiting.popleft()

    def start(self, line: Try, caller: Caller, on_answer: Callable[[Answer], None]) -> None:
        """Compute a line, in a task of its own. `on_answer` hears of answers that had no room."""
        task = asyncio.create_task(self._compute(line, caller, on_answer))
        self.running[task] = line
        task.add_done_callback(self._line_ended)

    def _line_ended(self, task: asyncio.Task[None]) -> None:
        line = self.running.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault(line.raw.number, error)
        self.batch_service.free.set()
        self._look()

    def _fault(self, number: int | None, error: BaseException) -> None:
        """Fail the batch for an unexpected exception, which is logged."""
        log.error("batch %s failed, at line %s", self.batch.id, number, exc_info=error)
        self.fail("internal_error", f"internal error; batch {self.batch.id}", number)

    def _look(self) -> None:
        """End the batch as completed once all of its lines are answered."""
        if self._is_read and not (self._waiting or self.running) and self.ready:
            self.stop(Ending("completed"))

    async def _compute(self, attempt: Try, caller: Caller, on_answer: Callable[[Answer], None]) -> None:
        raw, batch_id = attempt.raw, self.batch.id
        if self.batch.identity not in ("", now := self.routes.identity(self.batch.model)):
            return self.stop(other_model(self.batch.identity, now))
        try:
            custom_id, body = await self._read(raw, lambda line: (line.custom_id, body_of(line)))
        except BadLine as error:  # the file was changed after its check
            return await self._keep(Entry(raw.number, FAILED, failed_line(batch_id, raw.number, "", error.code, str(error))))
        request_id = f"{batch_id}-{raw.number}"
        answer = await self.routes.ask(self.batch.endpoint, body, caller, request_id)
        if answer.status in AGAIN or (answer.status in FEW_TIMES and attempt.failures + 1 < TRIES):
            attempt.failures += answer.status in FEW_TIMES
            self.batch_service.numbers.lines["retried"] += 1
            self._waiting.append(attempt)
            return on_answer(answer)
        outcome, usage = (DONE, answer.usage) if answer.status == 200 else (FAILED, NO_TOKENS)
        text = success(batch_id, raw.number, custom_id, answer.status, request_id, answer.body)
        return await self._keep(Entry(raw.number, outcome, text, usage))

    async def _read(self, raw: Raw, take: Callable[[Line], T]) -> T:
        """What `take` makes of a line, beside the event loop. Raises BadLine."""
        read = partial(read_line, raw, self.batch.endpoint, self.routes.parse, self._most_line)
        return await _patiently(lambda: take(read()), len(raw.text))

    async def _keep(self, answer: Entry) -> None:
        """Write an answer down. Where the batch is over before the disk has taken it, its end does."""
        self._unwritten[answer.number] = answer
        await self._persist(partial(self._append, answer))

    async def _append(self, answer: Entry) -> None:
        if await self._disk(self.answers.append, answer) and answer.outcome != LEFT:
            self.batch_service.numbers.lines["completed" if answer.outcome == DONE else "failed"] += 1
        self._unwritten.pop(answer.number, None)

    # The end

    async def _end(self, ending: Ending) -> None:
        """Write down how it ended, again and again while the disk is full. Raises nothing."""
        while ending.status != "left":
            try:
                return await self._finish(ending)
            except (OSError, StorageFailed) as error:
                if isinstance(error, OSError):
                    self.batch_service.count_failure(error)
                await asyncio.sleep(STUCK_SECONDS)
            except QuotaReached as error:
                ending = Ending("failed", (problem("storage_limit_reached", str(error)),))

    async def _finish(self, ending: Ending) -> None:
        """Make its files, and write down that it ended. Where that fails, nothing of them is left."""
        batches, folder, db = self.batch_service.batches, self.batch_service.files.folder, self.batch_service.db
        if ending.status == "failed" and ending.rest is None:
            return await db(batches.end, self.batch, "failed", self.answers.counts, ending.errors)
        for answer in [*self._unwritten.values()]:
            await self._append(answer)
        if ending.rest is not None:
            await self._add_left_lines(*ending.rest)
        elif not await db(batches.finalize, self.batch, self.charge):
            return None  # cancelled a moment ago: the runner takes it anew, and ends it
        ids = new_file_id(), new_file_id()
        writing = self.batch_service.submit(
            self.batch.owner, write_files, self.answers.path, self.answers.counts.total, *map(folder.file, ids)
        )
        is_known = False
        try:
            counts, *sizes = await asyncio.wrap_future(writing)
            made = [None if size is None else (file_id, size) for file_id, size in zip(ids, sizes, strict=True)]
            await db(batches.end, self.batch, ending.status, counts, ending.errors, *made)
            is_known = True
        finally:
            if not is_known:  # a thread may still write them, or the end
                writing.add_done_callback(lambda _: self.batch_service.drop_unknown(ids))

    async def _add_left_lines(self, code: str, message: str) -> None:
        """Add an error for each line that was not computed, where the input was ever checked and can still be read."""
        with suppress(InputUnreadable):
            async with aclosing(self._lines()) as pieces:
                async for raw in (raw async for lines in pieces for raw in lines if self.answers.counts.total):
                    if not self.answers.has(raw.number):
                        with suppress(BadLine):
                            custom_id = await self._read(raw, lambda line: line.custom_id)
                            await self._append(
                                Entry(raw.number, LEFT, failed_line(self.batch.id, raw.number, custom_id, code, message))
                            )


async def _patiently(work: Callable[[], T], size: int) -> T:
    """The result of work on lines, in the turn of batches, when there is room for it."""
    while True:
        try:
            return await run_exclusive(work, Arrival(BATCHES, None, size))
        except Overloaded as error:
            await asyncio.sleep(getattr(error, "retry_after", 1))
