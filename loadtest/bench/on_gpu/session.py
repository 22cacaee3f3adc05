"""The time of a run, the processes of its parts, and its rows, each of which is filed as soon as it is known.

A signal, or the end of the time, interrupts nothing: it leaves no time, so that what is under way is ended, what is to come is
left out, and the table is still printed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench.contestant import ENDED, TICK, TREE

Left = Callable[[], float]
"""Seconds that are left."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class Session:
    """`end`: when everything must be over (time.monotonic). `facts` stand in every line of the file at `path`."""

    end: float
    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)
    ended_by: str = ""
    """The signal that ended it before its time."""

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def time_left(self, seconds: float) -> Left:
        """What is left of so many seconds from now on, and of the session."""
        end = time.monotonic() + seconds
        return lambda: min(end, self.end) - time.monotonic()

    def listen(self) -> None:
        """From now on a signal ends the time, but one that whoever started this ignores, as nohup does."""
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda one, _: self.interrupt(one))

    def interrupt(self, number: int) -> None:
        """What a signal does."""
        self.ended_by = self.ended_by or signal.Signals(number).name
        self.end = min(self.end, time.monotonic())

    def note(self, kind: str, text: str, /, **values: Any) -> None:
        """Append a row to the file, down to the disk, and print it. A lack of either costs the other nothing."""
        line = {"kind": kind, "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **values}
        self.notes.append(line)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | {"facts": self.facts}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            say(f"{self.path} cannot be written: {error}")
        say(text)

    def lose(self, what: str, why: str) -> None:
        """Note a part that failed, or was not run."""
        self.note("failed", f"FAILED {what}: {why}", what=what, why=why)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The rows of a kind."""
        return [note for note in self.notes if note["kind"] == kind]


def say(text: str) -> None:
    """Print, even where nobody reads any more."""
    with suppress(OSError):
        print(text, flush=True)


def run(command: Sequence[object], log: Path, left: Left, more: Mapping[str, str] | None = None) -> int | None:
    """The exit code of a command whose output goes to `log`; None where it had no time left. Nothing of it stays behind."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=TREE,
            env=os.environ | dict(more or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while left() > 0:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(max(0.0, min(TICK, left())))
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one that hangs in a driver cannot be ended
                process.wait(ENDED)


def tail(log: Path, lines: int = 8) -> str:
    """The end of what a command printed."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def ask(session: Session, what: str, log: Path, left: Left, name: str, *words: object) -> list[dict[str, Any]]:
    """The objects of JSON that a module of this folder printed, a line each; a failure is noted.

    Libraries print what they like before and after them.
    """
    code = run([sys.executable, "-m", f"loadtest.bench.on_gpu.{name}", *words], log, left)
    if code != 0:
        session.lose(what, "it took too long" if code is None else tail(log))
    found = []
    for line in log.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            if line.startswith("{"):
                found.append(json.loads(line))
    return found
