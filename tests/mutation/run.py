"""Do the tests bite? A sample of mutants of `service/` and `model/engine/`, each tried by the tests that reach its line.

Run `make mutants`; a later run goes on. Everything lies in `mutants/`:

- `tree`, a copy of this tree, whose code stays as it was when the sample was drawn;
- `.coverage` and `tests.json`: which test reaches which line, and how many seconds it took;
- `results.jsonl`: a line for each mutant that was tried.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import coverage

from tests.mutation.changes import Mutant, mutants
from tests.mutation.plugin import COLD, LIMIT_S

ROOT = Path(__file__).parent.parent.parent
HOME = ROOT / "mutants"
TREE, COVERED, TESTS, RESULTS = HOME / "tree", HOME / ".coverage", HOME / "tests.json", HOME / "results.jsonl"
PLANTED = HOME / "planted.json"
ROOMS = ("service", "model/engine")
FOLDERS = ["tests/service", "tests/model/engine", "tests/model/parallel", "tests/simulation", "tests/wire"]
QUICK = [
    "-m",
    "not (ray or cluster or clients or long)",
    "--cases-seed",
    "mutants",
    "-p",
    "tests.mutation.plugin",
    "-p",
    "no:cacheprovider",
    "-q",
]
SEED, COUNT = 200, 200
MAX_S, MAX_TESTS, MAX_FILES = 40.0, 250, 4
"""Of the tests that reach a line the nearest run: so many, so many seconds of them as recorded, and of what an import runs
those of so many files.
"""
CASES, ALL_CASES = 2, 1000
"""Of each test so many are recorded and tried. Survivors are tried `--again` by all of them."""
ALIVE = ("survived", "timeout", "unreached")


@dataclass(frozen=True)
class Result:
    """What became of mutant `number` of the sample: killed (`by` a test), survived, timeout, or unreached."""

    number: int
    name: str
    state: str
    tests: int
    by: str
    seconds: float


def copy_tree() -> None:
    """The code as it is now, and the tests as they are now: the code only the first time."""
    ignored = shutil.ignore_patterns(".git", "mutants", "__pycache__", ".*_cache", "build", "out")
    if not TREE.exists():
        shutil.copytree(ROOT, TREE, symlinks=True, ignore=ignored)
    else:
        shutil.copytree(ROOT / "tests", TREE / "tests", symlinks=True, ignore=ignored, dirs_exist_ok=True)


def run_tests(arguments: list[str], cases: int, limit_s: float | None = None, **variables: str) -> tuple[int | None, str]:
    """Exit code and output of pytest in the copy. No code: it took longer than `limit_s`."""
    paths = os.pathsep.join([str(TREE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | variables
    command = [sys.executable, "-m", "pytest", *QUICK, "--cases", str(cases), *arguments]
    output = HOME / "output.txt"
    with output.open("w") as out:
        process = subprocess.Popen(command, cwd=TREE, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it left behind too
            process.wait()
    return code, output.read_text(errors="replace")


def record(folders: list[str]) -> None:
    """Run the tests of these folders once, and add to what is known of them."""
    print(f"recording which lines the tests of {', '.join(folders)} reach", flush=True)
    _, output = run_tests(folders, CASES, ATTEND_TEST_MUTANTS_RECORD=str(HOME))
    print(output[-3000:])


def sample() -> list[Mutant]:
    """Lines are drawn, so that a file has its share by its lines; of each line one mutant."""
    lines: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for room in ROOMS:
        for path in sorted((TREE / room).rglob("*.py")):
            for mutant in mutants(path.relative_to(TREE).as_posix(), path.read_text(encoding="utf-8")):
                lines[mutant.path, mutant.line].append(mutant)
    draw = random.Random(SEED)
    print(f"{sum(map(len, lines.values()))} mutants in {len(lines)} lines", flush=True)
    return [draw.choice(lines[line]) for line in draw.sample(sorted(lines), COUNT)]


class Reach:
    """Which tests reach a mutant, nearest first."""

    def __init__(self, wide: bool = False) -> None:
        """`wide`: of a function's mutant, those that reach the function. The case that reaches the line may not be recorded."""
        self.wide = wide
        self.data = coverage.CoverageData(str(COVERED))
        self.data.read()
        self.seconds: dict[str, float] = json.loads(TESTS.read_text())

    def tests(self, mutant: Mutant) -> list[str]:
        """Functions: its file's own first; then a few of each file, those of its folder and quick ones before others."""
        own = f"tests/{Path(mutant.path).parent}/"
        reached = self.data.contexts_by_lineno(str(TREE / mutant.path))
        lines = mutant.scope if self.wide and self.is_seen(mutant) else mutant.span
        found = {test for line in lines for test in reached.get(line, ()) if test in self.seconds}
        if not found and any(line in reached for line in mutant.span):  # the import runs it: constants, and defaults
            found = {test for tests in reached.values() for test in tests if test in self.seconds}
            found = found or {test for test in self.seconds if test.startswith(own)}
        mine = f"{own}test_{Path(mutant.path).stem}"
        found = found or {test for test in self.seconds if test.startswith(mine)}  # which may run it in another process
        ranks: dict[str, int] = {}
        places: Counter[str] = Counter()
        for test in sorted(found, key=self.seconds.__getitem__):
            ranks[test] = 0 if test.startswith(mine) else 1 + places[test.partition("::")[0]] // 5
            places[test.partition("::")[0]] += 1
        order = sorted(found, key=lambda test: (ranks[test], not test.startswith(own), self.seconds[test]))
        if not self.is_seen(mutant):  # a process of its own has to import them
            files = list(dict.fromkeys(test.partition("::")[0] for test in order))[:MAX_FILES]
            order = [test for test in order if test.partition("::")[0] in files]
        return list(dict.fromkeys(test.partition("[")[0] for test in self.within(order)))

    def is_seen(self, mutant: Mutant) -> bool:
        """True if a test runs it in its own process, in a function."""
        reached = self.data.contexts_by_lineno(str(TREE / mutant.path))
        return bool(mutant.function) and any(test in self.seconds for line in mutant.span for test in reached.get(line, ()))

    def within(self, order: list[str]) -> Iterator[str]:
        total = 0.0
        for test in order[:MAX_TESTS]:
            total += self.seconds[test]
            if total > MAX_S and test != order[0]:
                return
            yield test


