"""The APIs of responses and messages: the same conversations as a chat, the same answers, and streams that are whole or cut."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from attend.model.engine.request import EngineInfo, FinishReason
from attend.model.errors import InvalidRequest, NotSupported
from attend.model.text.chat import ChatTemplate
from attend.service.chat.forms import form_of
from attend.service.chat.prompt import without_oldest
from attend.service.contract.anthropic import CountTokensRequest, MessagesRequest
from attend.service.contract.commands import conversation_of, to_command
from attend.service.contract.requests import ChatRequest
from attend.service.contract.responses import ResponsesRequest, seal, unseal
from attend.service.remarks import IGNORED, Remarks
from tests.fakes import FakeEngine, build_server, info, says
from tests.service.http_api.described import ask
from tests.service.sse import events_of, named_events_of

TEMPLATE = ChatTemplate(
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{% endif %}"
)
FORM = form_of("", "hermes", "think")
LONG = info(max_model_len=2048, num_blocks=4096)
WIDER = replace(LONG, max_model_len=32768)
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
CHAT_TOOL = {"type": "function", "function": TOOL}
RESPONSE_TOOL = {"type": "function"} | TOOL
ANTHROPIC_TOOL = {"name": "f", "description": "d", "input_schema": TOOL["parameters"]}


def prompt_of(read: Any, document: dict[str, Any], remarks: Remarks | None = None) -> str:
    """The prompt that a body becomes."""
    remarks = Remarks() if remarks is None else remarks
    (prompt,) = conversation_of(read.read(document, remarks), TEMPLATE, FORM, remarks)["prompts"]
    return prompt.write().text


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "user", "content": [{"type": "text", "text": "p"}, {"type": "text", "text": "q"}]},
    ],
    "tools": [CHAT_TOOL],
}
RESPONSE = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b"}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"x": 1}', "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"role": "user", "content": [{"type": "input_text", "text": "p"}, {"type": "input_text", "text": "q"}]},
    ],
    "tools": [RESPONSE_TOOL],
}
ANTHROPIC = {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "r", "signature": "s"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "4"}]},
                {"type": "text", "text": "p"},
                {"type": "text", "text": "q"},
            ],
        },
    ],
    "tools": [ANTHROPIC_TOOL],
    "max_tokens": 4,
}


@pytest.mark.parametrize(
    ("read", "document"),
    [(ResponsesRequest, RESPONSE), (MessagesRequest, ANTHROPIC), (CountTokensRequest, ANTHROPIC)],
)
def test_a_conversation_becomes_the_prompt_of_the_same_chat(read, document):
    document = {name: value for name, value in document.items() if read is not CountTokensRequest or name != "max_tokens"}
    assert prompt_of(read, document) == prompt_of(ChatRequest, CHAT)


def test_what_is_special_of_each_api_becomes_the_same_command():
    same = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 4, "thinking_token_budget": 9}
    choice = {"type": "function", "function": {"name": "f"}}
    chat = ChatRequest.read(CHAT | same | {"max_tokens": 7, "stop": ["x"], "tool_choice": choice, "parallel_tool_calls": False})
    response = RESPONSE | same | {"max_output_tokens": 7, "stop": ["x"], "parallel_tool_calls": False}
    response["tool_choice"] = {"type": "function", "name": "f"}
    message = ANTHROPIC | same | {"max_tokens": 7, "stop_sequences": ["x"]}
    message["tool_choice"] = {"type": "tool", "name": "f", "disable_parallel_tool_use": True}
    wanted, *others = (
        replace(to_command(body, "id", template=TEMPLATE, form=FORM, remarks=Remarks()), prompts=("",), names=())
        for body in (chat, ResponsesRequest.read(response, Remarks()), MessagesRequest.read(message, Remarks()))
    )
    assert [replace(each, chat=None) for each in others] == [replace(wanted, chat=None)] * 2
    for each in others:
        assert each.chat.calling.tools == wanted.chat.calling.tools
        assert (each.chat.calling.choice, each.chat.calling.parallel) == ("required", False)
        assert each.chat.thinking_token_budget == 9


# --- answers

ANSWER = '<think>r</think>Hi <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'

CALLS = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def server(text: str = ANSWER, info: EngineInfo = LONG):
    return build_server(FakeEngine(says(text), info=info), template=TEMPLATE, form=FORM)


def asked(path: str, text: str = ANSWER, /, *, info: EngineInfo = LONG, **fields: Any):
    document = {"/v1/responses": RESPONSE, "/v1/messages": ANTHROPIC, "/v1/chat/completions": CHAT}[path]
    return ask(server(text, info), "POST", path, json=document | {"temperature": 0} | fields)


USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 10**399}}
WIDE = '{"x": 123456789012345678901234567890, "y": [-1e999, 0.10000000000000000000001], "z": ' + "9" * 500 + "}"
BOUND = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 2**256 - 1, "minimum": -(10**399)}}}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/chat/completions"])
def test_numbers_of_any_width_survive_on_every_route(path):
    """In the schema of a tool, in the arguments of an earlier call, in other fields, and in the model's own call."""
    function = {"name": "f", "parameters": BOUND}
    call = CALL | {"function": {"name": "f", "arguments": WIDE}}
    said: dict[str, Any] = {
        "/v1/responses": {
            "input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": WIDE}, *RESPONSE["input"]]
        },
        "/v1/messages": {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [USE]}, *ANTHROPIC["messages"][:1]]
        },
        "/v1/chat/completions": {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}, *CHAT["messages"]]},
    }[path]
    tool = {"/v1/responses": {"type": "function"} | function, "/v1/messages": {"name": "f", "input_schema": BOUND}}
    fields = said | {"tools": [tool.get(path, {"type": "function", "function": function})], "x_more": {"a": 2**70}}
    text = f'<tool_call>{{"name": "f", "arguments": {WIDE}}}</tool_call>'
    limit = {"max_tokens": 9999} if path == "/v1/messages" else {}
    made = asked(path, text, info=WIDER, **fields, **limit)
    assert made.status_code == 200, made.text
    assert WIDE in made.text.replace('\\"', '"')
    streamed = asked(path, text, info=WIDER, stream=True, **fields, **limit)
    events = (events_of if path == "/v1/chat/completions" else named_events_of)(streamed.text)
    assert streamed.status_code == 200 and "error" not in events[-1] and events[-1].get("type") != "response.failed"


