"""Anthropic's own client on POST /v1/messages: whole, streamed, counted, with tools that are answered."""

import json
import urllib.request
from typing import Any

import pytest

from tests.clients.narrow import MODEL
from tests.service.server import Server

anthropic = pytest.importorskip("anthropic")
pytestmark = [pytest.mark.ray, pytest.mark.clients]

TOOL: dict[str, Any] = {
    "name": "now",
    "description": "The time.",
    "input_schema": {
        "type": "object",
        "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
    "strict": True,
}
HELLO = [{"role": "user", "content": "def f("}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(server: Server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def ask(client, **fields: Any):
    return client.messages.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 12, "extra_body": GREEDY} | fields)


def test_a_message_has_the_text_of_the_same_chat(client, server):
    made = ask(client, system="Write Python.")
    messages = [{"role": "system", "content": "Write Python."}, *HELLO]
    body = json.dumps({"messages": messages, "max_tokens": 12, "temperature": 0}).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        chat = json.load(answer)
    assert made.content[0].text == chat["choices"][0]["message"]["content"]
    read = made.usage.input_tokens + made.usage.cache_read_input_tokens
    assert (read, made.usage.output_tokens) == (chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"])
    counted = client.messages.count_tokens(model=MODEL, system="Write Python.", messages=HELLO)
    assert counted.input_tokens == read


def test_a_stream_is_the_whole_message(client):
    made = ask(client)
    with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=12, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == made.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (made.stop_reason, made.usage.output_tokens)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_answered(client, streamed):
    given = {"model": MODEL, "messages": HELLO, "max_tokens": 60, "tools": [TOOL], "extra_body": GREEDY}
    given["tool_choice"] = {"type": "tool", "name": "now", "disable_parallel_tool_use": True}
    if streamed:
        with client.messages.stream(**given) as stream:
            made = stream.get_final_message()
    else:
        made = client.messages.create(**given)
    assert made.stop_reason == "tool_use"
    (call,) = made.content
    assert call.input["zone"] in ("UTC", "CET")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "noon"}]}
    turn = [*HELLO, {"role": "assistant", "content": [call.model_dump()]}, {"role": "user", "content": [result]}]
    assert ask(client, messages=turn, tools=[TOOL]).content[0].type == "text"


def test_a_tool_runner_sends_the_whole_conversation_where_no_thread_is_kept(client, server):
    """It asks for a thread first, and without the reason of the refusal it would go on with the new turn alone."""
    zones: list[str] = []

    @anthropic.beta_tool
    def now(zone: str) -> str:
        """The time of a zone."""
        zones.append(zone)
        return "noon"

    choice = {"type": "any", "disable_parallel_tool_use": True}
    given = {"max_tokens": 90, "tools": [now], "tool_choice": choice, "max_iterations": 2, "extra_body": GREEDY}
    first, second = client.beta.messages.tool_runner(model=MODEL, messages=HELLO, **given)
    assert (first.stop_reason, second.stop_reason) == ("tool_use", "tool_use")
    assert len(zones) == 2
    assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) > first.usage.input_tokens


def test_what_is_ignored_is_said_and_an_error_has_its_type(client):
    raw = client.messages.with_raw_response.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=4,
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        tools=[{"type": "bash_20250124", "name": "bash"}],
    )
    assert sorted(raw.headers["x-attend-ignored"].split(", ")) == ["cache_control", "tools.bash_20250124"]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with pytest.raises(anthropic.BadRequestError, match="takes no other input"):
        ask(client, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="another")


def test_an_answer_goes_on_where_its_beginning_ends(client):
    begun = [*HELLO, {"role": "assistant", "content": "    return "}]
    assert ask(client, messages=begun).content[0].type == "text"


def test_max_tokens_beyond_the_context_is_clamped(client):
    raw = client.messages.with_raw_response.create(
        model=MODEL, messages=HELLO, max_tokens=8000, stop_sequences=["\n"], extra_body=GREEDY
    )
    assert raw.headers["x-attend-clamped"] == "max_tokens"
