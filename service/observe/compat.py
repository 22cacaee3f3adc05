"""The metrics under vLLM's names as well. vLLM counts answers in `request_success`, here it is calls."""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

TWINS = {
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "kv_cache_usage": "kv_cache_usage_perc",
    "cache_config_info": "cache_config_info",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "preemptions": "num_preemptions",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "request_duration_seconds": "e2e_request_latency_seconds",
    "request_queue_seconds": "request_queue_time_seconds",
    "request_prefill_seconds": "request_prefill_time_seconds",
    "request_decode_seconds": "request_decode_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
}
"""Our names after `attend_` to vLLM's after `vllm:`. The heartbeat and the steps have no twin."""

LABELS = {"model": "model_name", "num_blocks": "num_gpu_blocks"}
ENGINE = {"engine": "0"}
"""vLLM numbers the engines behind one page; a replica has one."""

REASONS = {"stop": "stop", "length": "length", "abort": "abort", "deadline": "abort", "error": "error"}
"""Outcomes to vLLM's finished_reason. Calls that were refused never count there."""


class VllmNames(Collector):
    """The twins of what another collector (one replica's registry) collects."""

    def __init__(self, original: Collector) -> None:
        self._original = original

    def collect(self) -> Iterator[Metric]:
        """The families that have a twin, renamed."""
        return compatible_twins(self._original.collect())

    def text(self) -> str:
        """A page of the twins alone, to stand behind the original's."""
        return generate_latest(self).decode()


def compatible_twins(families: Iterable[Metric]) -> Iterator[Metric]:
    """The twins of metric families; those without one are left out."""
    for family in families:
        name = family.name.removeprefix("attend_")
        if name == "requests":
            yield _successes(family)
        elif name in TWINS:
            twin = Metric(f"vllm:{TWINS[name]}", family.documentation, family.type)
            for sample in family.samples:
                tail = sample.name.removeprefix(family.name)
                twin.samples.append(Sample(twin.name + tail, _labels(sample.labels), sample.value))
            yield twin


def _labels(labels: dict[str, str]) -> dict[str, str]:
    return ENGINE | {LABELS.get(name, name): value for name, value in labels.items()}


def _successes(family: Metric) -> Metric:
    """Our calls by outcome, added up over transports and routes."""
    counts: Counter[tuple[str, str]] = Counter()
    for sample in family.samples:
        if sample.name == "attend_requests_total" and sample.labels["outcome"] in REASONS:
            counts[sample.labels["model"], REASONS[sample.labels["outcome"]]] += int(sample.value)
    twin = CounterMetricFamily("vllm:request_success", family.documentation, labels=["engine", "model_name", "finished_reason"])
    for (model, reason), count in counts.items():
        twin.add_metric([*ENGINE.values(), model, reason], count)
    return twin
