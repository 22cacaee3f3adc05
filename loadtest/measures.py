"""What the rows of locust's statistics add up to, for each measure and transport, and whether they meet the objectives."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from loadtest.stream import ITL, REFUSED, TOTAL, TRANSPORTS, TTFT

PERCENTILES = (50, 95, 99)
MISSED = 3
"""The exit code of a run that missed an objective."""


@dataclass(frozen=True)
class Row:
    """Counts, and a histogram of milliseconds."""

    count: int = 0
    failures: int = 0
    tokens: int = 0
    times: Counter[float] = field(default_factory=Counter)

    def __add__(self, other: "Row") -> "Row":
        return Row(
            self.count + other.count, self.failures + other.failures, self.tokens + other.tokens, self.times + other.times
        )

    def percentile(self, percent: float) -> float | None:
        """Milliseconds that `percent` of the values do not exceed (nearest rank); None of no values."""
        rank, seen = percent / 100 * self.times.total(), 0
        for value in sorted(self.times):
            seen += self.times[value]
            if seen >= rank:
                return value
        return None


Rows = dict[tuple[str, str], Row]
"""By (measure, transport), summed over the kinds of prompts."""


def read(entries: Iterable[Any]) -> Rows:
    """Sum up locust's entries."""
    rows: Rows = {}
    for entry in entries:
        key = entry.method, entry.name.partition(" ")[0]
        one = Row(entry.num_requests, entry.num_failures, entry.total_content_length, Counter(entry.response_times))
        rows[key] = rows.get(key, Row()) + one
    return rows


def total(rows: Rows, measure: str) -> Row:
    """A measure over both transports."""
    return sum((rows[key] for key in rows if key[0] == measure), Row())


def used_transports(rows: Rows) -> list[str]:
    """The transports that somebody asked over."""
    return [each for each in TRANSPORTS if rows.get((TOTAL, each)) or rows.get((REFUSED, each))]


@dataclass(frozen=True)
class Objectives:
    """Milliseconds at the 95th percentile of each transport, None for no objective; ratios of all requests, 0 to 1."""

    ttft_p95_ms: float | None = None
    itl_p95_ms: float | None = None
    fail_ratio: float = 0.0
    refused_ratio: float = 0.0

    def missed_objectives(self, rows: Rows) -> Iterator[str]:
        """A sentence for each objective that was missed."""
        answers, refused = total(rows, TOTAL), total(rows, REFUSED).count
        asked = answers.count + refused
        if not answers.count:
            yield f"no request was answered, {refused} were refused"
            return
        for what, number, most in (
            ("failed", answers.failures, self.fail_ratio),
            ("were refused", refused, self.refused_ratio),
        ):
            if number / asked > most:
                yield f"{number / asked:.4f} of the requests {what}, more than {most}"
        for measure, limit in ((TTFT, self.ttft_p95_ms), (ITL, self.itl_p95_ms)):
            for transport in used_transports(rows) if limit is not None else ():
                p95 = rows.get((measure, transport), Row()).percentile(95)
                if p95 is None:
                    yield f"{transport}: p95 of {measure} was not seen"
                elif limit is not None and p95 > limit:
                    yield f"{transport}: p95 of {measure} is {p95:g} ms, above {limit:g} ms"
