"""Every HTTP route, in the order of service/API.md. A handler parses, calls the service, and writes."""

from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import PlainTextResponse, Response

from attend.service.contract import server_answers
from attend.service.contract.requests import ChatRequest, CompletionRequest
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
from attend.service.http_api.answering import generate_answer
from attend.service.http_api.anthropic import add_count_tokens, add_messages
from attend.service.http_api.attention import add_attention
from attend.service.http_api.batches import add_batches
from attend.service.http_api.chat_writer import ChatWriter
from attend.service.http_api.completion_writer import CompletionWriter
from attend.service.http_api.embeddings import add_embeddings
from attend.service.http_api.files import add_files
from attend.service.http_api.json_pieces import json_answer
from attend.service.http_api.responses import add_responses
from attend.service.http_api.route_deps import RouteDeps, bind, guard
from attend.service.http_api.tokens import add_tokens
from attend.service.observe.capacity import estimate
from attend.service.tested_versions import untested_packages

STALE_SECONDS = 10.0
"""A step thread that has shown no life for so long counts as stuck. Twice what a whole step of prompts is planned to take
(`budget.MAX_SECONDS`), while each of its layers is a sign of life, and longer than a rank waits for another in a layer."""


def build_router(deps: RouteDeps) -> APIRouter:
    """The routes of one replica."""
    generating = APIRouter(dependencies=[guard(deps, generates=True)])
    guarded = APIRouter(dependencies=[guard(deps, generates=False)])
    _add_generation(generating, guarded, deps)
    add_responses(generating, deps)
    add_messages(generating, deps)
    add_attention(generating, deps)
    add_embeddings(generating, deps)
    add_tokens(guarded, deps)
    add_count_tokens(guarded, deps)
    add_files(guarded, deps)
    add_batches(guarded, deps)
    router = APIRouter()
    _add_operations(router, deps)
    router.include_router(generating)
    router.include_router(guarded)
    return router


def _add_generation(router: APIRouter, guarded: APIRouter, deps: RouteDeps) -> None:
    """Completions and chats; models and capacity."""
    service = deps.service

    @bind(router, COMPLETIONS)
    async def completions(request: Request) -> Response:
        """Continue a prompt: OpenAI's completions, streamed when `stream` is true."""
        return await generate_answer(deps, request, CompletionRequest.read, CompletionWriter, is_chat=False)

    @bind(router, CHAT)
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation through the checkpoint's chat template, streamed when `stream` is true."""
        return await generate_answer(deps, request, ChatRequest.read, ChatWriter)

    @bind(guarded, MODELS)
    async def models() -> Response:
        """The served model, and its adapters."""
        served: server_answers.ModelList = {"object": "list", "data": [model_object(), *map(adapter_object, service.adapters)]}
        return json_answer(served)

    @bind(guarded, MODEL)
    async def model(model_id: Annotated[str, Path(description="The model's name.", examples=["attend"])]) -> Response:
        """The served model, or an adapter, by its name."""
        return json_answer(model_object() if service.find(model_id) is None else adapter_object(model_id))

    def model_object() -> server_answers.Model:
        return {
            "id": service.model_name,
            "object": "model",
            "created": 0,  # no checkpoint says it, and every replica must say the same
            "owned_by": "attend",
            "max_model_len": service.engine.info.max_model_len,
            "default_sampling": service.defaults.values(),
            "stop_token_ids": list(service.engine.info.eos_token_ids),
        }

    def adapter_object(name: str) -> server_answers.Model:
        return {**model_object(), "id": name, "parent": service.model_name}

    @bind(guarded, CAPACITY)
    async def capacity() -> Response:
        """Load of all replicas, and the estimated wait of a call that comes now."""
        expected, loads = (1, [deps.metrics.load()]) if deps.loads is None else await deps.loads()
        return json_answer(estimate(loads, expected))


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
