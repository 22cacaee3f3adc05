"""The HTTP application of several models: forwards routes that name a model, answers the others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Set as AbstractSet
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Path, Request, params
from fastapi.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from attend.model.errors import ModelNotFound
from attend.service.access.keys import KEY_HEADERS
from attend.service.contract.routes import (
    CAPACITY,
    HEALTHZ,
    METRICS,
    MODEL,
    MODELS,
    READYZ,
    ROUTES,
    TOKENIZER_INFO,
    VERSION,
    Route,
)
from attend.service.errors import ModelUnavailable, NotThere
from attend.service.http_api import openapi, problems
from attend.service.http_api.body import Reading
from attend.service.http_api.cors import with_cors
from attend.service.http_api.json_pieces import json_answer
from attend.service.http_api.playground import add_pages
from attend.service.http_api.request_ids import RequestIds
from attend.service.http_api.routing import bind
from attend.service.runtime.models.authentication import CallAuthenticator
from attend.service.runtime.models.http import ForwardedResponse, read_ask
from attend.service.runtime.models.metrics import fetch_from_model
from attend.service.runtime.models.pool import Pool, Slot, State
from attend.service.runtime.models.process import ModelProcess
from attend.service.settings import Settings
from attend.service.tested_versions import untested_packages

Page = Callable[[], Awaitable[str]]


class ModelRoutes:
    """What the HTTP routes of several models need."""

    def __init__(
        self,
        settings: Settings,
        authenticator: CallAuthenticator,
        pool: Pool[ModelProcess],
        page: Page,
        version: str,
        began: int,
    ) -> None:
        self.settings, self.authenticator, self.pool, self.page = settings, authenticator, pool, page
        self.version, self.began = version, began

    async def forward(self, request: Request) -> Response:
        """Pass a call on to the process of its model."""
        ask, body = await read_ask(request, self.pool, self.settings.request_timeout_seconds)
        return ForwardedResponse(ask, body, self.pool, self.authenticator)

    async def list_models(self, headers: dict[str, str]) -> list[dict[str, Any]]:
        """Every model, the default one first, with what the processes of the loaded ones say of them, and their adapters."""
        slots = sorted(self.pool.slots.values(), key=lambda slot: slot.name != self.pool.plan.default)
        return [one for found in await asyncio.gather(*(self._of(slot, headers) for slot in slots)) for one in found]

    async def _of(self, slot: Slot[ModelProcess], headers: dict[str, str]) -> list[dict[str, Any]]:
        told = await fetch_from_model(slot.process, MODELS.path, headers) if slot.state is State.LOADED else None
        bare = {"id": slot.name, "object": "model", "created": self.began, "owned_by": "attend"}
        found = [bare] if told is None else orjson.loads(told)["data"]
        return [one | {"status": slot.state.value} for one in found]


def build_models_app(routes: ModelRoutes, hosts: AbstractSet[str]) -> ASGIApp:
    """The application, which answers to the names `hosts` alone, where there are any."""
    app = openapi.bare_app(routes.version)
    guarded = APIRouter(dependencies=[_guard(routes)])
    for route in ROUTES:
        if route.tag == "batches":
            bind(guarded, route)(_refusing(route))
        elif route.method == "POST":
            bind(guarded, route)(_passing(routes, route.path))
    _add_models(guarded, routes)
    _add_numbers(guarded, routes)
    router = APIRouter()
    _add_operations(router, routes)
    app.include_router(router)
    app.include_router(guarded)
    if routes.settings.expose_docs:
        add_pages(app, [_guard(routes)])
    problems.install_error_handlers(app)
    openapi.install_openapi(app, has_api_keys=routes.authenticator.keys is not None)
    inner = RequestIds(app, hosts, behind_serve=False)
    return with_cors(inner, routes.settings.origins)


def _guard(routes: ModelRoutes) -> params.Depends:
    """What finds the caller, asks for an API key, and charges it, before a body is read. It counts what is refused here."""

    async def authenticate(request: Request) -> AsyncIterator[None]:
        peer = None if request.client is None else request.client.host
        try:
            _, arrival = routes.authenticator.enter(
                request.headers.items(), peer, answers=int(request.method == "POST"), transport="http"
            )
            request.state.arrival = arrival
            request.state.reading = Reading(arrival, routes.authenticator.unread_bodies)
            yield
        except Exception as error:
            routes.authenticator.count_refusal(error, "http", request.scope["route"].path, request.state.request_id, peer)
            raise

    return params.Depends(authenticate)


def _passing(routes: ModelRoutes, path: str) -> Callable[[Request], Awaitable[Response]]:
    """A handler of its own name for each route, as the API's document wants it."""

    async def passing(request: Request) -> Response:
        return await routes.forward(request)

    passing.__name__ = "_".join(part for part in path.strip("/").split("/") if part != "v1")
    passing.__doc__ = "The answer of the model that the body names in `model`; without it, of the server's default model."
    return passing


