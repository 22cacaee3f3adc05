"""`make simulate`: more lives than a run of the tests has time for.

python -m tests.simulation.simulate --lives 10000 --first 20000

A life that breaks a law is made short: events are left out as long as it still does.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial

from tests.simulation.events import Event, events_of, told
from tests.simulation.life import Life

Report = tuple[str, int]
"""What broke, "" for nothing; and how many steps there were."""


def live(seed: int) -> Report:
    """A life under a seed."""
    try:
        return "", Life(seed).run().num_steps
    except Exception as error:  # whatever it was, it is this seed's result
        events = shrunk(events_of(seed), partial(breaks, seed))
        last = "".join(traceback.format_exception(error, limit=-3))
        return f"seed {seed}:\n{last}these events are enough:\n{told(events)}", 0


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


def main(words: Sequence[str] | None = None) -> int:
    """The number of lives that broke a law, each named by its seed; at most 255, as an exit code is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=5000, help="default 5000, some minutes on two cores")
    parser.add_argument("--first", type=int, default=10000, help="the first seed; the tests run those below the default, 10000")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; default: one a core")
    options = parser.parse_args(words)
    seeds = range(options.first, options.first + options.lives)
    started, steps, broken = time.monotonic(), 0, 0
    with ExitStack() as stack:
        reports: Iterable[Report] = map(live, seeds)  # the threads that compute masks would not outlive a fork
        if options.workers > 1:
            reports = stack.enter_context(ProcessPoolExecutor(options.workers)).map(live, seeds, chunksize=20)
        for fault, count in reports:
            steps += count
            if fault:
                broken += 1
                print(fault, flush=True)
    seconds = time.monotonic() - started
    print(f"{options.lives} lives, {steps} steps in {seconds:.0f} s; broken: {broken or 'none'}", flush=True)
    return min(broken, 255)


if __name__ == "__main__":
    sys.exit(main())
