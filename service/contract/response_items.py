"""Input items of OpenAI's Responses API, converted to messages of a chat."""

import base64
import binascii
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, StrictStr, Tag
from typing_extensions import TypedDict

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import at_most
from attend.service.chat.messages import MAX_MESSAGES, arguments_of, wrong
from attend.service.contract.conversation import Name
from attend.service.contract.media import MediaPart, kind_of_part, refuse_media, without_media
from attend.service.contract.shapes import UNSUPPORTED, NullAsAbsent, Or, Shape, closed, open_to_more
from attend.service.contract.validation import validate
from attend.service.remarks import Remarks

SEALED = "attend1."
"""What reasoning that is given back as `encrypted_content` begins with. It is base64 of the text, and no secret."""


_TEXT_ALONE = "must be 'input_text' or 'output_text': this server takes no other input"


@closed
class InputText(TypedDict):
    """A text in a message."""

    type: Annotated[
        Literal["input_text", "output_text", "text"],
        Or(_TEXT_ALONE, UNSUPPORTED),
    ]
    """What kind of part it is."""
    text: StrictStr
    """The text of the part."""
    annotations: NotRequired[Any]
    """Of an answer, as clients send it back; left out."""
    logprobs: NotRequired[Any]
    """Of an answer, as clients send it back; left out."""


@closed
class InputRefusal(TypedDict):
    """That a model, somewhere else, did not answer. It is left out."""

    type: Literal["refusal"]
    """What kind of part it is."""
    refusal: StrictStr
    """Why the model did not answer, in its words."""


Part = Annotated[
    Annotated[InputText, NullAsAbsent(), Tag("a text")]
    | Annotated[InputRefusal, NullAsAbsent(), Tag("a refusal")]
    | Annotated[MediaPart, Tag("media")],
    Discriminator(kind_of_part),
]
Content = StrictStr | Annotated[list[Part], Field(fail_fast=True)]
Status = Annotated[Any, Field(description="As clients send it back; not used.")]


@closed
class InputMessage(TypedDict):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    """Who says it; `developer` is `system`."""
    content: Content
    """The text, or parts of it."""
    type: NotRequired[Literal["message"]]
    """What the item is."""
    id: NotRequired[Status]
    status: NotRequired[Status]
    phase: NotRequired[Status]


@closed
class InputCall(TypedDict):
    """A call of a tool, as the model made it."""

    type: Literal["function_call"]
    """What the item is."""
    call_id: Name
    """What the item with the tool's answer names."""
    name: Name
    """The name of the tool."""
    arguments: StrictStr
    """A JSON object, or as much of it as was written."""
    id: NotRequired[Status]
    status: NotRequired[Status]
    namespace: NotRequired[Status]
    caller: NotRequired[Status]


@closed
class InputOutput(TypedDict):
    """What a tool answers."""

    type: Literal["function_call_output"]
    """What the item is."""
    call_id: Name
    """The call, of an item before."""
    output: Content
    """What the tool answered."""
    id: NotRequired[Status]
    status: NotRequired[Status]
    name: NotRequired[Status]
    namespace: NotRequired[Status]
    caller: NotRequired[Status]


@open_to_more
class ReasoningText(TypedDict):
    """A piece of reasoning."""

    text: StrictStr
    """What the model wrote for itself."""


@closed
class InputReasoning(TypedDict):
    """What the model wrote for itself. The chat template keeps it or drops it."""

    type: Literal["reasoning"]
    """What the item is."""
    summary: NotRequired[list[ReasoningText] | None]
    """Used where neither of the others is there."""
    content: NotRequired[list[ReasoningText] | None]
    """The text of the reasoning."""
    encrypted_content: NotRequired[StrictStr | None]
    """The text as this server gave it; another server's is left out."""
    id: NotRequired[Status]
    status: NotRequired[Status]


@open_to_more
class OtherItem(TypedDict):
    """An item of a tool that is no function. It is left out."""

    type: StrictStr
    """What the item is."""


_ITEMS = ("function_call", "function_call_output", "reasoning")


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if kind in _ITEMS:
        return f"a {kind}"
    return "another item" if isinstance(kind, str) and kind != "message" else "a message"


