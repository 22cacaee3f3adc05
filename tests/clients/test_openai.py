"""OpenAI's own client: what it is told, whole and in pieces, with and without asyncio."""

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.service.server import Server, wait_for

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.ray, pytest.mark.clients]

MODEL = "attend-default"
TEXT = {"model": MODEL, "prompt": "def fibonacci(n):", "max_tokens": 24, "temperature": 0}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "def add(a, b):"}], "max_tokens": 24, "temperature": 0}


class Verdict(BaseModel):
    """An answer with a shape."""

    kind: Literal["def", "class"]
    good: bool


@pytest.fixture
def client(server: Server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def run(server: Server, use: Callable[[Any], Any]) -> Any:
    """What `use(client)` comes to with the asynchronous client."""

    async def main() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await use(client)

    return asyncio.run(main())


def test_a_completion_is_the_same_whole_streamed_and_asynchronous(server, client):
    async def streamed(other):
        return "".join([chunk.choices[0].text async for chunk in await other.completions.create(**TEXT, stream=True)])

    whole = client.completions.create(**TEXT).choices[0].text
    assert whole == "".join(chunk.choices[0].text for chunk in client.completions.create(**TEXT, stream=True))
    assert whole == run(server, lambda other: other.completions.create(**TEXT)).choices[0].text
    assert whole == run(server, streamed)
    assert whole.strip()


def test_a_chat_is_the_same_whole_streamed_and_asynchronous(server, client):
    async def streamed(other):
        chunks = [chunk async for chunk in await other.chat.completions.create(**CHAT, stream=True)]
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    whole = client.chat.completions.create(**CHAT).choices[0].message
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    assert (whole.role, chunks[0].choices[0].delta.role) == ("assistant", "assistant")
    assert whole.content == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.content == run(server, lambda other: other.chat.completions.create(**CHAT)).choices[0].message.content
    assert whole.content == run(server, streamed)
    assert whole.content.strip()


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_the_last_chunk_alone_carries_the_usage_of_the_whole_answer(client, route):
    create, ask = (client.completions.create, TEXT) if route == "completions" else (client.chat.completions.create, CHAT)
    whole = create(**ask).usage
    *chunks, last = create(**ask, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage) == ([], whole)
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert whole.total_tokens == whole.prompt_tokens + whole.completion_tokens
    assert whole.completion_tokens == 24


def test_log_probabilities_are_of_the_tokens_that_make_the_text(client):
    choice = client.completions.create(**TEXT, logprobs=2).choices[0]
    lists = choice.logprobs
    assert "".join(lists.tokens) == choice.text
    assert [max(top.values()) for top in lists.top_logprobs] == lists.token_logprobs  # greedy
    content = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3).choices[0]
    assert b"".join(bytes(item.bytes) for item in content.logprobs.content).decode() == content.message.content
    assert all(item.top_logprobs[0].logprob == item.logprob < 0 for item in content.logprobs.content)
    assert all(sum(math.exp(top.logprob) for top in item.top_logprobs) <= 1 for item in content.logprobs.content)


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_several_answers_stream_side_by_side_and_each_ends_once(client, route):
    create, ask = (client.completions.create, TEXT) if route == "completions" else (client.chat.completions.create, CHAT)
    drawn = {**ask, "temperature": 1, "seed": 5, "n": 3}
    texts, ends = ["", "", ""], [[], [], []]
    for chunk in create(**drawn, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text if route == "completions" else choice.delta.content or ""
            ends[choice.index].append(choice.finish_reason)
    whole = create(**drawn).choices
    assert texts == [choice.text if route == "completions" else choice.message.content for choice in whole]
    assert [[end for end in each if end] for each in ends] == [[choice.finish_reason] for choice in whole]
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"max_tokens": -1}, "BadRequestError", "invalid_value", "max_tokens"),
        ({"extra_body": {"temprature": 1}}, "BadRequestError", "invalid_value", "temprature"),
        ({"prompt": "x " * 2000}, "BadRequestError", "context_length_exceeded", "prompt"),
        ({"model": "nobody"}, "NotFoundError", "model_not_found", "model"),
        ({"suffix": "pass"}, "BadRequestError", "unsupported_value", "suffix"),
        ({"prompt": "x" * 2**21}, "APIStatusError", "request_too_large", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_is_the_clients_own_exception(client, fields, kind, code, param, stream):
    with pytest.raises(getattr(openai, kind)) as caught:
        client.completions.create(**{**TEXT, **fields}, stream=stream)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.body["message"] in str(caught.value)
    assert caught.value.request_id


def test_a_model_without_pooling_makes_no_embeddings_and_says_why(client):
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        client.embeddings.create(model=MODEL, input="x")


def test_a_route_that_is_not_there_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="/v1/images"):
        client.images.generate(model=MODEL, prompt="x")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"
    assert client.models.list().data[0].id == client.models.retrieve(MODEL).id == MODEL


