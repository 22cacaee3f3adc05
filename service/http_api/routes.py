"""Every HTTP route, in the order of service/API.md. A handler parses, calls the service, and writes."""

from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import PlainTextResponse, Response

from attend.service.contract import server_answers
from attend.service.contract.chat import ChatRequest, read_chat
from attend.service.contract.commands import to_command, to_embedding, to_explanation
from attend.service.contract.requests import CompletionRequest, read_completion
from attend.service.contract.routes import (
    ATTENTION,
    CAPACITY,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    HEALTHZ,
    METRICS,
    MODEL,
    MODELS,
    READYZ,
    VERSION,
)
from attend.service.contract.texts import AttentionRequest, EmbeddingsRequest
from attend.service.contract.validation import read_body
from attend.service.generation.embed import command_of, compute_embeddings
from attend.service.generation.explain import explainable
from attend.service.generation.generation import GenerationService
from attend.service.http_api import attention, embeddings
from attend.service.http_api.answering import answer, converse
from attend.service.http_api.anthropic import add_count_tokens, add_messages
from attend.service.http_api.batches import add_batches
from attend.service.http_api.body import read_json
from attend.service.http_api.chat_writer import ChatWriter
from attend.service.http_api.completion_writer import CompletionWriter
from attend.service.http_api.files import add_files
from attend.service.http_api.json_pieces import json_answer, json_response
from attend.service.http_api.query import Query
from attend.service.http_api.responses import add_responses
from attend.service.http_api.route_deps import RouteDeps, adopt, guard, guard_others, open_record
from attend.service.http_api.routing import bind
from attend.service.http_api.scores import add_scores
from attend.service.http_api.tokens import add_tokens
from attend.service.observe.capacity import MAX_TOKENS, Question, estimate
from attend.service.records import Command, ExplainCommand, TokenCounts, TokenUsage
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
    _add_attention(generating, deps)
    _add_embeddings(generating, deps)
    add_scores(generating, deps)
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
    """Add the routes that generate text."""
    service = deps.service

    @bind(router, COMPLETIONS)
    async def completions(request: Request) -> Response:
        """Continue a prompt: OpenAI's completions, streamed when `stream` is true."""
        record = open_record(deps.metrics, request)
        with record.errors():
            remarks = deps.remarks()

            def read(fields: dict[str, Any]) -> tuple[CompletionRequest, Command]:
                body = read_completion(fields, remarks)
                return body, to_command(body, request.state.request_id, service.defaults, remarks=remarks)

            body, command = await read_json(request, read, deps.most_bytes)
            command = adopt(command, request, record)
            adapter, usage = service.adapter_of(command), TokenCounts(command.n)
            name, fingerprint = body.model or service.model_name, service.fingerprint(adapter)
            writer = CompletionWriter(body, command.request_id, name, fingerprint, usage, service.tokenizer)
            response = await answer(service, command, adapter, writer, record, stream=bool(body.stream))
            return deps.with_remarks(response, remarks, request, usage.total)

    @bind(router, CHAT)
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation through the checkpoint's chat template, streamed when `stream` is true."""

        def write(body: ChatRequest, command: Command, fingerprint: str, usage: TokenCounts) -> ChatWriter:
            return ChatWriter(body, command.request_id, body.model or service.model_name, fingerprint, usage, service.tokenizer)

        return await converse(deps, request, read_chat, write)


def _add_attention(router: APIRouter, deps: RouteDeps) -> None:
    """What the model does with a text."""

    @bind(router, ATTENTION)
    async def explain_attention(request: Request) -> Response:
        """Attention weights of a text, log probabilities of its tokens, and the logit lens of each layer."""
        record = open_record(deps.metrics, request)
        with record.errors():
            explaining = explainable(deps.explaining)

            remarks = deps.remarks()

            def read(fields: dict[str, Any]) -> ExplainCommand:
                return to_explanation(read_body(AttentionRequest, fields, remarks), request.state.request_id)

            command = await read_json(request, read, deps.most_bytes)
            with ExitStack() as held:
                explained = await explaining.explain(adopt(command, request, record), record, held)
                response = json_response(attention.AttentionWriter(explaining, explained).full_response(), held)
                return deps.with_remarks(response, remarks, request)


def _add_embeddings(router: APIRouter, deps: RouteDeps) -> None:
    """Add /v1/embeddings."""
    service = deps.service

    @bind(router, EMBEDDINGS)
    async def embed_texts(request: Request) -> Response:
        """Each text as a vector of length 1: OpenAI's embeddings."""
        record = open_record(deps.metrics, request)
        with record.errors(), ExitStack() as held:
            remarks = deps.remarks()

            def read(fields: dict[str, Any]) -> tuple[EmbeddingsRequest, Command]:
                body = read_body(EmbeddingsRequest, fields, remarks)
                return body, command_of(service, **to_embedding(body, request.state.request_id))

            body, command = await read_json(request, read, deps.most_bytes_of_texts)
            command = adopt(command, request, record)
            adapter = service.adapter_of(command)
            embedded = await compute_embeddings(service, command, body.dimensions, record, held, adapter=adapter)
            response = json_response(embeddings.answer_of(body, embedded, body.model or service.model_name), held)
            return deps.with_remarks(response, remarks, request, TokenUsage(embedded.num_tokens))


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
        """Ready for requests: the weights are loaded, and no drain has begun."""
        draining = deps.is_draining()
        return PlainTextResponse("draining\n" if draining else "ready\n", 503 if draining else 200)

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
