"""The answers, as the writers return them and /openapi.json shows them. A long list may be an iterator: see `pieces.py`.

A field's example is part of the example of each answer that has the field.
"""

from collections.abc import Iterable
from typing import Annotated, Literal, NotRequired, TypeVar, cast

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic reads that of `typing` from Python 3.12 on

from attend.model.engine.request import FinishReason
from attend.service import records

record = with_config(ConfigDict(extra="forbid", use_attribute_docstrings=True))
"""A JSON object with these fields and no others. The text under a field is its description, but others do not inherit that."""
T = TypeVar("T")
Ended = Literal["stop", "length"]
"""Why an answer ended, in words that every client knows."""
CUT = (FinishReason.DEADLINE, FinishReason.ABORT)
"""What cuts an answer beside its limit of tokens. `stop_reason` has these words, since clients' lists of reasons lack them."""
Count = Annotated[int, Field(ge=0)]
ObjectKind = Annotated[T, Field(description="What this is.")]
MaxModelLen = Annotated[T, Field(description="Tokens that a prompt and its answer may have together.", examples=[1024])]
OfLogprobs = Annotated[T | None, Field(description="null where the request does not have `logprobs`.")]
Answers = Annotated[list[T], Field(description="The answers, by index.")]
Pieces = Annotated[
    list[T], Field(description="A piece of one answer; empty in the event that brings the usage of the whole call.")
]
Logprob = Annotated[float, Field(description="Natural logarithm; -9999 for minus infinity.", examples=[-0.5])]
Fingerprint = Annotated[
    str,
    Field(
        description="Equal where weights, dtype, backend, instruction set, threads and library versions are: then equal seeds "
        "draw equally.",
        examples=["fp_5f0c1d2e3a4b"],
    ),
]
CompletionId = Annotated[
    str, Field(description="The request's id, with a prefix that tells the route.", examples=["cmpl-8d3f"])
]
ServedName = Annotated[str, Field(description="The served model's name.", examples=["attend"])]


@record
class PromptTokensDetails(TypedDict):
    """More about the tokens of the prompts."""

    cached_tokens: Count
    """Tokens found in the prefix cache."""


@record
class CompletionTokensDetails(TypedDict):
    """More about the tokens of the answers."""

    reasoning_tokens: Count
    """Tokens of reasoning."""


@record
class PromptUsage(TypedDict):
    """Tokens of a call that makes none."""

    prompt_tokens: Annotated[
        Count,
        Field(description="Tokens of the prompts or texts. A prompt counts once, however many answers it gets.", examples=[3]),
    ]
    total_tokens: Annotated[Count, Field(description="All tokens of the call.", examples=[3])]


@record
class Usage(TypedDict):
    """Tokens of a whole call."""

    prompt_tokens: Annotated[Count, Field(examples=[3])]
    """Tokens of the prompts. A prompt counts once, however many answers it gets."""
    completion_tokens: Annotated[Count, Field(examples=[2])]
    """Tokens of all answers, stop tokens included."""
    total_tokens: Annotated[Count, Field(examples=[5])]
    """All tokens of the call."""
    prompt_tokens_details: PromptTokensDetails
    """What else is known of the prompts' tokens."""
    completion_tokens_details: CompletionTokensDetails
    """What else is known of the answers' tokens."""


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


@record
class Timing(TypedDict):
    """What the slowest answer of the call took."""

    queue_ms: float
    """Milliseconds in the queue."""
    prefill_ms: float
    """Milliseconds of prefill: on the prompt."""
    decode_ms: float
    """Milliseconds of decode: on the answer."""
    cached_tokens: Count
    """Tokens of the prompt that were not computed again; of several answers, the fewest."""


@record
class Made(TypedDict):
    """What every object that the model makes has."""

    created: Annotated[int, Field(description="When the call began, in seconds since 1970.", examples=[1767225600])]
    model: Annotated[str, Field(description="The model's name, as the request has it.", examples=["attend"])]
    system_fingerprint: Fingerprint


@record
class Event(Made):
    """What every object of a call that generates has."""

    timing: NotRequired[
        Annotated[Timing, Field(description="Where the request has `timing`: in a stream, with the last chunk of an answer.")]
    ]


@record
class Whole(Event):
    """What every answer that is not streamed has."""

    seed: Annotated[
        int,
        Field(
            description="The request's, or the one that the service chose; the answers can be generated again with it.",
            examples=[229101],
        ),
    ]
    usage: Annotated[Usage, Field(description="What the call took.")]


