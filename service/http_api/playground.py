"""The web pages: the playground at /, the API reference at /docs, and /openapi.json."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import orjson
from fastapi import FastAPI
from fastapi.params import Depends
from starlette.requests import Request
from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
PAGES = {"/": "index.html", "/docs": "docs.html"}
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-DNS-Prefetch-Control": "off",
    "Cache-Control": "no-cache",
}
"""Only files of this server run, no text of a model can become markup, and no host that it links to is looked up: the browser
itself refuses it."""


def add_pages(app: FastAPI, dependencies: Sequence[Depends]) -> None:
    """The pages, open to everybody, and /openapi.json behind `dependencies`. The files are read once, here."""
    files = {path: STATIC / name for path, name in PAGES.items()}
    files |= {f"/static/{file.name}": file for file in STATIC.iterdir() if file.suffix in KINDS and file.suffix != ".html"}
    for path, file in files.items():
        app.add_route(path, _sender(file.read_bytes(), KINDS[file.suffix]), ["GET"], include_in_schema=False)

    @app.get("/openapi.json", include_in_schema=False, dependencies=dependencies)
    async def openapi() -> Response:
        """The document that /docs shows: made when it is first asked for, beside the event loop."""
        made = await asyncio.to_thread(app.openapi)
        return Response(orjson.dumps(made), headers=POLICY, media_type="application/json")


def _sender(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(_: Request) -> Response:
        return Response(content, headers=POLICY, media_type=kind)

    return send
