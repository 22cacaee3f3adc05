"""The shapes of the answers of a chat, for /openapi.json alone, as in `responses.py`."""

from typing import Annotated, Literal

from pydantic import Field

from attend.model.engine.request import FinishReason
from attend.service.contract.answers import Answers, Choice, Chunk, Count, Logprob, ObjectKind, OfLogprobs, Pieces, Whole
from attend.service.contract.shapes import MAYBE, Shape

ChatFinishReason = FinishReason | Literal["tool_calls"]
Nothing = Annotated[None, Field(description="Always null.")]
WithFirst = Field(MAYBE, description="With the first event of a call.")


class ChatToken(Shape):
    """A token with its log probability."""

    token: str
    """The token alone as text; bytes that are no characters show as U+FFFD."""
    logprob: Logprob
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
    refusal: Nothing


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

    name: str = WithFirst
    arguments: str
    """The next piece of the arguments; empty in the first event of a call."""


class ToolCallDelta(Shape):
    """What is new in a call of a tool."""

    index: Count
    """Which of the answer's calls."""
    id: str = WithFirst
    type: Literal["function"] = WithFirst
    function: FunctionDelta
    """What is called."""


class AnswerMessage(Shape):
    """What the model says."""

    role: Literal["assistant"]
    """Who says it."""
    content: str | None = Field(examples=["Hi there"])
    """The text; null where the message is calls of tools alone."""
    refusal: Nothing
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
    content: str = Field(MAYBE, examples=["Hi there"])
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
    logprobs: OfLogprobs[ChatLogprobs]
    finish_reason: ChatFinishReason = Field(examples=["length"])
    """Why the answer ended; `tool_calls` where it stopped with calls."""


class ChatChunkChoice(Choice):
    """A piece of one answer."""

    delta: Delta
    """What is new."""
    logprobs: ChatLogprobs | None
    """Of this event's tokens; null where the request does not have `logprobs`."""
    finish_reason: ChatFinishReason | None = Field(examples=["length"])
    """Why the answer ended; null where it goes on, `tool_calls` where it stopped with calls."""


class ChatCompletion(Whole):
    """The answer to a chat that is not streamed."""

    id: str = Field(examples=["chatcmpl-8d3f"])
    """The request's id, with a prefix that tells the route."""
    object: ObjectKind[Literal["chat.completion"]]
    choices: Answers[ChatChoice]


class ChatCompletionChunk(Chunk):
    """One event of a streamed chat."""

    id: str = Field(examples=["chatcmpl-8d3f"])
    """The request's id, with a prefix that tells the route."""
    object: ObjectKind[Literal["chat.completion.chunk"]]
    choices: Pieces[ChatChunkChoice]
