"""Servers that a benchmark starts itself, of any make, and the memory that they take."""

import argparse
import contextlib
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.bench.start import MARK, marked, wait_first_token
from loadtest.server import STOP_SECONDS, StartError, terminable, two_free_ports

SERVE = [sys.executable, "-m", "attend.service.commands.cli", "serve"]


@dataclass(frozen=True, slots=True)
class Running:
    """A server that has answered. `seconds`: from its command to its first token. `grpc`: host:port, where it has one."""

    name: str
    url: str
    mark: str
    seconds: float
    grpc: str | None = None


def parse_command(text: str) -> tuple[str, list[str]]:
    """(name, words) of NAME=COMMAND. Raises ArgumentTypeError."""
    name, _, command = text.partition("=")
    if not name or "{port}" not in command:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND with {{port}} in the command")
    return name, shlex.split(command)


@contextlib.contextmanager
def started(name: str, command: Sequence[str], log: Path) -> Iterator[Running]:
    """A server on a loopback port that takes the place of {port}, and {grpc} for gRPC; it ends with the block.

    What it prints goes to `log`. Raises StartError. In the main thread only.
    """
    ports, mark = dict(zip(("{port}", "{grpc}"), two_free_ports(), strict=True)), secrets.token_hex(8)
    words = [_filled(word, ports) for word in command]
    began = time.perf_counter()
    try:
        with log.open("wb") as out:
            process = subprocess.Popen(words, stdout=out, stderr=out, env=os.environ | {MARK: mark}, start_new_session=True)
    except OSError as error:
        raise StartError(f"{name} did not start: {error}") from None
    with terminable():
        try:
            wait_first_token(ports["{port}"], process, log)
            grpc = f"127.0.0.1:{ports['{grpc}']}" if "{grpc}" in command else None
            yield Running(name, f"http://127.0.0.1:{ports['{port}']}", mark, time.perf_counter() - began, grpc)
        finally:
            _end(process, mark)


def _filled(word: str, ports: dict[str, int]) -> str:
    for place, port in ports.items():
        word = word.replace(place, str(port))
    return word


def _end(process: subprocess.Popen, mark: str) -> None:
    """SIGTERM, and SIGKILL for what it leaves behind or is left when its time is over."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    for left in marked(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()


def memory(processes: Iterable[psutil.Process]) -> float:
    """MiB of all of them (PSS): a page that several share counts once, pages of mapped files count while they are resident."""
    found = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found += process.memory_full_info().pss
    return found / (1 << 20)
