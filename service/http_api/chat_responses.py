"""The shapes of the answers of a chat, for /openapi.json alone, as in `responses.py`."""

from typing import Literal

from pydantic import Field

from model.engine.request import FinishReason
from service.http_api.responses import MAYBE, Choice, Event, Shape, Usage

ChatFinishReason = FinishReason | Literal["tool_calls"]


class ChatToken(Shape):
    """A token with its log probability."""

    token: str
    """The token alone as text; bytes that are no characters show as U+FFFD."""
    logprob: float
    """Natural logarithm; -9999 for minus infinity."""
    bytes: list[int]
    """The text's UTF-8 bytes."""


class ChatTokenLogprob(ChatToken):
    """A token of the answer, with the likeliest ones in its place."""

    top_logprobs: list[ChatToken]
    """`top_logprobs` of them, the likeliest first."""


class ChatLogprobs(Shape):
    """Log probabilities of an answer's tokens."""

    content: list[ChatTokenLogprob]
    """One for each token."""
    refusal: None
    """Always null."""


class CalledFunction(Shape):
    """What is called."""

    name: str
    """The name of one of the request's tools."""
    arguments: str
    """A JSON object; only its beginning where the answer ended in it."""


class ToolCall(Shape):
    """A call of a tool."""

    id: str
    """What the message with the tool's answer names."""
    type: Literal["function"]
    """What kind of tool it is."""
    function: CalledFunction
    """Its name and its arguments."""


class FunctionDelta(Shape):
    """What is new in a call."""

    name: str = MAYBE
    """With the first event of a call."""
    arguments: str
    """The next piece of the arguments; empty in the first event of a call."""


class ToolCallDelta(Shape):
    """What is new in a call of a tool."""

    index: int = Field(ge=0)
    """Which of the answer's calls."""
    id: str = MAYBE
    """With the first event of a call."""
    type: Literal["function"] = MAYBE
    """With the first event of a call."""
    function: FunctionDelta
    """What is called."""


class AnswerMessage(Shape):
    """What the model says."""

    role: Literal["assistant"]
    """Who says it."""
    content: str | None
    """The text; null where the message is calls of tools alone."""
    refusal: None
    """Always null."""
    reasoning_content: str = MAYBE
    """What the model wrote for itself, where it did."""
    reasoning: str = MAYBE
    """The same."""
    tool_calls: list[ToolCall] = MAYBE
    """The calls, where there are any."""


class Delta(Shape):
    """What is new in an answer: one of these, or nothing in an event that ends it."""

    role: Literal["assistant"] = MAYBE
    """With the first event of an answer."""
    content: str = MAYBE
    """What is new of the text; empty in the first event of an answer."""
    reasoning_content: str = MAYBE
    """What is new of what the model writes for itself."""
    reasoning: str = MAYBE
    """The same."""
    tool_calls: list[ToolCallDelta] = MAYBE
    """What is new of the calls of tools."""


class ChatChoice(Choice):
    """One answer."""

    message: AnswerMessage
    """The answer."""
    logprobs: ChatLogprobs | None
    """null where the request does not have `logprobs`."""
    finish_reason: ChatFinishReason
    """Why the answer ended; `tool_calls` where it stopped with calls."""
    stop_reason: str | int | None
    """The stop string or stop token that ended the answer; null for the model's own end-of-text token."""


class ChatChunkChoice(Choice):
    """A piece of one answer."""

    delta: Delta
    """What is new."""
    logprobs: ChatLogprobs | None
    """Of this event's tokens; null where the request does not have `logprobs`."""
    finish_reason: ChatFinishReason | None
    """Why the answer ended; null where it goes on, `tool_calls` where it stopped with calls."""
    stop_reason: str | int | None
    """The stop string or stop token that ended the answer; null for the model's own end-of-text token."""


class ChatCompletion(Event):
    """The answer to a chat that is not streamed."""

    object: Literal["chat.completion"]
    """What this is."""
    choices: list[ChatChoice]
    """The answers, by index."""
    seed: int
    """The request's, or the one that the service chose; the answers can be drawn again with it."""
    usage: Usage
    """What the call took."""


class ChatCompletionChunk(Event):
    """One event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    """What this is."""
    choices: list[ChatChunkChoice]
    """A piece of one answer; empty in the event that brings the usage of the whole call."""
    seed: int = MAYBE
    """The request's, or the one that the service chose; missing from the event that brings the usage of the whole call."""
    usage: Usage | None = MAYBE
    """In the last event, where the request has `include_usage`; null in those before it, or with `continuous_usage_stats` the
    tokens so far."""
