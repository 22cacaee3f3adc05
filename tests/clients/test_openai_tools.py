"""OpenAI's own client with tools: enforced calls, its parser, its accumulator, and the loop of an agent."""

import asyncio
from typing import Any

import pytest

from tests.clients.narrow import MODEL
from tests.clients.tools import MODELS, QUESTION, ROOM, TOOLS, Now, Weather, named, valid
from tests.service.server import Server

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.ray, pytest.mark.clients]

ONE = {"parallel_tool_calls": False}
ASK = {"model": MODEL, "messages": [QUESTION], "tools": TOOLS, "max_tokens": ROOM, "temperature": 1, "seed": 5}
ENFORCED = ["required", named("Weather"), named("Now")]


@pytest.fixture
def client(server: Server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def said(choice: Any) -> tuple:
    """What a whole answer says, but for the ids of its calls."""
    calls = [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return choice.message.content or "", calls, choice.finish_reason


def counts(answer: Any) -> tuple[int, int]:
    """Tokens read and written; how many of them were cached depends on what came before."""
    return answer.usage.prompt_tokens, answer.usage.completion_tokens


def put_together(chunks: Any) -> dict[int, tuple]:
    """The same of each answer of a stream, put together by hand; each call begins once, in order, with all that names it."""
    texts: dict[int, list[str]] = {}
    calls: dict[int, list[list]] = {}
    ends: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts.setdefault(choice.index, []).append(choice.delta.content or "")
        mine = calls.setdefault(choice.index, [])
        for delta in choice.delta.tool_calls or []:
            if delta.id is not None:
                assert (delta.index, delta.type) == (len(mine), "function")
                mine.append([delta.type, delta.function.name, ""])
            mine[delta.index][2] += delta.function.arguments
        if choice.finish_reason is not None:
            assert choice.index not in ends
            ends[choice.index] = choice.finish_reason
    return {at: ("".join(texts[at]), [tuple(call) for call in calls[at]], ends[at]) for at in ends}


@pytest.mark.parametrize("choice", ENFORCED, ids=["required", "Weather", "Now"])
def test_an_enforced_call_is_the_same_whole_streamed_and_asynchronous(server, client, choice):
    async def other() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
            return (await made.chat.completions.create(**ask)).choices[0]

    ask = {**ASK, **ONE, "tool_choice": choice}
    whole = client.chat.completions.create(**ask).choices[0]
    [(_, name, arguments)] = said(whole)[1]
    assert valid(name, arguments)
    assert choice in ("required", named(name))
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    assert put_together(client.chat.completions.create(**ask, stream=True)) == {0: said(whole)}
    assert said(asyncio.run(other())) == said(whole)


def test_with_choice_none_the_answer_is_as_without_tools(client):
    bare = {key: value for key, value in ASK.items() if key != "tools"} | {"max_tokens": 24}
    hidden = client.chat.completions.create(**bare, tools=TOOLS, tool_choice="none")
    without = client.chat.completions.create(**bare)
    assert (said(hidden.choices[0]), counts(hidden)) == (said(without.choices[0]), counts(without))


@pytest.mark.parametrize("strict", [False, True])
def test_with_choice_auto_the_answer_is_text_after_the_tools(client, strict):
    tools = [{**tool, "function": tool["function"] | {"strict": strict}} for tool in TOOLS]
    ask = {**ASK, "tools": tools, "max_tokens": 24}
    whole = client.chat.completions.create(**ask, tool_choice="auto")
    assert whole.choices[0].message.content
    assert whole.choices[0].message.tool_calls is None
    assert whole.usage.prompt_tokens > 100
    assert put_together(client.chat.completions.create(**ask, stream=True)) == {0: said(whole.choices[0])}


def test_calls_of_several_answers_stream_side_by_side_and_each_ends_once(client):
    ask = {**ASK, **ONE, "tool_choice": "required", "n": 3}
    whole = client.chat.completions.create(**ask).choices
    assert put_together(client.chat.completions.create(**ask, stream=True)) == {each.index: said(each) for each in whole}
    ids = [call.id for each in whole for call in each.message.tool_calls]
    assert len(set(ids)) == 3


def test_an_answer_may_hold_several_calls_and_is_cut_inside_one_as_far_as_it_came(client):
    ask = {**ASK, "tool_choice": named("Now"), "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0]
    content, calls, reason = said(whole)
    assert (content, reason) == ("", "length")  # greedy, this model goes on and on
    assert len({call.id for call in whole.message.tool_calls}) == len(calls) > 2
    assert all(valid(name, arguments) for _, name, arguments in calls[:-1])
    assert put_together(client.chat.completions.create(**ask, stream=True)) == {0: said(whole)}


@pytest.mark.parametrize("choice", ENFORCED, ids=["required", "Weather", "Now"])
def test_the_parser_gives_arguments_of_the_tools_class(client, choice):
    ask = {**ASK, **ONE, "tools": [openai.pydantic_function_tool(model) for model in MODELS.values()], "tool_choice": choice}
    for parse in (client.chat.completions.parse, client.beta.chat.completions.parse):
        [call] = parse(**ask).choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, MODELS[call.function.name])
        assert call.function.parsed_arguments == valid(call.function.name, call.function.arguments)


def test_the_parser_reads_a_content_of_a_class_beside_tools(client):
    tools = [openai.pydantic_function_tool(Weather)]
    ask = {**ASK, **ONE, "tools": tools, "max_tokens": 400, "response_format": Now}
    message = client.chat.completions.parse(**ask).choices[0].message
    assert isinstance(message.parsed, Now) != bool(message.tool_calls)


def test_the_parser_raises_its_own_error_for_a_call_that_is_cut(client):
    ask = {**ASK, "tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required", "max_tokens": 16}
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**ask)


@pytest.mark.parametrize("choice", ENFORCED, ids=["required", "Weather", "Now"])
def test_the_accumulator_ends_with_the_whole_answer_of_the_same_seed(client, choice):
    ask = {**ASK, **ONE, "tools": [openai.pydantic_function_tool(model) for model in MODELS.values()], "tool_choice": choice}
    whole = client.chat.completions.parse(**ask)
    with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert said(final.choices[0]) == said(whole.choices[0])
    assert counts(final) == counts(whole)
    assert "".join(event.arguments_delta for event in deltas) == done.arguments == deltas[-1].arguments
    assert len(deltas) > 3
    assert {event.name for event in deltas} == {done.name} == {whole.choices[0].message.tool_calls[0].function.name}
    assert done.parsed_arguments == final.choices[0].message.tool_calls[0].function.parsed_arguments
    assert done.parsed_arguments == whole.choices[0].message.tool_calls[0].function.parsed_arguments


def test_the_accumulator_keeps_several_calls_apart(client):
    ask = {**ASK, "tool_choice": named("Now"), "temperature": 0}
    with client.chat.completions.stream(**ask) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.current_completion_snapshot.choices[0]
    assert said(final) == said(client.chat.completions.create(**ask).choices[0])
    assert [event.index for event in done] == list(range(len(done)))
    calls = zip(done, final.message.tool_calls, strict=False)
    assert all(event.arguments == call.function.arguments for event, call in calls)


def answers(client: Any, way: str, **ask: Any) -> Any:
    """The message of an answer, as a client keeps it."""
    if way == "stream":
        with client.chat.completions.stream(**ask) as stream:
            return stream.get_final_completion().choices[0].message
    return getattr(client.chat.completions, way)(**ask).choices[0].message


@pytest.mark.parametrize(
    "keep", [lambda message: message, lambda message: message.model_dump(), lambda message: message.to_dict()]
)
@pytest.mark.parametrize("way", ["create", "parse", "stream"])
def test_an_agent_calls_is_answered_and_says_its_last_word_however_it_keeps_messages(client, way, keep):
    tools = [openai.pydantic_function_tool(model) for model in MODELS.values()]
    ask = {**ASK, **ONE, "tools": tools, "max_tokens": 60}
    messages: list[Any] = [QUESTION]
    for turn, choice in enumerate(("required", named("Now"))):
        message = answers(client, way, **{**ask, "messages": messages, "tool_choice": choice, "seed": turn})
        [call] = message.tool_calls
        assert valid(call.function.name, call.function.arguments)
        messages += [keep(message), {"role": "tool", "tool_call_id": call.id, "content": f"It is {turn}."}]
    assert (
        len({message["tool_call_id"] for message in messages if isinstance(message, dict) and "tool_call_id" in message}) == 2
    )
    shape = {"max_tokens": 300, "tool_choice": "none", "response_format": Now}
    last = client.chat.completions.parse(**{**ask, "messages": messages, **shape}).choices[0].message
    assert isinstance(last.parsed, Now)
    messages += [keep(last), {"role": "user", "content": "Thank you."}]
    assert answers(client, "create", **{**ask, "messages": messages, "tool_choice": "none", "max_tokens": 8}).content


def test_every_call_of_one_answer_is_answered(client):
    ask = {**ASK, "tool_choice": named("Now"), "temperature": 0, "max_tokens": 80}
    message = client.chat.completions.create(**ask).choices[0].message
    whole = message.tool_calls[:2]
    kept = message.model_dump() | {"tool_calls": [call.model_dump() for call in whole]}
    told = [{"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "noon"}]} for call in whole]
    after = {**ask, "messages": [QUESTION, kept, *told], "tool_choice": "none", "max_tokens": 4}
    assert client.chat.completions.create(**after).choices[0].message.content


def test_log_probabilities_of_a_call_are_of_all_its_tokens(client):
    ask = {**ASK, **ONE, "tool_choice": "required", "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**ask)
    content = whole.choices[0].logprobs.content
    assert len(content) in (whole.usage.completion_tokens - 1, whole.usage.completion_tokens)  # the last may be the end
    text = "".join(token.token for token in content)
    assert whole.choices[0].message.tool_calls[0].function.arguments in text
    pieces = [each for chunk in client.chat.completions.create(**ask, stream=True) for each in chunk.choices]
    streamed = [token for each in pieces if each.logprobs for token in each.logprobs.content or []]
    assert [token.logprob for token in streamed] == [token.logprob for token in content]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"tool_choice": named("nobody")}, "tool_choice.function.name", "one of the tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "custom"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name", "no other tool"),
        (
            {"messages": [QUESTION, {"role": "tool", "tool_call_id": "x", "content": "1"}]},
            "messages[1].tool_call_id",
            "id of a call",
        ),
        ({"reasoning_effort": "low"}, "reasoning_effort", "does not read it"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_tool_is_the_clients_own_exception(client, fields, param, word, stream):
    with pytest.raises(openai.BadRequestError, match=word) as caught:
        client.chat.completions.create(**{**ASK, **fields}, stream=stream)
    assert caught.value.param == param
