"""Every HTTP route, in the order of service/API.md. A handler parses, calls the service, and writes."""

from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import PlainTextResponse, Response

from attend.service.contract import server_answers
from attend.service.contract.chat import read_chat
from attend.service.contract.requests import read_completion
from attend.service.contract.routes import (
    CAPACITY,
    CHAT,
    COMPLETIONS,
    HEALTHZ,
    LEAVING_HEADER,
    METRICS,
    MODEL,
    MODELS,
    READYZ,
    VERSION,
)
from attend.service.generation.generation import GenerationService
from attend.service.http_api.answering import generate_answer
from attend.service.http_api.anthropic import add_count_tokens, add_messages
from attend.service.http_api.attention import add_attention
from attend.service.http_api.batches import add_batches
from attend.service.http_api.chat_writer import ChatWriter
from attend.service.http_api.completion_writer import CompletionWriter
from attend.service.http_api.embeddings import add_embeddings
from attend.service.http_api.files import add_files
from attend.service.http_api.json_pieces import json_answer
from attend.service.http_api.query import Query
from attend.service.http_api.responses import add_responses
from attend.service.http_api.route_deps import RouteDeps, guard, guard_others
from attend.service.http_api.routing import bind
from attend.service.http_api.tokens import add_tokens
from attend.service.observe.capacity import MAX_TOKENS, Question, estimate
from attend.service.tested_versions import untested_packages

STALE_SECONDS = 10.0
"""A step thread that has shown no life for so long counts as stuck. Twice what a whole step of prompts is planned to take
(`budget.MAX_SECONDS`), while each of its layers is a sign of life, and longer than a rank waits for another in a layer."""


def build_router(deps: RouteDeps) -> APIRouter:
    """The routes of one replica."""
    generating = APIRouter(dependencies=[guard(deps)])
    _add_generation(generating, deps)
    add_responses(generating, deps)
    add_messages(generating, deps)
    add_attention(generating, deps)
    add_embeddings(generating, deps)
    guarded = APIRouter(dependencies=[guard_others(deps)])
    _add_models(guarded, deps.service)
    _add_capacity(guarded, deps)
    add_tokens(guarded, deps)
    add_count_tokens(guarded, deps)
    add_files(guarded, deps)
    add_batches(guarded, deps)
    router = APIRouter()
    _add_operations(router, deps)
    router.include_router(generating)
    router.include_router(guarded)
    return router


def _add_generation(router: APIRouter, deps: RouteDeps) -> None:
    """Add completions and chats."""

    @bind(router, COMPLETIONS)
    async def completions(request: Request) -> Response:
        """Continue a prompt: OpenAI's completions, streamed when `stream` is true."""
        return await generate_answer(deps, request, read_completion, CompletionWriter, is_chat=False)

    @bind(router, CHAT)
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation through the checkpoint's chat template, streamed when `stream` is true."""
        return await generate_answer(deps, request, read_chat, ChatWriter)


def _add_models(router: APIRouter, service: GenerationService) -> None:
    """Add /v1/models."""

    @bind(router, MODELS)
    async def models() -> Response:
        """The served model, and its adapters."""
        served: server_answers.ModelList = {"object": "list", "data": [model_object(), *map(adapter_object, service.adapters)]}
        return json_answer(served)

    @bind(router, MODEL)
    async def model(model_id: Annotated[str, Path(description="The model's name.", examples=["attend"])]) -> Response:
        """The served model, or an adapter, by its name."""
        return json_answer(model_object() if service.find(model_id) is None else adapter_object(model_id))

    def model_object() -> server_answers.Model:
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.started_at,
            "owned_by": "attend",
            "max_model_len": service.engine.info.max_model_len,
            "default_sampling": service.defaults.values(),
            "stop_token_ids": list(service.engine.info.eos_token_ids),
        }

    def adapter_object(name: str) -> server_answers.Model:
        return {**model_object(), "id": name, "parent": service.model_name}


def _add_capacity(router: APIRouter, deps: RouteDeps) -> None:
    """Add /v1/capacity."""

    @bind(router, CAPACITY)
    async def capacity(request: Request) -> Response:
        """Load of all replicas, and the estimated times of a call of `prompt_tokens` (0) and `max_tokens` (16)."""
        asked, usual = Query(request.query_params.multi_items(), Question.__slots__), Question()
        counts = (asked.integer(name, getattr(usual, name), MAX_TOKENS, least=0) for name in Question.__slots__)
        own = deps.metrics.load()
        expected, loads = (1, [own]) if deps.loads is None else await deps.loads()
        return json_answer(estimate(loads, expected, Question(*counts)))


def _add_operations(router: APIRouter, deps: RouteDeps) -> None:
    """What an operator asks: health, readiness, version, metrics."""

    @router.head("/healthz", include_in_schema=False)
    @router.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
    @bind(router, HEALTHZ)
    async def healthz() -> Response:
        """Liveness: the process answers, and the step thread made progress within 10 s."""
        stuck = deps.service.engine.heartbeat_age() >= STALE_SECONDS
        return PlainTextResponse("the engine is stuck\n" if stuck else "ok\n", 503 if stuck else 200)

    @router.head("/readyz", include_in_schema=False)
    @bind(router, READYZ)
    async def readyz() -> Response:
        """Ready for requests: the weights are loaded, and the server has not been told to end."""
        draining = deps.is_leaving() or deps.is_draining()
        headers = {LEAVING_HEADER: "true"} if deps.is_leaving() else None
        return PlainTextResponse("draining\n" if draining else "ready\n", 503 if draining else 200, headers)

    @bind(router, VERSION)
    async def version() -> Response:
        """Version, model, device and backend of this replica."""
        info = deps.service.engine.info
        running: server_answers.Version = {
            "version": deps.version,
            "model": deps.service.model_name,
            "family": info.family,
            "device": info.device,
            "dtype": info.dtype,
            "weights": info.weights,
            "backend": info.backend,
            "slower_path": info.slower_path and info.slower_path.cause,
            "untested": list(untested_packages()),
            "grpc_port": deps.grpc_port,
            "system_fingerprint": info.fingerprint,
        }
        return json_answer(running)

    @bind(router, METRICS)
    async def metrics() -> Response:
        """Prometheus text of all replicas."""
        return Response(await deps.scrape(), media_type="text/plain; version=0.0.4; charset=utf-8")
