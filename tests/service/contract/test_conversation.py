"""Calls and their answers as they come back in a conversation."""

import pytest

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.text.chat import ChatTemplate
from attend.service.chat.prompt import options_of
from tests.service.contract.asked import messages_of

ASK = {"role": "user", "content": "Time?"}


def call(number="c1", name="now", arguments='{"zone": "UTC"}', **more):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def assistant(*calls, **more):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def answer(number="c1", **more):
    return {"role": "tool", "tool_call_id": number, "content": "noon", **more}


def test_calls_and_answers_go_to_the_template_with_arguments_as_objects():
    read = messages_of([ASK, assistant(call(), call("c2", "f", "")), answer(), answer("c2", name="f")])
    assert read[1]["content"] == ""
    assert [each["function"] for each in read[1]["tool_calls"]] == [
        {"name": "now", "arguments": {"zone": "UTC"}},
        {"name": "f", "arguments": {}},
    ]
    assert read[2] == {"role": "tool", "content": "noon", "tool_call_id": "c1"}
    assert read[3] == {"role": "tool", "content": "noon", "tool_call_id": "c2", "name": "f"}


@pytest.mark.parametrize("text", ["{", '{\n    "', '{"zone": ', '{"zone": "U', "[1]", "null", "[" * 9999])
def test_arguments_that_are_no_object_come_back_as_text_in_one(text):
    """As those of a call that max_tokens cut: the conversation goes on."""
    read = messages_of([ASK, assistant(call(arguments=text)), answer()])
    assert read[1]["tool_calls"][0]["function"]["arguments"] == {"INVALID_JSON": text}


def test_an_empty_list_of_calls_is_none_and_text_must_be_there_but_for_an_assistant():
    assert messages_of([{"role": "assistant", "content": "a", "tool_calls": []}]) == [{"role": "assistant", "content": "a"}]
    with pytest.raises(InvalidRequest, match=r"^messages\[0\]\.content is required"):
        messages_of([{"role": "user", "content": None}])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_goes_to_the_template_under_either_name(name):
    assert messages_of([{"role": "assistant", "content": "Noon.", name: "Hm."}])[0]["reasoning_content"] == "Hm."


@pytest.mark.parametrize("name", ["parsed", "provider_specific_fields"])
def test_what_a_client_has_added_to_an_answer_comes_back_with_it_and_is_dropped(name):
    called = call() | {"index": 0}
    called["function"]["parsed_arguments"] = {"zone": "UTC"}
    read = messages_of([ASK, assistant(called, **{name: None}), answer(), {"role": "assistant", "content": "[1]", name: [1]}])
    assert read[1]["tool_calls"][0]["function"].keys() == {"name", "arguments"}
    assert read[3] == {"role": "assistant", "content": "[1]"}


def test_effort_reaches_the_templates_that_know_it():
    knows = ChatTemplate("{{ reasoning_effort }}")
    switch = ChatTemplate("{{ enable_thinking }}")
    assert options_of(knows, {}, "low") == {"reasoning_effort": "low"}
    assert options_of(knows, {}, "max") == {"reasoning_effort": "xhigh"}
    assert options_of(knows, {"reasoning_effort": "high"}, "low") == {"reasoning_effort": "high"}
    assert options_of(switch, {}, "none") == {"enable_thinking": False}
    assert options_of(switch, {}, "high") == {"enable_thinking": True}
    assert options_of(ChatTemplate("x"), {"a": 1}, None) == {"a": 1}
    with pytest.raises(NotSupported, match="does not read it"):
        options_of(ChatTemplate("x"), {}, "low")
    with pytest.raises(InvalidRequest, match=r"^reasoning_effort must be one of none, minimal"):
        options_of(knows, {}, "much")
