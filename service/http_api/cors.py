"""CORS: which pages of other origins may call the server, with any header, without cookies."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

METHODS = ("GET", "POST", "DELETE")
EXPOSED = "*"
"""Headers that a page may read: Retry-After, x-should-retry and x-request-id among them."""


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """An application that pages of `origins` may call, `*` for any page. It belongs around all that answers."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=["*"],
        expose_headers=[EXPOSED],
        allow_private_network="*" not in origins,  # public pages reach into a private network only where they are named
    )


def cors_headers(origins: Sequence[str], origin: str | None) -> dict[str, str]:
    """The headers of an answer that no application gives, to a request with this `Origin`."""
    if "*" in origins:
        return {"access-control-allow-origin": "*", "access-control-expose-headers": EXPOSED}
    if origin is None or origin not in origins:
        return {}
    return {"access-control-allow-origin": origin, "access-control-expose-headers": EXPOSED, "vary": "Origin"}
