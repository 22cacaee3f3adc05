"""`make soak`: a server of our own under steady load for half an hour, beside callers who do harm (HARM).

python -m loadtest.soak --minutes 30 --rate 40

What the server's processes hold is read every few seconds: memory, descriptors, threads, KV blocks, its files in /tmp.
At the end a line is fitted to each, from the end of the first fifth on. The exit code is 3 where one of them grew, or a call
failed.
"""

import argparse
import asyncio
import itertools
import json
import re
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from loadtest.faults.attacker import attacker
from loadtest.faults.attacks import ATTACKS
from loadtest.faults.target import Target, running, wait_for
from loadtest.load import OUT, locust
from loadtest.measures import MISSED
from loadtest.server import StartError

EVERY = 5.0
"""Seconds between two readings."""
HARM = ("callers who leave", "cancelled rpcs", "short deadlines", "errors", "deep bodies", "answers unread", "unknown fields")
"""Attacks that are made one after the other beside the load, each for a fifth of EVERY."""
WARM_SHARE = 0.2
"""Of the run, which is left out at its beginning: pools of threads and caches fill."""
GROWTH = {"memory_mb": 1.0, "descriptors": 0.5, "threads": 0.2, "files_mb": 0.5}
"""The most that a fitted line may rise in a minute."""
USED = re.compile(r"^attend_kv_cache_usage\{[^}]*\} (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sample:
    """What all processes of the server hold together."""

    seconds: float
    memory_mb: float
    """Resident, without what processes share."""
    descriptors: int
    threads: int
    files_mb: float
    """Of the server's own folders in /tmp."""
    blocks: float
    """Share of the KV blocks that requests hold."""


def sample(target: Target, start: float) -> Sample:
    """A reading of the server as it is now."""
    memory, descriptors, threads = 0, 0, 0
    for process in target.processes():
        with suppress(psutil.Error):
            memory += process.memory_full_info().uss
            descriptors += process.num_fds()
            threads += process.num_threads()
    _, text = target.get("/metrics")
    blocks = max((float(value) for value in USED.findall(text)), default=0.0)
    seconds, megabytes = time.monotonic() - start, files(target) / 2**20
    return Sample(seconds, memory / 2**20, descriptors, threads, megabytes, blocks)


def files(target: Target) -> int:
    """Bytes in the folders below /tmp that a process of the server has a file open in, or that it works in."""
    folders = set()
    for process in target.processes():
        with suppress(psutil.Error):
            paths = [Path(process.cwd()), *(Path(file.path) for file in process.open_files())]
            folders |= {own for path in paths if (own := folder_of(path)) is not None}
    total = 0
    for folder in folders:
        for path in folder.rglob("*"):
            with suppress(OSError):
                total += path.lstat().st_size
    return total


def folder_of(path: Path) -> Path | None:
    """The folder below /tmp that a file of a server's process lies in; of Ray's, that of its session alone."""
    parts = path.parts
    depth = 4 if parts[2:3] == ("ray",) else 3
    return Path(*parts[:depth]) if parts[:2] == ("/", "tmp") and len(parts) > depth else None


def slope(samples: Sequence[Sample], name: str) -> float:
    """How much a figure rises in a minute: least squares over the run without its first part."""
    some = samples[int(len(samples) * WARM_SHARE) :]
    times, values = [one.seconds / 60 for one in some], [float(getattr(one, name)) for one in some]
    return statistics.linear_regression(times, values).slope if len(set(times)) > 1 else 0.0


async def harm(target: Target, over: threading.Event) -> None:
    """HARM, round and round, until `over`."""
    for name in itertools.cycle(HARM):
        if over.is_set():
            return
        async with attacker(target) as one:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY / 5):
                    await ATTACKS[name].run(one)
        await asyncio.sleep(EVERY)


def soak(target: Target, rate: int, minutes: float) -> tuple[list[Sample], int]:
    """The readings of the run, and the exit code of locust. The last reading is of the idle server."""
    over, samples, started = threading.Event(), [], time.monotonic()

    def read() -> None:
        while not over.wait(EVERY):
            samples.append(sample(target, started))

    threads = [threading.Thread(target=read), threading.Thread(target=lambda: asyncio.run(harm(target, over)))]
    for thread in threads:
        thread.start()
    load = ["--loop", "open", "-u", str(rate), "-r", str(rate), "-t", f"{round(minutes * 60)}s", "--stop-timeout", "30"]
    with (OUT / "locust.log").open("w", encoding="utf-8") as log:  # at its end are the errors of calls that failed
        code = locust(target.address, OUT, load, stdout=log, stderr=log)
    over.set()
    for thread in threads:
        thread.join()
    wait_for(lambda: sample(target, started).blocks == 0, 10)
    return [*samples, sample(target, started)], code


def report(samples: Sequence[Sample], summary: dict[str, Any], rate: int) -> tuple[list[str], bool]:
    """The lines of the result, and whether nothing grew, no block is held at the end, and no call failed."""
    good, lines = True, []
    for name, most in GROWTH.items():
        rise = slope(samples, name)
        first, last = (getattr(one, name) for one in (samples[0], samples[-1]))
        good &= rise <= most
        lines.append(f"{name:<12} {first:>8.1f} to {last:>8.1f} {rise:>+8.3f} a minute  {'ok' if rise <= most else 'GREW'}")
    held = samples[-1].blocks
    calls = f"calls failed {summary['failed']}, refused {summary['refused']}, at {rate} requests a second"
    lines += [f"KV blocks held at the end: {held:.1%}; {calls}"]
    return lines, good and held == 0 and summary["failed"] == 0


def main(arguments: Sequence[str]) -> int:
    """0 where nothing grew, 1 where no server came up, 3 where something grew or failed."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30, help="length of the run (default 30)")
    parser.add_argument("--rate", type=int, required=True, help="requests a second: some 80 %% of what the machine can answer")
    options, flags = parser.parse_known_args(arguments)
    OUT.mkdir(exist_ok=True)
    (OUT / "summary.json").unlink(missing_ok=True)
    try:
        with running(flags) as target:
            samples, code = soak(target, options.rate, options.minutes)
    except StartError as error:
        print(error, file=sys.stderr)
        return 1
    if code not in (0, MISSED):
        print(f"locust ended with {code}", file=sys.stderr)
        return 1
    summary = json.loads((OUT / "summary.json").read_text(encoding="utf-8"))
    (OUT / "soak.json").write_text(json.dumps([asdict(one) for one in samples]), encoding="utf-8")
    lines, good = report(samples, summary, options.rate)
    print("\n".join(lines))
    return 0 if good else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
