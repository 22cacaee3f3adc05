"""The answers of a chat completion, whole and streamed."""

from collections.abc import Iterable
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from attend.service.contract.answers import AnyText, Choice, Chunk, Ended, Logprob, Whole, record

ChatFinishReason = Ended | Literal["tool_calls"]


@record
class ChatToken(TypedDict):
    """A token with its log probability. Its text may be a part of a character; `bytes` are its UTF-8 bytes."""

    token: str
    logprob: Logprob
    bytes: list[int]


@record
class ChatTokenLogprob(ChatToken):
    """A token of the answer, with the most likely ones at its position."""

    top_logprobs: list[ChatToken]


@record
class ChatLogprobs(TypedDict):
    """Log probabilities of an answer's tokens."""

    content: Iterable[ChatTokenLogprob]
    refusal: None


@record
class CalledFunction(TypedDict):
    """The function that is called. The arguments are a JSON object; its beginning where the answer ended in it. In a stream the
    name comes first, then the arguments in pieces.
    """

    name: NotRequired[str]
    arguments: str


@record
class ToolCall(TypedDict):
    """A call of a tool. The message with the tool's answer names its `id`. In a stream it has an `index`, and only its first
    event has the others.
    """

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


@record
class AnswerMessage(TypedDict):
    """What the model says. `content` is null where that is calls of tools alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    """What the model wrote for itself, where it did."""
    tool_calls: NotRequired[list[ToolCall]]


@record
class Delta(TypedDict):
    """What is new in an answer: one of these, or nothing in an event that ends it."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[AnyText]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


@record
class ChatChoice(Choice):
    """One answer of a chat."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


@record
class ChatChunkChoice(Choice):
    """A piece of one answer."""

    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


@record
class ChatCompletion(Whole):
    """The answer to a chat that is not streamed."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


@record
class ChatCompletionChunk(Chunk):
    """One event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    """A piece of one answer; empty in the event that brings the usage of the whole call."""
