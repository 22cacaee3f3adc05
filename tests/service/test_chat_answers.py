"""Chat with tools and reasoning, from a body to its answer: streamed deltas joined are the whole answer."""

import asyncio
import json
from dataclasses import replace

import pytest

from attend.model.text.chat import ChatTemplate
from attend.service.chat.forms import form_of
from tests.fakes import END, INFO, FakeEngine, build_server, says
from tests.service.http_api.described import faults, operation

TEMPLATE = ChatTemplate(
    "{% for tool in tools or [] %}{{ tool.function.parameters.properties | list | join }} {{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if think %}<think>\n{% endif %}"
)
FORM = form_of("", "hermes", "think")
NOW = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
}
BODY = {"request_id": "r1", "messages": [{"role": "user", "content": "Time?"}], "tools": [NOW], "max_tokens": 500}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'

STREAMED = {"$ref": "#/components/schemas/ChatCompletionChunk"}


def server(text: str, burst: int = 1):
    engine = FakeEngine(says(text), burst=burst, info=replace(INFO, max_model_len=1024))
    return build_server(engine, template=TEMPLATE, form=FORM)


def ask(text: str, burst: int = 1, **more):
    """The whole answer, and the events of the same call streamed."""

    async def calls():
        one = server(text, burst)
        async with one.http() as client:
            whole = await client.post("/v1/chat/completions", json=BODY | more)
            streamed = await client.post(
                "/v1/chat/completions", json=BODY | more | {"stream": True, "stream_options": {"include_usage": True}}
            )
        lines = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
        return whole, [json.loads(line) for line in lines if line != "[DONE]"], one

    return asyncio.run(calls())


