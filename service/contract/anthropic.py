"""Request bodies of Anthropic's Messages API, and its messages and blocks as messages of a chat."""

import re
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, StrictBool, StrictStr
from typing_extensions import TypedDict

from attend.model.errors import InvalidRequest
from attend.model.params import MAX_STOP_STRINGS
from attend.service.chat.messages import MAX_MESSAGES, wrong
from attend.service.chat.tools import MAX_TOOLS
from attend.service.contract.conversation import (
    TEXT_ALONE,
    FunctionName,
    FunctionSchema,
    FunctionText,
    Name,
    Other,
    TextPart,
    refuse_media,
    text_parts,
    without_media,
)
from attend.service.contract.requests import ModelName, NotNegative, Positive, Steering, StopTexts, Templated
from attend.service.contract.shapes import ByType, Shape, body, closed, optional_field
from attend.service.contract.tolerance import SAMPLING, Unsupported
from attend.service.contract.validation import read_body
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


THREAD = "thread"
"""A conversation that the server keeps."""
OFF: dict[str, Unsupported] = {
    "mcp_servers": Unsupported(([],), "no tools are called here: declare them in tools"),
    "stop": Unsupported(([],), "use stop_sequences"),
    "max_completion_tokens": Unsupported((), "use max_tokens"),
    **dict.fromkeys(("response_format", "output_format"), Unsupported((), "use output_config.format")),
    "compaction": Unsupported((), "summaries are not made here: shorten messages"),
    THREAD: Unsupported((), "nothing is kept here: send the whole conversation in messages"),
    "reasoning_effort": Unsupported((), "use output_config.effort"),
    "n": Unsupported((1,), "a message has one answer"),
    "logprobs": Unsupported((False,)),
    "top_logprobs": Unsupported((0,)),
}
"""Fields that are not carried out here."""


@closed
class ToolParam(TypedDict):
    """A function that the model may call."""

    name: FunctionName
    description: NotRequired[FunctionText]
    input_schema: FunctionSchema
    type: NotRequired[Literal["custom"]]
    strict: NotRequired[StrictBool]


Tools = Annotated[list[Annotated[ToolParam | Other, ByType("custom")]], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ToolUseChoice(Shape):
    """Which tools may be called."""

    type: Literal["auto", "any", "none", "tool"]
    """`any`: one has to be. `tool`: the one with this name."""
    name: StrictStr | None = None
    disable_parallel_tool_use: StrictBool | None = None
    """An answer holds one call at most."""


class Thinking(Shape):
    """True if the model is to reason; ignored, and said, where the chat template knows no such thing."""

    type: Literal["enabled", "disabled", "adaptive"]
    """`adaptive`: as the chat template has it."""
    budget_tokens: NotNegative | None = optional_field()
    """The most tokens of reasoning: then the reasoning ends, and the answer follows."""


class JsonOutput(Shape):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    content: dict[StrictStr, Any] = Field(alias="schema")
    """The JSON schema. At most 64 KiB."""


class OutputConfig(Shape):
    """What the answer must look like."""

    effort: StrictStr | None = optional_field()
    """As `reasoning_effort` of a chat; ignored, and said, where the chat template knows no such thing."""
    format: JsonOutput | None = None
    """JSON that the answer must be. Default: any text."""


class CountTokensRequest(Templated):
    """The body of POST /v1/messages/count_tokens."""

    model: ModelName = optional_field(minLength=1)
    system: Texts | None = optional_field()
    """What the model is told first."""
    messages: MessageParams = Field(description=f"The conversation, 1 to {MAX_MESSAGES} messages.")
    tools: Tools | None = optional_field(
        description=f"Functions that the model may call: at most {MAX_TOOLS}. Other tools are left out, and said. "
        "Default: none."
    )
    tool_choice: ToolUseChoice | None = optional_field()
    """Which tools may be called. Default: all, and none has to be."""
    thinking: Thinking | None = optional_field()
    """True if the model is to reason. Default: as the chat template has it."""
    output_config: OutputConfig | None = optional_field()
    """What the answer must look like. Default: anything."""


class MessagesRequest(CountTokensRequest, Steering):
    """The body of POST /v1/messages."""

    model_config = body(off=OFF)
    off = SAMPLING | OFF

    max_tokens: Positive | None = optional_field()
    """The most tokens of the answer, reasoning among them. Default: what the context has left."""
    stop_sequences: StopTexts | None = optional_field(
        description=f"Texts that end the answer: at most {MAX_STOP_STRINGS}. Default: none."
    )


def read_messages(document: dict[str, Any], remarks: Remarks) -> MessagesRequest:
    """A parsed body as a MessagesRequest. Raises InvalidRequest with the field named."""
    return read_body(MessagesRequest, document, remarks)


def read_count(document: dict[str, Any], remarks: Remarks) -> CountTokensRequest:
    """A parsed body as a CountTokensRequest. Raises InvalidRequest with the field named."""
    return read_body(CountTokensRequest, document, remarks)


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
    kept = [block for block in blocks if not BILLING.match(block["text"])]
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
