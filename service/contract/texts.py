"""Bodies and answers of the routes that generate no text: /v1/embeddings, /v1/attention, /tokenize, /detokenize."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, StrictBool, StrictInt, StrictStr
from typing_extensions import TypedDict

from attend.service.contract.answers import (
    AnyText,
    Count,
    Fingerprint,
    Id,
    Logprob,
    MaxModelLen,
    PromptUsage,
    Seconds,
    ServedModel,
)
from attend.service.contract.conversation import Messages, Tools
from attend.service.contract.requests import (
    TOKENS,
    Alternatives,
    Call,
    List,
    Prompts,
    SomeTokens,
    TokenId,
    TokenIds,
    TruncateTokens,
)
from attend.service.contract.shapes import Range, Shape, optional_field
from attend.service.records import MAX_INPUT_TOKENS, MAX_LENS, MAX_NUMBERS, MAX_TOKENS, TOP_LOGPROBS


class EmbeddingsRequest(Call):
    """The body of POST /v1/embeddings."""

    input: Prompts = Field(
        description="What to embed: a text, token ids, or a list of either; an empty text is the start-of-text token. At most "
        f"{MAX_INPUT_TOKENS} tokens in all. {TOKENS}"
    )
    encoding_format: Literal["float", "base64"] | None = optional_field("float")
    """How the answer has a vector: as numbers, or as the bytes of float32 in base64."""
    dimensions: StrictInt | None = optional_field(minimum=1)
    """So many numbers of each vector, from the first on, again with length 1; at most as many as there are. Default: all."""
    truncate_prompt_tokens: TruncateTokens = None


class EmbedRequest(EmbeddingsRequest):
    """What a message EmbedRequest of gRPC asks for: texts and token ids side by side."""

    input: List[StrictStr | TokenIds]  # type: ignore[assignment]  # over HTTP they are of one kind


class AttentionRequest(Call):
    """The body of POST /v1/attention."""

    model: StrictStr | None = None
    """The name of the served model; absent means it. An adapter is refused."""
    prompt: StrictStr | SomeTokens = Field(
        description=f"A text, or token ids, to look at; an empty text is the start-of-text token. {TOKENS} With `answer` at "
        f"most {MAX_TOKENS} tokens."
    )
    answer: StrictStr | TokenIds | None = optional_field(
        description=f"What follows the prompt: a text, tokenized by itself, or token ids. {TOKENS} Default: nothing.",
    )
    layers: List[TokenId] | None = optional_field(
        description=f"Layers whose attention is reported, from 0. An answer holds at most {MAX_NUMBERS} weights and scores; a "
        "head of T tokens has T * (T + 1) / 2. Default: all.",
    )
    heads: List[TokenId] | None = None
    """Query heads whose attention is reported in each of these layers, from 0. Default: all."""
    scores: StrictBool | None = optional_field(False)
    """Report the scores before mask and softmax too."""
    top_logprobs: Alternatives | None = optional_field(TOP_LOGPROBS)
    """How many of the most likely tokens to report at each position."""
    logit_lens: Annotated[int, Range(0, MAX_LENS)] | None = optional_field(0)
    """The logit lens: this many of the most likely tokens of each layer at each position."""


class TokenizeRequest(Shape):
    """The body of POST /tokenize."""

    prompt: StrictStr | None = None
    """The text. Either it or `messages` is needed."""
    messages: Messages | None = optional_field(
        description="A conversation, in place of a text: its tokens are those of the prompt that a chat of it has."
    )
    tools: Tools | None = None
    """Of a conversation: the functions that the model may call."""
    chat_template_kwargs: dict[StrictStr, Any] | None = None
    """Of a conversation: what the chat template takes beside it."""
    add_generation_prompt: StrictBool | None = optional_field(True)
    """Of a conversation: whether the prompt ends where an answer begins."""
    continue_final_message: StrictBool | None = optional_field(False)
    """Of a conversation: the answer goes on in its last message."""
    model: StrictStr | None = None
    """The name of the served model or of a LoRA adapter."""
    add_special_tokens: StrictBool | None = optional_field(True)
    """With the special tokens that the checkpoint puts around a text."""
    return_token_strs: StrictBool | None = optional_field(False)
    """Report each token as the vocabulary spells it, too."""


class DetokenizeRequest(Shape):
    """The body of POST /detokenize."""

    tokens: TokenIds = Field(description=f"Token ids. {TOKENS}")
    model: StrictStr | None = None
    """The name of the served model or of a LoRA adapter."""
    """The name of the served model or of a LoRA adapter."""


# --- answers


class Tokens(TypedDict):
    """A text as tokens."""

    count: Count
    max_model_len: MaxModelLen[int]
    tokens: Annotated[Iterable[int], Field(examples=[[72, 105]])]
    token_strs: NotRequired[Annotated[Iterable[str | None], Field(examples=[["H", "i"]])]]


class Text(TypedDict):
    """Tokens as a text, special tokens included."""

    prompt: AnyText


class EmbeddingVector(TypedDict):
    """The vector of a text."""

    object: Literal["embedding"]
    index: Count
    embedding: Annotated[Iterable[float] | str, Field(examples=[[0.6, -0.8]])]
    """Numbers whose squares sum to 1; with `encoding_format` base64 their bytes as float32, the lowest first."""


class Embeddings(TypedDict):
    """One vector for each text, in their order."""

    object: Literal["list"]
    data: list[EmbeddingVector]
    model: ServedModel
    usage: PromptUsage


class Alternative(TypedDict):
    """A token that may stand in a place. A part of a character is written as `bytes:` and its bytes."""

    id: Count
    token: AnyText
    logprob: Logprob


class NextToken(TypedDict):
    """What is expected behind the last token."""

    entropy: Annotated[float, Field(examples=[1.5])]
    """Entropy of the next token's distribution, in nats."""
    top_logprobs: list[Alternative]


