"""Real servers for end-to-end tests: `attend serve` as a user starts it, on ports of its own."""

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 200.0
SLOWNESS = float(os.environ.get("ATTEND_TEST_SLOWNESS", "1.5"))
"""How much slower than the reference machine a busy one may be."""
TAG = "ATTEND_TEST_SERVER"
"""A variable that every process of a server inherits, whatever becomes of its parents."""


def free_port() -> int:
    """A port that nobody listens on, below the range of outgoing connections. No two of pytest's workers try the same."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 15000 + 4 * secrets.randbelow(1000) + worker % 4
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on, no two the same."""
    found: set[int] = set()
    while len(found) < number:
        found.add(free_port())
    return list(found)


def wait_for(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    """True if `condition` came true in time. A connection that was cut is not yet what is waited for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionError):
            if condition():
                return True
        time.sleep(0.02)
    return False


def processes_of(tag: str) -> list[int]:
    """Every living process whose environment holds this tag, whatever became of its parents."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and f"{TAG}={tag}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


class Server:
    """One `attend serve` process and all that it starts.

    `folder`: where a user types it. `script`: another `attend`. `ca`: who signed its certificate, where it serves TLS.
    """

    def __init__(
        self, log: Path, *flags: str, folder: Path | None = None, script: Path | None = None, ca: Path | None = None
    ) -> None:
        self.trust = ssl.create_default_context(cafile=str(ca)) if ca else None
        self.tag = secrets.token_hex(8)
        self.http, self.grpc = free_ports(2)
        self.log = log
        python = os.environ.get("ATTEND_TEST_PYTHON", sys.executable)  # `make test-clients` runs us where Attend is not
        command = [str(script)] if script else [python, "-m", "attend.service.commands.cli"]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, "serve", *flags, "--port", str(self.http), "--grpc-port", str(self.grpc)],
                stdout=file,
                stderr=file,
                env={**os.environ, TAG: self.tag},
                cwd=folder,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"{'https' if self.trust else 'http'}://127.0.0.1:{self.http}"

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc}"

    def wait_ready(self) -> "Server":
        """Until the start-up line is there."""
        done = wait_for(lambda: "Ready:" in self.output() or self.process.poll() is not None, START_SECONDS)
        assert done and "Ready:" in self.output(), self.output()
        return self

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> list[int]:
        """Every living process of this server."""
        return processes_of(self.tag)

    def pid_of(self, command: str) -> int:
        """The process of this server whose command line holds `command`."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if command in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                    return pid
        raise AssertionError(f"no process of the server runs {command}")

    def get(self, path: str) -> tuple[int, str]:
        """(status, body) of a GET."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10, context=self.trust) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, path: str, key: str = "", /, **body: object) -> tuple[int, Message, Any]:
        """(status, headers, document) of a POST."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120, context=self.trust) as answer:
                return answer.status, answer.headers, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, error.headers, json.load(error)

    def metrics(self) -> str:
        """The metrics page: with every replica on it, where they all answer in time."""
        pages: list[str] = []

        def whole() -> bool:
            pages.append(self.get("/metrics")[1])
            return len(set(re.findall(r"^attend_scrape_replicas_\w+ (\S+)", pages[-1], re.MULTILINE))) < 2

        wait_for(whole)
        return pages[-1]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels, over all replicas."""
        families = text_string_to_metric_families(self.metrics())
        samples = [s for family in families for s in family.samples if s.name == name]
        assert samples, f"{name} is not on the page"
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def replicas(self) -> set[str]:
        """The replicas on the metrics page."""
        return set(re.findall(r'replica="(\w+)"', self.metrics()))

    def stop(self, number: int = signal.SIGTERM, within: float = 30.0) -> float:
        """Signal the server and wait for its end; returns the seconds that took."""
        started = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(within)
        return time.monotonic() - started


@contextlib.contextmanager
def started(log: Path, *flags: str, **where: Path) -> Iterator[Server]:
    """A server that begins to load its model, and leaves no process behind whatever the test does."""
    server = Server(log, *flags, **where)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(60)
        for pid in server.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def running(log: Path, *flags: str, **where: Path) -> Iterator[Server]:
    """A ready server."""
    with started(log, *flags, **where) as server:
        yield server.wait_ready()
