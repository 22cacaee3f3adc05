"""The answers of one batch, for who has its part: which lines have one, and new ones, charged before they are written."""

import asyncio
from typing import NamedTuple

from attend.service.batch.results import DONE, FAILED, Part, record, tally
from attend.service.batch.rows import Batch, Counts
from attend.service.batch.service import BatchService
from attend.service.records import NO_TOKENS, TokenUsage

CHARGE_BYTES = 1 << 20
"""Of answers, that are charged at a time. Each byte counts twice: at the end it lies in a part and in a file for a while."""


class Entry(NamedTuple):
    """An answer to a line. `outcome`: one of results.DONE, FAILED and LEFT."""

    number: int
    outcome: int
    record: bytes
    """As it stands in a part."""
    usage: TokenUsage


def entry(number: int, outcome: int, text: bytes, usage: TokenUsage = NO_TOKENS) -> Entry:
    """An answer whose line in the output or error file is `text`."""
    return Entry(number, outcome, record(number, outcome, text, usage), usage)


class AnswerLog:
    """`add` appends to the part."""

    def __init__(self, batch_service: BatchService, batch: Batch, part: Part) -> None:
        self.total, self.completed, self.failed, self.usage = batch.counts
        self.unwritten: dict[int, Entry] = {}
        """Answers that are not on the disk yet, by their lines."""
        self._batch_service, self._batch = batch_service, batch
        self._answered = bytearray()
        """One for each line that has an answer, by its number."""
        self.part = part
        self._charged_bytes = self._used_bytes = 0
        self._room = asyncio.Lock()

    @property
    def counts(self) -> Counts:
        """Lines and tokens so far."""
        return Counts(self.total, self.completed, self.failed, self.usage)

    def has(self, number: int) -> bool:
        """True if a line has an answer on the disk."""
        return number < len(self._answered) and self._answered[number] == 1

    async def resume(self) -> None:
        """Find out which lines have been answered before. Raises OSError."""
        await asyncio.wrap_future(self._batch_service.submit(self._batch.owner, self._resume))

    def _resume(self) -> None:
        found = self.part.resume()
        for number in found:
            self._mark(number)
        self.completed, self.failed, self.usage = tally(found.values())

    async def add(self, new: Entry) -> None:
        """Charge an answer, write it, and count it. Raises OSError, QuotaReached or StorageFailed, and can be tried again."""
        size = 2 * len(new.record)
        self._used_bytes += size
        try:
            async with self._room:
                if self._used_bytes > self._charged_bytes:
                    more = max(CHARGE_BYTES, self._used_bytes - self._charged_bytes)
                    await self._batch_service.db(self._batch_service.batches.charge, self._batch, more)
                    self._charged_bytes += more
            await self._batch_service.disk(self._batch.owner, self.part.append, new.record)
        except BaseException:
            self._used_bytes -= size
            raise
        self.unwritten.pop(new.number, None)
        self._mark(new.number)
        self.completed += new.outcome == DONE
        self.failed += new.outcome == FAILED
        self.usage = self.usage.plus(new.usage)
        if new.outcome in (DONE, FAILED):
            self._batch_service.numbers.lines["completed" if new.outcome == DONE else "failed"] += 1

    def close(self) -> None:
        """Close the part: later answers are not written, and another may have the batch."""
        self._batch_service.later(self._batch.owner, self.part.close)

    def _mark(self, number: int) -> None:
        self._answered += bytes(max(0, number + 1 - len(self._answered)))
        self._answered[number] = 1
