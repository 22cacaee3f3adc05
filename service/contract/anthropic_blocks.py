"""Messages and content blocks of Anthropic's API, converted to messages of a chat."""

import re
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag
from typing_extensions import TypedDict

from attend.model.errors import InvalidRequest
from attend.model.params import at_most
from attend.service.chat.messages import MAX_MESSAGES, wrong
from attend.service.contract.conversation import Name
from attend.service.contract.media import refuse_media, without_media
from attend.service.contract.shapes import NullAsAbsent, Shape, closed, open_to_more
from attend.service.contract.validation import validate
from attend.service.remarks import Remarks

BILLING = re.compile(r"x-anthropic-billing-header:")
"""How the block of a system prompt begins that Claude Code writes for billing. It changes with every call, so that no prompt
after it would be found in the prefix cache."""
BILLED = "system.x-anthropic-billing-header"


@closed
class TextBlock(TypedDict):
    """A text in a message."""

    type: Literal["text"]
    """What kind of block it is."""
    text: StrictStr
    """What is said."""
    citations: NotRequired[Any]
    """Of an answer, as clients send it back; left out."""


@closed
class ThinkingBlock(TypedDict):
    """What the model wrote for itself. The chat template keeps it or drops it."""

    type: Literal["thinking"]
    """What kind of block it is."""
    thinking: StrictStr
    """The text of the reasoning."""
    signature: NotRequired[Any]
    """Taken, and not used: nothing is signed here."""


@closed
class ToolUseBlock(TypedDict):
    """A call of a tool, as the model made it."""

    type: Literal["tool_use"]
    """What kind of block it is."""
    id: Name
    """What the block with the tool's answer names."""
    name: Name
    """The name of the tool."""
    input: dict[StrictStr, Any]
    """The arguments of the call."""
    caller: NotRequired[Any]
    """Taken, and not used."""


Texts = StrictStr | Annotated[list[Annotated[TextBlock, NullAsAbsent()]], Field(fail_fast=True)]


@open_to_more
class OtherBlock(TypedDict):
    """A block of a tool that runs elsewhere. It is left out."""

    type: StrictStr
    """What kind of block it is."""


ResultBlock = Annotated[
    Annotated[TextBlock, NullAsAbsent(), Tag("a text")] | Annotated[OtherBlock, Tag("another block")],
    Discriminator(lambda block: "a text" if _kind(block) == "a text" else "another block"),
]


@closed
class ToolResultBlock(TypedDict):
    """What a tool answers."""

    type: Literal["tool_result"]
    """What kind of block it is."""
    tool_use_id: Name
    """The call, of a message before."""
    content: NotRequired[StrictStr | Annotated[list[ResultBlock], Field(fail_fast=True)] | None]
    """What the tool answered."""
    is_error: NotRequired[StrictBool | None]
    """Not used: the answer says what went wrong."""


_BLOCKS = ("thinking", "tool_use", "tool_result")


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in _BLOCKS:
        return f"a {kind}"
    return "another block" if isinstance(kind, str) and kind != "text" else "a text"


Block = Annotated[
    Annotated[TextBlock, NullAsAbsent(), Tag("a text")]
    | Annotated[ThinkingBlock, NullAsAbsent(), Tag("a thinking")]
    | Annotated[ToolUseBlock, NullAsAbsent(), Tag("a tool_use")]
    | Annotated[ToolResultBlock, NullAsAbsent(), Tag("a tool_result")]
    | Annotated[OtherBlock, Tag("another block")],
    Discriminator(_kind),
]


@closed
class MessageParam(TypedDict):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    """Who says it."""
    content: StrictStr | Annotated[list[Block], Field(fail_fast=True)]
    """A text, or blocks. Where the last message is the assistant's, the answer goes on in it."""


