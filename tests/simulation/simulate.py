"""`make simulate`: more lives of the scheduler, and of the whole service, than a run of the tests has time for.

python -m tests.simulation.simulate --lives 10000 --first 20000

A life of the service that breaks a law is made short: events are left out as long as it still does.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from unittest.mock import patch

from tests.model.engine import simulation
from tests.model.engine.simulation import Simulation
from tests.simulation.events import Event, events_of, told
from tests.simulation.life import Life

GROUPS = ("full", "windows", "states")
"""Groups of layers, in turns; see `Simulation`."""
SLACK = 5.0
"""In place of the simulation's own: one life in thousands learns what a step costs from unlucky steps alone."""
Report = tuple[str, int]
"""What broke, "" for nothing; and how many steps there were."""


def scheduler_life(seed: int, groups: str | None = None) -> Report:
    """A life of the scheduler alone."""
    groups = groups or GROUPS[seed % len(GROUPS)]
    try:
        with patch.object(simulation, "SLACK", SLACK):
            return "", len(Simulation(seed, groups=groups).run().runner.plans)
    except Exception:  # whatever it was, it is this seed's result
        return f"scheduler, seed {seed}, {groups}:\n{traceback.format_exc(limit=-3)}", 0


def service_life(seed: int) -> Report:
    """A life of the service."""
    try:
        return "", Life(seed).run().num_steps
    except Exception as error:
        events = shrunk(events_of(seed), partial(breaks, seed))
        last = "".join(traceback.format_exception(error, limit=-3))
        return f"service, seed {seed}:\n{last}these events are enough:\n{told(events)}", 0


def breaks(seed: int, events: Sequence[Event]) -> bool:
    """True if a life of these events breaks a law."""
    try:
        Life(seed, events).run()
    except Exception:
        return True
    return False


def shrunk(events: Sequence[Event], fails: Callable[[Sequence[Event]], bool]) -> list[Event]:
    """Some of the events, which still fail, and of which none can be left out: halves are tried first, then smaller parts."""
    kept, size = list(events), max(1, len(events) // 2)
    while True:
        at, before = 0, len(kept)
        while at < len(kept):
            fewer = kept[:at] + kept[at + size :]
            if fails(fewer):
                kept = fewer
            else:
                at += size
        if size == 1 and len(kept) == before:
            return kept
        size = max(1, size // 2)


KINDS: dict[str, Callable[[int], Report]] = {"scheduler": scheduler_life, "service": service_life}


def main(words: Sequence[str] | None = None) -> int:
    """The number of lives that broke a law, each named by its seed; at most 255, as an exit code is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=5000, help="of each kind; default 5000, some minutes on two cores")
    parser.add_argument("--first", type=int, default=10000, help="the first seed; the tests run those below the default, 10000")
    parser.add_argument("--only", choices=KINDS, action="append", help="lives of this kind alone")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; default: one a core")
    options = parser.parse_args(words)
    seeds, num_broken = range(options.first, options.first + options.lives), 0
    with ProcessPoolExecutor(options.workers) as workers:
        for kind in options.only or KINDS:
            started, steps, broken = time.monotonic(), 0, 0
            for fault, count in workers.map(KINDS[kind], seeds, chunksize=20):
                steps += count
                if fault:
                    broken += 1
                    print(fault, flush=True)
            seconds = time.monotonic() - started
            print(f"{kind}: {options.lives} lives, {steps} steps in {seconds:.0f} s; broken: {broken or 'none'}", flush=True)
            num_broken += broken
    return min(num_broken, 255)


if __name__ == "__main__":
    sys.exit(main())
