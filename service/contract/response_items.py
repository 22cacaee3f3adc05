"""Input items of OpenAI's Responses API, converted to messages of a chat."""

import base64
import binascii
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, StrictStr
from typing_extensions import TypedDict

from attend.model.errors import InvalidRequest, NotSupported
from attend.service.chat.messages import MAX_MESSAGES, wrong
from attend.service.contract.conversation import (
    TEXT_ALONE,
    Content,
    Name,
    Other,
    past_call,
    refuse_media,
    text_parts,
    without_media,
)
from attend.service.contract.shapes import ByType, closed, open_to_more
from attend.service.remarks import Remarks

SEALED = "attend1."
"""What reasoning that is given back as `encrypted_content` begins with. It is base64 of the text, and no secret."""


class _Item(TypedDict):
    """What clients send back with an item; not used."""

    id: NotRequired[Any]
    status: NotRequired[Any]
    phase: NotRequired[Any]
    namespace: NotRequired[Any]
    caller: NotRequired[Any]


@closed
class InputMessage(_Item):
    """A message of the conversation; `developer` is `system`."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    type: NotRequired[Literal["message"]]


@closed
class InputCall(_Item):
    """A call of a tool, as the model made it. The arguments are a JSON object, or as much of it as was written."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: StrictStr


@closed
class InputOutput(_Item):
    """What a tool answers to a call of an item before."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Content
    name: NotRequired[Any]


@open_to_more
class ReasoningText(TypedDict):
    """A piece of reasoning."""

    text: StrictStr


@closed
class InputReasoning(_Item):
    """What the model wrote for itself. The chat template keeps it or drops it."""

    type: Literal["reasoning"]
    summary: NotRequired[list[ReasoningText]]
    """Used where neither of the others is there."""
    content: NotRequired[list[ReasoningText]]
    encrypted_content: NotRequired[StrictStr]
    """The text as this server gave it; another server's is left out."""


Item = Annotated[InputMessage | InputCall | InputOutput | InputReasoning | Other, ByType("message")]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def messages_of_input(instructions: str | None, items: str | list[Any], remarks: Remarks) -> list[dict[str, Any]]:
    """A conversation as templates take it. Raises InvalidRequest with the place named."""
    told_first: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*told_first, {"role": "user", "content": items}]
    refuse_media(items, "input", TEXT_ALONE)
    made = [*told_first]
    called: set[str] = set()
    for index, item in enumerate(items):
        _take(item, f"input[{index}]", made, called, remarks)
    if not made:
        raise InvalidRequest("input holds nothing that the model can be told", "input")
    return made


def _take(item: Any, place: str, made: list[dict[str, Any]], called: set[str], remarks: Remarks) -> None:
    """Take apart one item: reasoning, a text and calls that follow each other are one message of the assistant."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        if text := _reasoning(item, remarks):
            made.append({"role": "assistant", "content": "", "reasoning_content": text})
    elif kind == "function_call":
        if not made or made[-1]["role"] != "assistant":
            made.append({"role": "assistant", "content": ""})
        called.add(item["call_id"])
        made[-1].setdefault("tool_calls", []).append(past_call(item["call_id"], item["name"], item["arguments"]))
    elif kind == "function_call_output":
        if item["call_id"] not in called:
            raise wrong(f"{place}.call_id", "must be the call_id of a function_call before this item", item["call_id"])
        made.append({"role": "tool", "content": _text(item["output"], remarks), "tool_call_id": item["call_id"]})
    elif kind == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        last = made[-1] if made and role == "assistant" else None
        if last is None or last["role"] != role or last["content"] or "tool_calls" in last:
            made.append({"role": role})
        made[-1]["content"] = _text(item["content"], remarks)
    elif kind == "item_reference":
        raise NotSupported(f"{place}.type: items are not kept here; send the item itself", f"{place}.type")
    else:
        remarks.ignore(f"input.{kind}")


def _reasoning(item: Any, remarks: Remarks) -> str:
    sealed, given = unseal(item.get("encrypted_content")), item.get("content")
    if item.get("encrypted_content") and sealed is None:
        remarks.ignore("encrypted_content")
    if given or sealed is None:
        return "".join(piece["text"] for piece in given or item.get("summary") or ())
    return sealed


def _text(content: Any, remarks: Remarks) -> str | list[dict[str, str]]:
    """A text, or its parts as templates take them."""
    return content if isinstance(content, str) else text_parts(without_media(content, remarks))


def seal(text: str) -> str:
    """Reasoning as `encrypted_content`, which clients send back as it is."""
    return SEALED + base64.b64encode(text.encode()).decode()


def unseal(content: str | None) -> str | None:
    """The inverse of `seal`; None for what is not ours."""
    if not content or not content.startswith(SEALED):
        return None
    try:
        return base64.b64decode(content.removeprefix(SEALED), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
