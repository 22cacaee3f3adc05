"""What callers use, with a real chat model: schemas, tools, the prefix cache, seeds, both transports."""

import json
from pathlib import Path

import jsonschema
import pytest

from tests.real.models import lacking
from tests.real.served import ask, served
from tests.service.test_parity_chat import over_grpc, over_http

pytestmark = pytest.mark.skipif(bool(lacking("smollm2")), reason=lacking("smollm2"))
CAPITAL = [{"role": "user", "content": "What is the capital of Germany?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather of a city", "parameters": CITY}}


@pytest.fixture(scope="module")
def server():
    with served("smollm2") as server:
        yield server


def said(answer: dict) -> str:
    content: str = answer["choices"][0]["message"]["content"]
    return content


def test_it_knows_the_capital_of_germany(server):
    answer = ask(server, messages=CAPITAL, temperature=0, max_tokens=32)
    assert "Berlin" in said(answer) and answer["choices"][0]["finish_reason"] == "stop"


def test_an_enforced_schema_is_obeyed_and_filled_with_sense(server):
    asked = [{"role": "user", "content": "Anna is 31 years old. Give her name and age as JSON."}]
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    found = json.loads(said(ask(server, messages=asked, response_format=form, temperature=0, max_tokens=60)))
    jsonschema.validate(found, PERSON)
    assert found == {"name": "Anna", "age": 31}


def test_a_second_call_finds_the_prefix_and_says_the_same(server):
    asked = {"messages": [{"role": "user", "content": "Tell me a story about a fox. " * 8}], "temperature": 0, "max_tokens": 24}
    first, second = ask(server, **asked), ask(server, **asked)
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, second)]
    assert cached[0] == 0 < cached[1]
    assert said(first) == said(second)


def test_a_seed_draws_the_same_and_another_draws_another(server):
    asked = {"messages": CAPITAL, "temperature": 1.5, "max_tokens": 24}
    texts = [said(ask(server, **asked, seed=seed)) for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_both_transports_say_the_same(server, stream):
    asked = {"messages": CAPITAL, "temperature": 0.8, "seed": 5, "max_tokens": 32, "request_id": "r1", "return_token_ids": True}
    ours = over_http(server, asked, stream=stream)
    assert ours == over_grpc(server, asked, stream=stream)
    assert ours.status == 200 and ours.content and ours.tokens


def test_a_tool_is_called_and_its_result_is_told():
    template = str(Path(__file__).with_name("tools.jinja"))
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    with served("smollm2", chat_template=template, tool_parser="hermes") as server:
        answer = ask(server, messages=asked, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=80)
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls" and call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        asked += [message, {"role": "tool", "tool_call_id": call["id"], "content": "It is sunny, 21 degrees."}]
        assert "sunny" in said(ask(server, messages=asked, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=40))
