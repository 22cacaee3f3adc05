"""OpenAI's agents: they call, are answered, and end; whole, streamed, and with one agent handing over to another."""

import asyncio
import json
from typing import Any, Literal

import pytest

from tests.clients.narrow import MODEL
from tests.clients.tools import Now
from tests.service.server import Server

agents = pytest.importorskip("agents")
openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.ray, pytest.mark.clients]

agents.set_tracing_disabled(True)  # it would call out
Zone = Literal["UTC", "CET"]


@pytest.fixture
def seen() -> list[str]:
    """The zones that the tool was called with."""
    return []


@pytest.fixture
def run(server: Server, seen: list[str]):
    """Runs an agent that has the tool `now`, whole or streamed; what came of it, and the events of a stream."""

    @agents.function_tool
    def now(zone: Zone) -> str:
        """What time it is."""
        seen.append(zone)
        return f"It is noon, {zone}."

    async def main(streamed: bool, turns: int, settings: dict[str, Any], more: dict[str, Any]) -> tuple[Any, list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            model = agents.OpenAIChatCompletionsModel(MODEL, client)
            given = {"temperature": 0, "max_tokens": 40, "parallel_tool_calls": False, "tool_choice": "required"}
            agent = agents.Agent("clock", "Say the time.", **({"tools": [now]} | more), model=model)
            agent.model_settings = agents.ModelSettings(**given | settings, include_usage=True)
            for other in agent.handoffs:
                other.model, other.model_settings = model, agents.ModelSettings(max_tokens=400)
            if not streamed:
                return await agents.Runner.run(agent, "Time?", max_turns=turns), []
            result = agents.Runner.run_streamed(agent, "Time?", max_turns=turns)
            return result, [event async for event in result.stream_events()]

    def start(
        streamed: bool = False, turns: int = 4, settings: dict[str, Any] | None = None, **more: Any
    ) -> tuple[Any, list[Any]]:
        return asyncio.run(main(streamed, turns, settings or {}, more))

    return start


def history(result: Any) -> list[tuple]:
    """What was said and done, but for ids."""
    keys = ("type", "role", "content", "name", "arguments", "output")
    read = [{key: item.get(key) for key in keys} for item in result.to_input_list()]
    for item in read:
        if isinstance(item["content"], list):
            item["content"] = [part["text"] for part in item["content"]]
    return [tuple(map(str, item.values())) for item in read]


def test_an_agent_calls_its_tool_is_answered_and_ends_the_same_whole_and_streamed(run, seen):
    whole, _ = run()  # after a call, tool_choice is "auto" again
    streamed, events = run(streamed=True)
    assert [type(item).__name__ for item in whole.new_items] == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    assert history(streamed) == history(whole)
    assert seen[0] in ("UTC", "CET")
    assert seen == seen[:1] * 2
    assert streamed.final_output == whole.final_output
    raw = [event.data for event in events if event.type == "raw_response_event"]
    arguments = "".join(each.delta for each in raw if each.type == "response.function_call_arguments.delta")
    text = "".join(each.delta for each in raw if each.type == "response.output_text.delta")
    assert json.loads(arguments) == {"zone": seen[0]}
    assert text == whole.final_output
    usages = [result.context_wrapper.usage for result in (whole, streamed)]
    assert usages[0].requests == 2
    assert usages[0].output_tokens == usages[1].output_tokens > 40
    assert usages[0].total_tokens == usages[1].total_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_that_must_go_on_calling_does_so_until_its_turns_are_over(run, seen, streamed):
    with pytest.raises(agents.MaxTurnsExceeded):
        run(streamed, turns=3, reset_tool_choice=False)
    assert len(seen) == 3


@pytest.mark.parametrize("choice", ["now", "required"])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_may_end_with_its_first_call(run, seen, choice, streamed):
    result, _ = run(streamed, settings={"tool_choice": choice}, tool_use_behavior="stop_on_first_tool")
    assert result.final_output == f"It is noon, {seen[0]}."


@pytest.mark.parametrize("streamed", [False, True])
def test_several_calls_of_one_answer_are_all_carried_out(run, seen, streamed):
    result, _ = run(streamed, settings={"parallel_tool_calls": True, "max_tokens": 100})
    items = result.to_input_list()
    called = [item["call_id"] for item in items if item.get("type") == "function_call"]
    answered = [item["call_id"] for item in items if item.get("type") == "function_call_output"]
    assert called == answered
    assert len(set(called)) == len(seen) > 1


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_hands_over_to_another_which_answers_with_an_object(run, streamed):
    other = agents.Agent("zones", "Name the zone.", output_type=Now)
    result, _ = run(streamed, tools=[], handoffs=[other])
    assert result.last_agent is other
    assert isinstance(result.final_output, Now)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_works_with_its_default_model_class_which_speaks_responses(server, seen, streamed):
    """Nothing but the address is set: newer versions ask POST /v1/responses."""

    @agents.function_tool
    def now(zone: Zone) -> str:
        """What time it is."""
        seen.append(zone)
        return "It is noon."

    async def main() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            agents.set_default_openai_client(client, use_for_tracing=False)
            # A stream that max_tokens cuts is an error to it, as OpenAI's API has it.
            settings = agents.ModelSettings(temperature=0, max_tokens=400, tool_choice="required", parallel_tool_calls=False)
            agent = agents.Agent("clock", "Say the time.", tools=[now], model=MODEL, model_settings=settings)
            agent.tool_use_behavior = "stop_on_first_tool"
            if not streamed:
                return await agents.Runner.run(agent, "Time?", max_turns=4)
            result = agents.Runner.run_streamed(agent, "Time?", max_turns=4)
            async for _ in result.stream_events():
                pass
            return result

    result = asyncio.run(main())
    assert len(seen) == 1
    assert result.final_output == "It is noon."
    assert all(response.response_id.startswith("resp_") for response in result.raw_responses)
