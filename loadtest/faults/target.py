"""The server that faults are tried on: a real one of our own, its processes, its keys, and the pipe that reads its lines."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from loadtest import server
from loadtest.server import START_SECONDS, StartError

PAUSE = 0.02
REPLICA, CONTROLLER, HAPROXY, MANAGER, GCS = (
    "ray::ServeReplica",
    "ray::ServeController",
    "haproxy -db",
    "ray::HAProxyManager",
    "gcs_server",
)
"""Beginnings of titles, or parts of command lines, of a server's processes."""


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    """True if `condition` came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(PAUSE)
    return False


@dataclass
class Target(server.Server):
    """One `attend serve`, started with its standard error in a pipe of ours."""

    keys: dict[str, str]
    """The secret of each key by its name; empty where the server asks for none."""
    lines: list[str] = field(default_factory=list)
    reading: threading.Event = field(default_factory=threading.Event)
    """While it is clear, nobody reads the server's standard error."""

    def headers(self, key: str = "open") -> dict[str, str]:
        """The headers of a call with a key."""
        return {"content-type": "application/json"} | ({"authorization": f"Bearer {self.keys[key]}"} if self.keys else {})

    def pids(self, what: str) -> list[int]:
        """The processes whose command line holds `what`, the youngest last."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if what in " ".join(process.cmdline()):
                    found.append((process.create_time(), process.pid))
        return [pid for _, pid in sorted(found)]

    def send(self, what: str, number: signal.Signals) -> int:
        """A signal to the youngest process of this kind; returns its id. Raises StartError where there is none."""
        pids = self.pids(what)
        if not pids:
            raise StartError(f"no process of the server is {what!r}")
        os.kill(pids[-1], number)
        return pids[-1]

    def get(self, path: str, seconds: float = 5.0) -> tuple[int, str]:
        """(status, body) of a GET; (0, what went wrong) where there is no answer."""
        try:
            with urllib.request.urlopen(self.address.http + path, timeout=seconds) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def ready(self, seconds: float) -> bool:
        """True if a small call was answered within `seconds`."""
        body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{self.address.http}/v1/completions", body, self.headers())

        def has_answered() -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
                return bool(answer.status == 200)
            return False

        return wait_for(has_answered, seconds)

    def read_lines(self, pipe: int) -> None:
        """Read the server's standard error while `reading` is set; runs in a thread of its own until the pipe's end."""
        with open(pipe, "rb", buffering=0) as file:
            rest = b""
            while self.reading.wait() and (piece := file.read(1 << 16)):
                *whole, rest = (rest + piece).split(b"\n")
                self.lines += [line.decode(errors="replace") for line in whole]


def make_keys(folder: Path, *, same_key: bool = False) -> tuple[Path, dict[str, str]]:
    """A key file and its secrets by name, as `attend keys add` makes them: a neighbour's, one for short calls, an attacker's
    without limits, and a limited one. With `same_key` one key is all of them but the limited one.
    """
    path, secrets_of = folder / "keys.json", {}
    none: tuple[str, ...] = ()
    limits = {"neighbour": none, "quiet": none, "open": none, "limited": ("--requests-per-minute", "1", "--concurrent", "1")}
    for name, flags in [("gateway", none)] if same_key else limits.items():
        command = [sys.executable, "-m", "attend.service.commands.cli", "keys", "add", name, "--file", str(path), *flags]
        secrets_of[name] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    return path, dict.fromkeys(("neighbour", "quiet", "open"), secrets_of["gateway"]) if same_key else secrets_of


@contextlib.contextmanager
def start_target(
    flags: Sequence[str] = (),
    keys: dict[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    files: int | None = None,
) -> Iterator[Target]:
    """A server that has begun to start, with more variables than ours in its environment, and with the soft limit `files` on
    open files, as a login shell or systemd sets it. See `loadtest.server.started`.
    """
    limit = [] if files is None else ["sh", "-c", f'ulimit -Sn {files}; exec "$@"', "sh"]
    read, write = os.pipe()
    with server.start_server([*limit, *server.serve_command(*flags)], write, environment) as one:
        os.close(write)
        target = Target(one.address, one.process, one.mark, keys or {})
        target.reading.set()
        threading.Thread(target=target.read_lines, args=(read,), daemon=True).start()
        try:
            yield target
        finally:
            target.reading.set()


@contextlib.contextmanager
def running(
    flags: Sequence[str] = (),
    keys: dict[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    files: int | None = None,
) -> Iterator[Target]:
    """A server that is ready. Raises StartError with its last lines where it does not come up."""
    with start_target(flags, keys, environment, files) as target:

        def ready() -> bool:
            return target.process.poll() is not None or any("Ready:" in line for line in target.lines)

        if not wait_for(ready, START_SECONDS) or target.process.poll() is not None:
            raise StartError("the server was not ready:\n" + "\n".join(target.lines[-10:]))
        yield target
