"""The shapes of the answers, for /openapi.json alone: the writers make plain dicts, and tests hold them to these shapes.

A field's example is part of the example of each answer that has the field.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field

from attend.model.engine.request import FinishReason
from attend.model.generation_config import NO_DEFAULTS
from attend.service.contract.shapes import MAYBE, Shape

T = TypeVar("T")
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
ServedName = Annotated[str, Field(description="The served model's name.", examples=["attend"])]


class PromptTokensDetails(Shape):
    """More about the tokens of the prompts."""

    cached_tokens: Count
    """Those that were not computed again."""


class CompletionTokensDetails(Shape):
    """More about the tokens of the answers."""

    reasoning_tokens: Count
    """Those of reasoning, which a chat tells apart from the text."""


class PromptUsage(Shape):
    """Tokens of a call that makes none."""

    prompt_tokens: Count = Field(examples=[3])
    """Tokens of the prompts or texts. A prompt counts once, however many answers it gets."""
    total_tokens: Count = Field(examples=[3])
    """All tokens of the call."""


class Usage(PromptUsage):
    """Tokens of a whole call."""

    completion_tokens: Count = Field(examples=[2])
    """Tokens of all answers, stop tokens included."""
    total_tokens: Count = Field(examples=[5])
    """All tokens of the call."""
    prompt_tokens_details: PromptTokensDetails
    """What else is known of the prompts' tokens."""
    completion_tokens_details: CompletionTokensDetails
    """What else is known of the answers' tokens."""


class Timing(Shape):
    """What the slowest answer of the call took."""

    queue_ms: float
    """Milliseconds of waiting."""
    prefill_ms: float
    """Milliseconds on the prompt."""
    decode_ms: float
    """Milliseconds on the answer."""
    cached_tokens: Count
    """Tokens of the prompt that were not computed again; of several answers, the fewest."""


class Made(Shape):
    """What every object that the model makes has."""

    id: str = Field(examples=["cmpl-8d3f"])
    """The request's id, with a prefix that tells the route."""
    created: int = Field(examples=[1767225600])
    """When the call began, in seconds since 1970."""
    model: str = Field(examples=["attend"])
    """The model's name, as the request has it."""
    system_fingerprint: Fingerprint


class Event(Made):
    """What every object of a call that generates has."""

    timing: Timing = MAYBE
    """Where the request has `timing`: in a stream, with the last chunk of an answer."""


class Whole(Event):
    """What every answer that is not streamed has."""

    seed: int = Field(examples=[229101])
    """The request's, or the one that the service chose; the answers can be drawn again with it."""
    usage: Usage
    """What the call took."""


class Chunk(Event):
    """What every event of a stream has."""

    seed: int = MAYBE
    """The request's, or the one that the service chose; missing from the event that brings the usage of the whole call."""
    usage: Usage | None = MAYBE
    """In the last event, where the request has `include_usage`; null in those before it, or with `continuous_usage_stats` the
    tokens so far."""


class Choice(Shape):
    """What every choice has: one answer, or a piece of one."""

    index: Count
    """Answer i of prompt p has index p * n + i."""
    stop_reason: str | int | None
    """The stop string or stop token that ended the answer; null for the model's own end-of-text token."""
    token_ids: list[int] = MAYBE
    """The answer's token ids, where the request has `return_token_ids`; in a stream, those of this chunk."""
    prompt_token_ids: list[int] = MAYBE
    """The prompt's token ids, where the request has `return_token_ids`; in a stream, with an answer's first chunk."""


class CompletionLogprobs(Shape):
    """Log probabilities (natural, -9999 for minus infinity): four lists with one entry for each token."""

    tokens: list[str]
    """Each token alone as text; bytes that are no characters show as U+FFFD."""
    token_logprobs: list[float | None]
    """null for the first token of an echoed prompt, before which nothing comes, or where they were not asked for."""
    top_logprobs: list[dict[str, float] | None]
    """The likeliest tokens and the token itself, by their texts."""
    text_offset: list[int]
    """Characters of the answer before the token."""


class ScoredToken(Shape):
    """A token with its log probability."""

    logprob: Logprob
    decoded_token: str
    """The token alone as text."""


class CompletionChunkChoice(Choice):
    """A piece of one answer."""

    text: str = Field(examples=[" there was"])
    """The answer's text, after its prompt's where the request has `echo`; in a stream, what is new."""
    logprobs: OfLogprobs[CompletionLogprobs]
    finish_reason: FinishReason | None = Field(examples=["length"])
    """Why the answer ended; null where it goes on."""
    prompt_logprobs: list[dict[str, ScoredToken] | None] = MAYBE
    """Of each prompt token: null for the first, then objects by token id; where the request has `prompt_logprobs`."""


class CompletionChoice(CompletionChunkChoice):
    """One answer."""

    finish_reason: FinishReason = Field(examples=["length"])
    """Why the answer ended."""


class Completion(Whole):
    """The answer to a completion that is not streamed."""

    object: ObjectKind[Literal["text_completion"]]
    choices: Answers[CompletionChoice]


