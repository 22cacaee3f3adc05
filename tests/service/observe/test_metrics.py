"""The metrics: every series from the start, one outcome for each call, and the tokens that callers were given."""

import asyncio
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from attend.model.engine.request import FinishReason
from attend.model.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    NotSupported,
    Overloaded,
    Unavailable,
)
from attend.service.access.keys import KeyRing
from attend.service.observe import logs
from attend.service.observe.metrics import Metrics, outcome_of
from attend.service.records import Chunk
from tests.fakes import MODEL, FakeEngine, build_server, until

COMPLETIONS = ("http", "/v1/completions")


def families(server):
    return {family.name: family for family in text_string_to_metric_families(server.metrics.text())}


def test_every_series_is_there_before_any_traffic():
    """Names, types and labels are those of the table in service/METRICS.md (tests/test_docs.py)."""
    found = families(build_server())
    assert found and all(family.samples for family in found.values())
    assert all(sample.labels["model"] == MODEL for family in found.values() for sample in family.samples)


def test_the_cache_is_described_by_labels_and_its_usage_is_a_share():
    server = build_server()
    assert server.value("attend_cache_config_info", block_size="16", num_blocks="64") == 1
    assert server.value("attend_kv_cache_usage") == 0
    server.engine.open = dict.fromkeys(map(str, range(16)))
    assert server.value("attend_kv_cache_usage") == 0.25
    assert server.value("attend_requests_running") == 16


def test_a_key_file_that_became_bad_is_seen_in_the_metrics_without_a_call(tmp_path):
    path, now = tmp_path / "keys", [0.0]
    path.write_text("{}")
    metrics = Metrics(FakeEngine(), MODEL, keys=KeyRing(path, lambda: now[0]))

    def file_ok():
        now[0] += 1
        return metrics.registry.get_sample_value("attend_api_keys_file_ok", {"model": MODEL})

    assert file_ok() == 1
    path.write_text("{")
    assert file_ok() == 0
    path.write_text("{}")
    assert file_ok() == 1
    assert build_server().value("attend_api_keys_file_ok") is None, "without keys there is no such metric"


def ended(server, *reasons):
    """Count a call whose answers end for these reasons."""
    record = server.metrics.open(*COMPLETIONS)
    with record.outcome():
        for index, reason in enumerate(reasons):
            record.count_delivered([Chunk(index, "x", (1,), 1, 1, 0, reason)], len(reasons))


def test_of_several_answers_the_worst_gives_the_outcome():
    order = [FinishReason.ERROR, FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.LENGTH, FinishReason.STOP]
    for place, worst in enumerate(order):
        for pair in ((worst, order[-1]), (order[-1], worst), (*order[place:],)):
            server = build_server()
            ended(server, *pair)
            assert server.outcomes() == {(*COMPLETIONS, worst.value): 1}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidRequest("x"), "invalid"),
        (NotSupported("x"), "invalid"),
        (ContextTooLong("x"), "invalid"),
        (ModelNotFound("x"), "invalid"),
        (Overloaded("x"), "rejected"),
        (Unavailable("x"), "rejected"),
        (DeadlineExceeded("x"), "deadline"),
        (EngineFailed("x"), "error"),
    ],
)
def test_each_error_has_its_outcome_and_counts_once_though_it_passes_two_counters(error, outcome):
    server = build_server()
    record = server.metrics.open(*COMPLETIONS)
    with pytest.raises(type(error)), record.errors(), record.outcome():
        raise error
    assert outcome_of(error) == outcome
    assert server.outcomes() == {(*COMPLETIONS, outcome): 1}
    assert server.value("attend_request_duration_seconds_count") == 1


PANIC = type("PanicException", (BaseException,), {})("of a library in Rust")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(ValueError("bug"), "error"), (PANIC, "error"), (asyncio.CancelledError(), "abort"), (GeneratorExit(), "abort")],
)
def test_bugs_are_errors_and_leavers_are_aborts(error, outcome):
    server = build_server()
    with pytest.raises(type(error)), server.metrics.open(*COMPLETIONS).errors():
        raise error
    assert server.outcomes() == {(*COMPLETIONS, outcome): 1}


def test_calls_are_counted_while_they_are_prepared(monkeypatch):
    server, seen = build_server(), []
    prepare = server.service.preparation.answers

    async def watched(*given):
        seen.append(server.value("attend_requests_preparing"))
        return await prepare(*given)

    monkeypatch.setattr(server.service.preparation, "answers", watched)
    server.post({"prompt": "a", "max_tokens": 1})
    assert (seen, server.value("attend_requests_preparing")) == ([1], 0)


