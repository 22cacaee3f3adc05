"""POST /v1/embeddings, /v1/rerank and /v1/score, in the shapes of OpenAI, Cohere, Jina and vLLM."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from attend.service.contract.commands import to_embedding
from attend.service.contract.routes import EMBEDDINGS, RERANK, SCORE
from attend.service.contract.scores import Reranked, RerankRequest, RerankResult, ScoreRequest, Scores, to_rerank, to_scores
from attend.service.contract.texts import Embeddings, EmbeddingsRequest
from attend.service.generation.embed import EmbeddingResult, compute_embeddings
from attend.service.generation.embed import command_of as embedding_of
from attend.service.generation.score import ScoreResult, command_of, score
from attend.service.http_api.answering import compute
from attend.service.http_api.route_deps import RouteDeps, bind, origin_of
from attend.service.observe.metrics import RequestRecord
from attend.service.records import Command
from attend.service.remarks import Remarks

B = TypeVar("B", RerankRequest, ScoreRequest)


def add_embeddings(router: APIRouter, deps: RouteDeps) -> None:
    """Add /v1/embeddings, /v1/rerank and /v1/score."""
    service = deps.service

    @bind(router, EMBEDDINGS)
    async def embed_texts(request: Request) -> Response:
        """Each text as a vector of length 1: OpenAI's embeddings."""

        def read(fields: dict[str, Any], remarks: Remarks) -> tuple[EmbeddingsRequest, Command]:
            body = EmbeddingsRequest.read(fields, remarks)
            return body, embedding_of(service, **to_embedding(body, **origin_of(request)))

        async def work(
            body: EmbeddingsRequest, command: Command, record: RequestRecord, resources: ExitStack
        ) -> tuple[Any, int]:
            adapter = service.adapter_of(command)
            embedded = await compute_embeddings(service, command, body.dimensions, record, resources, adapter=adapter)
            return answer_of(body, embedded, body.model or service.model_name), embedded.num_tokens

        return await compute(deps, request, read, work, deps.most_bytes_of_texts)

    @bind(router, RERANK)
    async def rerank_documents(request: Request) -> Response:
        """Documents in the order of how well they answer a query."""
        return await _answer_scores(deps, request, RerankRequest, to_rerank, _rerank_answer)

    @bind(router, SCORE)
    async def score_pairs(request: Request) -> Response:
        """A score for each pair of texts."""
        return await _answer_scores(deps, request, ScoreRequest, to_scores, _score_answer)


async def _answer_scores(
    deps: RouteDeps,
    request: Request,
    kind: type[B],
    arguments_of: Callable[..., dict[str, Any]],
    write: Callable[[B, list[str], ScoreResult, str, str], Any],
) -> Response:
    """The answer to a call for scores. `arguments_of` gives those of `command_of`; `write` makes the answer's object."""
    service = deps.service

    def read(fields: dict[str, Any], remarks: Remarks) -> tuple[tuple[B, list[str]], Command]:
        body = kind.read(fields, remarks)
        asked = arguments_of(body, **origin_of(request))
        return (body, list(asked["documents"][1])), command_of(service, **asked)

    async def work(pair: tuple[B, list[str]], command: Command, record: RequestRecord, resources: ExitStack) -> tuple[Any, int]:
        body, texts = pair
        result = await score(service, command, len(texts), record, resources, adapter=service.adapter_of(command))
        return write(body, texts, result, command.request_id, body.model or service.model_name), result.num_tokens

    return await compute(deps, request, read, work, deps.most_bytes_of_texts)


def answer_of(body: EmbeddingsRequest, result: EmbeddingResult, model: str) -> Embeddings:
    """The answer. Its vectors are arrays, or the bytes of arrays: see `json_pieces`."""
    vectors = result.vectors
    if body.encoding_format == "base64":
        vectors = [memoryview(each) for each in vectors]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(vectors)],
        "model": model,
        "usage": _usage(result),
    }


def _rerank_answer(body: RerankRequest, texts: list[str], result: ScoreResult, request_id: str, model: str) -> Reranked:
    """The best documents, the best first; of equal scores the one that comes first."""
    order = sorted(range(len(texts)), key=lambda at: -result.scores[at])[: body.top_n or None]
    results: list[RerankResult] = [{"index": at, "relevance_score": result.scores[at]} for at in order]
    if body.return_documents:
        results = [{**each, "document": {"text": texts[each["index"]]}} for each in results]
    return {"id": f"rerank-{request_id}", "model": model, "usage": _usage(result), "results": results}


def _score_answer(body: ScoreRequest, texts: list[str], result: ScoreResult, request_id: str, model: str) -> Scores:
    """The scores in the order of the documents."""
    return {
        "id": f"score-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [{"index": at, "object": "score", "score": each} for at, each in enumerate(result.scores)],
        "usage": _usage(result),
    }


def _usage(result: EmbeddingResult | ScoreResult) -> Any:
    return {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens}
