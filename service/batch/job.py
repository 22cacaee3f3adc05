"""One batch in a runner: validates its input file, computes its lines, writes its output and error files."""

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
from attend.service.batch.answer_log import AnswerLog, Entry, entry
from attend.service.batch.batches import CANCELLED, EXPIRED, Ending, other_model, problem
from attend.service.batch.lines import ENVELOPE, BadLine, Check, Line, Raw, Reader, body_of, read_line
from attend.service.batch.results import DONE, FAILED, LEFT, Part, failed_line, success, write_files
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
MAX_UNWRITTEN = 16
"""Answers of a batch that wait for the disk; no more lines begin meanwhile."""
STUCK_SECONDS = 5.0
"""Between two tries of what the disk did not take."""
LATE_SECONDS = 3600.0
"""How long a batch that is over waits for room for its last answers; and past its window for its files: then it has failed."""


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
    part: Part
    answers: AnswerLog = field(init=False)
    ready: bool = False
    """True if there may be lines to compute."""
    running: dict[asyncio.Task[None], Try] = field(default_factory=dict)
    _waiting: deque[Try] = field(default_factory=deque)
    """Lines that were read, and lines to compute again."""
    _demand: asyncio.Event = field(default_factory=asyncio.Event)
    _is_read: bool = False
    _over: "asyncio.Future[Ending]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _keeping: set[asyncio.Task[None]] = field(default_factory=set)
    _over_at: float = 0.0

    def __post_init__(self) -> None:
        self.answers = AnswerLog(self.batch_service, self.batch, self.part)

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
            self.answers.close()

    async def _run(self) -> None:
        reading = None
        try:
            await self._prepare()
            reading = asyncio.create_task(self._read_ahead()) if self.ready else None
            ending = await self._over
        except (OSError, StorageFailed) as error:
            ending = self._over.result() if self._over.done() else self._broken(error)
        except Exception:
            log.exception("batch %s failed", self.batch.id)
            ending = Ending("failed", (problem("internal_error", f"internal error; batch {self.batch.id}"),))
        finally:
            if reading is not None:
                reading.cancel()
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
        if not await self._disk(path.exists):
            missing = problem("input_file_missing", "the input file is gone", None, "input_file_id")
            return self.stop(Ending("failed", (missing,)))
        if self.batch.status == "validating":
            check = await self._check_lines()
            if self._over.done():
                return None
            if check.errors:
                return self.stop(Ending("failed", tuple(check.errors)))
            model = check.model or ""
            self.batch = replace(self.batch, model=model, identity=self.routes.identity(model))
            begin = partial(self.batch_service.batches.begin, self.batch, check.total)
            if not await self._retry_storage(partial(self.batch_service.db, begin)):
                return self.stop(Ending("left"))
            self.answers.total = check.total
        await self.answers.resume()
        if self.batch.status == "cancelling":
            return self.stop(CANCELLED)
        if self.batch_service.files.clock() >= self.batch.expires:
            return self.stop(EXPIRED)
        if self.answers.completed + self.answers.failed >= self.answers.total:
            return self.stop(Ending("completed"))
        self.ready = not self._over.done()
        return None

    async def _check_lines(self) -> Check:
        """The check of all lines, a few at a time, and never beside the event loop for long."""
        check = Check(
            self.batch.endpoint,
            self.routes.parse,
            self.most_line,
            self.batch_service.limits.lines,
            self.routes.check_model,
            self.routes.strict_fields,
        )
        async with aclosing(self._lines(self.batch_service.limits.lines)) as pieces:
            async for lines in pieces:
                if lines:
                    await _patiently(partial(check.look, lines), sum(len(raw.text) for raw in lines))
                if check.is_over or self._over.done():
                    break
        check.end()
        return check

    async def _lines(self, max_lines: int | None = None) -> AsyncGenerator[list[Raw]]:
        """The lines of the input file, a few at a time, in turn with other owners'. Raises OSError."""
        path = self.batch_service.files.folder.file(self.batch.input_file)
        reader = await self._disk(Reader, path, self.most_line, max_lines)
        try:
            while not reader.is_over:
                yield await self._disk(reader.some)
        finally:
            self.batch_service.later(self.batch.owner, reader.close)

    async def _disk(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self.batch_service.disk(self.batch.owner, work, *arguments)

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
        except OSError as error:
            self.stop(self._broken(error))
        except Exception as error:
            self._fault(0, error)

    def next(self) -> Try:
        """A line to compute, where there is one."""
        self._demand.set()
        return self._waiting.popleft()

    @property
    def has_more(self) -> bool:
        """True if `next` has a line."""
        return self.ready and len(self._keeping) < MAX_UNWRITTEN and bool(self._waiting)

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
        if self._is_read and not (self._waiting or self.running or self._keeping) and self.ready:
            self.stop(Ending("completed"))

    async def _compute(self, attempt: Try, caller: Caller, on_answer: Callable[[Answer], None]) -> None:
        raw, batch_id = attempt.raw, self.batch.id
        if self.batch.identity not in ("", now := self.routes.identity(self.batch.model)):
            return self.stop(other_model(self.batch.identity, now))
        try:
            custom_id, body = await self._read(raw, lambda line: (line.custom_id, body_of(line)))
        except BadLine as error:  # the file was changed after its check
            return self._keep(entry(raw.number, FAILED, failed_line(batch_id, raw.number, "", error.code, str(error))))
        request_id = f"{batch_id}-{raw.number}"
        answer = await self.routes.ask(self.batch.endpoint, body, caller, request_id)
        if answer.status in AGAIN or (answer.status in FEW_TIMES and attempt.failures + 1 < TRIES):
            attempt.failures += answer.status in FEW_TIMES
            self.batch_service.numbers.lines["retried"] += 1
            self._waiting.append(attempt)
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
                if ending.status == "failed" and ending.rest is None:
                    await self.batch_service.db(
                        self.batch_service.batches.end, self.batch, "failed", self.answers.counts, ending.errors
                    )
                else:
                    await self._finish(ending)
                return
            except (OSError, StorageFailed) as error:
                if ending.status == "failed" and ending.rest is None:
                    await self._disk(self._make_room)
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
        if ending.rest is not None:
            failure = await self._add_rest(*ending.rest)
        elif not await self.batch_service.db(batches.finalize, self.batch):
            return  # cancelled a moment ago: whoever takes it next ends it
        ids = new_file_id(), new_file_id()
        writing = self.batch_service.submit(self.batch.owner, write_files, self.part.path, *map(folder.file, ids))
        is_known = False
        try:
            sums, files = await asyncio.wrap_future(writing)
            made = [(file_id, file.size) if file.count else None for file_id, file in zip(ids, files, strict=True)]
            counts = Counts(self.answers.total, *sums)
            await self.batch_service.db(batches.end, self.batch, ending.status, counts, ending.errors, *made)
            is_known = True
        finally:
            if not is_known:  # a thread may still write them, or the end
                writing.add_done_callback(lambda _: self.batch_service.drop_unknown(ids))
        if failure is not None:
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
        async with aclosing(self._lines()) as pieces:
            async for raw in (raw async for lines in pieces for raw in lines):
                if not self.answers.has(raw.number):
                    with suppress(BadLine):
                        custom_id = await self._read(raw, lambda line: line.custom_id)
                        text = failed_line(self.batch.id, raw.number, custom_id, code, message)
                        await self.answers.add(entry(raw.number, LEFT, text))

    def _make_room(self) -> None:
        """Delete the answers of a batch that has failed: on a full disk nothing else can be written before."""
        with suppress(OSError):
            self.part.clear()


async def _patiently(work: Callable[[], T], size: int) -> T:
    """The result of work on lines, in the turn of batches, when there is room for it."""
    while True:
        try:
            return await run_exclusive(work, Arrival(BATCHES, None, size))
        except Overloaded as error:
            await asyncio.sleep(getattr(error, "retry_after", 1))
