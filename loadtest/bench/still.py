"""Servers of this machine that stand still while others are asked: what spins for the next request would take their cores."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import psutil


def processes_at(url: str) -> tuple[int, ...]:
    """The process that listens at a URL's port on this machine, and all that it started; none if it is not found."""
    place = urlsplit(url)
    if place.hostname not in ("localhost", "127.0.0.1", "::1"):
        return ()
    listening = psutil.net_connections(kind="tcp")
    owners = {
        each.pid
        for each in listening
        if each.status == psutil.CONN_LISTEN and each.laddr.port == place.port and each.pid not in (None, os.getpid())
    }
    return tuple(
        each.pid for owner in owners for each in (psutil.Process(owner), *psutil.Process(owner).children(recursive=True))
    )


def send(processes: Sequence[int], number: signal.Signals) -> None:
    """A signal to each that is still there."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


@contextlib.contextmanager
def _between(processes: Sequence[int], first: signal.Signals, last: signal.Signals) -> Iterator[None]:
    send(processes, first)
    try:
        yield
    finally:
        send(processes, last)


def awake(processes: Sequence[int]) -> contextlib.AbstractContextManager[None]:
    """They run for the length of the block, and stand still after it."""
    return _between(processes, signal.SIGCONT, signal.SIGSTOP)


def still(processes: Sequence[int]) -> contextlib.AbstractContextManager[None]:
    """They stand still but where they are woken, and run again after the block."""
    return _between(processes, signal.SIGSTOP, signal.SIGCONT)