def scores_of(text: str, burst: int, **fields: Any) -> tuple[list[Any], list[Any], list[Any], str]:
    """The log probabilities of a response's text, those of its stream, those of the same chat, and the text."""
    served = build_server(FakeEngine(says(text), info=LONG, burst=burst), template=TEMPLATE, form=FORM)
    body = RESPONSE | fields | {"include": ["message.output_text.logprobs"], "temperature": 0}
    made = served.post(body, "/v1/responses").json()["output"]
    (part,) = [part for item in made if item["type"] == "message" for part in item["content"]]
    found = named_events_of(served.post(body | {"stream": True}, "/v1/responses").text)
    ends = [event["logprobs"] for event in found if event["type"] == "response.output_text.done"]
    assert ends == [part["logprobs"]]
    same = {name.replace("output_tokens", "tokens"): value for name, value in fields.items() if name != "tools"}
    chat = served.post({"messages": CHAT["messages"], "logprobs": True, "temperature": 0} | same, "/v1/chat/completions").json()
    deltas = [one for event in found if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    return part["logprobs"], deltas, chat["choices"][0]["logprobs"]["content"], part["text"]


HELD_BACK: dict[str, tuple[str, dict[str, Any]]] = {
    "characters of several bytes": ("é€😀a", {}),
    "a character that is cut": ("a€", {"max_output_tokens": 3}),
    "the beginning of a stop string": ("abXcd", {"stop": ["XY"]}),
    "a stop string": ("abXYcd", {"stop": ["XY"]}),
    "what might have been markup": ("a<thi <to", {}),
    "no text": ("", {}),
}


@pytest.mark.parametrize("burst", [1, 2, 64])
@pytest.mark.parametrize(("text", "fields"), HELD_BACK.values(), ids=HELD_BACK)
def test_tokens_whose_text_is_held_back_keep_their_log_probabilities_as_in_the_chat(text, fields, burst):
    whole, deltas, chat, _ = scores_of(text, burst, tools=[], **fields)
    assert whole == chat
    assert deltas == chat


@pytest.mark.parametrize("text", [ANSWER, "<think>ré</think>é😀" + CALLS])
def test_tokens_of_reasoning_and_of_calls_stand_with_no_text(text):
    whole, deltas, _, shown = scores_of(text, 1)
    assert bytes(byte for each in whole for byte in each["bytes"]).decode().strip() == shown.strip()
    assert deltas == whole


# --- reasoning that comes back


def test_reasoning_comes_back_as_it_was_given():
    assert unseal(seal("r\u00e9")) == "r\u00e9"
    for foreign in (None, "", "gAAAAAB", "attend1.!!!", "attend1./w=="):
        assert unseal(foreign) is None
    made = asked("/v1/responses", include=["reasoning.encrypted_content"]).json()["output"][0]
    back = {name: value for name, value in made.items() if name != "content"}
    items = [{"role": "user", "content": "a"}, back, {"role": "assistant", "content": "b"}]
    assert prompt_of(ResponsesRequest, {"input": items}) == prompt_of(
        ChatRequest, {"messages": [CHAT["messages"][1], {"role": "assistant", "content": "b", "reasoning_content": "r"}]}
    )
    remarks = Remarks()
    prompt_of(ResponsesRequest, {"input": [items[0], back | {"encrypted_content": "gAAAAAB"}]}, remarks)
    assert remarks.names == ["encrypted_content"]


# --- calls and their results

C1, C2 = "[c1 f {}]", "[c2 f {}]"
O1, O2 = "<tool>o#c1;", "<tool>o#c2;"
ORDERS = {
    "ucto": f"<user>u;<assistant>t{C1};{O1}",
    "ucrcoo": f"<user>u;<assistant>(r){C1}{C2};{O1}{O2}",
    "ucso": f"<user>u;<assistant>{C1};{O1}<system>s;",
    "ucuo": f"<user>u;<assistant>{C1};{O1}<user>u;",
    "ucstrcosto": f"<user>u;<assistant>(r)t\n\nt{C1}{C2};{O1}{O2}<system>s;<system>s;",
    "ucotu": f"<user>u;<assistant>{C1};{O1}<assistant>t;<user>u;",
    "uctu": f"<user>u;<assistant>{C1};<assistant>t;<user>u;",
    "ucutou": f"<user>u;<assistant>{C1};{O1}<user>u;<assistant>t;<user>u;",
    "ucucotou": f"<user>u;<assistant>{C1};{O1}<user>u;<assistant>t{C2};{O2}<user>u;",
}
"""Conversations by their letters: the user, the assistant's texts, reasoning and calls, outputs in the calls' order, the
system; and the prompts that they become."""


def ordered(letters: str, turns: dict[str, Any]) -> list[Any]:
    """A conversation in the words of one API: `{n}` is the number of a call."""
    numbers = {"c": 0, "o": 0}
    made = []
    for letter in letters:
        if letter in numbers:
            numbers[letter] += 1
        made.append(json.loads(json.dumps(turns[letter]).replace("{n}", str(numbers.get(letter)))))
    return made


def says_so(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


F = {"name": "f", "arguments": "{}"}
IN_CHATS = {
    **{"u": says_so("user", "u"), "s": says_so("developer", "s"), "t": says_so("assistant", "t")},
    "r": says_so("assistant", None, reasoning_content="r"),
    "c": says_so("assistant", None, tool_calls=[{"id": "c{n}", "type": "function", "function": F}]),
    "o": says_so("tool", "o", tool_call_id="c{n}"),
}
IN_RESPONSES = IN_CHATS | {
    "r": {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
    "c": {"type": "function_call", "call_id": "c{n}", **F},
    "o": {"type": "function_call_output", "call_id": "c{n}", "output": "o"},
}
IN_MESSAGES = IN_CHATS | {
    "s": says_so("system", "s"),
    "r": says_so("assistant", [{"type": "thinking", "thinking": "r"}]),
    "c": says_so("assistant", [{"type": "tool_use", "id": "c{n}", "name": "f", "input": {}}]),
    "o": says_so("user", [{"type": "tool_result", "tool_use_id": "c{n}", "content": "o"}]),
}


@pytest.mark.parametrize(
    ("read", "name", "turns"),
    [
        (ChatRequest, "messages", IN_CHATS),
        (ResponsesRequest, "input", IN_RESPONSES),
        (MessagesRequest, "messages", IN_MESSAGES),
    ],
    ids=["chats", "responses", "messages"],
)
def test_each_result_follows_its_call_and_what_came_between_waits_or_joins(read, name, turns):
    for letters, prompt in ORDERS.items():
        assert prompt_of(read, {name: ordered(letters, turns)}) == f"{prompt}<assistant>", letters


# --- tools


def calling_of(read: Any, fields: dict[str, Any]) -> Any:
    base = {"input": "a"} if read is ResponsesRequest else {"messages": [{"role": "user", "content": "a"}]}
    return conversation_of(read.read(base | fields, Remarks()), TEMPLATE, FORM, Remarks())["chat"].calling


def named_tools(read: Any, *names: str) -> list[Any]:
    """Tools of these names in the words of one API."""
    if read is MessagesRequest:
        return [{"name": name, "input_schema": {"type": "object"}} for name in names]
    functions = [{"name": name} for name in names]
    return [{"type": "function", **(each if read is ResponsesRequest else {"function": each})} for each in functions]


@pytest.mark.parametrize("read", [ChatRequest, ResponsesRequest], ids=["chats", "responses"])
def test_allowed_tools_are_those_that_may_be_called_and_the_mode_says_if_one_must(read):
    for mode in ("auto", "required"):
        check_allowed(read, mode)


def check_allowed(read: Any, mode: str) -> None:
    allowed = {"mode": mode, "tools": named_tools(read, "g", "h")}
    choice = {"type": "allowed_tools", **(allowed if read is ResponsesRequest else {"allowed_tools": allowed})}
    calling = calling_of(read, {"tools": named_tools(read, "f", "g", "h"), "tool_choice": choice})
    assert (calling.choice, calling.is_enforced) == (mode, mode == "required")
    assert [tool.name for tool in calling.tools] == ["g", "h"]
    assert [tool["function"]["name"] for tool in calling.template_tools] == ["f", "g", "h"]
    choice = json.loads(json.dumps(choice).replace('"h"', '"i"'))
    with pytest.raises(InvalidRequest, match="must be the name of one of the tools; got 'i'"):
        calling_of(read, {"tools": named_tools(read, "f", "g", "h"), "tool_choice": choice})


# --- what is left out, and refused


def test_tools_and_items_that_run_elsewhere_are_left_out_and_said():
    remarks = Remarks()
    tools = [{"type": "web_search"}, RESPONSE_TOOL, {"type": "custom", "name": "g"}]
    items = [{"role": "user", "content": "a"}, {"type": "web_search_call", "id": "x", "status": "completed"}]
    text = prompt_of(ResponsesRequest, {"input": items, "tools": tools}, remarks)
    assert text == prompt_of(ChatRequest, {"messages": CHAT["messages"][1:2], "tools": [CHAT_TOOL]})
    assert remarks.names == ["tools.web_search", "tools.custom", "input.web_search_call"]
    remarks = Remarks()
    tools = [{"type": "bash_20250124", "name": "bash"}, ANTHROPIC_TOOL | {"type": "custom"}]
    blocks = [{"type": "text", "text": "a"}, {"type": "server_tool_use", "id": "x", "name": "y", "input": {}}]
    prompt_of(MessagesRequest, {"messages": [{"role": "user", "content": blocks}], "tools": tools}, remarks)
    assert remarks.names == ["tools.bash_20250124", "content.server_tool_use"]


def test_the_block_for_billing_is_left_out_and_said():
    blocks = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=af3;"}, {"type": "text", "text": "s"}]
    remarks = Remarks()
    document = {"system": blocks, "messages": [{"role": "user", "content": "a"}]}
    assert prompt_of(MessagesRequest, document, remarks) == "<system>s;<user>a;<assistant>"
    assert remarks.names == ["system.x-anthropic-billing-header"]


PICTURES = [
    (ChatRequest, "messages", IN_CHATS, {"type": "image_url", "image_url": {"url": "data:"}}),
    (ResponsesRequest, "input", IN_RESPONSES, {"type": "input_image", "image_url": "data:"}),
    (ResponsesRequest, "input", IN_RESPONSES, {"type": "input_file", "file_id": "x"}),
    *(
        (MessagesRequest, "messages", IN_MESSAGES, {"type": kind, "source": {}})
        for kind in ("image", "document", "search_result")
    ),
]


@pytest.mark.parametrize(("read", "name", "turns", "picture"), PICTURES, ids=lambda value: getattr(value, "get", str)("type"))
def test_a_picture_ends_no_conversation_but_where_the_user_says_it_last(read, name, turns, picture):
    text = {"type": "input_text" if read is ResponsesRequest else "text", "text": "p"}
    seen = says_so("user", [text, picture])
    note = f"[{picture['type']} left out: this model reads text alone]"
    *talk, result = ordered("uco", turns)
    answer = result["content"][0] if read is MessagesRequest else result
    answer["output" if read is ResponsesRequest else "content"] = [picture, text]
    for given, prompt in [
        ([*talk, result], f"<user>u;<assistant>{C1};<tool>{note}\np#c1;"),
        ([seen, *ordered("tu", turns)], f"<user>p\n{note};<assistant>t;<user>u;"),
    ]:
        remarks = Remarks()
        assert prompt_of(read, {name: given}, remarks) == f"{prompt}<assistant>"
        assert remarks.names == [f"content.{picture['type']}"]
    with pytest.raises(NotSupported, match=rf"^{name}\[1\]\.content\[1\]\.type"):
        prompt_of(read, {name: [*ordered("u", turns), seen]})


# --- answers that are begun


LONG_TEXT = [{"role": "user", "content": "a" * 3000}]
OVERFLOWS = [
    ("/v1/chat/completions", {"messages": LONG_TEXT}, "messages", "messages: this model's maximum context length is 2048"),
    ("/v1/responses", {"input": LONG_TEXT}, "input", "input: this model's maximum context length is 2048"),
    ("/v1/messages", {"messages": LONG_TEXT}, "messages", "prompt is too long: 3182 tokens > 2048 maximum"),
    ("/v1/messages", {"messages": [LONG_TEXT[0] | {"content": "a" * 900_000}]}, "messages", "prompt is too long: "),
]


@pytest.mark.parametrize(("path", "fields", "param", "words"), OVERFLOWS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_overflow_is_said_in_the_words_of_each_api(path, fields, param, words, stream):
    error = asked(path, stream=stream, **fields).json()["error"]
    assert error["message"].startswith(words)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


DOUBLES = {"type": "object", "properties": {"x": {"enum": [2**60 + 1]}}}


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (
            "/v1/messages",
            {"tools": [{"name": "f", "strict": True, "input_schema": DOUBLES}]},
            "tools",
            "tools[0].input_schema.properties.x.enum",
        ),
        (
            "/v1/responses",
            {"tools": [{"type": "function", "name": "f", "strict": True, "parameters": DOUBLES}]},
            "tools",
            "tools[0].parameters.properties.x.enum",
        ),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": DOUBLES}}},
            "output_config.format.schema",
            "output_config.format.schema: ",
        ),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": DOUBLES}}},
            "text.format.schema",
            "text.format.schema: ",
        ),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": DOUBLES}}},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema: ",
        ),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_object", "schema": DOUBLES}},
            "response_format.schema",
            "response_format.schema: ",
        ),
        ("/v1/messages", {"structured_outputs": {"json": DOUBLES}}, "structured_outputs.json", "structured_outputs.json: "),
    ],
)
def test_errors_of_the_preparation_name_fields_as_their_api_does(path, fields, param, words):
    error = asked(path, **fields).json()["error"]
    assert words in error["message"] and "function" not in error["message"]
    assert error["param"] == param


