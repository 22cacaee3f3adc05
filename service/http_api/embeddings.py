"""POST /v1/embeddings: OpenAI's shape, a body to a Command and vectors to JSON."""

from attend.service.contract.text_answers import Embeddings
from attend.service.contract.texts import EmbeddingsRequest
from attend.service.generation.embed import EmbeddingResult


def answer_of(body: EmbeddingsRequest, result: EmbeddingResult, model: str) -> Embeddings:
    """The answer. Its vectors are arrays, or the bytes of arrays: see `json_pieces`."""
    vectors = result.vectors
    if body.encoding_format == "base64":
        vectors = [memoryview(each) for each in vectors]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(vectors)],
        "model": model,
        "usage": {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens},
    }
