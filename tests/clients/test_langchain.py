"""LangChain's OpenAI classes: one prompt, many, streams, and answers of a class."""

import asyncio
from typing import Literal

import pytest
from pydantic import BaseModel

from tests.clients.narrow import MODEL
from tests.service.server import Server

langchain_openai = pytest.importorskip("langchain_openai")
pytestmark = [pytest.mark.ray, pytest.mark.clients]

PROMPTS = ["def fibonacci(n):", "class Stack:\n", "import os\n"]


class Verdict(BaseModel):
    """An answer with a shape."""

    kind: Literal["def", "class"]
    good: bool


@pytest.fixture
def text(server: Server):
    return langchain_openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", model=MODEL, max_tokens=24, temperature=0)


@pytest.fixture
def chat(server: Server):
    return langchain_openai.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model=MODEL, max_tokens=24, temperature=0)


def test_text_is_the_same_whole_streamed_batched_and_asynchronous(text):
    async def streamed() -> str:
        return "".join([piece async for piece in text.astream(PROMPTS[0])])

    alone = [text.invoke(prompt) for prompt in PROMPTS]
    assert alone == text.batch(PROMPTS)
    assert alone[0] == "".join(text.stream(PROMPTS[0])) == asyncio.run(streamed())
    assert alone[1] == asyncio.run(text.ainvoke(PROMPTS[1]))
    assert len(set(alone)) == 3


def test_prompts_of_one_call_keep_their_places_and_add_up(text):
    result = text.generate(PROMPTS)
    assert [generations[0].text for generations in result.generations] == [text.invoke(prompt) for prompt in PROMPTS]
    usage = result.llm_output["token_usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 3 * 24


def test_a_message_is_the_same_whole_streamed_batched_and_asynchronous(chat):
    alone = [chat.invoke(prompt).content for prompt in PROMPTS]
    assert alone == [message.content for message in chat.batch(PROMPTS)]
    assert alone[0] == "".join(chunk.content for chunk in chat.stream(PROMPTS[0]))
    assert alone[1] == asyncio.run(chat.ainvoke(PROMPTS[1])).content
    assert len(set(alone)) == 3


def test_a_stream_adds_up_to_the_usage_of_the_whole_message(chat):
    whole = chat.invoke(PROMPTS[0])
    first, *rest = chat.stream(PROMPTS[0], stream_usage=True)
    total = sum(rest, start=first)
    counts = ("input_tokens", "output_tokens", "total_tokens")
    assert [total.usage_metadata[name] for name in counts] == [whole.usage_metadata[name] for name in counts]
    assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"] == "length"
    assert total.response_metadata["model_name"] == whole.response_metadata["model_name"] == MODEL


def test_log_probabilities_reach_the_messages_metadata(server):
    chat = langchain_openai.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model=MODEL, max_tokens=8, temperature=0)
    message = chat.bind(logprobs=True, top_logprobs=2).invoke(PROMPTS[0])
    content = message.response_metadata["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == message.content
    assert all(item["top_logprobs"][0]["logprob"] == item["logprob"] for item in content)


def roomy(chat):
    """`chat` with room for an object and for all the blanks that the grammar lets stand in it."""
    return chat.model_copy(update={"max_tokens": 400})


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_structured_output_is_an_object_of_its_class(chat, prompt, strict):
    shaped = roomy(chat).with_structured_output(Verdict, method="json_schema", strict=strict, include_raw=True)
    answer = shaped.invoke(prompt)
    assert answer["parsing_error"] is None
    assert answer["parsed"] == Verdict.model_validate_json(answer["raw"].content)
    assert answer["raw"].response_metadata["finish_reason"] == "stop"


def test_a_structured_stream_ends_in_an_object_of_its_class(chat):
    shaped = roomy(chat).with_structured_output(Verdict, method="json_schema")
    assert isinstance(list(shaped.stream(PROMPTS[0]))[-1], Verdict)


def test_a_prompt_that_is_too_long_is_known_as_such(chat):
    langchain = pytest.importorskip("langchain_core.exceptions")
    with pytest.raises(langchain.ContextOverflowError, match="maximum context length is 1024 tokens"):
        chat.invoke("x " * 2000)
