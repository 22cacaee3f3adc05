"""The shapes of the answers, for /openapi.json alone: the writers make plain dicts, and tests hold them to these shapes."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from model.engine.request import FinishReason

MAYBE: Any = None
"""The value of a field that may be missing from an answer. Where it is there, it has its type: null is no part of it."""


class Shape(BaseModel):
    """A JSON object with these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class PromptTokensDetails(Shape):
    """More about the tokens of the prompts."""

    cached_tokens: int = Field(ge=0)
    """Those that were not computed again."""


class CompletionTokensDetails(Shape):
    """More about the tokens of the answers."""

    reasoning_tokens: int = Field(ge=0)
    """Those of reasoning, which a chat tells apart from the text."""


class Usage(Shape):
    """Tokens of a whole call. A prompt counts once, however many answers it gets."""

    prompt_tokens: int = Field(ge=0)
    """Tokens of the prompts."""
    completion_tokens: int = Field(ge=0)
    """Tokens of all answers, stop tokens included."""
    total_tokens: int = Field(ge=0)
    """Both together."""
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
    cached_tokens: int = Field(ge=0)
    """Tokens of the prompt that were not computed again; of several answers, the fewest."""


class Event(Shape):
    """What every object of a call that generates has."""

    id: str
    """The request's id, with a prefix that tells the route."""
    created: int
    """When the call began, in seconds since 1970."""
    model: str
    """The served model's name."""
    system_fingerprint: str
    """Equal where weights, dtype, backend, instruction set, threads and library versions are: then equal seeds draw equally."""
    timing: Timing = MAYBE
    """Where the request has `timing`: in a stream, with the last chunk of an answer."""


class Choice(Shape):
    """What every choice has: one answer, or a piece of one."""

    index: int = Field(ge=0)
    """Answer i of prompt p has index p * n + i."""
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

    logprob: float
    """Natural logarithm; -9999 for minus infinity."""
    decoded_token: str
    """The token alone as text."""


class CompletionChunkChoice(Choice):
    """A piece of one answer."""

    text: str
    """The answer's text, after its prompt's where the request has `echo`; in a stream, what is new."""
    logprobs: CompletionLogprobs | None
    """null where the request does not have `logprobs`."""
    finish_reason: FinishReason | None
    """Why the answer ended; null where it goes on."""
    stop_reason: str | int | None
    """The stop string or stop token that ended the answer; null for the model's own end-of-text token."""
    prompt_logprobs: list[dict[str, ScoredToken] | None] = MAYBE
    """Of each prompt token: null for the first, then objects by token id; where the request has `prompt_logprobs`."""


class CompletionChoice(CompletionChunkChoice):
    """One answer."""

    finish_reason: FinishReason
    """Why the answer ended."""


class Completion(Event):
    """The answer to a completion that is not streamed."""

    object: Literal["text_completion"]
    """What this is."""
    choices: list[CompletionChoice]
    """The answers, by index."""
    seed: int
    """The request's, or the one that the service chose; the answers can be drawn again with it."""
    usage: Usage
    """What the call took."""


class CompletionChunk(Event):
    """One event of a streamed completion."""

    object: Literal["text_completion"]
    """What this is."""
    choices: list[CompletionChunkChoice]
    """A piece of one answer; empty in the event that brings the usage of the whole call."""
    seed: int = MAYBE
    """The request's, or the one that the service chose; missing from the event that brings the usage of the whole call."""
    usage: Usage | None = MAYBE
    """In the last event, where the request has `include_usage`; null in those before it, or with `continuous_usage_stats` the
    tokens so far."""


class Model(Shape):
    """A model that is served."""

    id: str
    """Its name."""
    object: Literal["model"]
    """What this is."""
    created: int
    """When the server started, in seconds since 1970."""
    owned_by: Literal["attend"]
    """Who serves it."""
    max_model_len: int
    """Tokens that a prompt and its answer may have together."""
    default_sampling: dict[str, float]
    """By field, what a call gets that leaves it out: generation_config.json's values with `generation_config=model`."""
    stop_token_ids: list[int]
    """The tokens that end an answer."""
    parent: str = MAYBE
    """Of a LoRA adapter: the model that it changes."""


class ModelList(Shape):
    """The served models: one, and its LoRA adapters."""

    object: Literal["list"]
    """What this is."""
    data: list[Model]
    """The models."""


class Tokens(Shape):
    """A text as tokens."""

    count: int = Field(ge=0)
    """How many there are."""
    max_model_len: int
    """Tokens that a prompt and its answer may have together."""
    tokens: list[int]
    """Their ids."""
    token_strs: list[str | None] = MAYBE
    """As the vocabulary spells them, where the request has `return_token_strs`."""


class Text(Shape):
    """Tokens as a text."""

    prompt: str
    """The text, special tokens included."""


class TokenizerInfo(BaseModel):
    """The checkpoint's tokenizer_config.json, with these fields where it lacks them, and whatever else it holds."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    eos_token: str | dict[str, Any] | None
    """The end-of-text token; null where there is none."""
    vocab_size: int
    """Token ids go from 0 to one below."""
    model_max_length: float
    """Tokens that a prompt and its answer may have together."""


class Version(Shape):
    """What is running."""

    version: str
    """Attend's version."""
    model: str
    """The served model's name."""
    family: str
    """The model's architecture."""
    device: str
    """Where it is computed."""
    dtype: str
    """The numbers that it is computed in."""
    weights: str
    """How its matrices are kept: as such numbers, or in whole numbers as int8 or int4."""
    backend: str
    """How attention is computed."""
    system_fingerprint: str
    """Equal where weights, dtype, backend, instruction set, threads and library versions are."""


class Replicas(Shape):
    """How many replicas told their load."""

    expected: int
    """Those that there should be."""
    answered: int
    """Those whose load is in the sums."""


class Capacity(Shape):
    """Sums over the replicas that answered, and what a call of the given length would wait for."""

    replicas: Replicas
    """Whose load this is."""
    free_blocks: int
    """The share of the KV cache that is free in the fullest group of layers, in blocks of the first group."""
    num_blocks: int
    """Blocks of the first group of layers, that of full attention where there is one."""
    block_size: int | None
    """Tokens of a block."""
    running: int
    """Requests in the batch."""
    waiting: int
    """Requests in the queue."""
    max_batch_requests: int
    """Requests that the batch may hold."""
    max_queued_requests: int
    """Requests that the queue may hold; more are refused with 429."""
    max_model_len: int | None
    """Tokens that a prompt and its answer may have together."""
    tokens_per_second: float
    """New tokens of answers, over the last ten seconds."""
    computed_tokens_per_second: float
    """Tokens of prompts and answers, over the last ten seconds."""
    prompt_tokens: int
    """As asked for."""
    max_tokens: int
    """As asked for."""
    fits: bool | None
    """Whether the context holds such a call; null where no replica answered."""
    estimated_wait_seconds: float | None
    """Until such a call starts; null where that is not known, or the call does not fit."""
    estimated_seconds: float | None
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
