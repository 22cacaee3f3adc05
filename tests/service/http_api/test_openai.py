"""OpenAI's shapes: a body to a command, chunks to completion objects."""

import pytest

from model.engine.request import FinishReason
from model.errors import InvalidRequest
from model.params import SamplingParams, StopRules
from service.http_api.openai import CompletionWriter, to_command
from service.http_api.schemas import read_completion
from service.records import Chunk, Command, Usage


def command(**body) -> Command:
    return to_command(read_completion(body), "id")


def test_a_bare_prompt_means_the_contracts_defaults():
    assert command(prompt="a") == Command(prompts=("a",), sampling=SamplingParams(), stops=StopRules(), request_id="id")
    assert StopRules().max_tokens == 16
    assert (SamplingParams().temperature, SamplingParams().top_p, SamplingParams().top_k) == (1, 1, 0)


def test_every_field_reaches_the_command():
    body = {
        "model": "m", "prompt": "a", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 2, "best_of": 2, "stop": ["x"],
        "seed": -3, "user": "u", "top_k": 7, "min_p": 0.1, "stop_token_ids": [4], "include_stop_str_in_output": True,
        "ignore_eos": True, "min_tokens": 1, "skip_special_tokens": False, "request_id": "r", "deadline_ms": 9,
    }  # fmt: skip
    assert command(**body) == Command(
        prompts=("a",),
        sampling=SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=-3),
        stops=StopRules(max_tokens=5, min_tokens=1, stop=("x",), stop_token_ids=(4,), include_stop=True, ignore_eos=True),
        n=2,
        model="m",
        request_id="id",
        deadline_ms=9,
        skip_special_tokens=False,
    )


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


def test_minus_one_switches_top_k_off_and_above_the_vocabulary_is_allowed():
    assert command(prompt="a", top_k=-1).sampling.top_k == -1
    assert command(prompt="a", top_k=10**9).sampling.top_k == 10**9


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": ["a"] * 33, "n": 4}, "n"),
        ({"prompt": "a", "stream_options": {}}, "stream_options"),
        ({"prompt": "a", "stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": ["x"] * 5}, "stop"),
        ({"prompt": "a", "stop": "x" * 257}, "stop"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_field(body, field):
    with pytest.raises(InvalidRequest, match=f"^{field} ") as caught:
        command(**body)
    assert caught.value.field == field


def writer(n: int = 1, **body) -> CompletionWriter:
    request = read_completion({"prompt": "a"} | body)
    return CompletionWriter(request, "r7", "m", "fp", Usage(n), created=1_700_000_000)


def chunk(index: int, text: str, total: int, reason: FinishReason | None = None, stop=None) -> Chunk:
    return Chunk(index, text, tuple(text.encode()), total, 5, 42, reason, stop)


def test_a_streamed_object_is_golden():
    assert writer().chunk(chunk(1, "ab", 2)) == {
        "id": "cmpl-r7",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "m",
        "system_fingerprint": "fp",
        "choices": [{"index": 1, "text": "ab", "logprobs": None, "finish_reason": None, "stop_reason": None}],
        "seed": 42,
    }


def test_token_ids_are_there_when_asked_for():
    assert writer(return_token_ids=True).chunk(chunk(0, "ab", 2))["choices"][0]["token_ids"] == [97, 98]
    assert "token_ids" not in writer(return_token_ids=False).chunk(chunk(0, "ab", 2))["choices"][0]


def test_a_whole_object_joins_the_pieces_and_orders_the_answers():
    pieces = [
        chunk(1, "x", 1),
        chunk(0, "a", 1),
        chunk(1, "y", 2, FinishReason.STOP, "END"),
        chunk(0, "b", 2, FinishReason.LENGTH),
        chunk(2, "", 0, FinishReason.ABORT),
    ]
    whole = writer(n=3)
    whole.usage.add(pieces)
    document = whole.whole(pieces)
    shown = [(c["index"], c["text"], c["finish_reason"], c["stop_reason"]) for c in document["choices"]]
    assert shown == [(0, "ab", "length", None), (1, "xy", "stop", "END"), (2, "", "abort", None)]
    assert document["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}


def test_the_last_chunk_of_a_stream_has_no_choice_and_the_usage():
    one = writer(n=2)
    one.usage.add([chunk(0, "ab", 2), chunk(1, "c", 1), chunk(2, "d", 1)])
    last = one.last_chunk()
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}


def test_usage_takes_totals_so_that_a_chunk_seen_twice_counts_once():
    usage = Usage(1)
    usage.add([chunk(0, "a", 1), chunk(0, "b", 2), chunk(0, "b", 2)])
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 2)
