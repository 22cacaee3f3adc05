"""From a conversation to a prompt by the chat template, and the template's arguments."""

from typing import Any

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import describe
from attend.model.text.caller_marks import ChatText
from attend.model.text.chat import ChatTemplate
from attend.service.chat.forms import AnswerFormat
from attend.service.chat.messages import results_after_calls
from attend.service.chat.tool_prompt import fit_tools
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
