"""Answers of the routes that generate no text: tokens, embeddings, attention."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from attend.service.contract.answers import Count, Made, MaxModelLen, ObjectKind, PromptUsage, record


@record
class Tokens(TypedDict):
    """A text as tokens."""

    count: Annotated[Count, Field(examples=[2])]
    """How many tokens the text has."""
    max_model_len: MaxModelLen[int]
    tokens: Annotated[Iterable[int], Field(examples=[[72, 105]])]
    """Token ids of the text."""
    token_strs: NotRequired[Annotated[Iterable[str | None], Field(examples=[["H", "i"]])]]
    """As the vocabulary spells them, where the request has `return_token_strs`."""


@record
class Text(TypedDict):
    """Tokens as a text."""

    prompt: Annotated[str, Field(examples=["Hi"])]
    """The text, special tokens included."""


@record
class EmbeddingVector(TypedDict):
    """The vector of a text."""

    object: ObjectKind[Literal["embedding"]]
    index: Count
    """The text's place in `input`."""
    embedding: Annotated[Iterable[float] | str, Field(examples=[[0.6, -0.8]])]
    """Numbers whose squares sum to 1; with `encoding_format` base64 their bytes as float32, the lowest first."""


@record
class Embeddings(TypedDict):
    """Texts as vectors."""

    object: ObjectKind[Literal["list"]]
    data: list[EmbeddingVector]
    """One vector for each text, in their order."""
    model: Annotated[str, Field(examples=["attend"])]
    """The model's name, as the request has it."""
    usage: PromptUsage
    """Tokens of all texts of the call."""


@record
class Alternative(TypedDict):
    """A token that may stand in a place."""

    id: Annotated[int, Field(examples=[7])]
    """Id of the token."""
    token: Annotated[str, Field(examples=[" there"])]
    """As it is written; a part of a character as `bytes:` and its bytes."""
    logprob: Annotated[float, Field(examples=[-0.5])]
    """Natural log probability."""


@record
class NextToken(TypedDict):
    """What is expected behind the last token."""

    entropy: Annotated[float, Field(examples=[1.5])]
    """Entropy of the next token's distribution, in nats."""
    top_logprobs: list[Alternative]
    """The most likely tokens."""


@record
class Place(TypedDict):
    """A token of the text, and what the model expected in its place."""

    id: int
    """Id of the token."""
    token: str
    """The token alone as text."""
    logprob: float | None
    """Natural log probability, given what stands before; null for the first token."""
    entropy: float | None
    """Of what was expected, in nats; null for the first token."""
    top_logprobs: list[Alternative] | None
    """The most likely tokens; null for the first token."""


@record
class HeadAttention(TypedDict):
    """What a query head of a layer attends to."""

    head: Count
    """Number of the layer, from 0."""
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
    """Number of the layer, from 0."""
    kind: Literal["attention", "state"]
    """A layer that keeps a state in place of keys and values has no weights."""
    window: int | None
    """Tokens that a token sees at most, itself included; null: all before it."""
    heads: list[HeadAttention]
    """The chosen query heads."""


@record
class LayerGuesses(TypedDict):
    """The logit lens of a layer: its hidden state through the final norm and the head."""

    layer: Count
    """Number of the layer, from 0."""
    guesses: Iterable[Iterable[Alternative]]
    """Of each token: what comes after it, the most likely first."""


@record
class TextUsage(PromptUsage):
    """Tokens of the call."""

    completion_tokens: Literal[0]
    """Always 0: no token is generated."""


_FIRST: dict[str, Any] = {"id": 5, "token": "Hi", "logprob": None, "entropy": None, "top_logprobs": None}
_SECOND: dict[str, Any] = {"id": 7, "token": " there", "logprob": -0.5}
_TOKENS = [_FIRST, _SECOND | {"entropy": 1.5, "top_logprobs": [_SECOND]}]


@record
class Attention(Made):
    """What the model does with a text."""

    id: Annotated[str, Field(examples=["attn-8d3f"])]
    """The call's id after `attn-`."""
    object: ObjectKind[Literal["attention"]]
    num_layers: Annotated[int, Field(examples=[6])]
    """Layers of the model."""
    num_heads: Annotated[int, Field(examples=[6])]
    """Query heads of a layer."""
    num_prompt_tokens: Annotated[int, Field(examples=[2])]
    """Tokens before the answer."""
    tokens: Annotated[Iterable[Place], Field(examples=[_TOKENS])]
    """Those of the prompt, then those of the answer."""
    next: NextToken
    """What would come after the text."""
    layers: list[LayerAttention]
    """The chosen layers."""
    logit_lens: NotRequired[list[LayerGuesses]]
    """Where the request has `logit_lens`."""
    usage: TextUsage
    """Tokens of the text that was explained."""
