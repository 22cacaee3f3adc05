"""The answers of Anthropic's Messages API, as `http_api/anthropic.py` writes them and /openapi.json shows them."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from attend.service.contract.answers import Count, record

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


@record
class TextAnswer(TypedDict):
    """A text of the answer."""

    type: Literal["text"]
    """What kind of block it is."""
    text: Annotated[str, Field(examples=["Hello!"])]
    """What the model says."""


@record
class ThinkingAnswer(TypedDict):
    """What the model wrote for itself."""

    type: Literal["thinking"]
    """What kind of block it is."""
    thinking: str
    """The text of the reasoning."""
    signature: str
    """A constant: nothing is signed."""


@record
class ToolUseAnswer(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    """What kind of block it is."""
    id: str
    """What the block with the tool's answer names."""
    name: str
    """The name of the tool."""
    input: dict[str, Any]
    """Its arguments. Of a call that was cut, `{"INVALID_JSON": "..."}`."""


AnswerBlock = TextAnswer | ThinkingAnswer | ToolUseAnswer


@record
class OutputTokensDetails(TypedDict):
    """More about the tokens of the answer."""

    thinking_tokens: Count
    """Tokens of reasoning."""


@record
class MessageUsage(TypedDict):
    """Tokens of the call."""

    input_tokens: Annotated[Count, Field(examples=[3])]
    """Tokens of the prompt that were not in the prefix cache."""
    cache_read_input_tokens: Count
    """Tokens of the prompt that were found in the prefix cache."""
    cache_creation_input_tokens: Count
    """Always 0: nothing is charged for the prefix cache."""
    output_tokens: Annotated[Count, Field(examples=[2])]
    """Tokens of the answer."""
    output_tokens_details: NotRequired[OutputTokensDetails]
    """What else is known of them."""


@record
class MessageAnswer(TypedDict):
    """The answer to a call of messages that is not streamed."""

    id: Annotated[str, Field(description="The request's id, with a prefix that tells the route.", examples=["msg_8d3f"])]
    type: Annotated[Literal["message"], Field(description="What this is.")]
    role: Annotated[Literal["assistant"], Field(description="Who says it.")]
    model: Annotated[str, Field(description="The model's name, as the request has it.", examples=["attend"])]
    content: Annotated[list[AnswerBlock], Field(description="The answer: reasoning, texts and calls of tools.", examples=[[]])]
    stop_reason: Annotated[
        StopReason | None,
        Field(description="Why the answer ended; `max_tokens` also at a deadline or a shutdown.", examples=["end_turn"]),
    ]
    stop_sequence: Annotated[str | None, Field(description="Which of `stop_sequences` ended it.", examples=[None])]
    usage: Annotated[MessageUsage, Field(description="What the call took.")]


@record
class BlockDelta(TypedDict):
    """What is new of a block, or of the message."""

    type: NotRequired[Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]]
    """Which part of a block is new."""
    text: NotRequired[str]
    """The next piece of a text."""
    thinking: NotRequired[str]
    """The next piece of reasoning."""
    signature: NotRequired[str]
    """The signature of the reasoning, which is a constant."""
    partial_json: NotRequired[str]
    """The next piece of a call's arguments."""
    stop_reason: NotRequired[StopReason]
    """How the message ended, once it has."""
    stop_sequence: NotRequired[str | None]
    """How the message ended, once it has."""


@record
class MessageEvent(TypedDict):
    """One event of a stream. Its name is its `type`."""

    type: Annotated[
        Literal[
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
            "ping",
        ],
        Field(description="What happened.", examples=["message_stop"]),
    ]
    message: NotRequired[Annotated[MessageAnswer, Field(description="The answer without its content.")]]
    index: NotRequired[Annotated[Count, Field(description="Which block it is about.")]]
    content_block: NotRequired[Annotated[AnswerBlock, Field(description="That block, empty.")]]
    delta: NotRequired[Annotated[BlockDelta, Field(description="What is new.")]]
    usage: NotRequired[Annotated[MessageUsage, Field(description="What the call took.")]]


@record
class TokenCount(TypedDict):
    """The size of a conversation."""

    input_tokens: Annotated[Count, Field(examples=[3])]
    """Tokens of the prompt that it becomes."""


@record
class ThreadDetails(TypedDict):
    """Why a conversation cannot be kept, by which Anthropic's client knows to send all of it."""

    error_code: Literal["thread_unsupported_request"]
    """Why no thread is kept."""
    unsupported: list[str]
    """The fields of the request that are not carried out."""


@record
class AnthropicProblem(TypedDict):
    """What went wrong."""

    type: str
    """Anthropic's kind of error."""
    message: str
    """A sentence for a person."""
    code: str
    """The error's name, as on the other routes."""
    param: str | None
    """The field of the request that is at fault; null where none is."""
    details: NotRequired[ThreadDetails]
    """More of the error, where the request asks for a thread."""


@record
class AnthropicError(TypedDict):
    """The answer to a call that failed, and the event of a stream that failed after it began."""

    type: Literal["error"]
    """What this is."""
    error: AnthropicProblem
    """Why the call failed."""
    request_id: str
    """The request's id."""
