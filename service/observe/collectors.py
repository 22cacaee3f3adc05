"""Metrics that are read at each scrape: the engine, KV offloading, and API keys."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from attend.model.engine.request import TokenEngine
from attend.service.access.keys import KeyRing
from attend.service.observe.tallies import single_sample


class EngineCollector(Collector):
    """What lives in the engine, read at each scrape."""

    def __init__(self, engine: TokenEngine, model: str) -> None:
        self._engine = engine
        self._labels = {"model": model}

    def collect(self) -> Iterator[Metric]:
        """The metrics of the engine at this moment."""
        stats, info = self._engine.stats(), self._engine.info
        gauges = (
            ("requests_running", "Running requests: they hold KV cache blocks", stats.num_running),
            ("requests_waiting", "Queued requests: they wait for KV cache blocks or a place in the batch", stats.num_waiting),
            (
                "kv_cache_usage",
                "KV cache usage, 0 to 1: share of the blocks that requests hold, in the fullest KV cache group",
                1 - stats.num_free_blocks / info.num_blocks,
            ),
            (
                "kv_cache_resident_bytes",
                "KV cache: bytes in memory. On a CPU they are taken as blocks are written",
                self._engine.cache_resident_bytes(),
            ),
            (
                "engine_heartbeat_seconds",
                "Liveness: seconds since the step thread last made progress: it ended a step or a layer of one, or was idle",
                self._engine.heartbeat_age(),
            ),
        )
        for name, text, value in gauges:
            yield single_sample(GaugeMetricFamily, f"attend_{name}", text, self._labels, value)
        about = "KV cache: tokens in a block, and blocks of the first KV cache group (full attention, if any)"
        sizes = {"block_size": str(info.block_size), "num_blocks": str(info.num_blocks)}
        yield single_sample(GaugeMetricFamily, "attend_cache_config_info", about, self._labels | sizes, 1)
        slower = info.slower_path
        about = "1 with the reason if a backend serves that is slower than this machine's fastest; else 0, with none"
        reason = {"reason": slower.reason if slower else "none"}
        yield single_sample(GaugeMetricFamily, "attend_slower_path_info", about, self._labels | reason, 1 if slower else 0)
        counters = (
            ("preemptions", "Preemptions: requests that lost their KV cache blocks and recomputed them", stats.num_preemptions),
            ("prefix_cache_queries", "Prefix cache queries, in tokens", stats.num_prefix_queries),
            ("prefix_cache_hits", "Prefix cache hits, in tokens", stats.num_prefix_hits),
            ("draft_tokens", "Speculative decoding: draft tokens", stats.num_drafted),
            ("draft_tokens_accepted", "Speculative decoding: accepted draft tokens", stats.num_accepted),
        )
        for name, text, value in counters:
            yield single_sample(CounterMetricFamily, f"attend_{name}", text, self._labels, value)


class OffloadCollector(Collector):
    """KV offloading to disk, read at each scrape."""

    def __init__(self, engine: TokenEngine, model: str) -> None:
        self._engine = engine
        self._labels = {"model": model}

    def collect(self) -> Iterator[Metric]:
        """Each metric, as it is now; none where no folder is set."""
        stats = self._engine.stats().offload
        if stats is None:
            return
        about = "KV offloading: bytes in kv_disk_folder, whoever wrote them"
        yield single_sample(GaugeMetricFamily, "attend_kv_disk_bytes", about, self._labels, stats.num_bytes)
        counters = (
            (
                "read_tokens",
                "KV offloading: tokens that were not computed, since their KV blocks were read from disk",
                stats.read_tokens,
            ),
            ("read_bytes", "KV offloading: bytes that were read back", stats.read_bytes),
            ("written_bytes", "KV offloading: bytes that were written", stats.written_bytes),
            (
                "dropped_requests",
                "KV offloading: ended requests that were not written whole: evicted, too many, or an error",
                stats.dropped_texts,
            ),
            (
                "recomputed_requests",
                "KV offloading: requests whose prefix was computed again, since reading is slower",
                stats.num_slower,
            ),
            (
                "errors",
                "KV offloading: files and records that were no good, and failures to read or write",
                stats.num_errors,
            ),
        )
        for name, text, value in counters:
            yield single_sample(CounterMetricFamily, f"attend_kv_disk_{name}", text, self._labels, value)


class KeysCollector(Collector):
    """The state of the API key file, looked at in each scrape."""

    def __init__(self, keys: KeyRing, model: str) -> None:
        self._keys = keys
        self._labels = {"model": model}

    def collect(self) -> Iterator[Metric]:
        """The metrics of the API key file at this moment."""
        about = "1 while the API key file is valid; with 0 the keys read before stay in use, and no replica can start"
        yield single_sample(GaugeMetricFamily, "attend_api_keys_file_ok", about, self._labels, float(self._keys.file_ok))
