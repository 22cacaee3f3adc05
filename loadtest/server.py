"""A server of our own to load, for as long as a block lasts."""

import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PORTS = range(19000, 19100)
START_SECONDS, STOP_SECONDS = 120.0, 90.0


class StartError(Exception):
    """The server did not become ready."""


@dataclass(frozen=True)
class Address:
    """Where a server listens: a URL, and host:port of gRPC."""

    http: str
    grpc: str


def free_port() -> int:
    """A loopback port that nobody listens on, below the range of outgoing connections and of the server's own ports."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def two_free_ports() -> tuple[int, int]:
    """Two that differ."""
    first = second = free_port()
    while second == first:
        second = free_port()
    return first, second


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM becomes SystemExit within the block, so that it ends what the block has started; in the main thread only."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def served(log: Path, flags: Sequence[str] = ()) -> Iterator[Address]:
    """Run `attend serve` with these flags; its lines go to `log`. Raises StartError. In the main thread only."""
    http, grpc = two_free_ports()
    command = [
        sys.executable,
        "-m",
        "attend.service.commands.cli",
        "serve",
        *flags,
        "--port",
        str(http),
        "--grpc-port",
        str(grpc),
    ]
    with terminable():
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            wait_ready(process, log)
            yield Address(f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}")
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


def wait_ready(process: subprocess.Popen, log: Path) -> None:
    """Until the start-up line is there. Raises StartError with the last lines where it does not come."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if b"Ready:" in log.read_bytes():
            return
        time.sleep(0.1)
    last = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
    raise StartError(f"the server was not ready; the end of {log}:\n{last}")
