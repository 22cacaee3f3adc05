"""HTTP of several models: forwards each call to the process of its model, byte for byte."""

import asyncio
import io
import json
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar
from urllib.parse import urlencode

import aiohttp
import orjson
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from attend.model.errors import AttendError, InvalidRequest
from attend.model.params import describe
from attend.service.access.caller import FORWARDED
from attend.service.contract.routes import EMBEDDINGS, RERANK, RESPONSES, SCORE
from attend.service.errors import ModelUnavailable, TooLarge
from attend.service.http_api.body import most_bytes, most_bytes_of_texts, read_json
from attend.service.http_api.problems import anthropic_body, error_body, is_anthropics
from attend.service.http_api.request_ids import ABORT
from attend.service.http_api.sse import HEADERS
from attend.service.records import MAX_DEADLINE_MS
from attend.service.runtime.models.admission import Admission
from attend.service.runtime.models.process import ModelProcess

T = TypeVar("T")

COMMENT_SECONDS = 5.0
"""How often a stream whose model loads gets a comment, and when it gets the first one, with its headers."""
MAX_BODY = 64 << 20
"""Bytes of a body. Its model's own limit, which is lower, is known once it is loaded."""
TEXTS = (EMBEDDINGS.path, RERANK.path, SCORE.path)
"""Routes whose bodies may be longer than the model's context."""
NOT_FORWARDED = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"),
    *("expect", "proxy-connection", "content-length", "host", "x-request-id"),
}
"""Headers of a request that are of one connection alone, or are written anew."""
NOT_BACK = {b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server", b"x-request-id"}
"""Headers of an answer that this side writes itself."""


class RecordedRequest(Request):
    """A request that keeps the bytes of its body as they came."""

    kept = b""

    async def stream(self) -> Any:
        """The body's pieces, as of any request; `kept` has them then."""
        pieces = []
        async for piece in super().stream():
            pieces.append(piece)
            yield piece
        self.kept = b"".join(pieces)


async def forward(request: Request, admission: Admission) -> "ForwardedResponse":
    """The answer to a request, whose caller is known, of the model that it names in `model`.

    Raises what `read_json` raises, ModelNotFound, and InvalidRequest for a `model` that is no name.
    """
    fields: dict[str, Any] = {}
    recorded = RecordedRequest(request.scope, request.receive)
    if request.method == "POST":
        fields = await read_json(recorded, lambda fields: fields, MAX_BODY)
    name = fields.get("model", request.query_params.get("model"))
    if name is not None and not isinstance(name, str):
        raise InvalidRequest(f"model must be a string; got {describe(name)}", "model")
    return ForwardedResponse(request, admission, name or "", fields, recorded.kept)


class ForwardedResponse(Response):
    """The answer of a model's process, as it comes."""

    def __init__(self, request: Request, admission: Admission, name: str, fields: dict[str, Any], body: bytes) -> None:
        super().__init__()
        self.slot = admission.find_model(name)
        self._request, self._admission, self._body = request, admission, body
        deadline = fields.get("deadline_ms")
        self._deadline = deadline if type(deadline) is int and 0 < deadline <= MAX_DEADLINE_MS else None
        self._fields = fields if self._deadline else {}
        self._asks_for_stream = fields.get("stream") is True
        self._has_begun = self._is_stream = False
        self._last = b"\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the model, and pass its answer on. Raises what fails before anything is sent."""
        guard, path, request_id = scope["state"]["reader_guard"], scope["path"], scope["state"]["request_id"]
        size, turn, about = len(self._body), self._request.state.arrival.turn, f"http {path} {request_id}"
        try:
            async with AsyncExitStack() as held:
                given = self._admission.use(self.slot, turn, size, self._deadline, guard, about)
                await self._relay(*await self._commenting(held.enter_async_context(given), send), send)
        except AttendError as error:
            if not self._has_begun:
                raise
            self._admission.log_refusal(error, "http", path, request_id, None)
            if self._is_stream and self._last.endswith(b"\n"):
                problem = anthropic_body(error, request_id) if is_anthropics(path) else error_body(error, request_id)
                await send({"type": "http.response.body", "body": _last_event(problem, path)})
            else:  # a cut answer must not look whole
                scope.get("extensions", {}).get(ABORT, lambda: None)()

    async def _commenting(self, given: Awaitable[T], send: Send) -> T:
        """What is awaited, which may take a load. A stream gets comments meanwhile: proxies cut a silent connection."""
        task = asyncio.ensure_future(given)
        try:
            while not (await asyncio.wait({task}, timeout=COMMENT_SECONDS if self._asks_for_stream else None))[0]:
                if not self._has_begun:
                    self._has_begun = self._is_stream = True
                    fields = {"content-type": "text/event-stream; charset=utf-8"} | HEADERS
                    head = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
                    await send({"type": "http.response.start", "status": 200, "headers": head})
                line = f": loading {self.slot.name}\n".encode()
                await send({"type": "http.response.body", "body": line, "more_body": True})
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return task.result()

    async def _relay(self, process: ModelProcess, left: int | None, send: Send) -> None:
        """Pass the call on, and its answer back. Raises ModelUnavailable where the process ends meanwhile, or TooLarge."""
        request, body, headers = self._request, self._body, _headers(self._request)
        if left is not None:
            body = json.dumps({**self._fields, "deadline_ms": left}, ensure_ascii=False, separators=(",", ":")).encode()
            headers = [(name, value) for name, value in headers if name != "content-encoding"]
        self._body, self._fields = b"", {}  # they are not held while the answer is made
        path = request.scope["path"]
        most = (most_bytes_of_texts if path in TEXTS else most_bytes)(int(process.facts["max_model_len"]))
        if len(body) > most:  # its process would answer before it has read it
            raise TooLarge(f"the body must be at most {most} bytes; got {len(body)}")
        query = urlencode([(key, value) for key, value in request.query_params.multi_items() if key != "model"])
        target = path + (f"?{query}" if query else "")
        data = io.BytesIO(body) if body else None
        del body
        try:
            async with process.http.request(request.method, target, data=data, headers=headers) as answer:
                data = None
                if not self._has_begun:
                    back = [(name.lower(), value) for name, value in answer.raw_headers if name.lower() not in NOT_BACK]
                    self._has_begun, self._is_stream = True, answer.content_type == "text/event-stream"
                    await send({"type": "http.response.start", "status": answer.status, "headers": back})
                elif answer.status != 200:
                    await send({"type": "http.response.body", "body": _last_event(json.loads(await answer.read()), path)})
                    return
                async for piece in answer.content.iter_any():
                    self._last = piece
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise ModelUnavailable(f"the process of the model {self.slot.name!r} ended during the call", 1) from error


def _headers(request: Request) -> list[tuple[str, str]]:
    """The headers for the process of the model, with the address that connected to us as HAProxy would add it."""
    headers = [(name, value) for name, value in request.headers.items() if name not in NOT_FORWARDED]
    peer = [] if request.client is None else [(FORWARDED, request.client.host)]
    return [*headers, *peer, ("x-request-id", request.state.request_id)]


def _last_event(problem: Mapping[str, Any], path: str) -> bytes:
    """The end of a stream that failed: an error in the shape of its API, after the end of an event before it."""
    if is_anthropics(path):
        return b"\nevent: error\ndata: %s\n\n" % orjson.dumps(problem)
    if path == RESPONSES.path:
        return b"\nevent: error\ndata: %s\n\n" % orjson.dumps({**problem["error"], "type": "error", "sequence_number": 0})
    return b"\ndata: %s\n\ndata: [DONE]\n\n" % orjson.dumps(problem)
