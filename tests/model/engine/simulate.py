"""`make simulate`: more lives of the scheduler than a run of the tests has time for.

python -m tests.model.engine.simulate --lives 10000 --first 300
"""

import argparse
import sys
import time
import traceback
from collections.abc import Sequence

from tests.model.engine.simulation import Simulation

GROUPS = ("full", "windows", "states")
"""Groups of layers, in turns; see `Simulation`."""


def main(words: Sequence[str] | None = None) -> int:
    """The number of lives that broke a law, each named by its seed; at most 255, as an exit code is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=5000, help="default 5000, some minutes on one core")
    parser.add_argument("--first", type=int, default=300, help="the first seed; the tests run those below 300, the default")
    options = parser.parse_args(words)
    broken, started = [], time.monotonic()
    for seed in range(options.first, options.first + options.lives):
        groups = GROUPS[seed % len(GROUPS)]
        try:
            Simulation(seed, groups=groups).run()
        except Exception:  # whatever it was, it is this seed's result
            broken.append(seed)
            print(f"seed {seed}, {groups}:\n{traceback.format_exc(limit=-3)}", flush=True)
    print(f"{options.lives} lives in {time.monotonic() - started:.0f} s; broken: {broken or 'none'}")
    return min(len(broken), 255)


if __name__ == "__main__":
    sys.exit(main())
