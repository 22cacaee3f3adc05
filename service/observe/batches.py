"""Files and batches as metrics: what this replica did, and what is in the folder that it shares with others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from attend.service.observe.tallies import single_sample

STATUSES = ("validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled")
OUTCOMES = ("completed", "failed", "retried")
"""Of a line: answered; answered with an error; to be computed again, since there was no room for it or the server failed."""


@dataclass(slots=True)
class BatchNumbers:
    """Written by the event loop, a few times a second at most."""

    batches: dict[str, int] = field(default_factory=dict)
    """Batches in the folder, by status."""
    lines: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    running: int = 0
    """Lines that are being computed."""
    bytes: int = 0
    """Bytes of all files and batches in the folder."""
    oldest_waiting: float = 0.0
    """Seconds that the oldest batch waits that nobody has begun."""
    storage_errors: int = 0


class BatchCollector(Collector):
    """The metrics of files and batches, read at each scrape."""

    def __init__(self, numbers: Callable[[], BatchNumbers], model: str) -> None:
        self._numbers, self._model = numbers, model

    def collect(self) -> Iterator[Metric]:
        """The families. What is in the folder is the same on all replicas that share it."""
        numbers = self._numbers()
        about = "Batches in batch_folder by status; replicas that share the folder report the same"
        batches = GaugeMetricFamily("attend_batch_batches", about, labels=["model", "status"])
        for status in STATUSES:
            batches.add_metric([self._model, status], numbers.batches.get(status, 0))
        yield batches
        about = "Lines of batches by outcome: completed, failed, or retried since there was no room or the server failed"
        lines = CounterMetricFamily("attend_batch_lines", about, labels=["model", "outcome"])
        for outcome in OUTCOMES:
            lines.add_metric([self._model, outcome], numbers.lines[outcome])
        yield lines
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        shared = "Bytes of files and batches in batch_folder; replicas that share the folder report the same"
        oldest = "Age of the oldest batch whose input no replica has checked yet; 0: there is none"
        errors = "Failures to read or write batch_folder, as on a full disk"
        for kind, name, about, value in (
            (gauge, "lines_running", "Lines of batches that are being computed", numbers.running),
            (gauge, "bytes", shared, numbers.bytes),
            (gauge, "oldest_waiting_seconds", oldest, numbers.oldest_waiting),
            (counter, "storage_errors", errors, numbers.storage_errors),
        ):
            yield single_sample(kind, f"attend_batch_{name}", about, {"model": self._model}, value)
