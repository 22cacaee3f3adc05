"""Changes of a Serve application under callers, and losses of its parts: does a call fail, is a stream cut, is a token lost?

    python -m tests.deploy.updates --kind settings --times 20
    python -m tests.deploy.updates --resume

Two replicas of deploy/serve/attend.yaml on Ray nodes of our own. Meanwhile small calls, plain streams and streams of our own
client go on over both transports. It prints a line for each change, keeps what callers saw in loadtest/out/updates.json as it
comes, and then prints the table. --resume goes on where a run was ended. It ends with 3 where a limit was missed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from attend.service.client.errors import CallFailed
from tests.deploy.callers import Callers, Seen, seen
from tests.deploy.changes import BEFORE, CHANGES, Service, service
from tests.deploy.manifests import ROOT
from tests.service.server import wait_for

OUT = ROOT / "loadtest/out/updates.json"
PLANNED = ("settings", "model", "code", "node", "autoscale")
"""Of these no caller may notice anything; of the others each answer of our client must be whole."""
APART = "node"
"""Its callers go through the head, since the node of the replicas leaves."""
AGAIN_SECONDS = 5.0
"""The most until both transports answer calls that began after a change."""
AFTER_SECONDS = 2.0
"""That callers still go on when a change is over."""
Found = dict[str, list[tuple[float, Seen]]]
"""By kind: how long each change took, and what callers saw."""


def tried(one: Service, kind: str) -> tuple[float, Seen]:
    """One change under callers. Raises RuntimeError where it does not come to an end."""
    before = one.uncut()
    if kind in BEFORE:
        BEFORE[kind](one)
    with Callers(one.address).going_on() as callers:
        if not wait_for(callers.under_way, 120):
            raise RuntimeError(f"callers are not answered: {callers.plain} {callers.failed}")
        began = time.monotonic()
        CHANGES[kind](one)
        seconds = time.monotonic() - began
        time.sleep(AFTER_SECONDS)
    return seconds, seen(callers, began, before | one.uncut())


def kept(kind: str, found: Seen) -> bool:
    """True if callers saw no more of a change than they may."""
    lost = found.wrong or found.given_up or found.again > AGAIN_SECONDS
    return not lost and not (kind in PLANNED and (found.failed or found.broken))


def line(kind: str, number: int, seconds: float, found: Seen) -> str:
    """What is said of a change when it is over."""
    last = f" (last begun at {found.last_failure:.1f} s)" if found.failed else ""
    what = Counter([*found.failed, *found.broken, *found.given_up])
    return (
        f"{kind} {number}: {seconds:.0f} s; {found.calls} calls, {len(found.failed)} failed{last}, "
        f"slowest {found.slowest:.2f} s, again after {found.again:.2f} s; "
        f"{found.streams} plain streams, {len(found.broken)} cut; "
        f"{found.answers} answers of our client, {found.resumed} of several tries, {found.wrong} wrong, "
        f"{len(found.given_up)} failed" + "".join(f"\n    {count} x {end}" for end, count in what.items())
    )


def table(found: Mapping[str, Sequence[tuple[float, Seen]]]) -> str:
    """The rows of a page."""
    rows = [
        "| what | times | failed of all calls | cut of all plain streams | our client's answers: resumed, wrong, failed | "
        "answered again, s | slowest call, s | all as before, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in (kind for kind in CHANGES if found.get(kind)):
        all_seen = [one for _, one in found[kind]]
        failed, broken = (sum(len(getattr(one, name)) for one in all_seen) for name in ("failed", "broken"))
        calls, streams, answers, resumed, wrong = (
            sum(getattr(one, name) for one in all_seen) for name in ("calls", "streams", "answers", "resumed", "wrong")
        )
        given_up = sum(len(one.given_up) for one in all_seen)
        again, slowest = (max(getattr(one, name) for one in all_seen) for name in ("again", "slowest"))
        longest = max(seconds for seconds, _ in found[kind])
        about = (CHANGES[kind].__doc__ or "").strip()
        rows.append(
            f"| {about} | {len(all_seen)} | {failed} of {calls} | {broken} of {streams} | {resumed} of {answers}, {wrong}, "
            f"{given_up} | {again:.2f} | {slowest:.2f} | {longest:.0f} |"
        )
    return "\n".join(rows)


def read_found() -> Found:
    """What an earlier run has seen."""
    if not OUT.is_file():
        return {}
    lists = {field.name for field in fields(Seen) if str(field.type).startswith("tuple")}

    def back(one: dict) -> Seen:
        return Seen(**{name: tuple(value) if name in lists else value for name, value in one.items()})

    return {kind: [(seconds, back(one)) for seconds, one in each] for kind, each in json.loads(OUT.read_text()).items()}


def keep(found: Found) -> None:
    """Write down what was seen so far."""
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({kind: [(seconds, asdict(one)) for seconds, one in each] for kind, each in found.items()}))


def try_kinds(kinds: Sequence[str], times: int, found: Found) -> Iterator[str]:
    """So many changes of each kind, those counted that are found already, on one cluster as long as each comes to an end.

    Yields what went wrong where one did not.
    """
    left = [kind for kind in kinds if len(found.setdefault(kind, [])) < times]
    while left:
        apart = (kind := left[0]) == APART
        try:
            with tempfile.TemporaryDirectory() as folder, service(Path(folder), through_head=apart) as one:
                while left and (left[0] == APART) == apart:
                    known = found[kind := left[0]]
                    while len(known) < times:
                        known.append(tried(one, kind))
                        print(line(kind, len(known), *known[-1]), flush=True)
                        keep(found)
                    left.pop(0)
        except (RuntimeError, AssertionError, CallFailed) as error:  # the cluster asserts that its own commands succeed
            left.remove(kind)
            yield f"{kind}: {error}"


def main(words: Sequence[str] | None = None) -> int:
    """0, 1 where a change did not come to an end, 3 where a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=CHANGES, default=list(CHANGES), help="what to try (default: all)")
    parser.add_argument("--times", type=int, default=5, help="of each (default 5)")
    parser.add_argument("--resume", action="store_true", help="count in what the last run has seen")
    options = parser.parse_args(words)
    found, failures = read_found(), []
    if not options.resume:
        found = {kind: known for kind, known in found.items() if kind not in options.kind}
    for failure in try_kinds(options.kind, options.times, found):
        failures.append(failure)
        print(failure, file=sys.stderr, flush=True)
    print(table(found))
    if failures:
        return 1
    return 0 if all(kept(kind, one) for kind in options.kind for _, one in found[kind]) else 3


if __name__ == "__main__":
    sys.exit(main())