@record
class Chunk(Event):
    """What every event of a stream has."""

    seed: NotRequired[
        Annotated[
            int,
            Field(
                description="The request's, or the one that the service chose; missing from the event that brings the "
                "usage of the whole call."
            ),
        ]
    ]
    usage: NotRequired[
        Annotated[
            Usage | None,
            Field(
                description="In the last event, where the request has `include_usage`; null in those before it, or "
                "with `continuous_usage_stats` the tokens so far."
            ),
        ]
    ]


@record
class Choice(TypedDict):
    """What every choice has: one answer, or a piece of one."""

    index: Annotated[Count, Field(description="Answer i of prompt p has index p * n + i.")]
    stop_reason: Annotated[
        str | int | None,
        Field(
            description="The stop string or stop token that ended the answer; null for the model's own end-of-text token. With "
            "`length`: `deadline`, or `abort` at a shutdown, where that cut the answer."
        ),
    ]
    token_ids: NotRequired[
        Annotated[
            Iterable[int],
            Field(
                description="The answer's token ids, where the request has `return_token_ids`; in a stream, those of "
                "this chunk."
            ),
        ]
    ]
    prompt_token_ids: NotRequired[
        Annotated[
            Iterable[int],
            Field(
                description="The prompt's token ids, where the request has `return_token_ids`; in a stream, with an "
                "answer's first chunk."
            ),
        ]
    ]


def finish_reason_of(chunk: records.Chunk) -> tuple[Ended | None, str | int | None]:
    """The `finish_reason` and the `stop_reason` of a chunk. An answer that was cut has a length in any case."""
    reason = chunk.finish_reason
    if reason in CUT:
        return "length", str(reason)
    return (None if reason is None else cast(Ended, str(reason))), chunk.stop


@record
class CompletionLogprobs(TypedDict):
    """Log probabilities (natural, -9999 for minus infinity): four lists with one entry for each token."""

    tokens: Iterable[str]
    """Each token alone as text; bytes that are no characters show as U+FFFD."""
    token_logprobs: Iterable[float | None]
    """null for the first token of an echoed prompt, before which nothing comes, or where they were not asked for."""
    top_logprobs: Iterable[dict[str, float] | None]
    """The most likely tokens and the token itself, by their texts."""
    text_offset: Iterable[int]
    """Characters of the answer before the token."""


@record
class ScoredToken(TypedDict):
    """A token with its log probability."""

    logprob: Logprob
    decoded_token: str
    """The token alone as text."""


@record
class CompletionText(Choice):
    """What every choice of a completion has."""

    text: Annotated[
        str,
        Field(
            description="The answer's text, after its prompt's where the request has `echo`; in a stream, what is new.",
            examples=[" there was"],
        ),
    ]
    logprobs: OfLogprobs[CompletionLogprobs]
    prompt_logprobs: NotRequired[
        Annotated[
            Iterable[dict[str, ScoredToken] | None],
            Field(
                description="Of each prompt token: null for the first, then objects by token id; where the request has "
                "`prompt_logprobs`."
            ),
        ]
    ]


@record
class CompletionChunkChoice(CompletionText):
    """A piece of one answer."""

    finish_reason: Annotated[Ended | None, Field(examples=["length"])]
    """Why the answer ended; null where it goes on."""


@record
class CompletionChoice(CompletionText):
    """One answer of a completion."""

    finish_reason: Annotated[Ended, Field(examples=["length"])]
    """Why the answer ended."""


@record
class Completion(Whole):
    """The answer to a completion that is not streamed."""

    id: CompletionId
    object: ObjectKind[Literal["text_completion"]]
    choices: Answers[CompletionChoice]


@record
class CompletionChunk(Chunk):
    """One event of a streamed completion."""

    id: CompletionId
    object: ObjectKind[Literal["text_completion"]]
    choices: Pieces[CompletionChunkChoice]


@record
class Problem(TypedDict):
    """What went wrong."""

    message: str
    """A sentence for a person."""
    type: str
    """The kind of error, in OpenAI's words."""
    param: str | None
    """The field of the request that is at fault; null where none is."""
    code: str
    """The error's name, which programs can rely on."""


@record
class Error(TypedDict):
    """The answer to a call that failed, and the event of a stream that failed after it began."""

    error: Problem
    """Why the call failed."""
