"""The HTTP application of several models: forwards routes that name a model, answers the others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Set as AbstractSet
from typing import Annotated, Any

import aiohttp
import orjson
from fastapi import APIRouter, Path, Request, params
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from starlette.types import ASGIApp

from attend.model.errors import ModelNotFound
from attend.service.access.keys import KEY_HEADERS
from attend.service.contract.routes import CAPACITY, HEALTHZ, METRICS, MODEL, MODELS, READYZ, ROUTES, TOKENIZER_INFO, VERSION
from attend.service.errors import ModelUnavailable
from attend.service.http_api import openapi, problems
from attend.service.http_api.body import Reading
from attend.service.http_api.cors import with_cors
from attend.service.http_api.json_pieces import json_answer
from attend.service.http_api.playground import add_pages
from attend.service.http_api.request_ids import RequestIds
from attend.service.http_api.route_deps import bind
from attend.service.observe.exposition import merge, replica_counts
from attend.service.runtime.models.admission import SERVER, Admission
from attend.service.runtime.models.http import forward
from attend.service.runtime.models.pool import Pool, Slot, State
from attend.service.runtime.models.process import ModelProcess
from attend.service.settings import Settings
from attend.service.tested_versions import untested_packages

SECONDS = 2.0
"""How long a page waits for the processes of the models."""
Page = Callable[[], Awaitable[str]]


def build_models_app(
    settings: Settings, admission: Admission, page: Page, version: str, hosts: AbstractSet[str] = frozenset()
) -> ASGIApp:
    """The application, which answers to the names `hosts` alone, where there are any."""
    app, guard = openapi.bare_app(version), _guard(admission)
    guarded, router = APIRouter(dependencies=[guard]), APIRouter()
    for route in ROUTES:
        if (route.method == "POST" and route.tag != "batches") or route in (TOKENIZER_INFO, CAPACITY):
            bind(guarded, route)(_forwarding(admission, route.path))
    _add_models(guarded, admission)
    _add_operations(router, settings, admission, page, version)
    app.include_router(router)
    app.include_router(guarded)
    if settings.expose_docs:
        add_pages(app, [guard])
    problems.install_error_handlers(app)
    openapi.install_openapi(app, has_api_keys=admission.keys is not None)
    return with_cors(RequestIds(app, hosts, behind_serve=False), settings.origins)


def _guard(admission: Admission) -> params.Depends:
    """What finds the caller, asks for an API key, and charges it, before a body is read. It logs what is refused here."""

    async def authenticate(request: Request) -> AsyncIterator[None]:
        peer = None if request.client is None else request.client.host
        try:
            answers = int(request.method == "POST")
            arrival = admission.enter(request.headers.items(), peer, answers=answers, transport="http")
            request.state.arrival, request.state.reading = arrival, Reading(arrival, admission.unread_bodies)
            yield
        except Exception as error:
            admission.log_refusal(error, "http", request.scope["route"].path, request.state.request_id, peer)
            raise

    return params.Depends(authenticate)


def _forwarding(admission: Admission, path: str) -> Callable[[Request], Awaitable[Response]]:
    """A handler of its own name for each route, as the API's document wants it."""

    async def forwarding(request: Request) -> Response:
        response = await forward(request, admission)
        if path == CAPACITY.path and response.slot.state is not State.LOADED:
            raise ModelUnavailable(f"the model {response.slot.name!r} is {response.slot.state}: a call that generates loads it")
        return response

    forwarding.__name__ = "_".join(part for part in path.strip("/").split("/") if part != "v1")
    forwarding.__doc__ = "The answer of the model that `model` names in the body or the query; else of the default model."
    return forwarding


