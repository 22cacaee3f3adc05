"""`make faults`: attacks and deaths on real servers of our own, and a table of what their other callers saw.

python -m loadtest.faults --serve single --keys none --only "bad words" "silent rpcs"

Loopback only. By default the attacks run on `--single` with a key for each caller, with one key for all and without keys, and
on Ray Serve with a key each; the deaths run on Ray Serve. Each attack lasts --seconds, with a quiet stretch between two. What
is measured is kept in loadtest/out/faults.json as it comes: --resume goes on where a run was ended. The exit code is 3 where a
limit was missed.
"""

import argparse
import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from loadtest.bench.machine import machine
from loadtest.faults.attack import KEYS, sensible
from loadtest.faults.attacks import ATTACKS
from loadtest.faults.deaths import DEATHS
from loadtest.faults.judge import Measure
from loadtest.faults.trial import SERVES, Setting, settings, try_attacks
from loadtest.server import StartError

OUT = Path(__file__).parents[1] / "out" / "faults.json"
DEATH = "deaths"
Results = dict[str, dict[str, list[Measure]]]
"""By setting, or DEATH, and name."""


def note(results: Results, place: str, name: str, measures: list[Measure]) -> None:
    """Keep what was measured, and say it."""
    results.setdefault(place, {})[name] = measures
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(
        json.dumps({place: {name: [*map(asdict, one)] for name, one in each.items()} for place, each in results.items()})
    )
    verdict = (
        "kept"
        if all(each.within_limit for each in measures)
        else "MISSED " + "; ".join(measure_text(e) for e in measures if not e.within_limit)
    )
    others = "; ".join(measure_text(each) for each in measures if each.within_limit)
    print(f"{place}: {name}: {verdict} | {others}", flush=True)


def measure_text(measure: Measure) -> str:
    """A measure with its note."""
    return measure.text() + (f" [{measure.note}]" if measure.note else "")


def table(results: Results) -> str:
    """The rows of a page: attacks by setting, then deaths."""
    columns = {
        "slower": "streams slower, times",
        "p99 gap, ms": "p99 gap",
        "largest": "largest gap",
        "longest chat, ms": "longest chat",
        "probe, ms": "longest probe",
        "memory, MiB": "memory",
    }
    rows = []
    for place in (place for place in results if place != DEATH):
        rows += [f"| {place}: attack | {' | '.join(columns)} | kept |", "| --- " * (len(columns) + 2) + "|"]
        for name in (name for name in ATTACKS if name in results[place]):
            measures = {each.what: each for each in results[place][name]}
            values = " | ".join(f"{measures[what].value:.3g}" if what in measures else "" for what in columns.values())
            missed = "; ".join(each.text() for each in measures.values() if not each.within_limit)
            rows.append(f"| {name}: {ATTACKS[name].about} | {values} | {f'**no**: {missed}' if missed else 'yes'} |")
        rows.append("")
    deaths = results.get(DEATH, {})
    rows += ["| death | measured | kept |", "| --- | --- | --- |"] if deaths else []
    for name in (name for name in DEATHS if name in deaths):
        kept = "yes" if all(each.within_limit for each in deaths[name]) else "**no**"
        rows.append(f"| {(DEATHS[name].__doc__ or '').strip()} | {'; '.join(each.text() for each in deaths[name])} | {kept} |")
    return "\n".join(rows)


def read_found() -> Results:
    """What an earlier run has measured."""
    if not OUT.is_file():
        return {}
    kept = json.loads(OUT.read_text())
    return {place: {name: [Measure(**m) for m in one] for name, one in each.items()} for place, each in kept.items()}


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", choices=SERVES, help="this server alone")
    parser.add_argument("--keys", choices=KEYS, help="callers with a key each, with one shared key, or with none alone")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*ATTACKS, *DEATHS], help="these, not all")
    parser.add_argument("--resume", action="store_true", help="leave out what the last run has measured")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of an attack (default 4)")
    parser.add_argument("--list", action="store_true", help="say what there is, and try nothing")
    return parser.parse_args(words)


def run(options: argparse.Namespace, results: Results) -> None:
    """Try what the options name and `results` lacks. Raises StartError."""
    names = options.only or [*ATTACKS, *DEATHS]
    for setting in settings(options.serve, options.keys):
        lacking = [name for name in names if name not in results.get(str(setting), {})]
        if sensible(lacking, setting.keys):
            try_attacks(setting, lacking, options.seconds, partial(note, results, str(setting)))
    if Setting("ray", "each") in settings(options.serve, options.keys):
        for name in (name for name in names if name in DEATHS and name not in results.get(DEATH, {})):
            note(results, DEATH, name, DEATHS[name]())


def main(words: Sequence[str] | None = None) -> int:
    """Try, say, judge."""
    options = parse_options(words)
    if options.list:
        print("\n".join(f"{name}: {one.about} ({', '.join(one.keys)})" for name, one in ATTACKS.items()))
        print("\n".join(f"{name}: {(one.__doc__ or '').strip()}" for name, one in DEATHS.items()))
        return 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the attacker's connections
    found = read_found() if options.resume else {}
    try:
        run(options, found)
    except StartError as error:
        print(error, file=sys.stderr)
        return 1
    about = machine()
    print(f"\n{table(found)}\n\n{about['cores']} cores of {about['processor']} ({', '.join(about['flags'])})")
    return 0 if all(each.within_limit for place in found.values() for one in place.values() for each in one) else 3


if __name__ == "__main__":
    sys.exit(main())
