"""Service level objectives, and whether a run met them."""

from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.measures import Row, Rows, total, used_transports
from loadtest.stream import ITL, REFUSED, TOTAL, TTFT

MISSED = 3
"""The exit code of a run that missed an objective."""


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
            if limit is None:
                continue
            for transport in used_transports(rows):
                p95 = rows.get((measure, transport), Row()).percentile(95)
                yield from too_slow(p95, limit, f"{transport}: p95 of {measure}")


def too_slow(p95: float | None, most: float, what: str) -> Iterator[str]:
    """A sentence where a percentile is above its objective or could not be had."""
    if p95 is None:
        yield f"{what} was not seen"
    elif p95 > most:
        yield f"{what} is {p95:g} ms, above {most:g} ms"