MessageParams = Annotated[
    list[Annotated[MessageParam, NullAsAbsent()]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class _Conversation(Shape):
    system: Texts | None = None
    messages: MessageParams


def messages_of_anthropic(system: Any, messages: Any, remarks: Remarks) -> list[dict[str, Any]]:
    """A conversation as templates take it. Raises InvalidRequest with the place named."""
    if not isinstance(messages, list):
        raise wrong("messages", "must be a list", messages)
    at_most("messages", messages, MAX_MESSAGES, "messages")
    read = validate(_Conversation, {"system": system, "messages": messages}, remarks, exact=True)
    newest = max((index for index, message in enumerate(read.messages) if message["role"] == "user"), default=-1)
    if newest >= 0 and isinstance(content := read.messages[newest]["content"], list):
        refuse_media(content, f"messages[{newest}].content", ": this model reads text alone, and no {kind}")
    reader = _Reader(remarks)
    if read.system is not None:
        reader.system(read.system)
    for index, message in enumerate(read.messages):
        reader.take(message, f"messages[{index}]")
    if not reader.messages:
        raise InvalidRequest("messages holds nothing that the model can be told", "messages")
    return reader.messages


class _Reader:
    """Takes blocks apart: an answer of a tool is a message of its own."""

    def __init__(self, remarks: Remarks) -> None:
        self.messages: list[dict[str, Any]] = []
        self._remarks = remarks
        self._called: set[str] = set()

    def system(self, content: Any) -> None:
        """What the model is told first."""
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        kept = [block for block in blocks if not (self._remarks.drops_billing and BILLING.match(block["text"]))]
        if len(kept) < len(blocks):
            self._remarks.ignore(BILLED)
        if text := self._texts(kept):
            self.messages.append({"role": "system", "content": text})

    def take(self, message: Any, place: str) -> None:
        """Take apart one message of the conversation."""
        role, content = message["role"], message["content"]
        if isinstance(content, str):
            self.messages.append({"role": role, "content": content})
            return
        if role == "assistant":
            self._assistant(content)
        else:
            self._user(role, without_media(content, self._remarks), place)

    def _assistant(self, blocks: list[Any]) -> None:
        said: dict[str, Any] = {"role": "assistant", "content": self._texts(self._of(blocks, "text"))}
        if thoughts := [block["thinking"] for block in self._of(blocks, "thinking")]:
            said["reasoning_content"] = "\n".join(thoughts)
        if calls := self._of(blocks, "tool_use"):
            self._called.update(call["id"] for call in calls)
            said["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["input"]}}
                for call in calls
            ]
        self._leave(blocks, ("text", "thinking", "tool_use"))
        self.messages.append(said)

    def _user(self, role: str, blocks: list[Any], place: str) -> None:
        self._leave(blocks, ("text", "tool_result"))
        texts: list[Any] = []
        for index, block in enumerate(blocks):
            if block["type"] == "tool_result":
                self._say(role, texts)
                self._result(block, f"{place}.content[{index}].tool_use_id")
            elif block["type"] == "text":
                texts.append(block)
        self._say(role, texts)
        if not blocks:
            self.messages.append({"role": role, "content": ""})

    def _say(self, role: str, texts: list[Any]) -> None:
        if texts:
            self.messages.append({"role": role, "content": self._texts(texts)})
            texts.clear()

    def _result(self, block: Any, place: str) -> None:
        number, content = block["tool_use_id"], block.get("content") or ""
        if number not in self._called:
            raise wrong(place, "must be the id of a tool_use in an assistant's message before this one", number)
        if block.get("is_error"):
            self._remarks.ignore("is_error")
        if not isinstance(content, str):
            content = without_media(content, self._remarks)
            self._leave(content, ("text",))
            content = self._texts(self._of(content, "text"))
        self.messages.append({"role": "tool", "content": content, "tool_call_id": number})

    def _of(self, blocks: list[Any], kind: str) -> list[Any]:
        return [block for block in blocks if block["type"] == kind]

    def _leave(self, blocks: list[Any], kept: tuple[str, ...]) -> None:
        """Name the blocks that are left out."""
        for block in blocks:
            if block["type"] not in kept:
                self._remarks.ignore(f"content.{block['type']}")

    def _texts(self, blocks: list[Any]) -> str | list[dict[str, str]]:
        """One text, or several as parts, which templates join."""
        parts = [{"type": "text", "text": block["text"]} for block in blocks]
        return parts[0]["text"] if len(parts) == 1 else parts or ""
