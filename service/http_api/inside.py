"""Calls of a route from inside the process: a line of a batch is read, checked, charged and answered as any caller's body."""

import asyncio
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Scope

from attend.service.access.caller import Caller
from attend.service.batch.job import Answer

CALLER = "attend.caller"
"""Where the scope of such a call has who makes it. No head of HTTP leads there."""
RETRY_SECONDS = 1.0


async def ask(app: ASGIApp, path: str, body: bytes, caller: Caller, request_id: str) -> Answer:
    """What the application answers to a POST. To cancel it is to leave, as a caller does. Raises nothing else."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers.append((b"x-request-id", request_id.encode()))
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        CALLER: caller,
    }
    status, sent, parts, left = 500, list[tuple[bytes, bytes]](), list[bytes](), [body]

    async def receive() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await asyncio.Future[Message]()  # it never leaves

    async def send(message: Message) -> None:
        nonlocal status, sent
        if message["type"] == "http.response.start":
            status, sent = message["status"], list(message.get("headers", ()))
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # the application has answered it and logged it
        status = 500
    if not parts:
        parts.append(orjson.dumps({"error": _NOTHING}))
    return Answer(status, b"".join(parts), _retry_after(sent))


_NOTHING: dict[str, Any] = {"message": "internal error", "type": "internal_error", "param": None, "code": "internal_error"}


def _retry_after(headers: list[tuple[bytes, bytes]]) -> float:
    text = next((value for name, value in headers if name == b"retry-after"), b"")
    return float(text) if text.isdigit() else RETRY_SECONDS