def _add_models(router: APIRouter, admission: Admission) -> None:
    async def of_model(slot: Slot, headers: dict[str, str]) -> list[dict[str, Any]]:
        told = await fetch_from_model(slot.process, MODELS.path, headers) if slot.state is State.LOADED else None
        bare = {"id": slot.name, "object": "model", "created": 0, "owned_by": "attend"}
        found = [bare] if told is None else orjson.loads(told)["data"]
        return [one | {"status": slot.state.value} for one in found]

    async def all_models(request: Request) -> list[dict[str, Any]]:
        """Every model, the default one first, and the adapters of the loaded ones."""
        keys = {name: value for name, value in request.headers.items() if name in KEY_HEADERS}
        slots = sorted(admission.pool.slots.values(), key=lambda slot: slot.name != admission.pool.plan.default)
        return [one for found in await asyncio.gather(*(of_model(slot, keys) for slot in slots)) for one in found]

    @bind(router, MODELS)
    async def models(request: Request) -> Response:
        """Every model with its `status`, and the adapters of those that are loaded."""
        return json_answer({"object": "list", "data": await all_models(request)})

    @bind(router, MODEL)
    async def model(request: Request, model_id: Annotated[str, Path(description="The model's name.")]) -> Response:
        """One model of /v1/models, by its name."""
        found = next((one for one in await all_models(request) if one["id"] == model_id), None)
        if found is None:
            raise ModelNotFound(f"the model {model_id[:64]!r} does not exist; /v1/models lists those of this server")
        return json_answer(found)


def _add_operations(router: APIRouter, settings: Settings, admission: Admission, page: Page, version_of_attend: str) -> None:
    """Add health, readiness, version and metrics."""

    @router.head("/healthz", include_in_schema=False)
    @router.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
    @bind(router, HEALTHZ)
    async def healthz() -> Response:
        """Alive: the process answers. Processes of models are watched by it."""
        return PlainTextResponse("ok\n")

    @router.head("/readyz", include_in_schema=False)
    @bind(router, READYZ)
    async def readyz() -> Response:
        """Ready for calls: the pinned models have loaded, and the server has not been told to end."""
        draining = admission.is_leaving or admission.is_draining()
        return PlainTextResponse("draining\n" if draining else "ready\n", 503 if draining else 200)

    @bind(router, VERSION)
    async def version() -> Response:
        """What is running: of the default model what is known since it was loaded."""
        default = admission.pool.slots[admission.pool.plan.default]
        facts = {} if default.process is None else default.process.facts
        known = {name: facts.get(name, "not loaded") for name in ("family", "device", "dtype", "weights", "backend")}
        own = {"version": version_of_attend, "model": default.name, "grpc_port": settings.grpc_port}
        rest = {"slower_path": None, "untested": list(untested_packages()), "system_fingerprint": ""}
        return json_answer(own | known | rest)

    @bind(router, METRICS)
    async def metrics() -> Response:
        """Prometheus text of the server and of all loaded models."""
        return Response(await page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def models_page(registry: CollectorRegistry, pool: Pool) -> str:
    """The page over all models that are loaded. The label `replica` is the model's name, or `server`."""
    loaded = {slot.name: slot.process for slot in pool.slots.values() if slot.state is State.LOADED}
    found = await asyncio.gather(*(fetch_from_model(process, "/metrics") for process in loaded.values()))
    pages = [(name, text.decode()) for name, text in zip(loaded, found, strict=True) if text is not None]
    merged = await asyncio.to_thread(merge, [*pages, (SERVER, generate_latest(registry).decode())])
    return merged + replica_counts(len(loaded), len(pages))


async def fetch_from_model(process: ModelProcess | None, path: str, headers: dict[str, str] | None = None) -> bytes | None:
    """What the process of a model answers to a GET; None where it does not, or not in time."""
    if process is None:
        return None
    try:
        async with asyncio.timeout(SECONDS), process.http.get(path, headers=headers) as answer:
            return await answer.read() if answer.status == 200 else None
    except (aiohttp.ClientError, OSError, RuntimeError, TimeoutError):  # RuntimeError: the session was closed meanwhile
        return None
