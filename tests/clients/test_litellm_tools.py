"""LiteLLM with tools: calls whole and in pieces, what it builds of them, and an agent's turns."""

import asyncio
from typing import Any

import pytest

from tests.clients.narrow import MODEL
from tests.clients.tools import QUESTION, ROOM, TOOLS, Weather, named, valid
from tests.service.server import Server

litellm = pytest.importorskip("litellm")
pytestmark = [pytest.mark.ray, pytest.mark.clients]

ENFORCED = ["required", named("Weather"), named("Now")]


@pytest.fixture
def ask(server: Server) -> dict[str, Any]:
    """The fields of a chat with tools."""
    where = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    drawn = {"max_tokens": ROOM, "temperature": 1, "seed": 5, "parallel_tool_calls": False}
    return {**where, **drawn, "messages": [QUESTION], "tools": TOOLS}


def said(answer: Any) -> tuple:
    """What a whole answer says, but for the ids of its calls."""
    choice = answer.choices[0]
    calls = [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return choice.message.content or "", calls, choice.finish_reason


@pytest.mark.parametrize("choice", ENFORCED, ids=["required", "Weather", "Now"])
def test_an_enforced_call_is_the_same_whole_built_of_pieces_and_asynchronous(ask, choice):
    async def streamed() -> list[Any]:
        return [piece async for piece in await litellm.acompletion(**ask, tool_choice=choice, stream=True)]

    whole = litellm.completion(**ask, tool_choice=choice)
    [(kind, name, arguments)] = said(whole)[1]
    assert valid(name, arguments)
    assert (kind, said(whole)[0], said(whole)[2]) == ("function", "", "tool_calls")
    pieces = list(litellm.completion(**ask, tool_choice=choice, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(pieces, messages=ask["messages"])
    assert said(built) == said(whole)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [getattr(built.usage, name) for name in counts] == [getattr(whole.usage, name) for name in counts]
    assert said(litellm.stream_chunk_builder(asyncio.run(streamed()))) == said(whole)


def test_several_calls_are_built_of_their_pieces(ask):
    fields = ask | {"parallel_tool_calls": True, "temperature": 0, "tool_choice": named("Now")}
    whole = litellm.completion(**fields)
    assert len(whole.choices[0].message.tool_calls) > 2
    built = litellm.stream_chunk_builder(list(litellm.completion(**fields, stream=True)))
    assert said(built) == said(whole)
    assert len({call.id for call in built.choices[0].message.tool_calls}) == len(said(whole)[1])


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_call_that_is_not_enforced_may_be_text(ask, choice):
    fields = ask | {"tool_choice": choice, "max_tokens": 24}
    whole = litellm.completion(**fields)
    content, calls, _ = said(whole)
    assert (bool(content), calls) == (True, [])
    assert (whole.usage.prompt_tokens > 100) == (choice != "none")
    assert said(litellm.stream_chunk_builder(list(litellm.completion(**fields, stream=True)))) == said(whole)


def test_an_agents_messages_come_back(ask):
    history: list[Any] = [QUESTION]
    for turn in range(3):
        fields = ask | {"messages": history, "tool_choice": "required", "seed": turn}
        if turn % 2:
            message = litellm.stream_chunk_builder(list(litellm.completion(**fields, stream=True))).choices[0].message
        else:
            message = litellm.completion(**fields).choices[0].message
        [call] = message.tool_calls
        assert valid(call.function.name, call.function.arguments)
        told = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": f"Answer {turn}."}
        history += [message if turn else message.model_dump(), told]
    last = litellm.completion(**ask | {"messages": history, "tool_choice": "none", "max_tokens": 8})
    assert said(last)[0]


def test_a_strict_tool_made_of_a_class_is_enforced(ask):
    openai = pytest.importorskip("openai")
    fields = ask | {"tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required"}
    assert valid(*said(litellm.completion(**fields))[1][0][1:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tool_choice": named("nobody")}, "one of the tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "no other tool"),
        ({"messages": [QUESTION, {"role": "tool", "tool_call_id": "x", "content": "1"}]}, "id of a call"),
    ],
    ids=["choice", "twice", "answer"],
)
def test_a_wrong_tool_is_litellms_own_exception(ask, fields, word, stream):
    with pytest.raises(litellm.BadRequestError, match=word):
        list(litellm.completion(**ask | fields, stream=stream))