Item = Annotated[
    Annotated[InputMessage, NullAsAbsent(), Tag("a message")]
    | Annotated[InputCall, NullAsAbsent(), Tag("a function_call")]
    | Annotated[InputOutput, NullAsAbsent(), Tag("a function_call_output")]
    | Annotated[InputReasoning, NullAsAbsent(), Tag("a reasoning")]
    | Annotated[OtherItem, Tag("another item")],
    Discriminator(_kind),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class _Input(Shape):
    input: Items


def messages_of_input(instructions: str | None, input_value: Any, remarks: Remarks) -> list[dict[str, Any]]:
    """A conversation as templates take it. Raises InvalidRequest with the place named."""
    told_first: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(input_value, str):
        return [*told_first, {"role": "user", "content": input_value}]
    if not isinstance(input_value, list):
        raise wrong("input", "must be a string, or a list of items", input_value)
    at_most("input", input_value, MAX_MESSAGES, "items")
    items = validate(_Input, {"input": input_value}, remarks, exact=True).input
    newest = max((index for index, item in enumerate(items) if item.get("role") == "user"), default=-1)
    if newest >= 0 and isinstance(content := items[newest]["content"], list):  # type: ignore[typeddict-item]
        refuse_media(content, f"input[{newest}].content", f" {_TEXT_ALONE}; got {{got}}")
    read = _Reader(remarks, told_first)
    for index, item in enumerate(items):
        read.take(item, f"input[{index}]")
    if not read.messages:
        raise InvalidRequest("input holds nothing that the model can be told", "input")
    return read.messages


class _Reader:
    """Puts items together: reasoning, a text and calls that follow each other are one message of the assistant."""

    def __init__(self, remarks: Remarks, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        self._remarks = remarks
        self._called: set[str] = set()
        self._answer: dict[str, Any] | None = None

    def take(self, item: Any, place: str) -> None:
        """Take apart one item of the conversation."""
        kind = item.get("type", "message")
        if kind == "reasoning":
            self._reasoning(item)
        elif kind == "function_call":
            self._call(item)
        elif kind == "function_call_output":
            self._answer = None
            if item["call_id"] not in self._called:
                raise wrong(f"{place}.call_id", "must be the call_id of a function_call before this item", item["call_id"])
            self._add({"role": "tool", "content": self._text(item["output"]), "tool_call_id": item["call_id"]})
        elif kind == "message":
            self._message(item)
        elif kind == "item_reference":
            raise NotSupported(f"{place}.type: items are not kept here; send the item itself", f"{place}.type")
        else:
            self._remarks.ignore(f"input.{kind}")

    def _message(self, item: Any) -> None:
        text = self._text(item["content"])
        if item["role"] != "assistant":
            self._answer = None
            self._add({"role": "system" if item["role"] == "developer" else item["role"], "content": text})
            return
        if self._answer is None or self._answer["content"] or "tool_calls" in self._answer:
            self._begin()
        assert self._answer is not None
        self._answer["content"] = text

    def _reasoning(self, item: Any) -> None:
        sealed = unseal(item.get("encrypted_content"))
        pieces = item.get("content") or item.get("summary") or ()
        text = "".join(piece["text"] for piece in pieces) if item.get("content") or sealed is None else sealed
        if item.get("encrypted_content") and sealed is None:
            self._remarks.ignore("encrypted_content")
        if text:
            self._begin()["reasoning_content"] = text

    def _call(self, item: Any) -> None:
        answer = self._begin() if self._answer is None else self._answer
        self._called.add(item["call_id"])
        function = {"name": item["name"], "arguments": arguments_of(item["arguments"])}
        answer.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})

    def _begin(self) -> dict[str, Any]:
        self._answer = {"role": "assistant", "content": ""}
        self._add(self._answer)
        return self._answer

    def _add(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def _text(self, content: Any) -> str | list[dict[str, str]]:
        """A text, or its parts as templates take them."""
        if isinstance(content, str):
            return content
        said = [part for part in content if part["type"] != "refusal"]
        if len(said) < len(content):
            self._remarks.ignore("refusal")
        parts = [{"type": "text", "text": part["text"]} for part in without_media(said, self._remarks)]
        return parts[0]["text"] if len(parts) == 1 else parts or ""


def seal(text: str) -> str:
    """Reasoning as `encrypted_content`, which clients send back as it is."""
    return SEALED + base64.b64encode(text.encode()).decode()


def unseal(content: str | None) -> str | None:
    """The inverse of `sealed`; None for what is not ours."""
    if not content or not content.startswith(SEALED):
        return None
    try:
        return base64.b64decode(content.removeprefix(SEALED), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
