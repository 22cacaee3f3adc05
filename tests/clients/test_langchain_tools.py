"""LangChain with tools: bound ones, calls in pieces, structured output by a call, and agents of LangChain and LangGraph."""

import asyncio
from typing import Any

import pytest

from tests.clients.narrow import MODEL
from tests.clients.tools import MODELS, ROOM, Now, Weather, valid
from tests.service.server import Server

langchain_openai = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")
tools = pytest.importorskip("langchain_core.tools")
pytestmark = [pytest.mark.ray, pytest.mark.clients]

QUESTION = "Weather in Oslo?"
SETTINGS = {"parallel_tool_calls": False, "strict": True, "max_tokens": 60}
"""Of the agents. Without `strict`, LangChain drops from a schema that there may be nothing else."""


def chat_of(server: Server, **more: Any) -> Any:
    fields = {"model": MODEL, "max_tokens": ROOM, "temperature": 1, "seed": 5, "max_retries": 0} | more
    return langchain_openai.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", **fields)


@pytest.fixture
def chat(server: Server):
    return chat_of(server)


def bound(chat: Any, **more: Any) -> Any:
    return chat.bind_tools(list(MODELS.values()), **({"parallel_tool_calls": False} | more))


def said(message: Any) -> tuple:
    """What a message says, but for ids; nothing of it may be beyond LangChain's reading."""
    assert message.invalid_tool_calls == []
    return message.content, [(call["name"], call["args"]) for call in message.tool_calls]


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("choice", ["any", "required", "Weather", "Now", True])
def test_an_enforced_call_is_the_same_whole_and_streamed(chat, choice, strict):
    if choice is True:
        asked = chat.bind_tools([Now], tool_choice=True, parallel_tool_calls=False, strict=strict)
    else:
        asked = bound(chat, tool_choice=choice, strict=strict)
    whole = asked.invoke(QUESTION)
    [(name, arguments)] = said(whole)[1]
    assert MODELS[name].model_validate(arguments, strict=True)
    assert name == choice or choice in ("any", "required", True)
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    first, *rest = asked.stream(QUESTION, stream_usage=True)
    total = sum(rest, start=first)
    assert said(total) == said(whole)
    assert total.response_metadata["finish_reason"] == "tool_calls"
    counts = ("input_tokens", "output_tokens", "total_tokens")
    assert [total.usage_metadata[name] for name in counts] == [whole.usage_metadata[name] for name in counts]


def test_an_enforced_call_is_the_same_asynchronous(server):
    asked = bound(chat_of(server, timeout=59), tool_choice="any")  # LangChain keeps a pool of connections for each timeout
    assert said(asyncio.run(asked.ainvoke(QUESTION))) == said(asked.invoke(QUESTION))


def test_pieces_of_a_call_name_it_once_and_join_to_its_arguments(chat):
    asked = bound(chat, tool_choice="any")
    pieces = [piece for chunk in asked.stream(QUESTION) for piece in chunk.tool_call_chunks]
    assert [bool(piece["id"]) for piece in pieces] == [bool(piece["name"]) for piece in pieces]
    assert [bool(piece["id"]) for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert {piece["index"] for piece in pieces} == {0}
    assert valid(pieces[0]["name"], "".join(piece["args"] for piece in pieces))
    assert len(pieces) > 3


def test_without_enforcement_a_bound_model_may_answer_in_text(chat):
    asked = bound(chat.model_copy(update={"max_tokens": 24}))
    whole = asked.invoke(QUESTION)
    first, *rest = asked.stream(QUESTION)
    assert whole.content
    assert said(sum(rest, start=first)) == said(whole)
    assert whole.usage_metadata["input_tokens"] > chat.invoke(QUESTION).usage_metadata["input_tokens"] + 100


def test_messages_with_calls_and_answers_come_back(chat):
    asked = bound(chat, tool_choice="any")
    history = [messages.HumanMessage(QUESTION)]
    for turn in range(3):
        message = asked.invoke(history, seed=turn)
        [call] = message.tool_calls
        history += [message, messages.ToolMessage(f"Answer {turn}.", tool_call_id=call["id"])]
    last = bound(chat, tool_choice="none").invoke(history, max_tokens=8)
    assert said(last)[1] == []
    assert last.content


@pytest.mark.parametrize("model", [Weather, Now])
@pytest.mark.parametrize("strict", [None, True])
def test_structured_output_by_a_call_is_an_object_of_its_class(chat, model, strict):
    shaped = chat.with_structured_output(model, method="function_calling", strict=strict, include_raw=True)
    answer = shaped.invoke(QUESTION)
    assert answer["parsing_error"] is None
    assert answer["parsed"] == model.model_validate(answer["raw"].tool_calls[0]["args"], strict=True)
    plain = chat.with_structured_output(model, method="function_calling", strict=strict)
    assert list(plain.stream(QUESTION))[-1] == answer["parsed"]


def agent_with(chat: Any, kind: str, seen: list[str]) -> Any:
    """An agent that has a tool, and has to call it in its first turn."""

    @tools.tool(args_schema=Now)
    def clock(zone: str) -> str:
        """What time it is."""
        seen.append(zone)
        return f"It is noon, {zone}."

    def choice(history: list[Any]) -> str:
        return "none" if any(isinstance(message, messages.ToolMessage) for message in history) else "required"

    if kind == "langgraph":
        prebuilt = pytest.importorskip("langgraph.prebuilt")
        return prebuilt.create_react_agent(
            lambda state, _: chat.bind_tools([clock], tool_choice=choice(state["messages"]), **SETTINGS), [clock]
        )
    made = pytest.importorskip("langchain.agents")
    middleware = pytest.importorskip("langchain.agents.middleware")

    @middleware.wrap_model_call
    def enforce(request: Any, handler: Any) -> Any:
        return handler(request.override(tool_choice=choice(request.messages), model_settings=SETTINGS))

    return made.create_agent(chat, [clock], system_prompt="Say the time.", middleware=[enforce])


@pytest.mark.parametrize("kind", ["langchain", "langgraph"])
def test_an_agent_calls_its_tool_is_answered_and_ends_the_same_whole_and_streamed(chat, kind):
    seen: list[str] = []
    agent = agent_with(chat, kind, seen)
    ask = {"messages": [{"role": "user", "content": "Time?"}]}
    whole = agent.invoke(ask)["messages"]
    assert [message.type for message in whole] == ["human", "ai", "tool", "ai"]
    assert (whole[1].tool_calls[0]["args"], whole[2].content) == ({"zone": seen[0]}, f"It is noon, {seen[0]}.")
    pieces: dict[str, Any] = {}
    for piece, _ in agent.stream(ask, stream_mode="messages"):
        pieces[piece.id] = pieces[piece.id] + piece if piece.id in pieces else piece
    streamed = [message for message in pieces.values() if message.type != "tool"]
    assert [said(message) for message in streamed] == [said(whole[1]), said(whole[3])]
    assert len(seen) == 2
