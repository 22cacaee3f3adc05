"""What the rows of locust's statistics add up to, for each measure and transport."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from loadtest.stream import REFUSED, TOTAL, TRANSPORTS

PERCENTILES = (50, 95, 99)


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

    def __sub__(self, earlier: "Row") -> "Row":
        return Row(
            self.count - earlier.count,
            self.failures - earlier.failures,
            self.tokens - earlier.tokens,
            self.times - earlier.times,
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


def since(rows: Rows, earlier: Rows) -> Rows:
    """What was added to `earlier`."""
    return {key: row - earlier.get(key, Row()) for key, row in rows.items()}


def total(rows: Rows, measure: str) -> Row:
    """A measure over both transports."""
    return sum((rows[key] for key in rows if key[0] == measure), Row())


def used_transports(rows: Rows) -> list[str]:
    """The transports that somebody asked over."""
    return [each for each in TRANSPORTS if rows.get((TOTAL, each)) or rows.get((REFUSED, each))]
