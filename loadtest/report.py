"""The record of a run, and what is written of it: latency against load, and the sums as JSON."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import gevent

from loadtest.curve import page
from loadtest.measures import PERCENTILES, Row, Rows, read, since, total, used_transports
from loadtest.provenance import identity, provenance
from loadtest.stream import ITL, REFUSED, TOTAL, TPOT, TTFT

LOAD = ("loop", "shape", "prompts", "long_chars", "max_tokens", "source_rate", "prefixes", "turns", "models", "tools")
TRACE = ("trace_speed", "trace_scale")
"""Options that a summary repeats."""
SAMPLE_SECONDS = 0.5
SETTLE_SECONDS = 3.0
"""Left out at the beginning of a phase: workers report every second, and answers begun before still come."""


@dataclass(frozen=True)
class Sample:
    """All that was measured until the moment `at` (seconds), with so many users wanted."""

    at: float
    users: int
    rows: Rows


@dataclass(frozen=True)
class Phase:
    """What was measured in `seconds` of one number of users."""

    users: int
    seconds: float
    rows: Rows

    def document(self) -> dict[str, Any]:
        """Rates a second and milliseconds, as JSON has them."""
        answers = total(self.rows, TOTAL)
        sums = {
            "users": self.users,
            "seconds": round(self.seconds, 2),
            "answers_per_s": round((answers.count - answers.failures) / self.seconds, 2),
            "tokens_per_s": round(answers.tokens / self.seconds, 1),
            "failed": answers.failures,
            "refused": total(self.rows, REFUSED).count,
        }
        return sums | {each: transport_document(self.rows, each) for each in used_transports(self.rows)}


def transport_rows(rows: Rows, transport: str) -> dict[str, Row]:
    """The measures that have percentiles."""
    return {each: rows.get((each, transport), Row()) for each in (TTFT, ITL, TPOT, TOTAL)}


def transport_document(rows: Rows, transport: str) -> dict[str, Any]:
    """Percentiles of each measure in milliseconds."""
    return {
        name: {"count": row.count} | {f"p{percent}": row.percentile(percent) for percent in PERCENTILES}
        for name, row in transport_rows(rows, transport).items()
    }


def phases(samples: Sequence[Sample]) -> list[Phase]:
    """The stretches of one number of users, each without the time in which the number before it still shows."""
    found = []
    for users, group in groupby(samples, key=lambda sample: sample.users):
        stretch = list(group)
        length = stretch[-1].at - stretch[0].at
        settled = [sample for sample in stretch if sample.at - stretch[0].at >= min(SETTLE_SECONDS, length / 4)]
        rows = since(settled[-1].rows, settled[0].rows)
        if length > 0 and total(rows, TOTAL).count:
            found.append(Phase(users, settled[-1].at - settled[0].at, rows))
    return found


class Recorder:
    """Samples locust's statistics twice a second while users run."""

    def start(self, environment: Any) -> None:
        """Sample from now on."""
        self.environment = environment
        self.samples: list[Sample] = []
        self.greenlet = gevent.spawn(self._run)

    def _run(self) -> None:
        while True:
            runner = self.environment.runner
            if runner.state in ("spawning", "running"):
                rows = read(self.environment.stats.entries.values())
                self.samples.append(Sample(time.perf_counter(), runner.target_user_count, rows))
            gevent.sleep(SAMPLE_SECONDS)

    def stop(self) -> Rows:
        """End the record; returns all that was measured."""
        self.greenlet.kill()
        return read(self.environment.stats.entries.values())

    def phases(self) -> list[Phase]:
        """The phases of the record."""
        return phases(self.samples)


def write(options: argparse.Namespace, phases: Sequence[Phase], rows: Rows, misses: Sequence[str]) -> None:
    """Write curve.html and summary.json into the folder that was asked for.

    `times` are the histograms, milliseconds to counts, from which `loadtest.compare` has its intervals.
    """
    folder = Path(options.report)
    folder.mkdir(parents=True, exist_ok=True)
    load = {name: getattr(options, name) for name in (*LOAD, *TRACE)}
    load |= {name: value.text for name in ("prompt_tokens", "output_tokens") if (value := getattr(options, name)) is not None}
    load |= {"trace": str(options.trace)} if options.trace else {}
    summary = {
        "provenance": provenance(options.seed, {"HTTP": identity(options.host, options.ca_file)} if options.host else {}),
        "load": load,
        "missed": list(misses),
        "failed": total(rows, TOTAL).failures,
        "answers": total(rows, TOTAL).count,
        "refused": total(rows, REFUSED).count,
        "transports": {each: transport_document(rows, each) for each in used_transports(rows)},
        "times": {
            each: {name: dict(sorted(row.times.items())) for name, row in transport_rows(rows, each).items()}
            for each in used_transports(rows)
        },
        "phases": [phase.document() for phase in phases],
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    limits = {TTFT: options.max_ttft_p95_ms, ITL: options.max_itl_p95_ms}
    (folder / "curve.html").write_text(page(summary, limits), encoding="utf-8")