def test_the_request_id_is_readable_on_answers_and_errors(client):
    assert client.completions.create(**TEXT, extra_headers={"X-Request-Id": "mine-1"})._request_id == "mine-1"
    raw = client.completions.with_raw_response.create(**TEXT)
    assert raw.request_id == raw.parse()._request_id
    assert raw.request_id in raw.parse().id
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**TEXT, "n": 0}, extra_headers={"X-Request-Id": "mine-2"})
    assert caught.value.request_id == "mine-2"


def test_fields_that_the_client_does_not_know_are_carried_out(client):
    greedy = client.completions.create(**TEXT).choices[0].text
    one = client.completions.create(**{**TEXT, "temperature": 1}, extra_body={"top_k": 1}).choices[0].text
    bound = {"structured_outputs": {"regex": "[0-9]{6}"}, "return_token_ids": True}
    digits = client.completions.create(**{**TEXT, "temperature": 1}, extra_body=bound).choices[0]
    assert one == greedy
    assert len(digits.text) == 6
    assert digits.text.isdigit()
    assert digits.token_ids


def test_prompts_of_every_kind_are_the_same_prompt(client):
    text = TEXT["prompt"]
    ids = client.completions.create(**TEXT, extra_body={"return_token_ids": True}).choices[0].prompt_token_ids
    whole = client.completions.create(**TEXT).choices[0].text
    for prompt, count in ((ids, 1), ([text, text], 2), ([ids, ids], 2)):
        choices = client.completions.create(**{**TEXT, "prompt": prompt}).choices
        assert [choice.text for choice in choices] == [whole] * count
        assert [choice.index for choice in choices] == list(range(count))


def test_the_clients_parser_gets_an_object_of_its_class(client):
    ask = {**CHAT, "max_tokens": 400, "response_format": Verdict}
    assert isinstance(client.chat.completions.parse(**ask).choices[0].message.parsed, Verdict)
    with client.chat.completions.stream(**ask) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.parsed == Verdict.model_validate(json.loads(final.content))


def test_an_answer_that_its_deadline_cut_says_so_and_keeps_its_text(client):
    ask = {**TEXT, "max_tokens": 900, "extra_body": {"ignore_eos": True, "deadline_ms": 500}}
    choice = client.completions.create(**ask).choices[0]
    *_, last = client.completions.create(**ask, stream=True)
    assert choice.finish_reason == last.choices[0].finish_reason == "length"
    assert choice.stop_reason == last.choices[0].stop_reason == "deadline"
    assert choice.text


def test_a_client_that_gives_up_leaves_nothing_running(server, client):
    def left(number):
        aborts = server.metric("attend_requests_total", outcome="abort")
        return aborts == before + number and server.metric("attend_requests_running") == 0

    long = {**TEXT, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    before = server.metric("attend_requests_total", outcome="abort")
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(**long)
    assert wait_for(lambda: left(1))
    with client.completions.create(**long, stream=True) as stream:
        next(iter(stream))
        assert server.metric("attend_requests_running") == 1
    assert wait_for(lambda: left(2))