def test_an_answer_goes_on_where_the_last_message_ends():
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once "}]
    wanted = "<user>a;<assistant>Once "
    assert prompt_of(MessagesRequest, {"messages": begun}) == wanted
    assert prompt_of(ChatRequest, {"messages": begun, "continue_final_message": True}) == wanted
    parts = [begun[0], {"role": "assistant", "content": [{"type": "text", "text": "On"}, {"type": "text", "text": "ce "}]}]
    assert prompt_of(ChatRequest, {"messages": parts, "continue_final_message": True}) == "<user>a;<assistant>On\nce "
    assert prompt_of(ChatRequest, {"messages": begun}) == f"{wanted};<assistant>"
    for wrong in ({"messages": begun[:1]}, {"messages": CHAT["messages"][:3]}):
        with pytest.raises(InvalidRequest, match="the last message must be an assistant's"):
            prompt_of(ChatRequest, wrong | {"continue_final_message": True})
    with pytest.raises(InvalidRequest, match="add_generation_prompt cannot be true"):
        prompt_of(ChatRequest, {"messages": begun, "continue_final_message": True, "add_generation_prompt": True})
    forgetful = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}")
    body = ChatRequest.read({"messages": begun, "continue_final_message": True}, Remarks())
    with pytest.raises(NotSupported, match="does not write the last message"):
        conversation_of(body, forgetful, FORM, Remarks())["prompts"][0].write()


