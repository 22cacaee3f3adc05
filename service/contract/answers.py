"""Answers of completions and chats, and what all answers share, as the writers return them and /openapi.json shows them.

A long list may be an iterator: see `json_pieces.py`. Fields without a text are as OpenAI describes them.
"""

from collections.abc import Iterable
from typing import Annotated, Literal, NotRequired, TypeVar, cast

from pydantic import Field
from typing_extensions import TypedDict  # pydantic reads that of `typing` from Python 3.12 on

from attend.model.engine.request import FinishReason
from attend.service import records

T = TypeVar("T")
Ended = Literal["stop", "length"]
"""Why an answer ended, in words that every client knows."""
Count = Annotated[int, Field(ge=0)]
AnyText = Annotated[str, Field(examples=["Hi there"])]
Id = Annotated[str, Field(description="The request's id, after a prefix that tells the route.", examples=["cmpl-8d3f"])]
ServedModel = Annotated[str, Field(description="The model's name, as the request has it.", examples=["attend"])]
Seconds = Annotated[int, Field(description="In seconds since 1970.", examples=[1767225600])]
MaxModelLen = Annotated[T, Field(description="Tokens that a prompt and its answer may have together.", examples=[1024])]
Logprob = Annotated[float, Field(description="Natural logarithm; -9999 for minus infinity.", examples=[-0.5])]
Fingerprint = Annotated[
    str,
    Field(
        description="Equal where weights, dtype, backend, instruction set, threads and library versions are: then equal seeds "
        "draw equally.",
        examples=["fp_5f0c1d2e3a4b"],
    ),
]
Seed = Annotated[int, Field(description="With which the answer can be generated again.", examples=[229101])]


Details = Annotated[
    dict[str, Count], Field(description="How many of these are cached, or reasoning.", examples=[{"cached_tokens": 0}])
]


class PromptUsage(TypedDict):
    """Tokens of a call that makes none. Where there are `completion_tokens` they are 0."""

    prompt_tokens: Count
    completion_tokens: NotRequired[Count]
    total_tokens: Count


class Usage(TypedDict):
    """Tokens of a whole call. A prompt counts once, however many answers it gets; stop tokens count."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: Details
    completion_tokens_details: Details


class ResponseUsage(TypedDict):
    """Tokens of a call of the Responses API, or of all lines of a batch so far that were answered."""

    input_tokens: Count
    input_tokens_details: Details
    output_tokens: Count
    output_tokens_details: Details
    total_tokens: Count


def usage(counts: records.TokenCounts) -> Usage:
    """The counts of a call, as OpenAI writes them."""
    total = counts.total
    return {
        "prompt_tokens": total.prompt,
        "completion_tokens": total.completion,
        "total_tokens": total.prompt + total.completion,
        "prompt_tokens_details": {"cached_tokens": total.cached_prompt},
        "completion_tokens_details": {"reasoning_tokens": total.reasoning},
    }


class Timing(TypedDict):
    """What the slowest answer of the call took, where the request has `timing`; in a stream with the end of an answer."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    cached_tokens: Count
    """Of the answer that found the fewest."""


class Event(TypedDict):
    """What every object of a call that generates has."""

    id: Id
    created: Seconds
    model: ServedModel
    system_fingerprint: Fingerprint
    timing: NotRequired[Timing]


class Whole(Event):
    """What every answer that is not streamed has."""

    seed: Seed
    usage: Usage


class Chunk(Event):
    """What every event of a stream has. The one that brings the usage of the whole call has no seed."""

    seed: NotRequired[int]
    usage: NotRequired[Usage | None]


class Choice(TypedDict):
    """One answer, or a piece of one. It has token ids where the request has `return_token_ids`."""

    index: Annotated[Count, Field(description="Answer i of prompt p has index p * n + i.")]
    stop_reason: str | int | None
    """What ended the answer: a stop string or stop token; null for the model's own. With `length`: `deadline` or `abort`."""
    token_ids: NotRequired[Iterable[int]]
    prompt_token_ids: NotRequired[Iterable[int]]


def finish_reason_of(chunk: records.Chunk) -> tuple[Ended | None, str | int | None]:
    """The `finish_reason` and the `stop_reason` of a chunk. An answer that was cut has a length in any case, and what cut it in
    `stop_reason`, since clients' lists of reasons lack these words.
    """
    reason = chunk.finish_reason
    if reason in (FinishReason.DEADLINE, FinishReason.ABORT):
        return "length", str(reason)
    return (None if reason is None else cast(Ended, str(reason))), chunk.stop


class CompletionLogprobs(TypedDict):
    """Log probabilities (natural, -9999 for minus infinity): four lists with one entry for each token."""

    tokens: Iterable[str]
    token_logprobs: Iterable[float | None]
    """null for the first token of an echoed prompt, or where they were not asked for."""
    top_logprobs: Iterable[dict[str, float] | None]
    text_offset: Iterable[int]
    """Characters of the answer before the token."""


class ScoredToken(TypedDict):
    """A token with its log probability."""

    logprob: Logprob
    decoded_token: str


class CompletionChoice(Choice):
    """One answer of a completion, or a piece of one."""

    text: AnyText
    logprobs: CompletionLogprobs | None
    finish_reason: Ended | None
    prompt_logprobs: NotRequired[Iterable[dict[str, ScoredToken] | None]]
    """By token id; null for the first token."""


class Completion(Whole):
    """The answer to a completion that is not streamed."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(Chunk):
    """One event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


# --- chats

ChatFinishReason = Ended | Literal["tool_calls"]


class ChatToken(TypedDict):
    """A token with its log probability. Its text may be a part of a character."""

    token: str
    logprob: Logprob
    bytes: list[int]


class ChatTokenLogprob(ChatToken):
    """A token of the answer, with the most likely ones at its position."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(TypedDict):
    """Log probabilities of an answer's tokens."""

    content: Iterable[ChatTokenLogprob]
    refusal: None


class CalledFunction(TypedDict):
    """The function that is called. The arguments are a JSON object, or its beginning where the answer ended in it."""

    name: NotRequired[str]
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool. In a stream it has an `index`, and only its first event has an `id`."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class AnswerMessage(TypedDict):
    """What the model says. `content` is null where that is calls of tools alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class Delta(TypedDict):
    """What is new in an answer: one of these, or nothing in an event that ends it."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[AnyText]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Choice):
    """One answer of a chat."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatChunkChoice(Choice):
    """A piece of one answer."""

    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletion(Whole):
    """The answer to a chat that is not streamed."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(Chunk):
    """One event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


# --- failures


class Problem(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field of the request that is at fault; null where none is."""
    code: str
    """The error's name, which programs can rely on."""


class Error(TypedDict):
    """The answer to a call that failed, and the event of a stream that failed after it began."""

    error: Problem
