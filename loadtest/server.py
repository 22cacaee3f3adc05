"""Servers of our own, for as long as a block lasts: started, awaited, measured, ended with all that they started."""

import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

PORTS = range(19000, 19100)
START_SECONDS, STOP_SECONDS, PAUSE = 120.0, 90.0, 0.05
MARK = "ATTEND_BENCH_SERVER"
"""A variable that every process of a server inherits, whatever becomes of its parents."""


class StartError(Exception):
    """The server did not become ready, or did not end."""


@dataclass(frozen=True)
class Address:
    """Where a server listens: a URL, and host:port of gRPC."""

    http: str
    grpc: str


@dataclass
class Server:
    """A server that was started here. `mark` is the value of MARK in the environment of its processes."""

    address: Address
    process: "subprocess.Popen[bytes]"
    mark: str

    def processes(self) -> list[psutil.Process]:
        """Every living process of the server."""
        found = []
        for process in psutil.process_iter(["environ", "status"]):
            alive = process.info["status"] != psutil.STATUS_ZOMBIE
            if alive and (process.info["environ"] or {}).get(MARK) == self.mark:
                found.append(process)
        return found


def memory(processes: Iterable[psutil.Process]) -> float:
    """MiB of all of them (PSS): a page that several share counts once, pages of mapped files count while they are resident."""
    found = 0
    for process in processes:
        with suppress(psutil.Error):
            found += process.memory_full_info().pss
    return found / (1 << 20)


def free_ports() -> list[int]:
    """Two loopback ports that nobody listens on, below the range of outgoing connections and of the server's own ports."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                found.append(port)
        if len(found) == 2:
            return found
    raise StartError("no port is free")


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM becomes SystemExit within the block, so that it ends what the block has started; in the main thread only."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def serve_command(*flags: str) -> list[str]:
    """`attend serve` with these flags, for `start_server`."""
    return [sys.executable, "-m", "attend.service.commands.cli", "serve", *flags, "--port", "{port}", "--grpc-port", "{grpc}"]


@contextmanager
def start_server(
    command: Sequence[str], output: int | IO[Any], environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server that has begun to start. `{port}` and `{grpc}` in the command become loopback ports; `output` gets its lines.

    Whatever happens in the block, SIGTERM too, no process of the server is left after it. Raises StartError where the command
    cannot be run. In the main thread only.
    """
    (http, grpc), mark = free_ports(), secrets.token_hex(8)
    words = [word.replace("{port}", str(http)).replace("{grpc}", str(grpc)) for word in command]
    variables = {**os.environ, **(environment or {}), MARK: mark}
    with terminable():
        try:
            process = subprocess.Popen(words, stdout=output, stderr=output, env=variables, start_new_session=True)
        except OSError as error:
            raise StartError(f"{words[0]} did not start: {error}") from None
        server = Server(Address(f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"), process, mark)
        try:
            yield server
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            for left in server.processes():
                with suppress(psutil.NoSuchProcess):
                    left.kill()
            process.wait()


@contextmanager
def ready_server(log: Path, flags: Sequence[str] = ()) -> Iterator[Address]:
    """An `attend serve` with these flags that is ready; its lines go to `log`. Raises StartError. In the main thread only."""
    with log.open("wb") as output, start_server(serve_command(*flags), output) as server:
        wait_ready(server, log)
        yield server.address


def wait_ready(server: Server, log: Path) -> None:
    """Until the start-up line is there. Raises StartError."""
    wait_started(server, log, lambda: b"Ready:" in log.read_bytes())


def wait_first_token(server: Server, log: Path) -> None:
    """Ask for one token, again and again, until it comes. Raises StartError."""
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(f"{server.address.http}/v1/completions", b'{"prompt":"a","max_tokens":1}', headers)

    def has_answered() -> bool:
        with suppress(OSError), urllib.request.urlopen(asked, timeout=5) as answer:  # nobody listens yet, or not ready: 503
            answer.read()
            return True
        return False

    wait_started(server, log, has_answered)


def wait_started(server: Server, log: Path, condition: Callable[[], bool]) -> None:
    """Until a condition holds. Raises StartError with the last lines of the log where the server ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.process.poll() is None:
        if condition():
            return
        time.sleep(PAUSE)
    last = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
    raise StartError(f"the server was not ready; the end of {log}:\n{last}")
