"""The ASGI application: routes, errors in one shape, and a request id on everything."""

import asyncio
import secrets
from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attend.model.errors import Overloaded
from attend.service.generation.stall import Stall
from attend.service.generation.turns import get_turn, yield_to_loop
from attend.service.http_api import documents, problems
from attend.service.http_api.cors import opened
from attend.service.http_api.limits import PROBES, HeaderLimit, HostCheck
from attend.service.http_api.page import add_pages
from attend.service.http_api.routes import build_router
from attend.service.http_api.site import Site, guard_others
from attend.service.records import REQUEST_ID


def build_app(
    site: Site,
    *,
    expose_docs: bool = True,
    cors_origins: Sequence[str] = (),
    hosts: AbstractSet[str] = frozenset(),
    behind_serve: bool = True,
) -> ASGIApp:
    """The application of one replica. Pages of `cors_origins` may call it from a browser; `*` is any page.

    It answers to the names `hosts` alone, where there are any. `expose_docs` is the playground, /docs and /openapi.json
    together. `behind_serve`: see `RequestIds`.
    """
    app = FastAPI(
        title="Attend",
        version=site.version,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.include_router(build_router(site))
    if expose_docs:
        add_pages(app, [guard_others(site)])
    problems.install(app)
    documents.install(app, keyed=site.keys is not None)
    return opened(RequestIds(HeaderLimit(HostCheck(app, hosts)), behind_serve=behind_serve), cors_origins)


ABORT = "attend.abort"
"""Where a server's scope has a function that ends the connection with all that was not sent."""


def caller_of(scope: Scope) -> Hashable:
    """Whose call it is, before anything is checked: what it shows as its keys, and its address. Calls that only ask, as probes
    do, do not wait for those that bring work.
    """
    keys = tuple(value for name, value in scope["headers"] if name in (b"authorization", b"x-api-key"))
    return keys, (scope.get("client") or ("",))[0], scope.get("method") == "POST"


async def _refusal(scope: Scope) -> ASGIApp | None:
    """Wait for the turn of a call without a body; what answers it where too many wait."""
    if scope["method"] != "POST" and scope["path"] not in PROBES:
        try:
            await get_turn()
        except Overloaded as error:
            return problems.error_response(error, scope["state"]["request_id"], scope["path"])
    return None


class RequestIds:
    """Gives each request an id: the caller's own where there is one and it is plain, or a new one, sent back as X-Request-Id.

    Behind Ray Serve every request has one by now, and Serve sends it back itself.
    """

    def __init__(self, app: ASGIApp, *, behind_serve: bool = True) -> None:
        self.app = app
        self.behind_serve = behind_serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await yield_to_loop(caller_of(scope))  # many calls at once would hold the event loop for all of them
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        plain = len(given) == 1 and REQUEST_ID.fullmatch(given[0].decode("latin-1")) is not None
        request_id = given[0] if plain else secrets.token_hex(16).encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        stamps = not given or not self.behind_serve

        async def sent(message: Message) -> None:
            if stamps and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            stall.writing()
            try:
                await send(message)
            finally:
                stall.written()

        with Stall() as stall:
            try:
                refusal = await _refusal(scope)
                await (refusal or self.app)(scope, receive, sent)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not stall.over or task is None or task.uncancel():
                    raise
                scope.get("extensions", {}).get(ABORT, lambda: None)()
