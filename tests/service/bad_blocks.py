"""Bad inputs of the routes of OpenAI's Responses and of Anthropic's messages, as rows of the table in `bad_inputs.py`."""

from typing import Any

from tests.service.bad_rows import INVALID, UNSUPPORTED, Row, http

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "a"}]
DEEP: Any = "x"
for _ in range(200):
    DEEP = [DEEP]


def response(name: str, fields: dict[str, Any], param: str | None, word: str, code: str = INVALID) -> Row:
    """Fields beside a good input, or in its place."""
    return http(f"responses: {name}", {"input": "a"} | fields, param, word, code, path=RESPONSES)


def message(name: str, fields: dict[str, Any], param: str | None, word: str, code: str = INVALID, path: str = MESSAGES) -> Row:
    """Fields beside good messages, or in their place."""
    return http(f"anthropic: {name}", {"messages": HELLO} | fields, param, word, code, path=path)


def item(name: str, given: Any, place: str, word: str, code: str = INVALID) -> Row:
    """An item of the input after a good one."""
    return response(name, {"input": [*HELLO, given]}, f"input[1]{place}", word, code)


def block(name: str, given: Any, place: str, word: str, code: str = INVALID) -> Row:
    """A block of a user's message."""
    return message(name, {"messages": [{"role": "user", "content": [given]}]}, f"messages[0].content[0]{place}", word, code)


JSON = {"type": "json_schema", "name": "n"}
RESPONSE_ROWS = [
    http("responses: no input", {}, "input", "input is required", path=RESPONSES),
    response("too many items", {"input": HELLO * 2049}, "input", "at most 2048"),
    response("a previous response", {"previous_response_id": "r"}, "previous_response_id", "whole conversation", UNSUPPORTED),
    response("a conversation", {"conversation": {"id": "c"}}, "conversation", "whole conversation", UNSUPPORTED),
    response("a kept prompt", {"prompt": {"id": "p"}}, "prompt", "use instructions", UNSUPPORTED),
    response("no tokens", {"max_output_tokens": 0}, "max_output_tokens", "from 1 to"),
    response("a mistyped name", {"max_output_token": 3}, "max_output_token", "did you mean max_output_tokens"),
    response("a number to truncate", {"truncation": 3}, "truncation", "'auto' or 'disabled'"),
    response("a format without its schema", {"text": {"format": JSON}}, "text.format.schema", "is required"),
    response("a schema that is no JSON", {"text": {"format": JSON | {"schema": "00"}}}, "text.format.schema", "Extra data"),
    response("a tool without a name", {"tools": [{"type": "function"}]}, "tools[0].name", "is required"),
    item("a picture", {"role": "user", "content": [{"type": "input_image"}]}, ".content[0].type", "no other", UNSUPPORTED),
    item("a kept item", {"type": "item_reference", "id": "x"}, ".type", "not kept here", UNSUPPORTED),
    item("a call without a name", {"type": "function_call", "call_id": "c", "arguments": ""}, ".name", "is required"),
    item("an answer to no call", {"type": "function_call_output", "call_id": "c", "output": ""}, ".call_id", "before this"),
]
MESSAGE_ROWS = [
    http("anthropic: no messages", {"max_tokens": 3}, "messages", "messages is required", path=MESSAGES),
    message("too many", {"messages": HELLO * 2049}, "messages", "at most 2048"),
    message("no tokens", {"max_tokens": 0}, "max_tokens", "from 1 to"),
    message("too hot", {"temperature": 3}, "temperature", "from 0 to 2"),
    message("servers of tools", {"mcp_servers": [{"url": "x"}]}, "mcp_servers", "declare them", UNSUPPORTED),
    message("a mistyped name", {"stop_sequence": ["x"]}, "stop_sequence", "did you mean stop_sequences"),
    message("another model to count", {"model": "other"}, "model", "does not exist", "model_not_found", COUNT),
    message(
        "thinking that is no integer",
        {"thinking": {"type": "enabled", "budget_tokens": "3"}},
        "thinking.budget_tokens",
        "integer",
    ),
    message("a tool without its schema", {"tools": [{"name": "f"}]}, "tools[0].input_schema", "is required"),
    message("a tool that is not there", {"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
    block("a picture", {"type": "image", "source": {}}, ".type", "no other", UNSUPPORTED),
    block("a document", {"type": "document", "source": {}}, ".type", "no other", UNSUPPORTED),
    block("an answer to no call", {"type": "tool_result", "tool_use_id": "x"}, ".tool_use_id", "before this one"),
]