def take_out() -> None:
    """Make the copy whole again, also after a run that was killed."""
    if PLANTED.exists():
        path, source = json.loads(PLANTED.read_text())
        Path(path).write_text(source, encoding="utf-8")
        PLANTED.unlink()


def attempt(number: int, mutant: Mutant, tests: list[str], cases: int) -> None:
    """Plant it in the copy, run its tests in a process of their own until one fails, and take it out again."""
    begun = time.monotonic()
    path = TREE / mutant.path
    source = path.read_text(encoding="utf-8")
    (HOME / "choice.txt").write_text("\n".join(tests))
    state, by = "unreached", ""
    if tests:
        try:
            PLANTED.write_text(json.dumps([str(path), source]))
            path.write_text(mutant.applied(source), encoding="utf-8")
            files = sorted({test.partition("::")[0] for test in tests})
            code, output = run_tests(["-x", *files], cases, LIMIT_S, ATTEND_TEST_MUTANTS_CHOICE=str(HOME / "choice.txt"))
        finally:
            take_out()
        state = "timeout" if code is None else "survived" if code == 0 else "killed"
        if state == "killed":
            names = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
            by = names[0] if names else output.strip().splitlines()[-1][:200]
    result = Result(number, mutant.name, state, len(tests), by, round(time.monotonic() - begun, 1))
    with RESULTS.open("a") as out:
        out.write(json.dumps(asdict(result)) + "\n")


def attempt_together(numbered: dict[int, Mutant], reach: Reach, cases: int) -> None:
    """Try mutants of functions in one process, which collects the tests once."""
    plan = [
        {
            "number": number,
            "name": mutant.name,
            "path": mutant.path,
            "text": mutant.applied((TREE / mutant.path).read_text(encoding="utf-8")),
            "tests": reach.tests(mutant),
        }
        for number, mutant in numbered.items()
    ]
    (HOME / "plan.json").write_text(json.dumps(plan))
    files = sorted({test.partition("::")[0] for planned in plan for test in planned["tests"]})
    code, output = run_tests(files, cases, ATTEND_TEST_MUTANTS_TRY=str(HOME))
    if code:
        raise SystemExit(f"pytest ended with {code}:\n{output[-3000:]}")


def equivalent() -> dict[str, str]:
    """Mutants that no test can kill, and why."""
    return tomllib.loads((ROOT / "tests/mutation/equivalent.toml").read_text(encoding="utf-8"))


def results() -> dict[str, Result]:
    """The last that is known of each mutant."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {result.name: result for result in (Result(**json.loads(line)) for line in lines)}


def report(chosen: dict[int, Mutant]) -> None:
    known, same = results(), equivalent()
    states = Counter("equivalent" if name in same else known[name].state for name in known)
    counted = sum(states.values()) - states["equivalent"]
    for mutant in chosen.values():
        if (result := known.get(mutant.name)) and result.state in ALIVE and mutant.name not in same:
            print(f"#{result.number} {result.state} ({result.tests} tests): {mutant.name}")
    print(f"{len(known)} of {len(chosen)} tried: {dict(states)}; killed {states['killed'] / max(counted, 1):.0%} of {counted}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--again", action="store_true", help="try those again that live, by all cases of the tests as they are now"
    )
    parser.add_argument(
        "--record", nargs="+", default=[], metavar="TESTS", help="note what these tests reach, new ones for instance"
    )
    parser.add_argument("--only", nargs="+", type=int, default=[], metavar="NUMBER", help="only these of the sample, and again")
    parser.add_argument("--report", action="store_true", help="say how it stands, and try none")
    options = parser.parse_args()
    HOME.mkdir(exist_ok=True)
    if not options.report:
        copy_tree()
        take_out()
        if not COVERED.exists() or options.record:
            record(options.record or FOLDERS)
    chosen = dict(enumerate(sample()))
    if not options.report:
        known, same = {name: result for name, result in results().items() if result.state != COLD}, equivalent()
        alive = {name for name, result in known.items() if result.state in ALIVE and name not in same}
        wanted = {
            number: mutant
            for number, mutant in chosen.items()
            if (number in options.only if options.only else mutant.name in alive if options.again else mutant.name not in known)
        }
        reach, cases = Reach(options.again), ALL_CASES if options.again else CASES
        attempt_together({number: mutant for number, mutant in wanted.items() if reach.is_seen(mutant)}, reach, cases)
        known = results()
        for number, mutant in wanted.items():
            if not reach.is_seen(mutant) or mutant.name not in known or known[mutant.name].state == COLD:
                attempt(number, mutant, reach.tests(mutant), cases)
    report(chosen)


if __name__ == "__main__":
    main()
