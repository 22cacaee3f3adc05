"""Batch scheduler: takes batches and has their lines computed, few beside other calls, fairly among owners.

Several runners may share a folder, one in each replica of a machine. What a runner has taken is its own until it lets go of
it or dies (`results.Part`).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from math import inf

from attend.model.errors import AttendError
from attend.service.access.caller import Caller
from attend.service.access.keys import KeyRing
from attend.service.batch.batches import CANCELLED, EXPIRED, KEY_REMOVED, Ending
from attend.service.batch.job import Job
from attend.service.batch.owners import caller_of
from attend.service.batch.routes import Answer, Routes
from attend.service.batch.service import BatchService
from attend.service.errors import StorageFailed

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
"""Batches that a runner works on at a time, and of one owner."""
SPARED = 0.5
"""A line begins only while its key has taken less than this share of each of its limits: the rest is for its other calls."""
AWAY_SECONDS = 300.0
"""So long after its key was last known a batch ends. A key file may lack a key for a moment; and another server, which never
knew the key, may share the folder."""
MAX_PAUSE = 30.0
"""Seconds for which an owner whose line found no room is passed over, at most."""


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
        self._routes, self._keys, self._others, self._clock = routes, keys, others, clock
        self._busy_until = 0.0
        self._paused: dict[str, float] = {}
        self._known: dict[str, float] = {}
        """When the caller was known last, of each owner of an open batch; those alone who were known at some time."""
        self._unknown: set[str] = set()
        self._began = Counter[str]()
        """When an owner's last line began, as a number that grows."""
        self._lines = 0
        self._sweeps_at = 0.0
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
        self.jobs.clear()

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
        """Write down how far the batches are, hear what was cancelled, and take what nobody has."""
        for batch_id, (_, task) in [*self.jobs.items()]:
            if task.done():
                del self.jobs[batch_id]
                if not task.cancelled() and (error := task.exception()) is not None:
                    log.error("batch %s could not be ended", batch_id, exc_info=error)
        owners = {job.batch.owner for job, _ in self.jobs.values()}
        self._paused = {owner: until for owner, until in self._paused.items() if owner in owners}
        self._began = Counter({owner: number for owner, number in self._began.items() if owner in owners})
        mine = {batch_id: job.answers.counts for batch_id, (job, _) in self.jobs.items()}
        statuses = await self.batch_service.db(self.batch_service.batches.save, mine) if mine else {}
        for batch_id in mine:
            self._judge(self.jobs[batch_id][0], statuses[batch_id])
        await self._count()
        while await self._take():
            pass
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_SECONDS):
                await self.batch_service.woken.wait()
        self.batch_service.woken.clear()

    def _judge(self, job: Job, status: str) -> None:
        if status == "cancelling":
            job.stop(CANCELLED)
        elif self.batch_service.files.clock() >= job.batch.expires:
            job.stop(EXPIRED)
        elif self._is_away(job.batch.owner):
            job.stop(KEY_REMOVED)

    async def _take(self) -> bool:
        """Begin with one more batch, of the owner who has the fewest here. False where there is none."""
        first = await self.batch_service.db(self.batch_service.batches.owners)
        self._look_for_keys(first)
        held = Counter(job.batch.owner for job, _ in self.jobs.values())
        able = [owner for owner in first if held[owner] < MAX_OF_ONE] if len(self.jobs) < MAX_JOBS else []
        for owner in sorted(able, key=lambda owner: (held[owner], first[owner])):
            is_away = self._is_away(owner)
            ends_by = inf if is_away or owner not in self._unknown else self.batch_service.files.clock()
            found = None
            with suppress(StorageFailed):  # which has been told; other owners' may be taken
                found = await self.batch_service.db(self.batch_service.batches.take, owner, [*self.jobs], ends_by)
            if found is not None:
                job = Job(self.batch_service, self._routes, *found)
                if is_away:
                    job.stop(KEY_REMOVED)
                self.jobs[job.batch.id] = job, asyncio.create_task(job.run())
                return True
        return False

    def _look_for_keys(self, owners: Iterable[str]) -> None:
        """Note which owners of open batches are callers of this server. Batches of the others wait."""
        now, unknown = self._clock(), {owner for owner in owners if caller_of(owner, self._keys) is None}
        still = {owner: at for owner, at in self._known.items() if owner in unknown}
        self._known = still | {owner: now for owner in owners if owner not in unknown}
        if more := unknown - self._unknown:
            log.warning("batches of %s wait: this server does not know whose they are", sorted(more)[:8])
        self._unknown = unknown

    def _is_away(self, owner: str) -> bool:
        """True if this server has known an owner, and does not for long."""
        return owner in self._unknown and self._clock() - self._known.get(owner, inf) >= AWAY_SECONDS

    async def _count(self) -> None:
        numbers = self.batch_service.numbers
        numbers.batches, numbers.oldest_waiting = await self.batch_service.db(self.batch_service.batches.numbers)
        numbers.bytes = await self.batch_service.db(self.batch_service.files.total_bytes)
        numbers.running = self._running()
        if self._clock() >= self._sweeps_at:
            self._sweeps_at = self._clock() + SWEEP_SECONDS
            await self.batch_service.db(self.batch_service.files.sweep)

    # Lines

    def _running(self) -> int:
        return sum(len(job.running) for job, _ in self.jobs.values())

    def room(self) -> int:
        """Lines that may be computed now."""
        now = self._clock()
        if self._others():
            self._busy_until = now + CALM_SECONDS
        return self.batch_service.limits.beside_others if now < self._busy_until else self.batch_service.limits.concurrency

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
