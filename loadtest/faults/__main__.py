"""`make faults`: attacks and deaths on a real server of our own, and a table of what its other callers saw.

python -m loadtest.faults --only "bad words" "replica frozen"

Loopback only. Each attack lasts --seconds, after a quiet stretch of the same length beside it. What is measured is kept in
loadtest/out/faults.json as it comes: --resume goes on where a run was ended. The exit code is 3 where a limit was missed.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from loadtest.bench.machine import machine
from loadtest.faults.attacker import attacker
from loadtest.faults.attacks import ATTACKS
from loadtest.faults.deaths import DEATHS
from loadtest.faults.measure import Measure
from loadtest.faults.neighbours import Seen, Watched, beside
from loadtest.faults.target import Target, make_keys, running
from loadtest.server import StartError

OUT = Path(__file__).parents[1] / "out" / "faults.json"
LEAST_GAP, TIMES_QUIET = 0.25, 3.0
"""A neighbour's gap may be so many seconds, or so many times the largest of a quiet stretch beside it."""
REFUSED_SECONDS = 0.05
SETTLE_SECONDS = 3.0
RECOVERY_SECONDS = 60.0
Found = dict[str, list[Measure]]


async def _attacked(target: Target, name: str, seconds: float) -> str:
    """Attack for so long; how the attacker's calls ended."""
    async with attacker(target) as one:
        try:
            async with asyncio.timeout(seconds):
                await ATTACKS[name](one)
        except TimeoutError:
            pass
        return ", ".join(f"{count} {what}" for what, count in one.outcomes.most_common(4)) or "none ended"


def median(values: Sequence[float]) -> float:
    """The middle value; nothing came: infinity."""
    return sorted(values)[len(values) // 2] if values else float("inf")


def judged(quiet: Seen, seen: Seen, outcomes: str) -> list[Measure]:
    """What the neighbours saw of an attack, beside what they saw before it."""
    most = max(LEAST_GAP, TIMES_QUIET * quiet.longest_gap())
    return [
        Measure("largest gap", seen.longest_gap() * 1e3, "ms", most * 1e3, f"quiet {quiet.longest_gap() * 1e3:.0f} ms"),
        Measure("limited key refused, median", median(seen.refusals) * 1e3, "ms", REFUSED_SECONDS * 1e3),
        Measure("limited key refused, longest", max(seen.refusals, default=float("inf")) * 1e3, "ms"),
        Measure("longest first token", max(seen.firsts, default=0.0) * 1e3, "ms"),
        Measure("turned away", seen.turned_away),
        Measure("broken", len(seen.failed), "", 0, ", ".join(sorted(set(seen.failed)))[:300]),
        Measure("the attacker's calls", 0, "", None, outcomes),
    ]


def try_attack(target: Target, watched: Watched, runner: asyncio.Runner, name: str, seconds: float) -> list[Measure]:
    """One attack beside the neighbours, and a quiet stretch before it."""
    watched.take()
    time.sleep(seconds)
    quiet = watched.take()
    outcomes = runner.run(_attacked(target, name, seconds))
    seen = watched.take()
    recovered = target.ready(RECOVERY_SECONDS)
    time.sleep(SETTLE_SECONDS)
    found = judged(quiet, seen, outcomes)
    return found if recovered else [*found, Measure("answering again", float("inf"), "s", RECOVERY_SECONDS)]


def try_attacks(names: Sequence[str], seconds: float, found: Found) -> None:
    """All attacks on one server."""
    with tempfile.TemporaryDirectory() as folder:
        path, keys = make_keys(Path(folder))
        # One event loop for all: gRPC has one poller in a process, and tells each loop it ever met.
        with running(("--api-keys-file", str(path)), keys) as target, beside(target) as watched, asyncio.Runner() as runner:
            time.sleep(SETTLE_SECONDS)
            for name in names:
                note(name, try_attack(target, watched, runner, name, seconds), found)


def note(name: str, measures: list[Measure], found: Found) -> None:
    """Keep what was measured, and say it."""
    found[name] = measures
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({name: [asdict(each) for each in one] for name, one in found.items()}, indent=1))
    print(
        f"{name}: " + "; ".join(f"{each.text()}{' [' + each.note + ']' if each.note else ''}" for each in measures), flush=True
    )


def table(found: Found) -> str:
    """The rows of a page: attacks, then deaths."""
    rows = ["| attack | largest gap, ms | quiet | limited key refused, ms | kept |", "| --- | --- | --- | --- | --- |"]
    for name in (name for name in ATTACKS if name in found):
        gap, refused, *_ = found[name]
        kept = "yes" if all(each.kept for each in found[name]) else "**no**"
        about = f"{name}: {(ATTACKS[name].__doc__ or '').strip()}"
        rows.append(f"| {about} | {gap.value:.0f} | {gap.note.removeprefix('quiet ')} | {refused.value:.0f} | {kept} |")
    rows += ["", "| death | measured | kept |", "| --- | --- | --- |"]
    for name in (name for name in DEATHS if name in found):
        kept = "yes" if all(each.kept for each in found[name]) else "**no**"
        said = "; ".join(each.text() for each in found[name])
        rows.append(f"| {(DEATHS[name].__doc__ or '').strip()} | {said} | {kept} |")
    return "\n".join(rows)


def read_found() -> Found:
    """What an earlier run has measured."""
    if not OUT.is_file():
        return {}
    return {name: [Measure(**each) for each in one] for name, one in json.loads(OUT.read_text()).items()}


def main(words: Sequence[str] | None = None) -> int:
    """Try, say, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*ATTACKS, *DEATHS], help="these, not all")
    parser.add_argument("--resume", action="store_true", help="leave out what the last run has measured")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of an attack (default 8)")
    parser.add_argument("--list", action="store_true", help="say what there is, and try nothing")
    options = parser.parse_args(words)
    if options.list:
        print("\n".join(f"{name}: {(one.__doc__ or '').strip()}" for name, one in (ATTACKS | DEATHS).items()))
        return 0
    found = read_found() if options.resume else {}
    names = [name for name in options.only or [*ATTACKS, *DEATHS] if name not in found]
    attacks = [name for name in names if name in ATTACKS]
    try:
        if attacks:
            try_attacks(attacks, options.seconds, found)
        for name in (name for name in names if name in DEATHS):
            note(name, DEATHS[name](), found)
    except StartError as error:
        print(error, file=sys.stderr)
        return 1
    about = machine()
    print(f"\n{table(found)}\n\n{about['cores']} cores of {about['processor']} ({', '.join(about['flags'])})")
    return 0 if all(each.kept for one in found.values() for each in one) else 3


if __name__ == "__main__":
    sys.exit(main())
