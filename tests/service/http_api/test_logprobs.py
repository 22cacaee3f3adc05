"""Log probabilities over HTTP: four parallel lists, offsets into the text that is shown, and no number that JSON lacks."""

import math

import pytest

from attend.model.engine.request import FinishReason, TokenLogprob
from attend.service.http_api.logprobs import FLOOR, CompletionLogprobs, finite, prompt_logprobs
from attend.service.records import Chunk, PromptPart
from tests.fakes import END, FakeEngine, build_server, byte_tokenizer, says
from tests.service.http_api.described import as_read
from tests.service.sse import events_of

TEXTS = ["abc", "naïve café 日本語 😀", "a<|endoftext|>b", "x STOP y"]


def choice(rule=says("é STO😀 x"), **body) -> dict:
    answer = build_server(FakeEngine(rule)).post({"max_tokens": 50} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_the_four_lists_are_golden():
    assert choice(prompt="!", echo=True, logprobs=1, max_tokens=1, seed=1)["logprobs"] == {
        "tokens": ["!", "bytes:\\xc3"],
        "token_logprobs": [None, -19.5],
        "top_logprobs": [None, {"\0": 0.0, "bytes:\\xc3": -19.5}],
        "text_offset": [0, 1],
    }


@pytest.mark.parametrize("prompt", [*TEXTS, list("日本".encode()), [97, END, 98], [97, 0xC3]])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("more", [{}, {"stop": ["STOP"]}, {"truncate_prompt_tokens": 2}, {"skip_special_tokens": False}])
def test_at_its_offset_the_text_begins_with_the_token(prompt, echo, more):
    told = choice(prompt=prompt, echo=echo, logprobs=2, return_token_ids=True, **more)
    lists, ids = told["logprobs"], told["prompt_token_ids"] * echo + told["token_ids"]
    assert {len(values) for values in lists.values()} == {len(ids)}
    for token, offset, token_id in zip(lists["tokens"], lists["text_offset"], ids, strict=True):
        if token_id < 128:  # a character that has several tokens begins with the first of them
            assert told["text"][offset:].startswith(token)
    assert lists["text_offset"] == sorted(lists["text_offset"])
    assert lists["text_offset"][0] == 0


@pytest.mark.parametrize("prompt", TEXTS)
@pytest.mark.parametrize("max_tokens", [0, 50])
def test_with_echo_the_text_is_prompt_and_answer_and_the_first_token_has_no_probability(prompt, max_tokens):
    told = choice(prompt=prompt, echo=True, logprobs=0, max_tokens=max_tokens)
    assert told["text"] == prompt + ("é STO😀 x" if max_tokens else "")
    first, *others = told["logprobs"]["token_logprobs"]
    assert first is None
    assert None not in others
    assert told["logprobs"]["top_logprobs"][0] is None


@pytest.mark.parametrize("count", range(6))
def test_at_most_one_more_than_asked_for_stands_in_top_logprobs(count):
    lists = choice(prompt="abc", echo=True, logprobs=count)["logprobs"]
    for token, value, top in list(zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True))[1:]:
        assert count <= len(top) <= count + 1
        assert top[token] >= value


def test_pieces_put_together_are_the_whole():
    body = {"prompt": "日本", "echo": True, "logprobs": 2, "max_tokens": 50, "prompt_logprobs": 2}
    streamed = build_server(FakeEngine(says("é STO😀 x"), burst=2)).post(body | {"stream": True}).text
    choices = [event["choices"][0] for event in events_of(streamed)]
    told = choice(**body)
    for name, values in told["logprobs"].items():
        assert [value for each in choices for value in each["logprobs"][name]] == values
    assert ["prompt_logprobs" in each for each in choices] == [True] + [False] * (len(choices) - 1)
    assert choices[0]["prompt_logprobs"] == told["prompt_logprobs"]


def test_log_probabilities_are_there_when_asked_for():
    told = choice(prompt="abc", echo=True)
    assert told["logprobs"] is None
    assert "prompt_logprobs" not in told
    assert "prompt_logprobs" not in choice(prompt="abc", echo=True, logprobs=1)


def test_an_echo_and_the_prompts_own_list_hold_as_many_alternatives_as_each_was_asked_for():
    told = choice(prompt="abc", echo=True, logprobs=1, prompt_logprobs=4, max_tokens=2)
    assert [len(each) for each in told["logprobs"]["top_logprobs"][1:]] == [2] * 4
    assert [len(each) for each in told["prompt_logprobs"][1:]] == [5] * 2


def test_prompt_logprobs_have_vllms_shape():
    assert choice(prompt="ab", prompt_logprobs=1)["prompt_logprobs"] == [
        None,
        {"0": {"logprob": 0.0, "decoded_token": "\0"}, "98": {"logprob": -9.8, "decoded_token": "b"}},
    ]


def test_minus_infinity_is_a_number_in_json():
    assert FLOOR == -9999.0
    assert [finite(value) for value in (-math.inf, -1e9, -1.5, 0.0)] == [-9999.0, -9999.0, -1.5, 0.0]
    scored = TokenLogprob(98, -math.inf, ((97, -math.inf),))
    prompt = PromptPart((97, 98), (scored,), "ab")
    end = Chunk(0, "b", (98,), 1, 2, 0, FinishReason.STOP, None, (scored,), prompt)
    lists = as_read(CompletionLogprobs(byte_tokenizer(), 1, skip_special_tokens=True, echo=True).of(end))
    assert lists["token_logprobs"] == [None, -9999.0, -9999.0]
    assert lists["top_logprobs"] == [None, *[{"a": -9999.0, "b": -9999.0}] * 2]
    _, row = prompt_logprobs(prompt, 1, byte_tokenizer())
    assert {each["logprob"] for each in row.values()} == {-9999.0}
