"""Request bodies of Anthropic's Messages API, and its messages and blocks as messages of a chat."""

import re
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field, StrictBool, StrictStr
from typing_extensions import TypedDict

from attend.model.errors import InvalidRequest
from attend.model.params import MAX_STOP_STRINGS
from attend.service.chat.messages import MAX_MESSAGES
from attend.service.chat.tools import MAX_TOOLS
from attend.service.contract.answers import AnyText, Count, Id, ServedModel
from attend.service.contract.conversation import (
    FunctionName,
    FunctionSchema,
    FunctionText,
    Name,
    Other,
    TextPart,
    check_called,
    refuse_media,
    text_parts,
    without_media,
)
from attend.service.contract.requests import NotNegative, Positive, SamplingFields, StopTexts, TemplateFields
from attend.service.contract.shapes import ByType, Shape, closed, optional_field
from attend.service.contract.tolerance import SAMPLING, Unsupported, use_instead
from attend.service.remarks import Remarks

BILLING = re.compile(r"x-anthropic-billing-header:")
"""How the block of a system prompt begins that Claude Code writes for billing. It changes with every call, so that no prompt
after it would be found in the prefix cache."""
BILLED = "system.x-anthropic-billing-header"


@closed
class ThinkingBlock(TypedDict):
    """What the model wrote for itself. The chat template keeps it or drops it."""

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


Texts = StrictStr | Annotated[list[TextPart], Field(fail_fast=True)]


@closed
class ToolResultBlock(TypedDict):
    """What a tool answers to a call of a message before."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: NotRequired[StrictStr | Annotated[list[Annotated[TextPart | Other, ByType("text")]], Field(fail_fast=True)]]
    is_error: NotRequired[StrictBool]


Block = Annotated[TextPart | ThinkingBlock | ToolUseBlock | ToolResultBlock | Other, ByType("text")]


@closed
class MessageParam(TypedDict):
    """One message of the conversation. Where the last one is the assistant's, the answer goes on in it."""

    role: Literal["user", "assistant", "system"]
    content: StrictStr | Annotated[list[Block], Field(fail_fast=True)]


MessageParams = Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


_UNSUPPORTED = use_instead(
    max_completion_tokens="use max_tokens",
    response_format="use output_config.format",
    output_format="use output_config.format",
    compaction="summaries are not made here: shorten messages",
    thread="nothing is kept here: send the whole conversation in messages",
    reasoning_effort="use output_config.effort",
) | {
    "mcp_servers": Unsupported(([],), "no tools are called here: declare them in tools"),
    "stop": Unsupported(([],), "use stop_sequences"),
    "n": Unsupported((1,), "a message has one answer"),
    "logprobs": Unsupported((False,)),
    "top_logprobs": Unsupported((0,)),
}


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


class Thinking(Shape):
    """True if the model is to reason; ignored, and said, where the chat template knows no such thing."""

    type: Literal["enabled", "disabled", "adaptive"]
    """`adaptive`: as the chat template has it."""
    budget_tokens: NotNegative | None = None
    """The most tokens of reasoning: then the reasoning ends, and the answer follows."""


class JsonOutput(Shape):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    content: dict[StrictStr, Any] = Field(alias="schema")


class OutputConfig(Shape):
    """What the answer must look like."""

    effort: StrictStr | None = None
    """As `reasoning_effort` of a chat; ignored, and said, where the chat template knows none."""
    format: JsonOutput | None = None


class CountTokensRequest(TemplateFields):
    """The body of POST /v1/messages/count_tokens."""

    model: StrictStr | None = None
    """The name of the served model or of a LoRA adapter; absent means the served one. Any other is 404."""
    system: Texts | None = None
    """What the model is told first."""
    messages: MessageParams = Field(description=f"The conversation, 1 to {MAX_MESSAGES} messages.")
    tools: Tools | None = optional_field(description=f"Functions that the model may call: at most {MAX_TOOLS}. Default: none.")
    tool_choice: ToolUseChoice | None = None
    """Which tools may be called. Default: all, and none has to be."""
    thinking: Thinking | None = None
    """True if the model is to reason. Default: as the chat template has it."""
    output_config: OutputConfig | None = None
    """What the answer must look like. Default: anything."""


