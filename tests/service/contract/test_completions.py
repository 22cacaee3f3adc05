"""OpenAI's shapes: a body to a command, chunks to completion objects."""

from dataclasses import replace
from typing import Any

import pytest

from attend.model.engine.request import FinishReason, Times
from attend.model.params import NO_CHANGE, DecodingParams, SamplingParams, StopRules
from attend.service.contract.answers import usage as usage_of
from attend.service.contract.commands import to_command
from attend.service.contract.requests import CompletionRequest
from attend.service.http_api.completion_writer import CompletionWriter
from attend.service.merging import merge_chunks
from attend.service.records import Chunk, Command, PromptPart, TokenCounts, TokenUsage
from tests.fakes import byte_tokenizer


def command(**body) -> Command:
    return to_command(CompletionRequest.read(body), "id")


def test_a_bare_prompt_means_the_contracts_defaults():
    assert command(prompt="a") == Command(prompts=("a",), sampling=SamplingParams(), stops=StopRules(), request_id="id")
    assert StopRules().max_tokens == 16
    assert (SamplingParams().temperature, SamplingParams().top_p, SamplingParams().top_k) == (1, 1, 0)


EVERYTHING: dict[str, Any] = {
    "model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x"],
    "seed": -3, "top_k": 7, "min_p": 0.1, "stop_token_ids": [4], "include_stop_str_in_output": True,
    "ignore_eos": True, "min_tokens": 1, "skip_special_tokens": False, "request_id": "r", "deadline_ms": 9,
    "logprobs": 3, "echo": True, "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.5,
    "logit_bias": {"5": -100, "0": 2.5}, "prompt_logprobs": 3, "truncate_prompt_tokens": 6, "cache_salt": "s",
    "priority": 0, "allowed_token_ids": [0, 5], "bad_words": ["x", " y"], "timing": True, "return_token_ids": True,
}  # fmt: skip
"""A value of each field that gRPC has too, and that is not the default."""


def test_every_field_reaches_the_command():
    assert command(prompt="a", user="u", best_of=1, **EVERYTHING) == Command(
        prompts=("a",),
        sampling=SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=-3),
        stops=StopRules(
            max_tokens=5, min_tokens=1, stop=("x",), stop_token_ids=(4,), include_stop_str_in_output=True, ignore_eos=True
        ),
        n=2,
        model="m",
        request_id="r",
        deadline_ms=9,
        skip_special_tokens=False,
        decoding=DecodingParams(
            presence_penalty=0.5,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias={5: -100, 0: 2.5},
            bad_words=("x", " y"),
            allowed_token_ids=(0, 5),
        ),
        logprobs=3,
        prompt_logprobs=3,
        echo=True,
        truncate_prompt_tokens=6,
        priority=0,
        cache_salt="s",
    )
    assert command(prompt="a", resume_token_ids=[1, 2]).resume_token_ids == (1, 2)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1},
        {"logit_bias": {}, "bad_words": []},
        {"logit_bias": None, "allowed_token_ids": None},
    ],
)
def test_scores_that_nothing_changes_share_one_record(body):
    assert command(prompt="a", **body).decoding is NO_CHANGE


@pytest.mark.parametrize(
    ("body", "top"),
    [
        ({}, None),
        ({"logprobs": 2}, None),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 2}, 2),
        ({"prompt_logprobs": 20}, 20),
    ],
)
def test_an_echo_with_log_probabilities_asks_for_those_of_the_prompt(body, top):
    assert command(prompt="a", **body).prompt_logprobs == top


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", ("",)),
        ("ab", ("ab",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ([[]], ((),)),
        ([0], ((0,),)),
    ],
)
def test_a_prompt_is_one_text_many_texts_one_list_of_ids_or_many(prompt, prompts):
    assert command(prompt=prompt).prompts == prompts


def test_a_stop_string_alone_is_a_list_of_one():
    assert command(prompt="a", stop="end").stops.stop == ("end",)
    assert command(prompt="a", stop=[]).stops.stop == ()


def writer(n: int = 1, **body) -> CompletionWriter:
    request = CompletionRequest.read({"prompt": "a"} | body)
    return CompletionWriter(request, "r7", "m", "fp", TokenCounts(n), byte_tokenizer(), created=1_700_000_000)


def chunk(index: int, text: str, total: int, reason: FinishReason | None = None, stop=None) -> Chunk:
    times = Times(0.25 * index, 0.5, 1.0) if reason else None
    return Chunk(index, text, tuple(text.encode()), total, 5, 42, reason, stop, times=times)


def test_timing_is_that_of_the_slowest_answer_and_only_where_it_is_asked_for():
    ends = [chunk(index, "a", 1, FinishReason.STOP) for index in (0, 1)]
    timing = {"queue_ms": 250, "prefill_ms": 500, "decode_ms": 1000, "cached_tokens": 0}
    assert writer(timing=True, n=2).full_response(ends)["timing"] == timing
    assert writer(timing=True).chunk(ends[1])["timing"] == timing
    assert "timing" not in writer(timing=True).chunk(chunk(0, "a", 1))
    for asked in ({}, {"timing": False}):
        assert "timing" not in writer(**asked).chunk(ends[1])
        assert "timing" not in writer(**asked).full_response(ends)


def test_a_whole_object_joins_the_pieces_and_orders_the_answers():
    pieces = [
        chunk(1, "x", 1),
        chunk(0, "a", 1),
        chunk(1, "y", 2, FinishReason.STOP, "END"),
        chunk(0, "b", 2, FinishReason.LENGTH),
        chunk(2, "", 0, FinishReason.ABORT),
    ]
    one = writer(n=3)
    one.usage.add(pieces)
    document = one.full_response(merge_chunks(pieces))
    shown = [(c["index"], c["text"], c["finish_reason"], c["stop_reason"]) for c in document["choices"]]
    assert shown == [(0, "ab", "length", None), (1, "xy", "stop", "END"), (2, "", "length", "abort")]
    assert document["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_of_several_answers_the_one_that_found_least_in_the_cache_counts_for_its_prompt():
    one = writer(n=2)
    founds = [(0, 16), (1, 48), (2, 0), (3, 32)]
    one.usage.add([replace(chunk(at, "a", 1), prompt=PromptPart((), (), "", found)) for at, found in founds])
    assert usage_of(one.usage)["prompt_tokens_details"] == {"cached_tokens": 16}


def test_usage_takes_totals_so_that_a_chunk_seen_twice_counts_once():
    usage = TokenCounts(1)
    usage.add([chunk(0, "a", 1), chunk(0, "b", 2), chunk(0, "b", 2)])
    assert usage.total == TokenUsage(prompt=5, completion=2)
