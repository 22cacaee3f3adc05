"""The answers of a chat completion, whole and streamed."""

from collections.abc import Iterable
from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from attend.service.contract.answers import (
    Answers,
    Choice,
    Chunk,
    Count,
    Ended,
    Logprob,
    ObjectKind,
    OfLogprobs,
    Pieces,
    Whole,
    record,
)

ChatFinishReason = Ended | Literal["tool_calls"]
Nothing = Annotated[None, Field(description="Always null.")]
WithFirst = Field(description="With the first event of a call.")
ChatId = Annotated[str, Field(description="The request's id, with a prefix that tells the route.", examples=["chatcmpl-8d3f"])]


@record
class ChatToken(TypedDict):
    """A token with its log probability."""

    token: Annotated[str, Field(description="The token alone as text; bytes that are no characters show as U+FFFD.")]
    logprob: Logprob
    bytes: Annotated[list[int], Field(description="The text's UTF-8 bytes.")]


@record
class ChatTokenLogprob(ChatToken):
    """A token of the answer, with the most likely ones at its position."""

    top_logprobs: list[ChatToken]
    """`top_logprobs` of them, the most likely first."""


@record
class ChatLogprobs(TypedDict):
    """Log probabilities of an answer's tokens."""

    content: Iterable[ChatTokenLogprob]
    """One entry for each token of the answer."""
    refusal: Nothing


@record
class CalledFunction(TypedDict):
    """The function that is called."""

    name: str
    """The name of one of the request's tools."""
    arguments: str
    """A JSON object; only its beginning where the answer ended in it."""


@record
class ToolCall(TypedDict):
    """A call of a tool."""

    id: str
    """What the message with the tool's answer names."""
    type: Literal["function"]
    """What kind of tool it is."""
    function: CalledFunction
    """Its name and its arguments."""


@record
class FunctionDelta(TypedDict):
    """What is new in a call."""

    name: NotRequired[Annotated[str, WithFirst]]
    arguments: str
    """The next piece of the arguments; empty in the first event of a call."""


@record
class ToolCallDelta(TypedDict):
    """What is new in a call of a tool."""

    index: Count
    """Which of the answer's calls."""
    id: NotRequired[Annotated[str, WithFirst]]
    type: NotRequired[Annotated[Literal["function"], WithFirst]]
    function: FunctionDelta
    """The function that is called."""


@record
class AnswerMessage(TypedDict):
    """What the model says."""

    role: Literal["assistant"]
    """Who says it."""
    content: Annotated[str | None, Field(examples=["Hi there"])]
    """The text; null where the message is calls of tools alone."""
    refusal: Nothing
    reasoning_content: NotRequired[str]
    """What the model wrote for itself, where it did."""
    tool_calls: NotRequired[list[ToolCall]]
    """The calls, where there are any."""


@record
class Delta(TypedDict):
    """What is new in an answer: one of these, or nothing in an event that ends it."""

    role: NotRequired[Literal["assistant"]]
    """With the first event of an answer."""
    content: NotRequired[Annotated[str, Field(examples=["Hi there"])]]
    """What is new of the text; empty in the first event of an answer."""
    reasoning_content: NotRequired[str]
    """What is new of what the model writes for itself."""
    tool_calls: NotRequired[list[ToolCallDelta]]
    """What is new of the calls of tools."""


@record
class ChatChoice(Choice):
    """One answer of a chat."""

    message: AnswerMessage
    """The answer as a message."""
    logprobs: OfLogprobs[ChatLogprobs]
    finish_reason: Annotated[ChatFinishReason, Field(examples=["length"])]
    """Why the answer ended; `tool_calls` where it stopped with calls."""


@record
class ChatChunkChoice(Choice):
    """A piece of one answer."""

    delta: Delta
    """What is new in the answer."""
    logprobs: ChatLogprobs | None
    """Of this event's tokens; null where the request does not have `logprobs`."""
    finish_reason: Annotated[ChatFinishReason | None, Field(examples=["length"])]
    """Why the answer ended; null where it goes on, `tool_calls` where it stopped with calls."""


@record
class ChatCompletion(Whole):
    """The answer to a chat that is not streamed."""

    id: ChatId
    object: ObjectKind[Literal["chat.completion"]]
    choices: Answers[ChatChoice]


@record
class ChatCompletionChunk(Chunk):
    """One event of a streamed chat."""

    id: ChatId
    object: ObjectKind[Literal["chat.completion.chunk"]]
    choices: Pieces[ChatChunkChoice]
