"""Planned changes of a Serve application under callers: no call may fail, no stream may be cut, and no token be lost.

    python -m tests.deploy.updates --kind settings --times 20

Two replicas of deploy/serve/attend.yaml on Ray nodes of our own. Meanwhile small calls, plain streams and streams of our own
client go on over both transports. It prints a line for each change, and ends with 3 where callers noticed one.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.deploy.callers import Callers, Seen, seen
from tests.deploy.changes import CHANGES, Service, service
from tests.service.server import wait_for

AGAIN_SECONDS = 5.0
"""The most until both transports answer calls that began after a change."""
AFTER_SECONDS = 2.0
"""That callers still go on when a change is over."""


def make_change(one: Service, kind: str) -> tuple[float, Seen]:
    """One change under callers: how long it took, and what they saw. Raises RuntimeError where it does not come to an end."""
    before = one.uncut()
    with Callers(one.address).going_on() as callers:
        if not wait_for(callers.under_way, 120):
            raise RuntimeError(f"callers are not answered: {callers.plain} {callers.failed}")
        began = time.monotonic()
        CHANGES[kind](one)
        seconds = time.monotonic() - began
        time.sleep(AFTER_SECONDS)
    return seconds, seen(callers, began, before | one.uncut())


def is_unnoticed(saw: Seen) -> bool:
    """True if no caller noticed a change."""
    return not (saw.wrong or saw.given_up or saw.again > AGAIN_SECONDS or saw.failed or saw.broken)


def line(kind: str, number: int, seconds: float, saw: Seen) -> str:
    """What is said of a change when it is over."""
    what = Counter([*saw.failed, *saw.broken, *saw.given_up])
    return (
        f"{kind} {number}: {seconds:.0f} s; {saw.calls} calls, {len(saw.failed)} failed, slowest {saw.slowest:.2f} s, "
        f"again after {saw.again:.2f} s; {saw.streams} plain streams, {len(saw.broken)} cut; "
        f"{saw.answers} answers of our client, {saw.resumed} of several tries, {saw.wrong} wrong, {len(saw.given_up)} failed"
        + "".join(f"\n    {count} x {end}" for end, count in what.items())
    )


def main(words: Sequence[str] | None = None) -> int:
    """Make the changes; 3 where callers noticed one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=CHANGES, default=list(CHANGES), help="what to try (default: all)")
    parser.add_argument("--times", type=int, default=5, help="of each (default 5)")
    options = parser.parse_args(words)
    status = 0
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as one:
        for kind in options.kind:
            for number in range(1, options.times + 1):
                seconds, saw = make_change(one, kind)
                print(line(kind, number, seconds, saw), flush=True)
                status = status if is_unnoticed(saw) else 3
    return status


if __name__ == "__main__":
    sys.exit(main())
