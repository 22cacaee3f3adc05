"""Attacks, one after the other, on one server of a setting: a quiet stretch, the attack, until it has settled, the next one."""

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.faults import judge
from loadtest.faults.attack import ATTACKS, KEYS, sensible
from loadtest.faults.attacker import attacker
from loadtest.faults.judge import Measure
from loadtest.faults.neighbours import NeighbourProcess, Observation, run_neighbours
from loadtest.faults.target import REPLICA, Target, make_keys, running

SERVES = ("single", "ray")
FLAGS = ("--pooling", "mean", "--score", "cosine")
"""So that the default model embeds and ranks too."""
QUIET = 0.5
"""Of an attack's length."""
SETTLE_SECONDS, RECOVERY_SECONDS, FILES_SECONDS, START_SECONDS = 0.5, 60.0, 10.0, 2.0
END_SECONDS = 20.0
"""For an attack that is done with a few calls."""
LEAST_SECONDS = 1.5
"""The neighbours need so long to see something."""
AGAIN_SECONDS = 10.0
"""In which the server must answer again."""
UNFIT = 10.0
"""A server whose streams are so many times slower after an attack has not got over it: the next attack has another one."""
OTHER_ADDRESS = "127.0.0.2"
"""Where callers have no keys, the neighbours call from another address than the attacker; probes share his."""
EVERY, NEW_PROCESSES = 0.2, 10
"""Seconds between two looks at what a server holds, and looks between two searches for new processes."""
Note = Callable[[str, list[Measure]], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a server runs, and how its callers are known: see SERVES and KEYS."""

    serve: str
    keys: str

    def __str__(self) -> str:
        return f"{self.serve}, {SAID[self.keys]}"


SAID = dict(zip(KEYS, ("a key each", "one shared key", "no keys"), strict=True))


def settings(serve: str | None = None, keys: str | None = None) -> list[Setting]:
    """Those that options name. By default `single` with all keys, and `ray` with a key each."""
    found = []
    for one in [serve] if serve else SERVES:
        usual = KEYS if one == "single" else KEYS[:1]
        found += [Setting(one, each) for each in ([keys] if keys else usual)]
    return found


@contextlib.contextmanager
def server_of(setting: Setting) -> Iterator[Target]:
    """A server of a setting that is ready."""
    flags = [*FLAGS, *(["--single"] if setting.serve == "single" else [])]
    with tempfile.TemporaryDirectory() as folder:
        flags += ["--batch-folder", folder]
        if setting.keys == "none":  # as OpenAI's clients, which always send a header
            keys = dict.fromkeys(("neighbour", "quiet", "open"), "none")
        else:
            path, keys = make_keys(Path(folder), same_key=setting.keys == "shared")
            flags += ["--api-keys-file", str(path)]
        with running(flags, keys, files=1024) as target:
            yield target


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


async def _attack(target: Target, name: str, seconds: float) -> list[Measure]:
    """Attack for so long, or until it is done, and LEAST_SECONDS at least; what it checked, and how its calls ended."""
    began = time.monotonic()
    async with attacker(target) as one:
        try:
            async with asyncio.timeout(END_SECONDS if ATTACKS[name].ends else seconds):
                await ATTACKS[name].run(one)
        except* TimeoutError:
            if ATTACKS[name].ends:
                one.check("calls without an end", 1)
        except* Exception as group:
            one.check("the attack itself failed", 1, 0, repr(group.exceptions))
        await asyncio.sleep(max(0.0, LEAST_SECONDS - (time.monotonic() - began)))
        outcomes = ", ".join(f"{count} {what}" for what, count in one.outcomes.most_common(4)) or "none ended"
        return [*one.checks, Measure("the attacker's calls", 0, "", None, outcomes)]


@dataclass
class Trial:
    """A server that is attacked, and who watches."""

    target: Target
    neighbours: NeighbourProcess
    runner: asyncio.Runner
    setting: Setting
    seconds: float
    quiet: Observation

    def stretch(self) -> Observation:
        """What the neighbours see when nothing else is done."""
        self.neighbours.take()
        time.sleep(self.seconds * QUIET)
        return self.neighbours.take()

    def attack(self, name: str) -> tuple[list[Measure], bool]:
        """What came of one attack, and whether the server is fit for the next one."""
        before, replicas = use(self.target), set(self.target.pids(REPLICA))
        self.neighbours.take()
        with highest_use(self.target) as most:
            checked = self.runner.run(_attack(self.target, name, self.seconds))
            seen = self.neighbours.take()
        again = self._recovery_seconds()
        left = files_come_back(self.target, before.files + judge.FILES, FILES_SECONDS)
        seen, after = seen.with_end(self.neighbours.take()), self.stretch()
        may_refuse = ATTACKS[name].fills and self.setting.keys != "each"
        measures = [
            *judge.streams(self.quiet, seen, may_refuse=may_refuse),
            *(judge.refusals(seen, is_attacker=name.endswith("of a limited key")) if "limited" in self.target.keys else ()),
            *judge.server(most.memory - before.memory, left + judge.FILES if left else 0, again, AGAIN_SECONDS),
            Measure("replicas lost", len(replicas - set(self.target.pids(REPLICA))), "", 0),
            *judge.afterwards(self.quiet, after),
            *checked,
        ]
        fit = again < RECOVERY_SECONDS and judge.times(self.quiet.speed(), after.speed()) < UNFIT
        self.quiet = after
        return measures, fit

    def _recovery_seconds(self) -> float:
        """Seconds until the server answers again."""
        began = time.monotonic()
        answers = self.target.ready(RECOVERY_SECONDS)
        again = time.monotonic() - began
        time.sleep(SETTLE_SECONDS)
        return again if answers else float("inf")


def try_attacks(setting: Setting, names: Sequence[str], seconds: float, note: Note) -> None:
    """All of them that make sense in a setting. Where one has left the server unfit, the next one has a new server."""
    left = sensible(names, setting.keys)
    address = OTHER_ADDRESS if setting.keys == "none" else ""
    # One event loop for all: gRPC has one poller in a process, and tells each loop it ever met.
    with asyncio.Runner() as runner:
        while left:
            with server_of(setting) as target, run_neighbours(target, address) as watched:
                time.sleep(START_SECONDS)
                trial = Trial(target, watched, runner, setting, seconds, Observation())
                trial.quiet, fit = trial.stretch(), True
                while left and fit:
                    name = left.pop(0)
                    measures, fit = trial.attack(name)
                    note(name, measures)
