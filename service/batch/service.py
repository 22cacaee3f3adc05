"""Files and batches for the event loop: a thread for the database, and three for file I/O, which owners have in turn."""

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from io import FileIO
from typing import Any, TypeVar

from attend.service.batch.batches import Batches
from attend.service.batch.files import Clock, Files
from attend.service.batch.folder import opener
from attend.service.batch_settings import BatchSettings
from attend.service.errors import NotThere, StorageFailed
from attend.service.generation.thread_pools import FairSemaphore, TurnPool
from attend.service.observe.collectors import BatchNumbers

log = logging.getLogger("attend.batch")
T = TypeVar("T")

MAX_UPLOADS = 32
"""Files that are uploaded at a time; one caller has a quarter of them at most."""
LOG_SECONDS = 10.0
"""The same failure of the disk is logged once in so many; each try of each answer has it."""
READ_BYTES = 256 << 10
"""Of a file that is sent, at a time."""


class BatchService:
    """What routes and runner share. Raises SettingError where the folder cannot be used."""

    def __init__(self, limits: BatchSettings, concurrency: int, clock: Clock = time.time) -> None:
        """`concurrency`: lines that are computed at a time, where the settings do not say."""
        self.limits, self.concurrency = limits, limits.batch_concurrency or concurrency
        self.files = Files(limits, clock)
        self.batches = Batches(self.files)
        self.numbers = BatchNumbers()
        self.uploads = FairSemaphore(MAX_UPLOADS, "files are being uploaded")
        self.woken = asyncio.Event()
        """Set where a batch is new, or is to end."""
        self.free = asyncio.Event()
        """Set where another line may begin."""
        self._logged: dict[str, float] = {}
        """When a failure of the disk was logged."""
        self._database = ThreadPoolExecutor(1, "attend-batch-db")
        self._disk = TurnPool(2, "attend-batch-io", rests=True)
        self._whole = TurnPool(1, "attend-batch-whole", rests=True)

    async def db(self, work: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """The result of work with the database. Raises StorageFailed where that cannot be written."""
        try:
            return await asyncio.wrap_future(self._database.submit(partial(work, *arguments, **keywords)))
        except (sqlite3.Error, OSError) as error:
            raise self.count_failure(error) from error

    async def disk(self, owner: str, work: Callable[..., T], *arguments: Any) -> T:
        """The result of work with files, a short piece of it, in the turn of this owner. Raises OSError."""
        return await asyncio.wrap_future(self._disk.submit(owner, partial(work, *arguments)))

    def submit(self, owner: str, work: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Work with all answers of a batch, which no other work waits for."""
        return self._whole.submit(owner, partial(work, *arguments))

    def later(self, owner: str, work: Callable[[], None]) -> None:
        """Have work with files done that nobody waits for."""
        self._disk.submit(owner, work)

    def release(self, handle: int) -> None:
        """Close a locked file, once what is under way is done."""
        self._whole.submit("", lambda: self._database.submit(os.close, handle))

    def drop_unknown(self, file_ids: Iterable[str]) -> None:
        """Delete files that were made, unless the database, once it is done with what it has, knows them."""
        self._database.submit(self.files.drop_unknown, file_ids)

    def count_failure(self, error: Exception) -> StorageFailed:
        """Count a failure of the disk, and log it unless the same one was logged a moment ago; what callers are told of it."""
        self.numbers.storage_errors += 1
        text, now = disk_error(error), time.monotonic()
        self._logged = {each: at for each, at in self._logged.items() if now - at < LOG_SECONDS}
        if text not in self._logged:
            self._logged[text] = now
            log.error("the folder of files and batches, %s: %s", self.files.folder.root, text)
        return StorageFailed(f"files cannot be kept now: {text}")

    @asynccontextmanager
    async def reserve_file(self, owner: str, size: int) -> AsyncIterator[str]:
        """The id of a file of at most so many bytes. Where the block ends in an exception nothing is left of it."""
        file_id = await self.db(self.files.reserve, owner, size)
        try:
            yield file_id
        except BaseException:
            self._database.submit(self.files.drop, file_id)
            raise

    async def content(self, owner: str, file_id: str) -> tuple[int, AsyncIterator[bytes]]:
        """The bytes of a file that the caller has, and how many. It is whole, even if the file is deleted meanwhile."""
        try:
            file = await self.disk(owner, partial(FileIO, opener=opener), self.files.folder.file(file_id))
        except FileNotFoundError as error:
            raise NotThere(f"file_id: there is no file {file_id!r}", "file_id") from error
        except OSError as error:
            raise self.count_failure(error) from error
        size = os.fstat(file.fileno()).st_size
        return size, self._pieces(owner, file, size)

    async def _pieces(self, owner: str, file: FileIO, size: int) -> AsyncIterator[bytes]:
        with file:  # where nothing is asked for it is closed with the last reference to it
            for place in range(0, size, READ_BYTES):
                yield await self.disk(owner, os.pread, file.fileno(), READ_BYTES, place)

    def close(self) -> None:
        """Let go of the folder, once what is under way is done."""
        self._whole.close()
        self._disk.close()
        self._database.submit(self.files.close)
        self._database.shutdown()


def disk_error(error: Exception) -> str:
    """Why a disk failed, without its paths."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
