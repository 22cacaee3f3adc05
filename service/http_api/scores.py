"""POST /v1/rerank and /v1/score: a body to a Command, and scores to JSON, in the shapes of Cohere, Jina and vLLM."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from attend.service.contract.routes import RERANK, SCORE
from attend.service.contract.scores import (
    Reranked,
    RerankRequest,
    RerankResult,
    ScoreRequest,
    Scores,
    to_rerank,
    to_scores,
)
from attend.service.contract.validation import read_body
from attend.service.generation.score import ScoreResult, command_of, score
from attend.service.http_api.body import read_json
from attend.service.http_api.json_pieces import json_response
from attend.service.http_api.route_deps import RouteDeps, adopt, open_record
from attend.service.http_api.routing import bind
from attend.service.records import Command

B = TypeVar("B", RerankRequest, ScoreRequest)


def add_scores(router: APIRouter, deps: RouteDeps) -> None:
    """Add /v1/rerank and /v1/score."""

    @bind(router, RERANK)
    async def rerank_documents(request: Request) -> Response:
        """Documents in the order of how well they answer a query."""
        return await _answer_scores(deps, request, RerankRequest, to_rerank, rerank_answer)

    @bind(router, SCORE)
    async def score_pairs(request: Request) -> Response:
        """A score for each pair of texts."""
        return await _answer_scores(deps, request, ScoreRequest, to_scores, scores_of)


async def _answer_scores(
    deps: RouteDeps,
    request: Request,
    kind: type[B],
    ask: Callable[[B, str], dict[str, Any]],
    write: Callable[[B, list[str], ScoreResult, str, str], Any],
) -> Response:
    """The answer to a call for scores. `ask` gives the arguments of `command_of`; `write` makes the answer's object."""
    service, record, remarks = deps.service, open_record(deps.metrics, request), deps.remarks()
    with record.errors(), ExitStack() as held:

        def read(fields: dict[str, Any]) -> tuple[B, Command, list[str]]:
            body = read_body(kind, fields, remarks)
            asked = ask(body, request.state.request_id)
            return body, command_of(service, **asked), list(asked["documents"][1])

        body, command, texts = await read_json(request, read, deps.most_bytes_of_texts)
        command = adopt(command, request, record)
        adapter = service.adapter_of(command)
        scored = await score(service, command, len(texts), record, held, adapter=adapter)
        made = write(body, texts, scored, command.request_id, body.model or service.model_name)
        return deps.with_remarks(json_response(made, held), remarks, request)


def rerank_answer(body: RerankRequest, texts: list[str], result: ScoreResult, request_id: str, model: str) -> Reranked:
    """The best documents, the best first; of equal scores the one that comes first."""
    order = sorted(range(len(texts)), key=lambda at: -result.scores[at])[: body.top_n or None]
    results: list[RerankResult] = [{"index": at, "relevance_score": result.scores[at]} for at in order]
    if body.return_documents:
        results = [{**each, "document": {"text": texts[each["index"]]}} for each in results]
    return {"id": f"rerank-{request_id}", "model": model, "usage": _usage(result), "results": results}


def scores_of(body: ScoreRequest, texts: list[str], result: ScoreResult, request_id: str, model: str) -> Scores:
    """The scores in the order of the documents."""
    return {
        "id": f"score-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [{"index": at, "object": "score", "score": each} for at, each in enumerate(result.scores)],
        "usage": _usage(result),
    }


def _usage(result: ScoreResult) -> Any:
    return {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens}