class CompletionChunk(Chunk):
    """One event of a streamed completion."""

    object: ObjectKind[Literal["text_completion"]]
    choices: Pieces[CompletionChunkChoice]


class Model(Shape):
    """A model that is served."""

    id: str = Field(examples=["attend"])
    """Its name."""
    object: ObjectKind[Literal["model"]]
    created: int = Field(examples=[1767225600])
    """When the server started, in seconds since 1970."""
    owned_by: Literal["attend"]
    """Who serves it."""
    max_model_len: MaxModelLen[int]
    default_sampling: dict[str, float] = Field(examples=[NO_DEFAULTS.values()])
    """By field, what a call gets that leaves it out: generation_config.json's values with `generation_config=model`."""
    stop_token_ids: list[int] = Field(examples=[[2]])
    """The tokens that end an answer."""
    parent: str = MAYBE
    """Of a LoRA adapter: the model that it changes."""


class ModelList(Shape):
    """The served models: one, and its LoRA adapters."""

    object: ObjectKind[Literal["list"]]
    data: list[Model]
    """The models."""


class Tokens(Shape):
    """A text as tokens."""

    count: Count = Field(examples=[2])
    """How many there are."""
    max_model_len: MaxModelLen[int]
    tokens: list[int] = Field(examples=[[72, 105]])
    """Their ids."""
    token_strs: list[str | None] = Field(MAYBE, examples=[["H", "i"]])
    """As the vocabulary spells them, where the request has `return_token_strs`."""


class Text(Shape):
    """Tokens as a text."""

    prompt: str = Field(examples=["Hi"])
    """The text, special tokens included."""


class TokenizerInfo(Shape):
    """The checkpoint's tokenizer_config.json, with these fields where it lacks them, and whatever else it holds."""

    model_config = ConfigDict(extra="allow")

    eos_token: str | dict[str, Any] | None = Field(examples=["<|endoftext|>"])
    """The end-of-text token; null where there is none."""
    vocab_size: int = Field(examples=[4096])
    """Token ids go from 0 to one below."""
    model_max_length: MaxModelLen[float]


class Version(Shape):
    """What is running."""

    version: str = Field(examples=["0.1.0"])
    """Attend's version."""
    model: ServedName
    family: str = Field(examples=["llama"])
    """The model's architecture."""
    device: str = Field(examples=["cpu"])
    """Where it is computed."""
    dtype: str = Field(examples=["bfloat16"])
    """The numbers that it is computed in."""
    weights: str = Field(examples=["bfloat16"])
    """How its matrices are kept: as such numbers, or quantised to int8 or int4."""
    backend: str = Field(examples=["cpu"])
    """How attention is computed."""
    slower_path: str | None = Field(examples=[None])
    """Why the fastest way of this machine does not serve; null where it does, or another was asked for by its name."""
    system_fingerprint: Fingerprint


class Replicas(Shape):
    """How many replicas told their load."""

    expected: int = Field(examples=[1])
    """Those that there should be."""
    answered: int = Field(examples=[1])
    """Those whose load is in the sums."""


class Capacity(Shape):
    """Sums over the replicas that answered, and what a call of the given length would wait for."""

    replicas: Replicas
    """Whose load this is."""
    free_blocks: int = Field(examples=[900])
    """The share of the KV cache that is free in the fullest group of layers, in blocks of the first group."""
    num_blocks: int = Field(examples=[1024])
    """Blocks of the first group of layers, that of full attention where there is one."""
    block_size: int | None = Field(examples=[16])
    """Tokens of a block."""
    running: int = Field(examples=[3])
    """Requests in the batch."""
    waiting: int = Field(examples=[0])
    """Requests in the queue."""
    max_batch_requests: int = Field(examples=[64])
    """Requests that the batch may hold."""
    max_queued_requests: int = Field(examples=[256])
    """Requests that the queue may hold; more are refused with 429."""
    max_model_len: MaxModelLen[int | None]
    tokens_per_second: float = Field(examples=[211.4])
    """New tokens of answers, over the last ten seconds."""
    computed_tokens_per_second: float = Field(examples=[498.0])
    """Tokens of prompts and answers, over the last ten seconds."""
    prompt_tokens: int = Field(examples=[100])
    """As asked for."""
    max_tokens: int = Field(examples=[200])
    """As asked for."""
    fits: bool | None = Field(examples=[True])
    """Whether the context holds such a call; null where no replica answered."""
    estimated_wait_seconds: float | None = Field(examples=[0.0])
    """Until such a call starts; null where that is not known, or the call does not fit."""
    estimated_seconds: float | None = Field(examples=[2.9])
    """Until its last token; null where that is not known, or the call does not fit."""


class Problem(Shape):
    """What went wrong."""

    message: str
    """A sentence for a person."""
    type: str
    """The kind of error."""
    param: str | None
    """The field of the request that is at fault; null where none is."""
    code: str
    """The error's name."""


class Error(Shape):
    """The answer to a call that failed, and the event of a stream that failed after it began."""

    error: Problem
    """The failure."""
