"""What `tests/mutation/run.py` does inside of pytest: it records what each test reaches, and tries mutants in turn."""

import gc
import importlib
import json
import os
import signal
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType

import pytest

LIMIT_S = 150.0
"""After so long the tests of a mutant are ended."""
COLD = "cold"
"""The state of a mutant that an import must see: another process tries it."""


def pytest_configure(config):
    if home := os.environ.get("ATTEND_TEST_MUTANTS_RECORD"):
        config.pluginmanager.register(Recording(Path(home)))
    if names := os.environ.get("ATTEND_TEST_MUTANTS_CHOICE"):
        config.pluginmanager.register(Choice(Path(names).read_text().splitlines()))
    if home := os.environ.get("ATTEND_TEST_MUTANTS_TRY"):
        config.pluginmanager.register(Trying(Path(home)))


class Recording:
    """Notes which test reaches which line, and what it took. A test that fails here says nothing of mutants: it is left out."""

    def __init__(self, home: Path) -> None:
        import coverage  # here alone: `make mutants` installs it

        rooms = [f"{Path.cwd()}/{room}/*" for room in ("service", "model/engine")]
        self.tests = home / "tests.json"
        self.covered = coverage.Coverage(data_file=str(home / ".coverage"), include=rooms, messages=False)
        self.covered.load()
        self.covered.start()
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.covered.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self.covered.switch_context("")

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_unconfigure(self):
        self.covered.stop()
        self.covered.save()
        known = json.loads(self.tests.read_text()) if self.tests.exists() else {}
        passed = {test: took for test, took in self.seconds.items() if test not in self.failed}
        self.tests.write_text(json.dumps(known | passed, indent=0))


class Choice:
    """Runs the tests named, all cases of each, in their order."""

    def __init__(self, names: list[str]) -> None:
        self.places = {name: place for place, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        places = {item: self.places.get(bare(item), -1) for item in items}
        items[:] = sorted((item for item in items if places[item] >= 0), key=places.__getitem__)


def bare(item: pytest.Item) -> str:
    """The name without the case."""
    return item.nodeid.partition("[")[0]


class Trying:
    """Collects the tests once, and forks for each mutant: importing all takes longer than the tests of one."""

    def __init__(self, home: Path) -> None:
        self.plan = json.loads((home / "plan.json").read_text())
        self.results = home / "results.jsonl"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        items = {item.nodeid: item for item in session.items}
        cases: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            cases[bare(item)].append(item)
        for mutant in self.plan:
            begun = time.monotonic()
            tests = [item for test in mutant.pop("tests") for item in cases[test]]
            path, text = Path(mutant.pop("path")), mutant.pop("text")
            state, by = forked(session, tests, path, text)
            while state == "killed" and forked(session, [items[by]], path, None)[0] == "killed":  # without it too
                tests.remove(items[by])
                state, by = forked(session, tests, path, text)
            result = mutant | {"state": state, "tests": len(tests), "by": by, "seconds": round(time.monotonic() - begun, 1)}
            with self.results.open("a") as out:
                out.write(json.dumps(result) + "\n")
        return True


def forked(session: pytest.Session, tests: list[pytest.Item], path: Path, text: str | None) -> tuple[str, str]:
    """The state, and the test that fails, of a file that has another text."""
    if not tests:
        return "unreached", ""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        try:
            said = run(session, tests, path, text)
        except BaseException:
            said = traceback.format_exc()
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    ended = ended_within(child)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it started
    if not ended:
        os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as said:
        by = said.read().decode() if ended else "timeout"
    return ("killed", by) if by in {test.nodeid for test in tests} else (by or "timeout", "")


def ended_within(child: int) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def run(session: pytest.Session, tests: list[pytest.Item], path: Path, text: str | None) -> str:
    """The test that fails, `survived`, or `cold`."""
    if text is not None and not planted(path, text):
        return COLD
    for test, later in zip(tests, [*tests[1:], None], strict=True):
        test.config.hook.pytest_runtest_protocol(item=test, nextitem=later)
        if session.testsfailed:
            return test.nodeid
    return "survived"


def planted(path: Path, text: str) -> bool:
    """Give the functions of one of our modules the code of another text. Whether that was possible."""
    module = importlib.import_module("attend." + path.with_suffix("").as_posix().replace("/", "."))
    return replaced(module.__file__, path.read_text(encoding="utf-8"), text)


def replaced(file: str, source: str, text: str) -> bool:
    """Give all functions that came from a file the code of its new text. Whether that was possible."""
    old, new = (list(codes(compile(each, file, "exec"))) for each in (source, text))
    if [code.co_name for code in old] != [code.co_name for code in new]:
        return False
    changed = dict(zip(old, new, strict=True))
    functions = [thing for thing in gc.get_objects() if type(thing) is FunctionType]  # isinstance would ask modules that warn
    found = [thing for thing in functions if thing.__code__.co_filename == file and thing.__code__ in changed]
    try:
        for function in found:
            function.__code__ = changed[function.__code__]
    except ValueError:  # it closes over other variables
        return False
    return bool(found)


def codes(code: CodeType) -> Iterator[CodeType]:
    """All functions of a module."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from codes(inner)
