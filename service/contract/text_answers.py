"""Answers of the routes that generate no text: tokens, embeddings, attention."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from attend.service.contract.answers import (
    AnyText,
    Count,
    Fingerprint,
    Id,
    Logprob,
    MaxModelLen,
    ModelName,
    PromptUsage,
    Seconds,
    record,
)


@record
class Tokens(TypedDict):
    """A text as tokens."""

    count: Count
    max_model_len: MaxModelLen[int]
    tokens: Annotated[Iterable[int], Field(examples=[[72, 105]])]
    token_strs: NotRequired[Annotated[Iterable[str | None], Field(examples=[["H", "i"]])]]
    """As the vocabulary spells them, where the request has `return_token_strs`."""


@record
class Text(TypedDict):
    """Tokens as a text, special tokens included."""

    prompt: AnyText


@record
class EmbeddingVector(TypedDict):
    """The vector of a text."""

    object: Literal["embedding"]
    index: Count
    embedding: Annotated[Iterable[float] | str, Field(examples=[[0.6, -0.8]])]
    """Numbers whose squares sum to 1; with `encoding_format` base64 their bytes as float32, the lowest first."""


@record
class Embeddings(TypedDict):
    """One vector for each text, in their order."""

    object: Literal["list"]
    data: list[EmbeddingVector]
    model: ModelName
    usage: PromptUsage


@record
class Alternative(TypedDict):
    """A token that may stand in a place. A part of a character is written as `bytes:` and its bytes."""

    id: Count
    token: AnyText
    logprob: Logprob


@record
class NextToken(TypedDict):
    """What is expected behind the last token."""

    entropy: Annotated[float, Field(examples=[1.5])]
    """Entropy of the next token's distribution, in nats."""
    top_logprobs: list[Alternative]


@record
class Place(TypedDict):
    """A token of the text, and what the model expected in its place: null for the first token."""

    id: int
    token: str
    logprob: float | None
    entropy: float | None
    top_logprobs: list[Alternative] | None


@record
class HeadAttention(TypedDict):
    """What a query head of a layer attends to."""

    head: Count
    key_value_head: Count
    """The number of the key and value head that it shares."""
    weights: Annotated[Iterable[Iterable[float]], Field(examples=[[[1.0], [0.25, 0.75]]])]
    """Of each token for itself and for those before it. A row sums to 1, less the sink's share."""
    sinks: NotRequired[Iterable[float]]
    """The share of each token's attention that goes to the head's sink, where the model has sinks."""
    scores: NotRequired[Iterable[Iterable[float]]]
    """Before mask and softmax, where the request has `scores`."""


@record
class LayerAttention(TypedDict):
    """The attention of one layer."""

    layer: Count
    kind: Literal["attention", "state"]
    """A layer that keeps a state in place of keys and values has no weights."""
    window: int | None
    """Tokens that a token sees at most, itself included; null: all before it."""
    heads: list[HeadAttention]


@record
class LayerGuesses(TypedDict):
    """The logit lens of a layer: its hidden state through the final norm and the head."""

    layer: Count
    guesses: Iterable[Iterable[Alternative]]
    """Of each token: what comes after it, the most likely first."""


_FIRST: dict[str, Any] = {"id": 5, "token": "Hi", "logprob": None, "entropy": None, "top_logprobs": None}
_SECOND: dict[str, Any] = {"id": 7, "token": " there", "logprob": -0.5}
_TOKENS = [_FIRST, _SECOND | {"entropy": 1.5, "top_logprobs": [_SECOND]}]


@record
class Attention(TypedDict):
    """What the model does with a text."""

    id: Id
    object: Literal["attention"]
    created: Seconds
    model: ModelName
    system_fingerprint: Fingerprint
    num_layers: Count
    num_heads: Count
    num_prompt_tokens: Count
    tokens: Annotated[Iterable[Place], Field(examples=[_TOKENS])]
    """Those of the prompt, then those of the answer."""
    next: NextToken
    layers: list[LayerAttention]
    logit_lens: NotRequired[list[LayerGuesses]]
    usage: PromptUsage