def _refusing(route: Route) -> Callable[[], Awaitable[Response]]:
    """The same for what a server of several models does not do."""

    async def refusing() -> Response:
        raise NotThere("a server of several models keeps no files and batches: a server of one does, with batch_folder")

    refusing.__name__ = route.summary.lower().replace(" ", "_")
    refusing.__doc__ = "Refused: a server of one model keeps files and batches."
    return refusing


def _add_models(router: APIRouter, routes: ModelRoutes) -> None:
    @bind(router, MODELS)
    async def models(request: Request) -> Response:
        """Every model with its `status`, and the adapters of those that are loaded."""
        return json_answer({"object": "list", "data": await routes.list_models(_keys(request))})

    @bind(router, MODEL)
    async def model(request: Request, model_id: Annotated[str, Path(description="The model's name.")]) -> Response:
        """One model of /v1/models, by its name."""
        found = next((one for one in await routes.list_models(_keys(request)) if one["id"] == model_id), None)
        if found is None:
            raise ModelNotFound(f"the model {model_id[:64]!r} does not exist; /v1/models lists those of this server")
        return json_answer(found)


def _keys(request: Request) -> dict[str, str]:
    """What a caller shows as its key, for the processes of the models."""
    return {name: value for name, value in request.headers.items() if name in KEY_HEADERS}


def _add_numbers(router: APIRouter, routes: ModelRoutes) -> None:
    @bind(router, CAPACITY)
    async def capacity(request: Request) -> Response:
        """The load of the model that `?model=` names, or of the default one. It is not loaded for this."""
        ask, body = await read_ask(request, routes.pool, routes.settings.request_timeout_seconds)
        if ask.slot.state is not State.LOADED:
            raise ModelUnavailable(f"the model {ask.slot.name!r} is {ask.slot.state}: a call that generates loads it")
        return ForwardedResponse(ask, body, routes.pool, routes.authenticator)

    @bind(router, TOKENIZER_INFO)
    async def tokenizer_info(request: Request) -> Response:
        """The tokenizer of the model that `?model=` names, or of the default one."""
        return await routes.forward(request)


def _add_operations(router: APIRouter, routes: ModelRoutes) -> None:
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
        """Ready for calls: the pinned models have loaded, and no drain has begun."""
        draining = routes.authenticator.is_draining()
        return PlainTextResponse("draining\n" if draining else "ready\n", 503 if draining else 200)

    @bind(router, VERSION)
    async def version() -> Response:
        """What is running: of the default model what is known since it was loaded."""
        default = routes.pool.slots[routes.pool.plan.default]
        facts = {} if default.process is None else default.process.facts
        known = {name: facts.get(name, "not loaded") for name in ("family", "device", "dtype", "weights", "backend")}
        own = {"version": routes.version, "model": default.name, "grpc_port": routes.settings.grpc_port}
        rest = {"slower_path": None, "untested": list(untested_packages()), "system_fingerprint": ""}
        return json_answer(own | known | rest)

    @bind(router, METRICS)
    async def metrics() -> Response:
        """Prometheus text of the server and of all loaded models."""
        return Response(await routes.page(), media_type="text/plain; version=0.0.4; charset=utf-8")
