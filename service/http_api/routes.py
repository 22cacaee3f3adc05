"""Every HTTP route, in the order of the README. A handler parses, calls the service, and writes."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from model.errors import AttendError, ModelNotFound
from model.params import describe
from service.errors import sentence
from service.generation import GenerationService
from service.http_api.body import read_json
from service.http_api.openai import CompletionWriter, to_command
from service.http_api.problems import error_body
from service.http_api.schemas import read_completion
from service.metrics import Metrics
from service.records import Chunk, Usage

log = logging.getLogger("attend.http")

SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
STALE_SECONDS = 30.0
"""A step thread that has not come round for so long is taken for stuck; the longest step is far shorter."""


@dataclass(frozen=True, slots=True)
class Site:
    """What the routes need of the replica that serves them."""

    service: GenerationService
    metrics: Metrics
    version: str
    scrape: Callable[[], Awaitable[str]]
    """The metrics page over all replicas."""
    is_draining: Callable[[], bool]


class Json(Response):
    """A JSON answer, written by orjson."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return orjson.dumps(content)


def build_router(site: Site) -> APIRouter:
    """The routes of one replica."""
    router = APIRouter()
    service = site.service

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continue a prompt: OpenAI's completions, streamed when `stream` is true."""
        request_id: str = request.state.request_id
        record = site.metrics.open("http", "/v1/completions", request_id)
        with record.errors():
            body = read_completion(await read_json(request))
            request_id = body.request_id or request_id
            command = to_command(body, request_id)
            writer = CompletionWriter(body, request_id, service.model_name, service.engine.info.fingerprint, Usage(command.n))
            batches = service.generate(command, record)
            record.at_once = not body.stream
            if not body.stream:
                chunks = [chunk async for batch in batches for chunk in batch]
                writer.usage.add(chunks)
                return Json(writer.whole(chunks))
            first = await anext(batches)  # so that an early failure has a status of its own
        return StreamingResponse(sse(first, batches, writer), media_type="text/event-stream", headers=SSE_HEADERS)

    @router.get("/v1/models")
    async def models() -> Response:
        """The served model."""
        return Json({"object": "list", "data": [model_object()]})

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        """The served model, by its name."""
        if model_id != service.model_name:
            raise ModelNotFound(f"the model {describe(model_id)} does not exist; this server has {service.model_name!r}")
        return Json(model_object())

    def model_object() -> dict[str, object]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.started_at,
            "owned_by": "attend",
            "max_model_len": service.engine.info.max_model_len,
        }

    _add_operations(router, site)
    return router


def _add_operations(router: APIRouter, site: Site) -> None:
    """What an operator asks: health, readiness, version, metrics."""

    @router.get("/health", include_in_schema=False)
    @router.get("/healthz")
    async def healthz() -> Response:
        """Alive: the process answers, and its step thread has come round lately."""
        age = site.service.engine.heartbeat_age()
        return PlainTextResponse(
            "ok\n" if age < STALE_SECONDS else "the engine is stuck\n", 200 if age < STALE_SECONDS else 503
        )

    @router.get("/readyz")
    async def readyz() -> Response:
        """Ready for requests: the weights are loaded, and no drain has begun."""
        draining = site.is_draining()
        return PlainTextResponse("draining\n" if draining else "ready\n", 503 if draining else 200)

    @router.get("/version")
    async def version() -> Response:
        """What is running."""
        info = site.service.engine.info
        return Json(
            {
                "version": site.version,
                "model": site.service.model_name,
                "family": info.family,
                "device": info.device,
                "dtype": info.dtype,
                "backend": info.backend,
                "system_fingerprint": info.fingerprint,
            }
        )

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text of all replicas."""
        return Response(await site.scrape(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def sse(first: list[Chunk], rest: AsyncGenerator[list[Chunk], None], writer: CompletionWriter) -> AsyncIterator[bytes]:
    """Server-sent events of a stream: each batch of chunks is one write, and `[DONE]` is always last."""
    async with aclosing(rest):
        yield _events(first, writer)
        try:
            async for chunks in rest:
                yield _events(chunks, writer)
        except AttendError as error:
            yield _event(error_body(error, writer.request_id))
        except Exception as error:
            log.exception("request %s failed in its stream: %s", writer.request_id, sentence(error, writer.request_id))
            yield _event(error_body(error, writer.request_id))
        else:
            options = writer.body.stream_options
            if options is not None and options.include_usage:
                yield _event(writer.last_chunk())
        yield DONE


def _events(chunks: list[Chunk], writer: CompletionWriter) -> bytes:
    options = writer.body.stream_options
    continuous = options is not None and bool(options.continuous_usage_stats)
    events = []
    for chunk in chunks:
        writer.usage.add((chunk,))
        event = writer.chunk(chunk)
        events.append(_event(event | {"usage": writer.usage_object()} if continuous else event))
    return b"".join(events)


def _event(document: dict[str, object]) -> bytes:
    return b"data: %s\n\n" % orjson.dumps(document)
