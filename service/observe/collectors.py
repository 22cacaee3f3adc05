"""Metrics that are read at each scrape, by rows; histograms without locks, for the event loop; failed authentications.

Those of prometheus_client may be written by any thread. Each write takes locks and searches the buckets one by one, which
for a token takes longer than the rest of the bookkeeping together.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from attend.model.engine.request import TokenEngine
from attend.service.contract.routes import COUNTED

log = logging.getLogger("attend.requests")

GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
Row = tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, float, Mapping[str, str]]
"""Of one sample: the kind of its metric, its name and its help, the value, and labels beside the model."""
STATUSES = ("validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled")
OUTCOMES = ("completed", "failed", "retried")
"""Of a line: answered; answered with an error; to be computed again, since there was no room for it or the server failed."""


SECONDS = 60.0
MAX_LINES = 60
"""Failed authentications that are logged in a minute."""


class RowCollector(Collector):
    """The metrics of the rows that `read` gives at each scrape."""

    def __init__(self, read: Callable[[], Iterator[Row]], model: str) -> None:
        self._read, self._model = read, model

    def collect(self) -> Iterator[Metric]:
        """The families; rows of one name are samples of one."""
        found: dict[str, Metric] = {}
        for kind, name, text, value, labels in self._read():
            if name not in found:
                found[name] = kind(f"attend_{name}", text, labels=["model", *labels])
            found[name].add_metric([self._model, *labels.values()], value)  # type: ignore[attr-defined]
        yield from found.values()


class Histogram(Collector):
    """A histogram with the upper bounds `buckets`, to which infinity is added."""

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._bounds = tuple(map(float, buckets))
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._about = (name, text, labels)
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value: into the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """The family of one histogram."""
        name, text, labels = self._about
        family = HistogramMetricFamily(name, text, labels=list(labels))
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric(list(labels.values()), list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


def engine_rows(engine: TokenEngine) -> Iterator[Row]:
    """What lives in the engine."""
    stats, info = engine.stats(), engine.info
    usage, resident, age = 1 - stats.num_free_blocks / info.num_blocks, engine.cache_resident_bytes(), engine.heartbeat_age()
    yield GAUGE, "requests_running", "Running requests: they hold KV cache blocks", stats.num_running, {}
    text = "Queued requests: they wait for KV cache blocks or a place in the batch"
    yield GAUGE, "requests_waiting", text, stats.num_waiting, {}
    text = "KV cache usage, 0 to 1: share of the blocks that requests hold, in the fullest KV cache group"
    yield GAUGE, "kv_cache_usage", text, usage, {}
    text = "KV cache: bytes in memory. On a CPU they are taken as blocks are written"
    yield GAUGE, "kv_cache_resident_bytes", text, resident, {}
    text = "Liveness: seconds since the step thread last made progress: it ended a step or a layer of one, or was idle"
    yield GAUGE, "engine_heartbeat_seconds", text, age, {}
    text = "KV cache: tokens in a block, and blocks of the first KV cache group (full attention, if any)"
    sizes = {"block_size": str(info.block_size), "num_blocks": str(info.num_blocks)}
    yield GAUGE, "cache_config_info", text, 1, sizes
    text = "1 with the reason if a backend serves that is slower than this machine's fastest; else 0, with none"
    slower = info.slower_path
    yield GAUGE, "slower_path_info", text, int(bool(slower)), {"reason": slower.reason if slower else "none"}
    text = "Preemptions: requests that lost their KV cache blocks and recomputed them"
    yield COUNTER, "preemptions", text, stats.num_preemptions, {}
    yield COUNTER, "prefix_cache_queries", "Prefix cache queries, in tokens", stats.num_prefix_queries, {}
    yield COUNTER, "prefix_cache_hits", "Prefix cache hits, in tokens", stats.num_prefix_hits, {}
    yield COUNTER, "draft_tokens", "Speculative decoding: draft tokens", stats.num_drafted, {}
    yield COUNTER, "draft_tokens_accepted", "Speculative decoding: accepted draft tokens", stats.num_accepted, {}
    if (disk := stats.offload) is not None:
        text = "KV offloading: tokens that were not computed, since their KV blocks were read from disk"
        yield COUNTER, "kv_disk_read_tokens", text, disk.read_tokens, {}
        yield COUNTER, "kv_disk_read_bytes", "KV offloading: bytes that were read back", disk.read_bytes, {}
        yield COUNTER, "kv_disk_written_bytes", "KV offloading: bytes that were written", disk.written_bytes, {}
        text = "KV offloading: files and records that were no good, and failures to read or write"
        yield COUNTER, "kv_disk_errors", text, disk.num_errors, {}


@dataclass(slots=True)
class BatchNumbers:
    """Files and batches. Written by the event loop, a few times a second at most."""

    batches: dict[str, int] = field(default_factory=dict)
    """Batches in the folder, by status."""
    lines: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    oldest_waiting: float = 0.0
    """Seconds that the oldest batch waits that nobody has begun."""
    storage_errors: int = 0


def batch_rows(numbers: BatchNumbers) -> Iterator[Row]:
    """What this replica did, and what is in the folder that it shares with others: the same on all of them."""
    text = "Batches in batch_folder by status; replicas that share the folder report the same"
    for status in STATUSES:
        yield GAUGE, "batch_batches", text, numbers.batches.get(status, 0), {"status": status}
    text = "Lines of batches by outcome: completed, failed, or retried since there was no room or the server failed"
    for outcome in OUTCOMES:
        yield COUNTER, "batch_lines", text, numbers.lines[outcome], {"outcome": outcome}
    text = "Age of the oldest batch whose input no replica has checked yet; 0: there is none"
    yield GAUGE, "batch_oldest_waiting_seconds", text, numbers.oldest_waiting, {}
    text = "Failures to read or write batch_folder, as on a full disk"
    yield COUNTER, "batch_storage_errors", text, numbers.storage_errors, {}


class AuthFailures:
    """Counts and logs a replica's calls with keys that are not known, or with none."""

    def __init__(self, model: str, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        about = "Requests without an API key that is known, or with another one that is not, by transport"
        self._counter = Counter("attend_auth_failures", about, ["model", "transport"], registry=registry)
        self._model, self._clock = model, clock
        self._began, self._lines = -SECONDS, 0
        for transport in COUNTED:
            self._counter.labels(model, transport)

    def add(self, transport: str) -> bool:
        """Count a call. Returns whether it may be logged."""
        self._counter.labels(self._model, transport).inc()
        now = self._clock()
        if now - self._began >= SECONDS:
            self._began, self._lines = now, 0
        self._lines += 1
        if self._lines == MAX_LINES + 1:
            log.warning("calls without a known API key are not logged for the rest of this minute, and counted as before")
        return self._lines <= MAX_LINES

    def add_beside(self, transport: str, key: str, header: str) -> None:
        """Count and log a key that is not known, which came in `header` beside the known one named `key`, and is ignored."""
        if self.add(transport):
            log.info(
                "%s: a call of the key %s has another key in %s, which is not known and is ignored", transport, key, header
            )