class Place(TypedDict):
    """A token of the prompt or the answer, and what was expected in its place: null for the first."""

    id: int
    token: str
    logprob: float | None
    entropy: float | None
    top_logprobs: list[Alternative] | None


class HeadAttention(TypedDict):
    """What a query head of a layer attends to: each token's weights for those before it and itself, less the sink's share."""

    head: Count
    key_value_head: Count
    weights: Annotated[Iterable[Iterable[float]], Field(examples=[[[1.0], [0.25, 0.75]]])]
    sinks: NotRequired[Iterable[float]]
    """Each token's share for the head's sink, where the model has sinks."""
    scores: NotRequired[Iterable[Iterable[float]]]


class LayerAttention(TypedDict):
    """The attention of one layer."""

    layer: Count
    kind: Literal["attention", "state"]
    window: int | None
    """Tokens that a token sees at most, itself included; null: all before it."""
    heads: list[HeadAttention]


class LayerGuesses(TypedDict):
    """The logit lens of a layer: what comes after each token, by its hidden state through the final norm and the head."""

    layer: Count
    guesses: Iterable[Iterable[Alternative]]


_FIRST: dict[str, Any] = {"id": 5, "token": "Hi", "logprob": None, "entropy": None, "top_logprobs": None}
_SECOND: dict[str, Any] = {"id": 7, "token": " there", "logprob": -0.5}
_TOKENS = [_FIRST, _SECOND | {"entropy": 1.5, "top_logprobs": [_SECOND]}]


class Attention(TypedDict):
    """What the model does with a text."""

    id: Id
    object: Literal["attention"]
    created: Seconds
    model: ServedModel
    system_fingerprint: Fingerprint
    num_layers: Count
    num_heads: Count
    num_prompt_tokens: Count
    tokens: Annotated[Iterable[Place], Field(examples=[_TOKENS])]
    next: NextToken
    layers: list[LayerAttention]
    logit_lens: NotRequired[list[LayerGuesses]]
    usage: PromptUsage