class MessagesRequest(CountTokensRequest, SamplingFields):
    """The body of POST /v1/messages."""

    unsupported: ClassVar = SAMPLING | _UNSUPPORTED
    format_place: ClassVar = "output_config.format"

    max_tokens: Positive | None = None
    """The most tokens of the answer, reasoning among them. Default: what the context has left."""
    stop_sequences: StopTexts | None = optional_field(
        description=f"Texts that end the answer: at most {MAX_STOP_STRINGS}. Default: none."
    )


def messages_of_anthropic(system: Any, messages: Any, remarks: Remarks) -> list[dict[str, Any]]:
    """A conversation as templates take it. Raises InvalidRequest with the place named."""
    refuse_media(messages, "messages")
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
        functions = [{"name": call["name"], "arguments": call["input"]} for call in calls]
        said["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": own} for call, own in zip(calls, functions, strict=True)
        ]
    return said


def _user(role: str, blocks: list[Any], place: str, called: set[str], remarks: Remarks) -> list[dict[str, Any]]:
    """Messages of texts that follow each other, and of the answers of tools between them."""
    made: list[dict[str, Any]] = []
    _by_type(blocks, ("text", "tool_result"), remarks)
    shown = [(index, block) for index, block in enumerate(blocks) if block["type"] in ("text", "tool_result")]
    for kind, run in groupby(shown, lambda pair: pair[1]["type"]):
        if kind == "text":
            made.append({"role": role, "content": text_parts([block for _, block in run])})
        else:
            made += [_result(block, f"{place}.content[{index}].tool_use_id", called, remarks) for index, block in run]
    return made if blocks else [{"role": role, "content": ""}]


def _result(block: Any, place: str, called: set[str], remarks: Remarks) -> dict[str, Any]:
    number, content = block["tool_use_id"], block.get("content") or ""
    check_called(number, called, place, "a tool_use in an assistant's message")
    if block.get("is_error"):
        remarks.ignore("is_error")
    if not isinstance(content, str):
        content = text_parts(*_by_type(without_media(content, remarks), ("text",), remarks))
    return {"role": "tool", "content": content, "tool_call_id": number}


# --- answers

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextAnswer(TypedDict):
    """A text of the answer."""

    type: Literal["text"]
    text: AnyText


class ThinkingAnswer(TypedDict):
    """What the model wrote for itself. Nothing is signed: the signature is a constant."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseAnswer(TypedDict):
    """A call of a tool. The block with the tool's answer names its `id`."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    """Its arguments. Of a call that was cut, `{"INVALID_JSON": "..."}`."""


AnswerBlock = TextAnswer | ThinkingAnswer | ToolUseAnswer


class MessageUsage(TypedDict):
    """Tokens of the call. `input_tokens` are those of the prompt that were not in the prefix cache."""

    input_tokens: Count
    cache_read_input_tokens: Count
    cache_creation_input_tokens: Count
    output_tokens: Count
    output_tokens_details: NotRequired[dict[str, Count]]


class MessageAnswer(TypedDict):
    """The answer to a call of messages that is not streamed."""

    id: Id
    type: Literal["message"]
    role: Literal["assistant"]
    model: ServedModel
    content: Annotated[list[AnswerBlock], Field(examples=[[]])]
    stop_reason: StopReason | None
    """Why the answer ended; `max_tokens` also at a deadline or a shutdown."""
    stop_sequence: str | None
    usage: MessageUsage


class BlockDelta(TypedDict):
    """What is new of a block; or how the message ended."""

    type: NotRequired[Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    partial_json: NotRequired[str]
    stop_reason: NotRequired[StopReason]
    stop_sequence: NotRequired[str | None]


class MessageEvent(TypedDict):
    """One event of a stream. Its name is its `type`."""

    type: Annotated[str, Field(examples=["message_stop"])]
    message: NotRequired[MessageAnswer]
    index: NotRequired[Count]
    content_block: NotRequired[AnswerBlock]
    delta: NotRequired[BlockDelta]
    usage: NotRequired[MessageUsage]


class TokenCount(TypedDict):
    """The size of the prompt that a conversation becomes."""

    input_tokens: Count


class AnthropicProblem(TypedDict):
    """What went wrong."""

    type: str
    message: str
    code: str
    param: str | None
    details: NotRequired[dict[str, Any]]


class AnthropicError(TypedDict):
    """The answer to a call that failed, and the event of a stream that failed after it began."""

    type: Literal["error"]
    error: AnthropicProblem
    request_id: str
