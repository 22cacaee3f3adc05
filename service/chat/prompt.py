"""A conversation as a prompt, and what a chat template takes beside its messages."""

from typing import Any

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import describe
from attend.model.text.chat import ChatTemplate
from attend.model.text.marks import ChatText
from attend.service.chat.tools import Calling

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def prompt_of(
    template: ChatTemplate, messages: list[dict[str, Any]], calling: Calling, given: dict[str, Any], effort: str | None
) -> ChatText:
    """The text that the model is to continue. It holds its special tokens: encode it with add_special_tokens=False.

    `messages` are as templates take them; `given` are the options that the caller names. Raises InvalidRequest with the place
    named.
    """
    return template.write(messages, list(calling.shown) or None, **options_of(template, given, effort))


def options_of(template: ChatTemplate, given: dict[str, Any], effort: str | None) -> dict[str, Any]:
    """The options of a template, among them how much the model is to reason. Raises InvalidRequest.

    A template that knows no effort, but can leave reasoning out, takes "none" for that and any other as reasoning.
    """
    if effort is None:
        return given
    if effort not in EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}; got {describe(effort)}", "reasoning_effort"
        )
    if "reasoning_effort" in template.options:
        return {"reasoning_effort": effort} | given
    if "enable_thinking" in template.options:
        return {"enable_thinking": effort != "none"} | given
    raise NotSupported("reasoning_effort: this model's chat template does not read it", "reasoning_effort")
