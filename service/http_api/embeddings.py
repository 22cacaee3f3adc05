"""POST /v1/embeddings: OpenAI's shape, a body to a Command and vectors to JSON."""

import base64
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, StrictStr

from attend.model.errors import InvalidRequest
from attend.service.contract.answers import Count, ObjectKind, PromptUsage
from attend.service.contract.requests import (
    TEXTS,
    TOKENS,
    DeadlineMs,
    List,
    ModelName,
    RequestId,
    TokenIds,
    TruncateTokens,
    User,
)
from attend.service.contract.shapes import Shape, body, told
from attend.service.generation.embed import Embedded, command_of
from attend.service.generation.generation import GenerationService
from attend.service.records import Command


class EmbeddingsRequest(Shape):
    """The body of POST /v1/embeddings."""

    model_config = body("input")

    model: ModelName = None
    input: Annotated[StrictStr | List[StrictStr] | TokenIds | List[TokenIds] | None, TEXTS] = told(
        description=f"What to embed: a text, token ids, or a list of either; an empty text is the start-of-text token. {TOKENS}"
    )
    encoding_format: Literal["float", "base64"] | None = told("float")
    """How the answer has a vector: as numbers, or as the bytes of float32 in base64."""
    dimensions: StrictInt | None = told(minimum=1)
    """So many numbers of each vector, from the first on, again with length 1; at most as many as there are. Default: all."""
    truncate_prompt_tokens: TruncateTokens = None
    user: User = None
    request_id: RequestId = None
    deadline_ms: DeadlineMs = None


class EmbeddingVector(Shape):
    """The vector of a text."""

    object: ObjectKind[Literal["embedding"]]
    index: Count
    """The text's place in `input`."""
    embedding: list[float] | str = Field(examples=[[0.6, -0.8]])
    """Numbers whose squares sum to 1; with `encoding_format` base64 their bytes as float32, the lowest first."""


class Embeddings(Shape):
    """Texts as vectors."""

    object: ObjectKind[Literal["list"]]
    data: list[EmbeddingVector]
    """One vector for each text, in their order."""
    model: str = Field(examples=["attend"])
    """The model's name, as the request has it."""
    usage: PromptUsage
    """Token counts."""


def to_command(body: EmbeddingsRequest, request_id: str, service: GenerationService) -> Command:
    """What the body asks for. Raises InvalidRequest with the field named."""
    given = body.input
    if given is None:
        raise InvalidRequest("input is required: a string, a list of strings, token ids, or a list of token-id lists", "input")
    several = isinstance(given, list) and not (given and isinstance(given[0], int))
    texts: list[Any] = list(given) if several else [given]
    return command_of(
        service,
        [text if isinstance(text, str) else tuple(text) for text in texts],
        body.dimensions,
        model=body.model or "",
        request_id=request_id,
        deadline_ms=body.deadline_ms,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )


def answer_of(body: EmbeddingsRequest, embedded: Embedded, model: str) -> dict[str, Any]:
    """The answer, as class Embeddings describes it. Its vectors are arrays: see `pieces`."""
    vectors = map(_base64, embedded.vectors) if body.encoding_format == "base64" else embedded.vectors
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(vectors)],
        "model": model,
        "usage": {"prompt_tokens": embedded.num_tokens, "total_tokens": embedded.num_tokens},
    }


def _base64(vector: Any) -> str:
    return base64.b64encode(vector.tobytes()).decode()
