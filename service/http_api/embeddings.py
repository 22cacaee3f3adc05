"""POST /v1/embeddings: OpenAI's shape, a body to a Command and vectors to JSON."""

import base64
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from model.errors import InvalidRequest
from service.generation.embed import Embedded, command_of
from service.generation.generation import GenerationService
from service.http_api.responses import Shape
from service.http_api.schemas import List, TokenIds
from service.records import Command


class EmbeddingsRequest(BaseModel):
    """The body of POST /v1/embeddings."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: StrictStr | None = None
    input: StrictStr | List[StrictStr] | TokenIds | List[TokenIds] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: StrictInt | None = None
    truncate_prompt_tokens: StrictInt | None = None
    user: StrictStr | None = Field(default=None, max_length=256)
    request_id: StrictStr | None = None
    deadline_ms: StrictInt | None = None


class EmbeddingVector(Shape):
    """The vector of a text."""

    object: Literal["embedding"]
    """What this is."""
    index: int = Field(ge=0)
    """The text's place in `input`."""
    embedding: list[float] | str
    """Numbers whose squares sum to 1; with `encoding_format` base64 their bytes as float32, the lowest first."""


class EmbeddingUsage(Shape):
    """Tokens of the call."""

    prompt_tokens: int = Field(ge=0)
    """Of all texts."""
    total_tokens: int = Field(ge=0)
    """The same."""


class Embeddings(Shape):
    """Texts as vectors."""

    object: Literal["list"]
    """What this is."""
    data: list[EmbeddingVector]
    """One vector for each text, in their order."""
    model: str
    """The model's name, as the request has it."""
    usage: EmbeddingUsage
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
