"""POST /v1/embeddings: OpenAI's shape, a body to a Command and vectors to JSON."""

import base64
from typing import Any, Literal

from pydantic import Field

from attend.service.contract.answers import Count, ObjectKind, PromptUsage
from attend.service.contract.shapes import Shape
from attend.service.contract.texts import EmbeddingsRequest
from attend.service.generation.embed import Embedded


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
