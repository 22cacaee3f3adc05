"""Batch scheduler: takes batches and has their lines computed, few beside other calls, fairly among owners.

Several replicas of a machine may share a folder. One of them at a time has the lines computed; where it ends, or dies, another
goes on at once (`Folder.lock_runner`).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from attend.model.errors import AttendError
from attend.service.access.caller import Caller
from attend.service.access.keys import KeyRing
from attend.service.batch.answers import AnswerLog
from attend.service.batch.batches import CANCELLED, EXPIRED, Ending
from attend.service.batch.job import Job
from attend.service.batch.routes import Answer, Routes
from attend.service.batch.rows import caller_of
from attend.service.batch.service import BatchService
from attend.service.errors import QuotaReached, StorageFailed

log = logging.getLogger("attend.batch")

BEAT_SECONDS = 1.0
SWEEP_SECONDS = 60.0
LOOK_SECONDS = 0.1
"""How often it is looked whether another line may begin, where nothing tells."""
CALM_SECONDS = 2.0
"""So long after the last other call lines take all of the room that they may have: a conversation has pauses."""
CLOSE_SECONDS = 2.0
"""How long the end of a server waits for what is being written."""
MAX_JOBS, MAX_OF_ONE = 32, 2
"""Batches that are worked on at a time, and of one owner."""
SPARED = 0.5
"""A line begins only while its key has taken less than this share of each of its limits: the rest is for its other calls."""
MAX_PAUSE = 30.0
"""Seconds for which an owner whose line found no room is passed over, at most."""
BESIDE = 8
"""Of the lines that are computed at a time, one of so many goes on beside other calls."""


class Runner:
    """`run` works until `close`. `others`: calls that are being answered and are no lines of batches."""

    def __init__(
        self,
        batch_service: BatchService,
        routes: Routes,
        keys: KeyRing | None,
        others: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batch_service = batch_service
        self.jobs: dict[str, tuple[Job, asyncio.Task[None]]] = {}
        self.lock: int | None = None
        """The file whose lock says that no other process has the lines computed."""
        self._routes, self._keys, self._others, self._clock = routes, keys, others, clock
        self._busy_until = self._sweeps_at = 0.0
        self._paused: dict[str, float] = {}
        self._began = Counter[str]()
        """When an owner's last line began, as a number that grows."""
        self._lines = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin, on the running event loop."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._keep_on(self._beat)), asyncio.create_task(self._keep_on(self._dispatch))]

    async def close(self) -> None:
        """Compute no more lines; what was taken is another runner's, or the next process's. What has been answered is kept."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for job, _ in self.jobs.values():
            job.stop(Ending("left"))
        ending = {task for _, task in self.jobs.values()}
        if ending:
            _, late = await asyncio.wait(ending, timeout=CLOSE_SECONDS)
            for task in late:  # it makes files of answers, or waits for a disk: the next one begins that anew
                task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        files = [(job.batch.owner, job.answers.close) for job, _ in self.jobs.values()]
        closing = [asyncio.ensure_future(self.batch_service.disk(*each)) for each in files]
        late = (await asyncio.wait(closing, timeout=CLOSE_SECONDS))[1] if closing else set()
        self.jobs.clear()
        if self.lock is not None and not late:  # else the end of the process frees it
            self.batch_service.release(self.lock)
            self.lock = None

    async def _keep_on(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except AttendError:
                await asyncio.sleep(BEAT_SECONDS)  # the disk, which `BatchService.count_failure` has told
            except Exception:
                log.exception("batches: the runner failed, and tries again")
                await asyncio.sleep(BEAT_SECONDS)

    # Batches

    async def _beat(self) -> None:
        """Write down how far the batches are, hear what was cancelled, and take what is new."""
        if self.lock is None:
            self.lock = await self.batch_service.db(self.batch_service.files.folder.lock_runner)
        for batch_id, (_, task) in [*self.jobs.items()]:
            if task.done():
                del self.jobs[batch_id]
                if not task.cancelled() and (error := task.exception()) is not None:
                    log.error("batch %s could not be ended", batch_id, exc_info=error)
        owners = {job.batch.owner for job, _ in self.jobs.values()}
        self._paused = {owner: until for owner, until in self._paused.items() if owner in owners}
        self._began = Counter({owner: number for owner, number in self._began.items() if owner in owners})
        mine = {batch_id: (job.answers.counts, job.charge) for batch_id, (job, _) in self.jobs.items()}
        found = await self.batch_service.db(self.batch_service.batches.save, mine) if mine else {}
        for batch_id, (status, refusal) in found.items():
            self._judge(self.jobs[batch_id][0], status, refusal)
        await self._count()
        if self.lock is not None:
            await self._take()
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_SECONDS):
                await self.batch_service.woken.wait()
        self.batch_service.woken.clear()

    def _judge(self, job: Job, status: str, refusal: QuotaReached | StorageFailed | None) -> None:
        job.is_paused = isinstance(refusal, StorageFailed)
        if status == "cancelling":
            job.stop(CANCELLED)
        elif self.batch_service.files.clock() >= job.batch.expires:
            job.stop(EXPIRED)
        elif isinstance(refusal, QuotaReached):
            job.fail("storage_limit_reached", str(refusal))

    async def _take(self) -> None:
        """Begin with more batches, of the owner who has the fewest here first. Those of unknown owners wait for their end."""
        rows = await self.batch_service.db(self.batch_service.batches.open_batches)
        held = Counter(job.batch.owner for job, _ in self.jobs.values())
        now = self.batch_service.files.clock()
        able = [row for row in rows if row[0] not in self.jobs and (now >= row[2] or caller_of(row[1], self._keys) is not None)]
        while len(self.jobs) < MAX_JOBS and (able := [row for row in able if held[row[1]] < MAX_OF_ONE]):
            batch_id, owner, _ = row = min(able, key=lambda row: held[row[1]])
            able.remove(row)
            batch = await self.batch_service.db(self.batch_service.batches.batch, owner, batch_id)
            try:
                path = self.batch_service.files.folder.part(batch_id)
                answers = await self.batch_service.disk(owner, AnswerLog, path, batch.counts.total)
            except OSError as error:  # of this batch alone, or of all
                self.batch_service.count_failure(error)
                continue
            job = Job(self.batch_service, self._routes, batch, answers)
            self.jobs[batch_id] = job, asyncio.create_task(job.run())
            held[owner] += 1

    async def _count(self) -> None:
        numbers = self.batch_service.numbers
        numbers.batches, numbers.oldest_waiting = await self.batch_service.db(self.batch_service.batches.numbers)
        if self._clock() >= self._sweeps_at:
            self._sweeps_at = self._clock() + SWEEP_SECONDS
            await self.batch_service.db(self.batch_service.files.sweep)

    # Lines

    def _running(self) -> int:
        return sum(len(job.running) for job, _ in self.jobs.values())

    def room(self) -> int:
        """Lines that may be computed now."""
        now, most = self._clock(), self.batch_service.concurrency
        if self._others():
            self._busy_until = now + CALM_SECONDS
        return max(1, most // BESIDE) if now < self._busy_until else most

    async def _dispatch(self) -> None:
        """Begin as many lines as there is room for."""
        while self._running() < self.room() and (found := self._next_job()) is not None:
            job, caller = found
            self._lines += 1
            self._began[job.batch.owner] = self._lines
            job.start(job.next(), caller, partial(self._pause, job.batch.owner))
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self.batch_service.free.wait()
        self.batch_service.free.clear()

    def _next_job(self) -> tuple[Job, Caller] | None:
        """A batch of the owner who has fewest lines running; of two such, of who began one the longest time ago.

        None where no owner whom this server knows has a line and room for it.
        """
        now, running = self._clock(), Counter[str]()
        for job, _ in self.jobs.values():
            running[job.batch.owner] += len(job.running)
        able: dict[str, tuple[Job, Caller]] = {}
        for job, _ in self.jobs.values():
            owner = job.batch.owner
            if job.has_more and owner not in able and self._paused.get(owner, 0.0) <= now:
                caller = caller_of(owner, self._keys)
                if caller is not None and not self._is_busy(caller, running[owner]):
                    able[owner] = job, caller
        return able[min(able, key=lambda owner: (running[owner], self._began[owner]))] if able else None

    def _is_busy(self, caller: Caller, lines: int) -> bool:
        """True if the key of a caller who has so many lines running has no room for another one."""
        if caller.key is None:
            return False
        most = caller.key.limits.concurrent  # a line that has only begun does not count there yet
        return caller.key.is_busy(SPARED) or (most is not None and lines >= max(1, int(most * SPARED)))

    def _pause(self, owner: str, answer: Answer) -> None:
        """A line of this owner found no room."""
        self._paused[owner] = self._clock() + min(max(0.1, answer.retry_after), MAX_PAUSE)
