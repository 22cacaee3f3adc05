"""`make simulate`: more lives than a run of the tests has time for.

python -m tests.simulation.simulate --lives 10000 --first 20000
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack

from tests.simulation.life import Life

Report = tuple[str, int]
"""What broke, "" for nothing; and how many steps there were."""


def live(seed: int) -> Report:
    """A life under a seed."""
    try:
        return "", Life(seed).run().num_steps
    except Exception as error:  # whatever it was, it is this seed's result
        return f"seed {seed}:\n{''.join(traceback.format_exception(error, limit=-3))}", 0


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
