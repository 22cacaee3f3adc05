"""Tools, calls and results in the words of a conversation, for a chat template that does not write them."""

import json
from collections.abc import Iterable
from typing import Any

from attend.model.text.chat import ChatTemplate
from attend.model.text.chat_shapes import join_all, text_of
from attend.service.chat.forms import CALLS, CallForm

_TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, write the name of the function and its arguments like this:
{example}"""
"""In the words of Hermes' and Qwen's templates."""
_EXAMPLE = ("function_name", {"argument_name": "argument value"})


def fit_tools(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]], form: CallForm | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages, and the tools that the template gets.

    What it does not write is written into the messages: tools into the system's, calls into the assistant's, in the `form` of
    the model's calls, and results into the user's.
    """
    form = form or CALLS["hermes"]
    system = messages[:1] if messages and messages[0]["role"] == "system" else []
    if tools and not template.shapes.takes_tools(system=bool(system)):
        told = {"role": "system", "content": _describe(tools, form)}
        messages, tools = [join_all([*system, told]), *messages[len(system) :]], []
    return _fit_calls(template, messages, form, tools=bool(tools)), tools or None


def _fit_calls(template: ChatTemplate, messages: list[dict[str, Any]], form: CallForm, *, tools: bool) -> list[dict[str, Any]]:
    made, called = [], False
    for message in messages:
        if calls := message.get("tool_calls"):
            called = template.shapes.takes_calls(message, tools=tools)
            if not called:
                text = {"role": "assistant", "content": write_calls(form, (call["function"] for call in calls))}
                message = join_all([{name: value for name, value in message.items() if name != "tool_calls"}, text])
        elif message["role"] == "tool" and not template.shapes.takes_results(calls=called, tools=tools):
            result = f"<tool_response>\n{text_of(message['content'])}\n</tool_response>"
            message = {"role": "user", "content": result}
        made.append(message)
    return made


def _describe(tools: Iterable[dict[str, Any]], form: CallForm) -> str:
    """What the model is told of its tools, and of how it calls them."""
    name, arguments = _EXAMPLE
    example = write_calls(form, [{"name": name, "arguments": arguments}])
    return _TOLD.format(tools="\n".join(map(_json, tools)), example=example)


def write_calls(form: CallForm, functions: Iterable[dict[str, Any]]) -> str:
    """Calls as a model of this form writes them."""
    layout = form.layout
    calls = []
    for function in functions:
        head, _, tail = layout.call.partition("%a")
        calls.append(head.replace("%n", function["name"]) + _arguments(form, function["arguments"]) + tail)
    return layout.opening + layout.between.join(calls) + layout.closing


def _arguments(form: CallForm, arguments: dict[str, Any]) -> str:
    if not form.layout.argument:
        return _json(arguments)
    head, _, tail = form.layout.argument.partition("%v")
    return form.layout.joint.join(head.replace("%k", key) + _value(form, value) + tail for key, value in arguments.items())


def _value(form: CallForm, value: Any) -> str:
    if form.syntax == "python":
        return repr(value)
    if isinstance(value, str):
        return f"{form.mark}{value}{form.mark}"
    if form.syntax == "braced" and isinstance(value, list):
        return "[" + ",".join(_value(form, each) for each in value) + "]"
    if form.syntax == "braced" and isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_value(form, each)}" for key, each in value.items()) + "}"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