def test_dropped_log_lines_are_on_the_page(monkeypatch):
    monkeypatch.setattr(logs, "_dropped", 7)
    assert build_server().value("attend_log_lines_dropped_total") == 7


def test_tokens_that_come_together_share_the_time_since_those_before():
    now = iter((0.0, 1.0, 4.0, 5.0))
    server = build_server(clock=lambda: next(now))
    record = server.metrics.open(*COMPLETIONS)  # arrives at 0
    with record.outcome():
        for total in (3, 6):  # three at 1, three at 4
            record.count_delivered([Chunk(0, "xxx", (1, 1, 1), total, 1, 0, FinishReason.LENGTH if total == 6 else None)], 1)
    assert server.value("attend_inter_token_latency_seconds_count") == 1
    assert server.value("attend_inter_token_latency_seconds_sum") == 1.0


def test_an_outcome_once_counted_stays():
    server = build_server()
    record = server.metrics.open(*COMPLETIONS)
    with record.outcome():
        record.count_delivered([Chunk(0, "x", (1,), 1, 1, 0, FinishReason.STOP)], 1)
    with pytest.raises(ValueError, match="late"), record.errors():
        raise ValueError("late")
    assert server.outcomes() == {(*COMPLETIONS, "stop"): 1}


class OnlyTheSecond(FakeEngine):
    """Answer 1 gets tokens; the others still wait in the queue."""

    def _advance(self, request, steps):
        return super()._advance(request, steps if request.request_id.endswith("-1") else 0)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.DEADLINE])
async def test_what_callers_received_is_what_was_counted_under_aborts_too(reason):
    """Of two prompts with two answers each, only the second answer of the first prompt gets tokens."""
    engine = OnlyTheSecond(held=True)
    server = build_server(engine)

    async with server.http() as client:
        body = {"prompt": ["abc", "de"], "n": 2, "max_tokens": 50}
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: engine.open)
        for step in (1, 2):
            engine.release()
            await until(lambda: server.value("attend_step_seconds_count") == step)  # noqa: B023 - waits for it
        for request in engine.requests:
            engine.abort(request.request_id, reason)
        found = (await call).json()
    usage = found["usage"]
    assert usage["completion_tokens"] == server.value("attend_generation_tokens_total") == 2
    assert usage["prompt_tokens"] == server.value("attend_prompt_tokens_total")


def test_a_whole_answer_that_never_reached_its_caller_counts_no_token():
    """The contract: the sum over what clients received equals the counters."""
    engine = FakeEngine()
    engine.broken_after = 2
    server = build_server(engine)
    assert server.post({"prompt": "abc", "max_tokens": 9}).status_code == 500
    assert server.outcomes() == {(*COMPLETIONS, "error"): 1}
    assert server.value("attend_generation_tokens_total") == 0
    assert server.value("attend_prompt_tokens_total") == 0


def test_times_are_measured_from_arrival_by_the_injected_clock():
    now = iter(range(100))
    server = build_server(clock=lambda: float(next(now)))
    server.post({"prompt": "a", "max_tokens": 3})  # arrives at 0; tokens at 1, 2, 3; ends at 4
    sums = {
        "time_to_first_token_seconds": 1,
        "inter_token_latency_seconds": 2,
        "time_per_output_token_seconds": 1,
        "request_duration_seconds": 4,
        "request_queue_seconds": 0.25,
        "request_prefill_seconds": 0.5,
        "request_decode_seconds": 1,
    }
    assert {name: server.value(f"attend_{name}_sum") for name in sums} == sums
    assert server.value("attend_inter_token_latency_seconds_count") == 2
    assert server.value("attend_step_batch_size_count") == 3


def test_of_a_resumed_answer_only_what_this_call_made_counts():
    now = iter(range(100))
    server = build_server(clock=lambda: float(next(now)))
    response = server.post({"prompt": "a", "max_tokens": 6, "resume_token_ids": [98, 99, 100]})
    assert response.json()["usage"]["completion_tokens"] == 6
    assert server.value("attend_generation_tokens_total") == 3
    assert server.value("attend_request_generation_tokens_sum") == 3
    assert server.value("attend_time_per_output_token_seconds_sum") == 1


def test_the_page_has_no_created_series_and_no_second_help():
    text = build_server().metrics.text()
    assert "_created" not in text
    helps = re.findall(r"^# HELP (\S+)", text, re.MULTILINE)
    assert len(helps) == len(set(helps))


def test_vllms_names_stand_on_the_page_only_where_they_are_wanted():
    plain, both = (Metrics(FakeEngine(), MODEL, vllm_names=wanted).text() for wanted in (False, True))
    assert "vllm:" not in plain
    assert "vllm:num_requests_waiting{" in both
    assert both.startswith(plain[:1000])
