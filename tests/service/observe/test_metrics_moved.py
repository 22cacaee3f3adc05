"""Every metric of the page is moved by something, and by how much: counts as well as sums."""

from dataclasses import fields

import pytest

from attend.model.engine.request import EngineStats, OffloadStats
from attend.model.errors import QueueFull
from tests.fakes import FakeEngine, Server, build_server

OF_THE_ENGINE = {
    "num_running": "requests_running",
    "num_waiting": "requests_waiting",
    "num_preemptions": "preemptions_total",
    "num_prefix_queries": "prefix_cache_queries_total",
    "num_prefix_hits": "prefix_cache_hits_total",
    "num_drafted": "draft_tokens_total",
    "num_accepted": "draft_tokens_accepted_total",
}
"""The sample that shows each figure. `num_free_blocks` is shown as the share that is not free."""
ALWAYS = {"cache_config_info", "cache_config", "slower_path_info"}
"""What a server is does not move."""
ELSEWHERE = {"requests_preparing", "log_lines_dropped", "auth_failures"}
ELSEWHERE |= {"memory_used_bytes", "memory_limit_bytes"}
"""What only moves while a call is prepared, or while nobody takes lines: test_metrics.py, and by calls without a key:
test_recorded.py. Memory is the machine's: tests/model/test_machine.py."""
PROMPTS, N, TOKENS = ["abc", "de"], 2, 3
ANSWERS = N * len(PROMPTS)
COUNTS = {
    "time_to_first_token_seconds": 1,
    "inter_token_latency_seconds": ANSWERS * (TOKENS - 1),
    "time_per_output_token_seconds": ANSWERS,
    "request_duration_seconds": 1,
    "request_queue_seconds": ANSWERS,
    "request_prefill_seconds": ANSWERS,
    "request_decode_seconds": ANSWERS,
    "request_prompt_tokens": len(PROMPTS),
    "request_generation_tokens": ANSWERS,
    "step_seconds": TOKENS,
    "step_batch_size": TOKENS,
}
"""How often a call with several answers is observed: once, or once for each prompt, answer or gap between tokens."""


class Known(FakeEngine):
    """An engine with figures of its own."""

    figures = EngineStats()

    def stats(self) -> EngineStats:
        return self.figures


def page(server: Server) -> dict[str, dict[tuple, float]]:
    """The samples of each family, without the prefix."""
    return {
        family.name.removeprefix("attend_"): {(s.name, *sorted(s.labels.items())): s.value for s in family.samples}
        for family in server.metrics.registry.collect()
    }


OFFLOAD = OffloadStats(*range(100, 107))


@pytest.mark.parametrize("stream", [False, True])
def test_a_histogram_counts_once_for_what_it_is_of(stream):
    server = build_server(FakeEngine())
    server.post({"prompt": PROMPTS, "n": N, "max_tokens": TOKENS, "stream": stream})
    assert {name: server.value(f"attend_{name}_count") for name in COUNTS} == COUNTS
    histograms = {
        family.name.removeprefix("attend_") for family in server.metrics.registry.collect() if family.type == "histogram"
    }
    assert histograms == COUNTS.keys()


def test_every_metric_is_moved_by_a_call_or_by_the_engine():
    engine = Known()
    server = build_server(engine)
    before = page(server)
    server.post({"prompt": PROMPTS, "n": N, "max_tokens": TOKENS})
    engine.refusal = QueueFull("full")
    server.post({"prompt": PROMPTS})
    engine.figures = EngineStats(*range(1, len(fields(EngineStats))), offload=OFFLOAD)
    engine.age, engine.resident = 3.0, 5
    after = page(server)
    still = {name for name in before if before[name] == after[name]}
    assert not still - ALWAYS - ELSEWHERE, "these metrics did not move; if another test moves them: ELSEWHERE"


def test_every_figure_of_the_engine_is_on_the_page_and_no_two_are_swapped():
    engine = Known()
    server = build_server(engine)
    assert {field.name for field in fields(EngineStats)} == OF_THE_ENGINE.keys() | {"num_free_blocks", "offload"}
    engine.figures = EngineStats(**{name: 10 + at for at, name in enumerate(OF_THE_ENGINE)}, num_free_blocks=48)
    found = {name: server.value(f"attend_{sample}") for name, sample in OF_THE_ENGINE.items()}
    assert found == {name: 10 + at for at, name in enumerate(OF_THE_ENGINE)}
    assert server.value("attend_kv_cache_usage") == 1 - 48 / engine.info.num_blocks


def test_every_figure_of_offloading_is_on_the_page_and_no_two_are_swapped():
    engine = Known()
    server = build_server(engine)
    engine.figures = EngineStats(offload=OFFLOAD)
    names = ("read_tokens", "read_bytes", "written_bytes", "errors")
    assert [server.value(f"attend_kv_disk_{name}_total") for name in names] == [101, 102, 103, 106]