# --- how much to reason


def test_reasoning_is_switched_where_the_template_can_and_else_said():
    hello = {"messages": [{"role": "user", "content": "a"}]}
    for thinking, shown in (({"type": "enabled", "budget_tokens": 5}, "True"), ({"type": "disabled"}, "False")):
        assert prompt_of(MessagesRequest, hello | {"thinking": thinking}).endswith(f"<assistant>{shown}")
    assert prompt_of(MessagesRequest, hello | {"output_config": {"effort": "max"}}).endswith("<assistant>True")
    assert prompt_of(ResponsesRequest, {"input": "a", "reasoning": {"effort": "none"}}).endswith("<assistant>False")
    plain = ChatTemplate("{{ messages[0].content }}")
    for read, document, name in (
        (MessagesRequest, hello | {"thinking": {"type": "enabled"}}, "thinking"),
        (MessagesRequest, hello | {"output_config": {"effort": "low"}}, "output_config.effort"),
        (ResponsesRequest, {"input": "a", "reasoning": {"effort": "low"}}, "reasoning"),
    ):
        remarks = Remarks()
        assert conversation_of(read.read(document, remarks), plain, FORM, remarks)["prompts"][0].write().text == "a"
        assert remarks.names == [name]


# --- conversations that are too long


def test_the_oldest_go_first_and_no_answer_of_a_tool_is_left_without_its_call():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "user", "content": "b"},
    ]
    assert without_oldest(messages, 0) == messages
    assert [m["content"] for m in without_oldest(messages, 1)] == ["s", "", "4", "b"]
    assert [m["content"] for m in without_oldest(messages, 2)] == ["s", "b"]
    assert [m["content"] for m in without_oldest(messages, 3)] == ["s", "b"]


