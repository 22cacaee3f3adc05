"""Bad inputs of a chat with tools: tools, choices of them, calls in messages and their answers."""

from typing import Any

from tests.service.bad_rows import UNSUPPORTED, chat, says


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    """A tool, as OpenAI's clients send it."""
    return {"type": "function", "function": {"name": name} | function}


def named(name: str) -> dict[str, Any]:
    """A choice of one tool."""
    return {"type": "function", "function": {"name": name}}


ANSWER = {"role": "tool", "tool_call_id": "1", "content": "4"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = "tools[0].function.parameters"

TOOLS = [
    says(
        "tools: a call whose arguments are no text",
        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]},
        "messages[1].tool_calls[0].function.arguments",
        "must be a string",
    ),
    says("tools: an answer without its call", ANSWER, "messages[1].tool_call_id", "the id of a call"),
    chat(
        "tools: a tool without a name", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"
    ),
    chat("tools: twice the same name", {"tools": [tool(), tool()]}, "tools[1].function.name", "no other tool"),
    chat(
        "tools: a schema that is none",
        {"tools": [tool(parameters={"properties": {"a": {"type": "text"}}})], "tool_choice": "required"},
        SCHEMA,
        "no JSON schema",
    ),
    chat(
        "tools: look-around in an enforced schema",
        {"tools": [tool(parameters={"properties": {"a": {"pattern": "(?!x)"}}})], "tool_choice": "required"},
        "tools",
        f"{SCHEMA}.properties.a.pattern: ",
    ),
    chat("tools: 500 of them", {"tools": [tool(f"f{number}") for number in range(500)]}, "tools", "at most 128"),
    chat(
        "tools: an unknown choice", {"tools": [tool()], "tool_choice": "always"}, "tool_choice", "'auto', 'none' or 'required'"
    ),
    chat(
        "tools: a choice of an unknown tool",
        {"tools": [tool()], "tool_choice": named("g")},
        "tool_choice",
        "one of the tools",
    ),
    chat("tools: required, and there are none", {"tool_choice": "required"}, "tool_choice", "needs tools"),
    chat("tools: functions", {"functions": [{"name": "f"}]}, "functions", "use tools", UNSUPPORTED),
]
