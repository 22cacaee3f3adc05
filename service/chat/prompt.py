"""From a conversation to a prompt by the chat template: its arguments, and in the words of the conversation what it does not
write of tools, calls and results.
"""

import json
from collections.abc import Iterable
from typing import Any

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import describe
from attend.model.text.caller_marks import ChatText
from attend.model.text.chat import ChatTemplate
from attend.model.text.chat_shapes import join_all, text_of
from attend.service.chat.forms import CALLS, AnswerFormat, CallForm
from attend.service.chat.messages import results_after_calls
from attend.service.chat.tools import Calling
from attend.service.remarks import Remarks

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""OpenAI's efforts of reasoning; templates know no more than "xhigh"."""

END = "\ufdd2"
"""What stands where the answer is to go on, until the prompt is written: no character of any text."""


def prompt_of(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    calling: Calling,
    form: AnswerFormat,
    template_options: dict[str, Any],
    effort: str | None,
    *,
    continues: bool = False,
) -> ChatText:
    """The text that the model is to continue. It holds its special tokens: encode it with add_special_tokens=False.

    `messages` are as templates take them; `template_options` are those that the caller names. Where it `continues`, the prompt
    ends with the text of the last message, which is the assistant's. `form` is that of the model's answers.
    Raises InvalidRequest with the place named.
    """
    options = options_of(template, template_options, effort)
    if continues:
        messages, options = [*messages[:-1], _open(messages[-1])], options | {"add_generation_prompt": False}
    told, tools = fit_tools(template, results_after_calls(messages), list(calling.template_tools), form.calls)
    written = template.write(told, tools, **options)
    if not continues:
        return written
    end = written.text.rfind(END)
    if end < 0:
        raise NotSupported("messages: the chat template does not write the last message's text, so no answer can go on in it")
    return ChatText(written.text[:end], tuple((first, min(last, end)) for first, last in written.literals if first <= end))


def _open(message: dict[str, Any]) -> dict[str, Any]:
    """The last message with a mark at the end of its text."""
    if message["role"] != "assistant" or message.get("tool_calls"):
        wanted = "an assistant's, without tool calls, for the answer to go on in it"
        raise InvalidRequest(f"the last message must be {wanted}", "messages")
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + END}
    return message | {"content": [*content[:-1], content[-1] | {"text": content[-1]["text"] + END}]}


def without_oldest(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The messages without so many of the oldest that are not the system's, and without answers of tools whose call is gone."""
    kept: list[dict[str, Any]] = []
    called: set[str] = set()
    for message in messages:
        if message["role"] != "system" and count > 0:
            count -= 1
            continue
        if message["role"] == "tool" and message["tool_call_id"] not in called:
            continue
        called.update(call["id"] for call in message.get("tool_calls", ()))
        kept.append(message)
    return kept


def known_effort(template: ChatTemplate, effort: str | None, name: str, remarks: Remarks) -> str | None:
    """How much to reason, where the template knows such a thing; else None, and the field `name` is said to be ignored.

    For APIs whose clients send it always.
    """
    if effort is None or (effort in EFFORTS and {"reasoning_effort", "enable_thinking"} & template.options):
        return effort
    remarks.ignore(name)
    return None


def thinking_of(template: ChatTemplate, thinking: str | None, remarks: Remarks) -> dict[str, Any]:
    """The options of a template for Anthropic's `thinking`: enabled, disabled, or adaptive, which leaves it to the template."""
    if thinking in (None, "adaptive"):
        return {}
    if "enable_thinking" in template.options:
        return {"enable_thinking": thinking == "enabled"}
    if "reasoning_effort" not in template.options or thinking == "disabled":
        remarks.ignore("thinking")
    return {}


def options_of(template: ChatTemplate, template_options: dict[str, Any], effort: str | None) -> dict[str, Any]:
    """The options of a template, among them how much the model is to reason. Raises InvalidRequest.

    A template that knows no effort, but can leave reasoning out, takes "none" for that and any other as reasoning.
    """
    if effort is None:
        return template_options
    if effort not in EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}; got {describe(effort)}", "reasoning_effort"
        )
    if "reasoning_effort" in template.options:
        return {"reasoning_effort": "xhigh" if effort == "max" else effort} | template_options
    if "enable_thinking" in template.options:
        return {"enable_thinking": effort != "none"} | template_options
    raise NotSupported("reasoning_effort: this model's chat template does not read it", "reasoning_effort")


# --- tools

_TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, write the name of the function and its arguments like this:
{example}"""
"""In the words of Hermes' and Qwen's templates."""


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
    example = write_calls(form, [{"name": "function_name", "arguments": {"argument_name": "argument value"}}])
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
