"""The ASGI application: routes, errors in one shape, and a request id on everything."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from starlette.types import ASGIApp

from attend.service.http_api import openapi, problems
from attend.service.http_api.cors import with_cors
from attend.service.http_api.playground import add_pages
from attend.service.http_api.request_ids import RequestIds
from attend.service.http_api.route_deps import RouteDeps, guard
from attend.service.http_api.routes import build_router


def build_app(
    deps: RouteDeps,
    *,
    expose_docs: bool = True,
    cors_origins: Sequence[str] = (),
    hosts: AbstractSet[str] = frozenset(),
    behind_serve: bool = True,
) -> ASGIApp:
    """The application of one replica. `expose_docs` is the playground, /docs and /openapi.json together."""
    app = openapi.bare_app(deps.version)
    app.include_router(build_router(deps))
    if expose_docs:
        add_pages(app, [guard(deps, generates=False)])
    problems.install_error_handlers(app)
    openapi.install_openapi(app, has_api_keys=deps.keys is not None)
    return with_cors(RequestIds(app, hosts, behind_serve=behind_serve), cors_origins)
