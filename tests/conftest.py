"""What holds for every test: what it leaves behind, and which files begin first."""

import gc
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path

import pytest

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
"""gRPC notes on standard error when a process with its threads starts another one; tests read standard error."""

FIRST = [
    "model/net/triton/test_triton.py",
    "model/net/laws/test_attention_laws.py",
    "model/net/native/test_cores.py",
    "model/net/native/test_arm.py",
    "service/test_installed.py",
    "service/test_page_chat.py",
    "service/test_resumed.py",
    "model/parallel/test_ranks.py",
    "simulation/test_service_lives.py",
    "service/test_fuzz.py",
    "loadtest/test_locustfile.py",
    "model/net/laws/test_engine_laws.py",
    "service/test_deaths.py",
    "model/text/test_grammar.py",
    "service/runtime/test_hub.py",
    "real/test_llama_cpp.py",
    "deploy/test_container.py",
    "deploy/test_monitoring.py",
    "service/test_replaced.py",
    "service/test_documents_run.py",
    "service/test_adapters_served.py",
    "service/runtime/models/test_served.py",
    "service/test_end_to_end.py",
    "service/test_contract.py",
    "service/runtime/test_edge.py",
]
"""The files that take longest, and the first one that needs the library `stand_ins`: while one worker builds it the other must
not wait for it. Two workers take the next file when they are free, so that the last ones should be short."""

REASONS = (
    r"this CPU has no \w+",  # an instruction set
    r"this machine has no (two )?CUDA devices?",
    r"node and its packages",
    r"guidellm|aiperf|redis-server|openssl|C\+\+ compiler|emulator of arm64|Chromium|promtool|prometheus",
    r"hadolint|kubectl|zizmor",  # make check brings them
    r"needs root|only root|namespaces|no Debian|no IPv6|large pages|the package \S+ is not installed",  # what the system lends
    r"nothing is recorded in the interpreter",  # Triton's own
    r"no cluster is given",  # make test-kubernetes
    r"no folder for arm64 is given",  # make test-arm64
    r"the real models are not here",  # 350 MB that no index had: tests/real/models.py
)
"""Why a test may be skipped: this machine lacks an instruction set, a device, or a named program. In CI nothing else may."""
skipped: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count what is skipped, by reason; xdist's workers tell the process that they work for."""
    count_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Whole files are skipped when they are collected."""
    count_skip(report)


def count_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1


def unexplained() -> list[str]:
    """The reasons of skipped tests that REASONS does not name."""
    return [reason for reason in skipped if not any(re.search(pattern, reason) for pattern in REASONS)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why tests were skipped, and in red for which reasons CI fails."""
    for reason, number in skipped.most_common():
        terminalreporter.write_line(f"{number} skipped: {reason}")
    if os.environ.get("CI"):
        for reason in unexplained():
            terminalreporter.write_line(f"FAILED: REASONS of tests/conftest.py has no such reason: {reason}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skip for another reason fails the run: what it hides would run at somebody else's."""
    if os.environ.get("CI") and unexplained() and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--cases`: see `thinned` and `examples`."""
    parser.addoption("--cases", type=int, help="run at most so many cases of a test, others with each commit")
    parser.addoption(
        "--cases-seed", help="any text: of --cases, the same cases as in another run with it (default: the commit)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Remember `--cases` for the modules that ask for `examples`. xdist's workers are given this process's seed."""
    global share
    share = 10 if config.getoption("--cases") else 1
    config.option.cases_seed = config.getoption("--cases-seed") or commit()
    with suppress(ImportError):  # clients, and a machine with a GPU, have no Hypothesis
        from hypothesis import settings

        settings.register_profile("attend", max_examples=examples(settings.default.max_examples))
        settings.load_profile("attend")


def commit() -> str:
    """The commit of the tree, or today's date where there is none."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"{datetime.now(UTC):%Y-%m-%d}"


def pytest_report_header(config: pytest.Config) -> str | None:
    """How to run the same cases again."""
    most, seed = config.getoption("--cases"), config.getoption("--cases-seed")
    return f"cases: at most {most} of each test, those of --cases {most} --cases-seed {seed}" if most else None


def pytest_collection_finish() -> None:
    """Modules and cases stay to the end: no later collection of garbage looks at them again, which takes half a second each."""
    gc.freeze()


share = 1


def examples(count: int) -> int:
    """How many random examples a law is tried with: `count`, or a tenth of it with `--cases`, five at least."""
    return max(count // share, min(count, 5))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the files; the tests of a file keep their order."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    if most := config.getoption("--cases"):
        kept = thinned(items, most, config.getoption("--cases-seed"))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def thinned(items: list[pytest.Item], most: int, seed: str) -> set[pytest.Item]:
    """At most so many cases of each test: those whose names have the smallest digests with the seed. So they vary in all
    parameters, and every case has its turn.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)

    def digest(case: pytest.Item) -> bytes:
        return blake2b(f"{seed} {case.nodeid}".encode(), digest_size=8).digest()

    return {case for cases in tests.values() for case in sorted(cases, key=digest)[:most]}


@pytest.fixture(autouse=True)
def our_modules_have_one_name() -> Iterator[None]:
    """Tests start at the top of the tree: Python finds its folders by their own names too, each class twice."""
    yield
    assert not {"model", "service", "protos"} & sys.modules.keys()


@pytest.fixture
def bold_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside many streams too, a draft needs no more tokens in common than that of a stream alone: so there are many drafts."""
    monkeypatch.setattr("attend.model.engine.lookup.SUREST", 0)


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    """A second thread of torch ends with its test: two workers with two threads each are slow on two cores."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
