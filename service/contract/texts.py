"""Request bodies of the routes that generate no text: /v1/embeddings, /v1/attention, /tokenize, /detokenize."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, WithJsonSchema

from attend.service.contract.conversation import Messages, Tools
from attend.service.contract.requests import (
    SOME_TOKENS,
    TOKENS,
    Alternatives,
    DeadlineMs,
    List,
    ModelName,
    RequestId,
    TokenId,
    TokenIds,
    TruncateTokens,
    User,
    texts_or_tokens,
)
from attend.service.contract.shapes import TEXT, Range, Shape, Wire, one_of, optional_field
from attend.service.records import MAX_INPUT_TOKENS, MAX_INPUTS, MAX_LENS, MAX_NUMBERS, MAX_TOKENS, TOP_LOGPROBS


class EmbeddingsRequest(Shape):
    """The body of POST /v1/embeddings."""

    model: ModelName = optional_field(proto="model")
    input: Annotated[StrictStr | List[StrictStr] | TokenIds | List[TokenIds], texts_or_tokens(MAX_INPUTS)] = Field(
        description="What to embed: a text, token ids, or a list of either; an empty text is the start-of-text token. At most "
        f"{MAX_INPUT_TOKENS} tokens in all. {TOKENS}"
    )
    encoding_format: Literal["float", "base64"] | None = optional_field("float")
    """How the answer has a vector: as numbers, or as the bytes of float32 in base64."""
    dimensions: StrictInt | None = optional_field(proto="dimensions", minimum=1)
    """So many numbers of each vector, from the first on, again with length 1; at most as many as there are. Default: all."""
    truncate_prompt_tokens: TruncateTokens = optional_field(proto="truncate_prompt_tokens")
    user: User = None
    request_id: RequestId = optional_field(proto="request_id")
    deadline_ms: DeadlineMs = optional_field(proto="deadline_ms")


class EmbedRequest(EmbeddingsRequest):
    """What a message EmbedRequest of gRPC asks for: texts and token ids side by side."""

    input: Annotated[List[StrictStr | TokenIds], Wire(("inputs",))]  # type: ignore[assignment]  # over HTTP they are of one kind


class AttentionRequest(Shape):
    """The body of POST /v1/attention."""

    model: StrictStr | None = optional_field(proto="model")
    """The name of the served model; absent means it. An adapter is refused."""
    prompt: Annotated[StrictStr | TokenIds, WithJsonSchema(one_of(TEXT, SOME_TOKENS)), Wire(("text", "token_ids"))] = Field(
        description=f"A text, or token ids, to look at; an empty text is the start-of-text token. {TOKENS} With `answer` at "
        f"most {MAX_TOKENS} tokens."
    )
    answer: StrictStr | TokenIds | None = optional_field(
        description=f"What follows the prompt: a text, tokenized by itself, or token ids. {TOKENS} Default: nothing.",
        proto="answer_text answer_token_ids",
    )
    layers: List[TokenId] | None = optional_field(
        description=f"Layers whose attention is reported, from 0. An answer holds at most {MAX_NUMBERS} weights and scores; a "
        "head of T tokens has T * (T + 1) / 2. Default: all.",
        proto="layers",
    )
    heads: List[TokenId] | None = optional_field(proto="heads")
    """Query heads whose attention is reported in each of these layers, from 0. Default: all."""
    scores: StrictBool | None = optional_field(False, proto="scores")
    """Report the scores before mask and softmax too."""
    top_logprobs: Alternatives | None = optional_field(TOP_LOGPROBS, proto="top_logprobs")
    """How many of the most likely tokens to report at each position."""
    logit_lens: Annotated[int, Range(0, MAX_LENS)] | None = optional_field(0, proto="logit_lens")
    """The logit lens: this many of the most likely tokens of each layer at each position."""
    user: User = None
    request_id: RequestId = optional_field(proto="request_id")
    deadline_ms: DeadlineMs = optional_field(proto="deadline_ms")


class TokenizeRequest(Shape):
    """The body of POST /tokenize."""

    prompt: StrictStr | None = optional_field()
    """The text. Either it or `messages` is needed."""
    messages: Messages | None = optional_field(
        description="A conversation, in place of a text: its tokens are those of the prompt that a chat of it has."
    )
    tools: Tools | None = optional_field()
    """Of a conversation: the functions that the model may call."""
    chat_template_kwargs: dict[StrictStr, Any] | None = optional_field()
    """Of a conversation: what the chat template takes beside it."""
    add_generation_prompt: StrictBool | None = optional_field(True)
    """Of a conversation: whether the prompt ends where an answer begins."""
    continue_final_message: StrictBool | None = optional_field(False)
    """Of a conversation: the answer goes on in its last message."""
    model: ModelName = None
    add_special_tokens: StrictBool | None = optional_field(True)
    """With the special tokens that the checkpoint puts around a text."""
    return_token_strs: StrictBool | None = optional_field(False)
    """Report each token as the vocabulary spells it, too."""


class DetokenizeRequest(Shape):
    """The body of POST /detokenize."""

    tokens: TokenIds = Field(description=f"Token ids. {TOKENS}")
    model: ModelName = None
