"""A plugin of pytest that writes each outcome as it is known, a line of JSON, to the file that BENCH_REPORT names."""

import json
import os
from typing import Any

import pytest

LONGEST = 200
"""Characters of a reason."""


def write(outcome: str, test: str, why: str = "") -> None:
    """A line; workers of xdist leave it to their controller."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["BENCH_REPORT"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"outcome": outcome, "test": test, "why": why}) + "\n")


def reason(report: Any) -> str:
    """What was raised, in a line; where pytest knows none, the last line of what it says."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = crash.message.strip().splitlines()[:1] if crash else str(report.longrepr).strip().splitlines()[-1:]
    return (lines or [""])[0][:LONGEST]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Its call decides, or whatever fails or is skipped before or after it."""
    if report.failed:
        write("failed", report.nodeid, reason(report))
    elif report.when == "call" or report.skipped:
        write(report.outcome, report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported."""
    if report.failed:
        write("failed", report.nodeid, reason(report))