def test_truncation_drops_as_little_as_it_must():
    small = build_server(FakeEngine(info=info(max_model_len=64)), template=TEMPLATE, form=FORM)
    items = [{"role": "user", "content": f"{number}" * 8} for number in range(1, 9)]
    body = {"input": items, "max_output_tokens": 2}
    refused = ask(small, "POST", "/v1/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    made = ask(small, "POST", "/v1/responses", json=body | {"truncation": "auto"})
    assert (made.status_code, made.headers[IGNORED]) == (200, "input")
    prompt = bytes(small.engine.requests[-1].prompt).decode()
    assert prompt == "".join(f"<user>{item['content']};" for item in items[-3:]) + "<assistant>"[: len(prompt)]
    fits = ask(small, "POST", "/v1/responses", json=body | {"input": items[:1], "truncation": "auto"})
    assert IGNORED not in fits.headers


def test_tokens_are_counted_as_they_are_made():
    whole = asked("/v1/messages").json()["usage"]
    body = {name: value for name, value in ANTHROPIC.items() if name != "max_tokens"}
    counted = ask(server(), "POST", "/v1/messages/count_tokens", json=body).json()["input_tokens"]
    assert counted == whole["input_tokens"] + whole["cache_read_input_tokens"]


def _cut(engine: FakeEngine, reason: FinishReason, request: Any) -> int:
    engine.abort(request.request_id, reason)
    return 97


@pytest.mark.parametrize("reason", [FinishReason.DEADLINE, FinishReason.ABORT])
def test_an_answer_that_a_deadline_or_a_shutdown_cuts_has_a_reason_that_clients_know(reason):
    for path in ("/v1/responses", "/v1/messages"):
        body = {"/v1/responses": RESPONSE, "/v1/messages": ANTHROPIC | {"max_tokens": 99}}[path]
        cut = FakeEngine(info=LONG)
        cut.rule = partial(_cut, cut, reason)
        made = ask(build_server(cut, template=TEMPLATE, form=FORM), "POST", path, json=body).json()
        assert made.get("stop_reason", "max_tokens") == "max_tokens"
        if path == "/v1/responses":
            assert made["incomplete_details"] == {"reason": "max_output_tokens", "finish_reason": str(reason)}


def test_strict_fields_refuse_tools_that_are_no_functions_on_every_route():
    for read, tool, own in (
        (ChatRequest, {"type": "web_search"}, "function"),
        (ResponsesRequest, {"type": "web_search"}, "function"),
        (MessagesRequest, {"type": "bash_20250124", "name": "bash"}, "custom"),
    ):
        base = {"input": "a"} if read is ResponsesRequest else {"messages": [{"role": "user", "content": "a"}]}
        with pytest.raises(InvalidRequest, match=rf"^tools\[0\]\.type must be '{own}'"):
            prompt_of(read, base | {"tools": [tool]}, Remarks(strict=True))


def test_a_call_that_names_a_thousand_kinds_of_items_is_said_in_few_words():
    items = [{"role": "user", "content": "a"}, *({"type": f"kind{number}"} for number in range(1000))]
    remarks = Remarks()
    prompt_of(ResponsesRequest, {"input": items}, remarks)
    assert len(remarks.names) == 65
    assert remarks.names[-1] == "?"
