"""The answers of Anthropic's Messages API, as `http_api/anthropic.py` writes them and /openapi.json shows them."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from attend.service.contract.answers import AnyText, Count, Id, ModelName, record

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


@record
class TextAnswer(TypedDict):
    """A text of the answer."""

    type: Literal["text"]
    text: AnyText


@record
class ThinkingAnswer(TypedDict):
    """What the model wrote for itself. Nothing is signed: the signature is a constant."""

    type: Literal["thinking"]
    thinking: str
    signature: str


@record
class ToolUseAnswer(TypedDict):
    """A call of a tool. The block with the tool's answer names its `id`."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    """Its arguments. Of a call that was cut, `{"INVALID_JSON": "..."}`."""


AnswerBlock = TextAnswer | ThinkingAnswer | ToolUseAnswer


@record
class MessageUsage(TypedDict):
    """Tokens of the call. Nothing is charged for the prefix cache."""

    input_tokens: Count
    """Tokens of the prompt that were not in the prefix cache."""
    cache_read_input_tokens: Count
    """Tokens of the prompt that were found in the prefix cache."""
    cache_creation_input_tokens: Count
    output_tokens: Count
    output_tokens_details: NotRequired[dict[str, Count]]


@record
class MessageAnswer(TypedDict):
    """The answer to a call of messages that is not streamed."""

    id: Id
    type: Literal["message"]
    role: Literal["assistant"]
    model: ModelName
    content: Annotated[list[AnswerBlock], Field(examples=[[]])]
    stop_reason: StopReason | None
    """Why the answer ended; `max_tokens` also at a deadline or a shutdown."""
    stop_sequence: str | None
    usage: MessageUsage


@record
class BlockDelta(TypedDict):
    """What is new of a block; or how the message ended."""

    type: NotRequired[Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    partial_json: NotRequired[str]
    stop_reason: NotRequired[StopReason]
    stop_sequence: NotRequired[str | None]


@record
class MessageEvent(TypedDict):
    """One event of a stream. Its name is its `type`."""

    type: Annotated[str, Field(examples=["message_stop"])]
    message: NotRequired[MessageAnswer]
    index: NotRequired[Count]
    content_block: NotRequired[AnswerBlock]
    delta: NotRequired[BlockDelta]
    usage: NotRequired[MessageUsage]


@record
class TokenCount(TypedDict):
    """The size of the prompt that a conversation becomes."""

    input_tokens: Count


@record
class AnthropicProblem(TypedDict):
    """What went wrong."""

    type: str
    message: str
    code: str
    """The error's name, as on the other routes."""
    param: str | None
    details: NotRequired[dict[str, Any]]
    """Why a conversation cannot be kept, by which Anthropic's client knows to send all of it."""


@record
class AnthropicError(TypedDict):
    """The answer to a call that failed, and the event of a stream that failed after it began."""

    type: Literal["error"]
    error: AnthropicProblem
    request_id: str
