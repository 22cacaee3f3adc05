"""What a server holds of its machine: memory and open files of all its processes."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.faults.target import Target

EVERY, NEW_PROCESSES = 0.2, 10
"""Seconds between two looks, and looks between two searches for new processes."""


@dataclass(slots=True)
class Use:
    """Bytes of memory and number of open files, of all processes together."""

    memory: int
    files: int


def use_of(processes: list[psutil.Process]) -> Use:
    """What these hold now; those that have ended hold nothing."""
    memory = files = 0
    for process in processes:
        with contextlib.suppress(psutil.Error), process.oneshot():
            memory += process.memory_info().rss
            files += process.num_fds()
    return Use(memory, files)


def use(target: Target) -> Use:
    """What a server holds now."""
    return use_of(target.processes())


@contextlib.contextmanager
def highest_use(target: Target) -> Iterator[Use]:
    """The most that a server has held at a time in the block, so far."""
    most, over = use(target), threading.Event()

    def look() -> None:
        processes, looks = target.processes(), 0
        while not over.wait(EVERY):
            looks += 1
            if looks % NEW_PROCESSES == 0:
                processes = target.processes()
            now = use_of(processes)
            most.memory, most.files = max(most.memory, now.memory), max(most.files, now.files)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def files_come_back(target: Target, most: int, seconds: float) -> int:
    """Open files beyond `most` once they have come back, or after so long."""
    deadline = time.monotonic() + seconds
    while (left := use(target).files - most) > 0 and time.monotonic() < deadline:
        time.sleep(EVERY)
    return max(0, left)


def open_to_others(path: Path) -> bool:
    """True if any user of the machine can reach this socket and write to it."""
    if not path.is_absolute() or not path.is_socket():
        return False
    return bool(path.stat().st_mode & 0o002) and all(folder.stat().st_mode & 0o001 for folder in path.parents)
