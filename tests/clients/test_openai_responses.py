"""OpenAI's own client on POST /v1/responses: whole, streamed, parsed, with tools that are answered."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from tests.clients.narrow import MODEL
from tests.service.server import Server

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.ray, pytest.mark.clients]

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "now",
    "description": "The time.",
    "parameters": {
        "type": "object",
        "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def client(server: Server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, **fields: Any):
    return client.responses.create(**{"model": MODEL, "input": "def f(", "max_output_tokens": 12, "temperature": 0} | fields)


def test_a_response_has_the_text_of_the_same_chat(client):
    made = ask(client, instructions="Write Python.")
    messages = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "def f("}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    assert made.output_text == chat.choices[0].message.content
    assert (made.usage.input_tokens, made.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)


def test_a_stream_ends_with_the_whole_response(client):
    made = ask(client)
    with client.responses.stream(model=MODEL, input="def f(", max_output_tokens=12, temperature=0) as stream:
        events = [*stream]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1].response
    assert events[-1].type == f"response.{made.status}"
    assert (final.output_text, final.status) == (made.output_text, made.status)


class Age(BaseModel):
    years: int


def test_an_answer_is_parsed_by_its_type(client):
    made = client.responses.parse(model=MODEL, input="Age?", text_format=Age, temperature=0, max_output_tokens=40)
    assert isinstance(made.output_parsed, Age)


def test_a_tool_is_called_and_answered(client):
    first = ask(client, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_output_tokens=60)
    (call,) = first.output
    assert json.loads(call.arguments)["zone"] in ("UTC", "CET")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    second = ask(client, input=[{"role": "user", "content": "Time?"}, *first.output, output], tools=[TOOL])
    assert second.output[0].type == "message"


def test_what_is_ignored_is_said_and_what_needs_a_memory_is_refused(client):
    raw = client.responses.with_raw_response.create(
        model=MODEL, input="def f(", max_output_tokens=4, tools=[{"type": "web_search"}], prompt_cache_key="k", store=True
    )
    assert raw.headers["x-attend-ignored"] == "prompt_cache_key, store, tools.web_search"
    with pytest.raises(openai.BadRequestError, match="send the whole conversation in input") as caught:
        ask(client, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        ask(client, model="another")


def test_log_probabilities_come_where_they_are_asked_for(client):
    made = ask(client, include=["message.output_text.logprobs"], top_logprobs=2)
    (text,) = made.output[0].content
    assert "".join(each.token for each in text.logprobs) == text.text
