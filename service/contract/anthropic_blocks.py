"""Messages and content blocks of Anthropic's API, converted to messages of a chat."""

import re
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, StrictBool, StrictStr
from typing_extensions import TypedDict

from attend.model.errors import InvalidRequest
from attend.service.chat.messages import MAX_MESSAGES, wrong
from attend.service.contract.conversation import TEXT_ALONE, Name, Other, TextPart, refuse_media, text_parts, without_media
from attend.service.contract.shapes import ByType, closed
from attend.service.remarks import Remarks

BILLING = re.compile(r"x-anthropic-billing-header:")
"""How the block of a system prompt begins that Claude Code writes for billing. It changes with every call, so that no prompt
after it would be found in the prefix cache."""
BILLED = "system.x-anthropic-billing-header"


@closed
class ThinkingBlock(TypedDict):
    """What the model wrote for itself. The chat template keeps it or drops it. Nothing is signed here."""

    type: Literal["thinking"]
    thinking: StrictStr
    signature: NotRequired[Any]


@closed
class ToolUseBlock(TypedDict):
    """A call of a tool, as the model made it."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[StrictStr, Any]
    caller: NotRequired[Any]
    """Taken, and not used."""


Texts = StrictStr | Annotated[list[TextPart], Field(fail_fast=True)]


@closed
class ToolResultBlock(TypedDict):
    """What a tool answers to a call of a message before."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: NotRequired[StrictStr | Annotated[list[Annotated[TextPart | Other, ByType("text")]], Field(fail_fast=True)]]
    is_error: NotRequired[StrictBool]
    """Not used: the answer says what went wrong."""


Block = Annotated[TextPart | ThinkingBlock | ToolUseBlock | ToolResultBlock | Other, ByType("text")]


@closed
class MessageParam(TypedDict):
    """One message of the conversation. Where the last one is the assistant's, the answer goes on in it."""

    role: Literal["user", "assistant", "system"]
    content: StrictStr | Annotated[list[Block], Field(fail_fast=True)]


MessageParams = Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def messages_of_anthropic(system: Any, messages: Any, remarks: Remarks) -> list[dict[str, Any]]:
    """A conversation as templates take it. Raises InvalidRequest with the place named."""
    refuse_media(messages, "messages", TEXT_ALONE)
    made: list[dict[str, Any]] = []
    if told := _system(system or "", remarks):
        made.append({"role": "system", "content": told})
    called: set[str] = set()
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if isinstance(content, str):
            made.append({"role": role, "content": content})
        elif role == "assistant":
            made.append(_assistant(content, called, remarks))
        else:
            made += _user(role, without_media(content, remarks), f"messages[{index}]", called, remarks)
    if not made:
        raise InvalidRequest("messages holds nothing that the model can be told", "messages")
    return made


def _system(content: str | list[Any], remarks: Remarks) -> str | list[dict[str, str]]:
    """What the model is told first."""
    blocks = [{"text": content}] if isinstance(content, str) else content
    kept = [block for block in blocks if not (remarks.drops_billing and BILLING.match(block["text"]))]
    if len(kept) < len(blocks):
        remarks.ignore(BILLED)
    return text_parts(kept)


def _by_type(blocks: list[Any], kinds: tuple[str, ...], remarks: Remarks) -> list[list[Any]]:
    """The blocks of each of these types. That others are left out is said."""
    for block in blocks:
        if block["type"] not in kinds:
            remarks.ignore(f"content.{block['type']}")
    return [[block for block in blocks if block["type"] == kind] for kind in kinds]


def _assistant(blocks: list[Any], called: set[str], remarks: Remarks) -> dict[str, Any]:
    texts, thoughts, calls = _by_type(blocks, ("text", "thinking", "tool_use"), remarks)
    said: dict[str, Any] = {"role": "assistant", "content": text_parts(texts)}
    if thoughts:
        said["reasoning_content"] = "\n".join(block["thinking"] for block in thoughts)
    if calls:
        called.update(call["id"] for call in calls)
        functions = [(call["id"], {"name": call["name"], "arguments": call["input"]}) for call in calls]
        said["tool_calls"] = [{"id": number, "type": "function", "function": function} for number, function in functions]
    return said


def _user(role: str, blocks: list[Any], place: str, called: set[str], remarks: Remarks) -> list[dict[str, Any]]:
    """Messages of texts that follow each other, and of the answers of tools between them."""
    made: list[dict[str, Any]] = []
    texts: list[Any] = []

    def say() -> None:
        if texts:
            made.append({"role": role, "content": text_parts(texts)})
            texts.clear()

    _by_type(blocks, ("text", "tool_result"), remarks)
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            texts.append(block)
        elif block["type"] == "tool_result":
            say()
            made.append(_result(block, f"{place}.content[{index}].tool_use_id", called, remarks))
    say()
    return made if blocks else [{"role": role, "content": ""}]


def _result(block: Any, place: str, called: set[str], remarks: Remarks) -> dict[str, Any]:
    number, content = block["tool_use_id"], block.get("content") or ""
    if number not in called:
        raise wrong(place, "must be the id of a tool_use in an assistant's message before this one", number)
    if block.get("is_error"):
        remarks.ignore("is_error")
    if not isinstance(content, str):
        content = text_parts(*_by_type(without_media(content, remarks), ("text",), remarks))
    return {"role": "tool", "content": content, "tool_call_id": number}
