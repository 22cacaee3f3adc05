"""Metrics under vLLM's names: the same values, vLLM's labels, and nothing that vLLM does not have."""

import warnings

import pytest
from prometheus_client.parser import text_string_to_metric_families

from attend.model.engine.request import FinishReason, Times
from attend.model.errors import InvalidRequest, Overloaded
from attend.service.observe.compat import REASONS, TWINS, VllmNames
from attend.service.observe.metrics import OUTCOMES
from attend.service.records import Chunk
from tests.fakes import MODEL, build_server

with warnings.catch_warnings():
    # Ray 2.60 declares its own fields in pydantic's old way; nothing of ours does.
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field` is deprecated")

ROUTE = ("http", "/v1/completions")
NAMES = """
gauge num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info
counter prompt_tokens generation_tokens prefix_cache_queries prefix_cache_hits num_preemptions request_success
histogram time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
histogram e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
histogram request_prompt_tokens request_generation_tokens
"""
"""What vLLM has of this, by type."""


@pytest.fixture
def server():
    """A replica that has answered, refused and turned away."""
    server = build_server()
    for reason in (FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH, FinishReason.DEADLINE, FinishReason.ABORT):
        record = server.metrics.open(*ROUTE)
        with record.outcome():
            record.count_delivered([Chunk(0, "x", (1, 2), 2, 5, 0, reason, times=Times(0.1, 0.2, 0.3))], 1)
            record.engine_times(Times(0.1, 0.2, 0.3))
    for error in (Overloaded("full"), InvalidRequest("what")):
        with pytest.raises(type(error)), server.metrics.open("grpc", "Generate").errors():
            raise error
    server.engine.open = dict.fromkeys(map(str, range(16)))
    return server


def twins(server):
    page = VllmNames(server.metrics.registry).text()
    return {family.name: family for family in text_string_to_metric_families(page)}


def test_the_twins_have_vllms_names_and_types(server):
    wanted = {f"vllm:{name}": kind for kind, *names in map(str.split, NAMES.split("\n")[1:-1]) for name in names}
    assert wanted == {name: family.type for name, family in twins(server).items()}


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_has_every_value_of_its_original(server, name):
    [ours] = [family for family in server.metrics.registry.collect() if family.name == f"attend_{name}"]
    theirs = twins(server)[f"vllm:{TWINS[name]}"]
    assert [(sample.name.removeprefix(ours.name), sample.labels.get("le"), sample.value) for sample in ours.samples] == [
        (sample.name.removeprefix(theirs.name), sample.labels.get("le"), sample.value) for sample in theirs.samples
    ]
    assert any(sample.value for sample in theirs.samples) == (name not in UNUSED)


UNUSED = {"requests_waiting", "preemptions", "prefix_cache_queries", "prefix_cache_hits", "inter_token_latency_seconds"}
"""What stays zero with a fake engine that answers all at once."""


def test_labels_are_vllms(server):
    found = twins(server)
    for family in found.values():
        for sample in family.samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == (MODEL, "0")
            assert "model" not in sample.labels
    assert found["vllm:cache_config_info"].samples[0].labels == {
        "model_name": MODEL,
        "engine": "0",
        "block_size": "16",
        "num_gpu_blocks": "64",
    }


def test_successes_are_calls_by_reason_over_all_routes_without_those_refused(server):
    samples = twins(server)["vllm:request_success"].samples
    assert {sample.labels["finished_reason"]: sample.value for sample in samples} == {
        "stop": 2,
        "length": 1,
        "abort": 2,
        "error": 0,
    }
    assert set(OUTCOMES) - REASONS.keys() == {"rejected", "invalid"}