def joined(events) -> dict:
    """The message and the end that the deltas make, as clients put them together."""
    message, calls, reason = {"content": "", "reasoning_content": ""}, {}, None
    for event in events:
        for choice in event["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            assert len(delta.keys() - {"role"}) <= (choice["finish_reason"] is None)
            message["content"] += delta.get("content", "")
            message["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                known = calls.setdefault(call["index"], {"name": "", "arguments": ""})
                known |= {key: call[key] for key in ("id", "type") if key in call}
                known["name"] += call["function"].get("name", "")
                known["arguments"] += call["function"]["arguments"]
    return message | {"calls": [calls[index] for index in sorted(calls)], "reason": reason}


def flat(whole) -> dict:
    choice = whole.json()["choices"][0]
    message = choice["message"]
    calls = [{"id": c["id"], "type": c["type"], **c["function"]} for c in message.get("tool_calls", ())]
    content, reasoning = message["content"] or "", message.get("reasoning_content", "")
    return {"content": content, "reasoning_content": reasoning, "calls": calls, "reason": choice["finish_reason"]}


TEXTS = [
    (CALL, "", "", 1, "tool_calls"),
    ("<think>\nLet me see.\n</think>\n\nI look.\n" + CALL + "\n" + CALL, "I look.", "Let me see.", 2, "tool_calls"),
    ("<think>Hm.</think>Noon.", "Noon.", "Hm.", 0, "stop"),
    ("Noon, é.", "Noon, é.", "", 0, "stop"),
    ("a <tool_call> b", "a <tool_call> b", "", 0, "stop"),
]


@pytest.mark.parametrize(("text", "content", "reasoning", "calls", "reason"), TEXTS)
@pytest.mark.parametrize("burst", [1, 7])
def test_streamed_deltas_joined_are_the_whole_answer(text, content, reasoning, calls, reason, burst):
    whole, events, _ = ask(text, burst, seed=5)
    assert whole.status_code == 200, whole.text
    found = flat(whole)
    assert (found["content"], found["reasoning_content"], len(found["calls"]), found["reason"]) == (
        content,
        reasoning,
        calls,
        reason,
    )
    assert joined(events) == found
    assert whole.json()["usage"] == events[-1]["usage"]
    described = operation("/v1/chat/completions")["responses"]["200"]["content"]
    assert not faults(described["application/json"]["schema"], whole.json())
    assert not [fault for event in events for fault in faults(STREAMED, event)]
    for call in found["calls"]:
        assert json.loads(call["arguments"]) == {"zone": "UTC"} and call["name"] == "now"
    assert len({call["id"] for call in found["calls"]}) == calls


def test_the_tokens_of_reasoning_are_counted():
    whole, *_ = ask("<think>ab</think>cd")
    usage = whole.json()["usage"]
    assert usage["completion_tokens"] == len("<think>ab</think>cd") + 1
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(">ab</think>")}


def test_reasoning_that_the_prompt_opens_needs_no_marker():
    whole, events, _ = ask("Hm.</think>Noon.", chat_template_kwargs={"think": True}, seed=5)
    assert (flat(whole)["reasoning_content"], flat(whole)["content"]) == ("Hm.", "Noon.")
    assert joined(events) == flat(whole)


def test_without_parallel_calls_an_answer_ends_with_the_first():
    whole, events, one = ask(CALL + "\n" + CALL + " and more", parallel_tool_calls=False, seed=5)
    assert (len(flat(whole)["calls"]), flat(whole)["reason"]) == (1, "tool_calls")
    assert joined(events) == flat(whole)
    assert not one.engine.open


def test_a_call_that_a_limit_cuts_is_no_finished_call():
    whole, events, _ = ask(CALL, max_tokens=50, seed=5)
    assert flat(whole)["reason"] == "length" and joined(events) == flat(whole)
    assert flat(whole)["calls"][0]["arguments"] == '{"zone": '


@pytest.mark.parametrize(
    ("text", "more", "reason"),
    [
        (CALL + "\n" + CALL[:50], {}, "stop"),
        (CALL[:50] + "]" + CALL, {}, "stop"),
        (CALL + "\n" + CALL[:50], {"parallel_tool_calls": False}, "tool_calls"),
    ],
)
def test_an_answer_ends_with_calls_where_all_of_them_are_whole(text, more, reason):
    whole, events, _ = ask(text, seed=5, **more)
    assert flat(whole)["reason"] == reason and joined(events) == flat(whole)


THOUGHT = "<think>\nNoon. So\n\nnoon.\n</think>\n\n"
KEPT = {"include_stop_str_in_output": True}
LAST = [("Noon", {"stop_token_ids": [ord(".")]}), ("Noon.", {"stop_token_ids": [ord(".")]} | KEPT)]


@pytest.mark.parametrize(
    ("text", "more", "content", "calls", "stop"),
    [
        (THOUGHT + "It is noon. So?", {"stop": ["So"]}, "It is noon. ", 0, "So"),
        (THOUGHT + "It is noon. So?", {"stop": ["So"]} | KEPT, "It is noon. So", 0, "So"),
        (THOUGHT + "It is\n\nnoon.", {"stop": ["\n\n"]}, "It is", 0, "\n\n"),
        (THOUGHT + "It is.", {"stop": ["</think>", "think", "."], "min_tokens": 39}, "It is", 0, "."),
        (THOUGHT + "It is noon.", {"stop": ["noon.\n"]}, "It is noon.", 0, None),
        (THOUGHT + "It is ST", {"stop": ["STOP"]}, "It is ST", 0, None),
        *[(THOUGHT + "Noon. So", more, content, 0, ord(".")) for content, more in LAST],
        (THOUGHT + "Noon", {"stop_token_ids": [ord("."), END]}, "Noon", 0, None),
        (CALL, {"stop": ["UTC", "\n", "</tool_call>", "}"]}, "", 1, None),
        (CALL, {"stop_token_ids": [ord("U"), ord("\n")]}, "", 1, None),
        (f"Yes.\n\n{CALL}\n{CALL}", {"stop": ["_call>", "\n\n"]}, "Yes.", 2, None),
        (f"Yes: S{CALL}TOP", {"stop": ["STOP"]}, "Yes: STOP", 1, None),
        (f"{CALL} So it is. {CALL}", {"stop": ["it"]}, "So ", 1, "it"),
        (f"{CALL} So it", {"stop_token_ids": [ord("i")]}, "So ", 1, ord("i")),
        ("<tool_call>\nnone <tool_call>", {"stop": ["none"]}, "<tool_call>\n", 0, "none"),
    ],
)
@pytest.mark.parametrize("burst", [1, 7, 300])
def test_stops_are_looked_for_in_content_alone(text, more, content, calls, stop, burst):
    whole, events, one = ask(text, burst, seed=5, **more)
    found, choice = flat(whole), whole.json()["choices"][0]
    assert (found["content"], len(found["calls"]), choice["stop_reason"]) == (content, calls, stop)
    assert found["reason"] == ("tool_calls" if calls else "stop")
    assert joined(events) == found and events[-2]["choices"][0]["stop_reason"] == stop
    assert found["reasoning_content"] == ("Noon. So\n\nnoon." if text.startswith(THOUGHT) else "")
    assert not one.engine.open


def test_token_ids_and_scores_of_held_tokens_arrive():
    whole, events, _ = ask("<think>ab</think>cd", return_token_ids=True, logprobs=True, seed=5)
    ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", ())]
    scores = [row for event in events for choice in event["choices"] for row in (choice["logprobs"] or {}).get("content", ())]
    choice = whole.json()["choices"][0]
    assert ids == choice["token_ids"] and scores == choice["logprobs"]["content"]


def test_the_agent_loop_sends_calls_and_answers_back():
    whole, *_ = ask(CALL)
    message = whole.json()["choices"][0]["message"]
    answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "noon"}
    again, *_, one = ask("It is noon.", messages=[*BODY["messages"], message, answer])
    assert flat(again)["content"] == "It is noon."
    assert bytes(one.engine.requests[0].prompt).decode().endswith("tool:noon\n")
