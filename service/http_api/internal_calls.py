"""In-process ASGI calls: a line of a batch goes through its route as any request."""

import asyncio
from dataclasses import dataclass

import orjson
from starlette.types import ASGIApp, Message, Scope

from attend.service.access.caller import Caller
from attend.service.batch.routes import Answer
from attend.service.records import NO_TOKENS, TokenUsage

BATCH_LINE = "attend.batch_line"
"""Key of the BatchLine in the ASGI scope of such a call. No header of HTTP leads there."""
RETRY_SECONDS = 1.0
MAX_BYTES = 32 << 20
"""Of an answer: it is held as a whole until it is written."""


@dataclass(slots=True)
class BatchLine:
    """Who makes such a call; and, once it is answered, the tokens that it took."""

    caller: Caller
    usage: TokenUsage = NO_TOKENS


async def ask(app: ASGIApp, path: str, body: bytes, caller: Caller, request_id: str) -> Answer:
    """What the application answers to a POST. To cancel it is to leave, as a caller does. Raises nothing else."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers.append((b"x-request-id", request_id.encode()))
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
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
        BATCH_LINE: (line := BatchLine(caller)),
    }
    status, sent, parts, left, size = 500, list[tuple[bytes, bytes]](), list[bytes](), [body], 0

    async def receive() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await asyncio.Future[Message]()  # it never leaves

    async def send(message: Message) -> None:
        nonlocal status, sent, size
        if message["type"] == "http.response.start":
            status, sent = message["status"], list(message.get("headers", ()))
        else:
            parts.append(piece := message.get("body", b""))
            size += len(piece)
            if size > MAX_BYTES:
                raise _TooLong

    try:
        await app(scope, receive, send)
    except _TooLong:
        message = f"the answer has more than {MAX_BYTES} bytes, the limit for a line of a batch"
        return Answer(400, _problem(message, "invalid_request_error", "answer_too_large"))
    except Exception:  # the application has answered it and logged it
        status = 500
    if not parts:
        parts.append(_problem("internal error", "internal_error", "internal_error"))
    return Answer(status, b"".join(parts), _retry_after(sent), line.usage)


class _TooLong(BaseException):
    """Ends a call whose answer nobody could keep; no handler of errors answers it."""


def _problem(message: str, kind: str, code: str) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


def _retry_after(headers: list[tuple[bytes, bytes]]) -> float:
    text = next((value for name, value in headers if name == b"retry-after"), b"")
    return float(text) if text.isdigit() else RETRY_SECONDS
