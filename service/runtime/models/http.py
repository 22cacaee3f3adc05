"""HTTP of several models: forwards each call to the process of its model, byte for byte."""

import asyncio
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp
import orjson
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from attend.model.errors import AttendError, DeadlineExceeded, InvalidRequest, ModelNotFound
from attend.model.params import describe
from attend.service.access.caller import FORWARDED
from attend.service.contract.routes import EMBEDDINGS, MESSAGES, RERANK, RESPONSES, SCORE
from attend.service.errors import ModelUnavailable, TooLarge
from attend.service.http_api.body import most_bytes, most_bytes_of_texts, read_json
from attend.service.http_api.problems import anthropic_body, error_body, is_anthropics
from attend.service.http_api.request_ids import ABORT
from attend.service.http_api.sse import DONE, HEADERS, one_line
from attend.service.records import MAX_DEADLINE_MS
from attend.service.runtime.models.authentication import CallAuthenticator
from attend.service.runtime.models.pool import Pool, Slot
from attend.service.runtime.models.process import ModelProcess

COMMENT_SECONDS = 5.0
"""How often a stream whose model loads gets a comment, and when it gets the first one, with its headers."""
MAX_BODY = 64 << 20
"""Bytes of a body. Its model's own limit, which is lower, is known once it is loaded."""
TEXTS = (EMBEDDINGS.path, RERANK.path, SCORE.path)
"""Routes whose bodies may be longer than the model's context."""
BY_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"),
    *("expect", "proxy-connection", "content-length", "host"),
}
"""Headers of a request that are of one connection alone, or are written anew."""
NOT_BACK = {"connection", "keep-alive", "transfer-encoding", "date", "server", "x-request-id"}
"""Headers of an answer that this side writes itself."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is known of a call before its model is there."""

    slot: Slot[ModelProcess]
    method: str
    target: str
    """Path and query of the request."""
    headers: list[tuple[str, str]]
    fields: Mapping[str, Any]
    """The fields of the body; none where no deadline is in it."""
    streams: bool
    seconds: float
    """How long it may wait for its model."""
    deadline_ms: int | None
    turn: str | None
    request_id: str

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]


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


async def read_ask(request: Request, pool: Pool[ModelProcess], seconds: float) -> tuple[Ask, bytes]:
    """The call of a request whose caller is known, and its body. `seconds`: how long it may wait where it says nothing.

    Raises what `read_json` raises, ModelNotFound, and InvalidRequest for a `model` that is no name.
    """
    recorded, fields = RecordedRequest(request.scope, request.receive), {}
    if request.method == "POST":
        fields = await read_json(recorded, lambda fields: fields, MAX_BODY)
    name = fields.get("model", request.query_params.get("model"))
    if name is not None and not isinstance(name, str):
        raise InvalidRequest(f"model must be a string; got {describe(name)}", "model")
    deadline = fields.get("deadline_ms")
    deadline = deadline if type(deadline) is int and 0 < deadline <= MAX_DEADLINE_MS else None
    query = urlencode([(key, value) for key, value in request.query_params.multi_items() if key != "model"])
    ask = Ask(
        find_model(pool, name or ""),
        request.method,
        request.scope["path"] + (f"?{query}" if query else ""),
        _passed_on(request),
        fields if deadline else {},
        streams=fields.get("stream") is True,
        seconds=seconds if deadline is None else min(seconds, deadline / 1000),
        deadline_ms=deadline,
        turn=request.state.arrival.turn,
        request_id=request.state.request_id,
    )
    return ask, recorded.kept


def find_model(pool: Pool[ModelProcess], name: str) -> Slot[ModelProcess]:
    """The model of this name. Raises ModelNotFound."""
    if (slot := pool.find(name)) is None:
        known = ", ".join(map(repr, list(pool.slots)[:16]))
        raise ModelNotFound(f"the model {describe(name)} does not exist; this server has {known}")
    return slot


def _passed_on(request: Request) -> list[tuple[str, str]]:
    """The headers for the process of the model, with the address that connected to us as HAProxy would add it."""
    headers = [(name, value) for name, value in request.headers.items() if name not in BY_HOP | {"x-request-id"}]
    peer = [] if request.client is None else [(FORWARDED, request.client.host)]
    return [*headers, *peer, ("x-request-id", request.state.request_id)]


class ForwardedResponse(Response):
    """The answer of a model's process, as it comes."""

    def __init__(self, ask: Ask, body: bytes, pool: Pool[ModelProcess], authenticator: CallAuthenticator) -> None:
        super().__init__()
        self.ask, self.pool, self.authenticator = ask, pool, authenticator
        self._unsent = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the model, and pass its answer on. Raises what fails before anything is sent."""
        out, guard = Out(self.ask, send), scope["state"]["reader_guard"]
        guard.end_where(lambda: self.ask.slot.yields)
        try:
            async with AsyncExitStack() as held:
                process, waited = await self._model(held, out)
                body, self._unsent = self._unsent, b""  # it is not held while the answer is made
                await _relay(process, self.ask, body, waited, out)
        except asyncio.CancelledError:
            if guard.over:
                self.authenticator.log_cut("http", self.ask.path, self.ask.request_id, self.ask.slot.name)
            raise
        except AttendError as error:
            if not out.has_begun:
                raise
            self.authenticator.count_refusal(error, "http", self.ask.path, self.ask.request_id, None, was_begun=True)
            if not await out.fail(error):
                scope.get("extensions", {}).get(ABORT, lambda: None)()

    async def _model(self, resources: AsyncExitStack, out: "Out") -> tuple[ModelProcess, float]:
        """The process of the model, and how long it took to have it."""
        began = asyncio.get_running_loop().time()
        task = asyncio.create_task(self._enter(resources))
        try:
            while not (await asyncio.wait({task}, timeout=COMMENT_SECONDS if self.ask.streams else None))[0]:
                await out.comment(f": loading {self.ask.slot.name}\n")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return task.result(), asyncio.get_running_loop().time() - began

    async def _enter(self, resources: AsyncExitStack) -> ModelProcess:
        with self.authenticator.unread_bodies.call(self.ask.turn) as waits:  # its body is held meanwhile
            waits.came(len(self._unsent))
            try:
                async with waits.waiting(), asyncio.timeout(self.ask.seconds):
                    return await resources.enter_async_context(self.pool.use(self.ask.slot, self.ask.turn))
            except TimeoutError as error:
                if self.ask.deadline_ms is not None:
                    raise DeadlineExceeded("the deadline passed before the model was loaded") from error
                raise ModelUnavailable(f"the model {self.ask.slot.name!r} is still loading") from error


class Out:
    """What is written to the caller of one call."""

    def __init__(self, ask: Ask, send: Send) -> None:
        self.ask = ask
        self.has_begun = False
        self._send = send
        self._streams = False
        self._last = self._before = b""

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send the head of an answer."""
        self.has_begun = True
        kinds = (value for name, value in headers if name == b"content-type")
        self._streams = any(value.startswith(b"text/event-stream") for value in kinds)
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, piece: bytes, *, more: bool = True) -> None:
        """Send a piece of the body."""
        if piece:
            self._before, self._last = self._last, piece
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})

    async def comment(self, line: str) -> None:
        """Send a line that clients ignore, after the head of a stream."""
        if not self.has_begun:
            fields = {"content-type": "text/event-stream; charset=utf-8"} | HEADERS
            await self.start(200, [(name.lower().encode(), value.encode()) for name, value in fields.items()])
        await self.write(line.encode())

    async def fail(self, error: AttendError) -> bool:
        """End a stream with an error; False where it is no stream, or stands inside an event, so that it must be cut."""
        after = (self._before + self._last).rpartition(b"\n\n")[2]
        between = not after or (after.endswith(b"\n") and all(line[:1] == b":" for line in after[:-1].split(b"\n")))
        if not self._streams or not between:
            return False
        await self.event(error_of(self.ask, error))
        return True

    async def event(self, document: Mapping[str, Any]) -> None:
        """End a stream with this event."""
        named = is_anthropics(self.ask.path) or self.ask.path == RESPONSES.path
        line = one_line(orjson.dumps(document))
        await self.write(b"event: error\ndata: %s\n\n" % line if named else b"data: %s\n\n%s" % (line, DONE), more=False)


def error_of(ask: Ask, error: BaseException) -> Mapping[str, Any]:
    """An error as an event of the API of this call."""
    if is_anthropics(ask.path):
        return anthropic_body(error, ask.request_id)
    body = error_body(error, ask.request_id)
    return _as_event(ask, body)


def _as_event(ask: Ask, body: Mapping[str, Any]) -> Mapping[str, Any]:
    if ask.path != RESPONSES.path:
        return body
    problem = body["error"]
    return {"type": "error", "sequence_number": 0} | {name: problem[name] for name in ("code", "message", "param")}


async def _relay(process: ModelProcess, ask: Ask, body: bytes, waited: float, out: Out) -> None:
    """Pass a call on, and its answer back. Raises ModelUnavailable where the process ends meanwhile, or TooLarge."""
    body, headers = _with_time_left(ask, body, waited)
    most = (most_bytes_of_texts if ask.path in TEXTS else most_bytes)(int(process.facts["max_model_len"]))
    if len(body) > most:  # its process would answer before it has read it
        raise TooLarge(f"the body must be at most {most} bytes; got {len(body)}")
    data = io.BytesIO(body) if body else None
    del body
    process.check()
    try:
        async with process.http.request(ask.method, ask.target, data=data, headers=headers) as answer:
            data = None
            if not out.has_begun:
                back = [(name.lower(), value) for name, value in answer.raw_headers]
                await out.start(answer.status, [each for each in back if each[0].decode() not in NOT_BACK])
            elif answer.status != 200:
                refused = json.loads(await answer.read())
                await out.event(refused if ask.path.startswith(MESSAGES.path) else _as_event(ask, refused))
                return
            async for piece in answer.content.iter_any():
                await out.write(piece)
            await out.write(b"", more=False)
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise ModelUnavailable(f"the process of the model {ask.slot.name!r} ended during the call", 1) from error


def _with_time_left(ask: Ask, body: bytes, waited: float) -> tuple[bytes, list[tuple[str, str]]]:
    """Body and headers for the process. What a call with a deadline has waited for its model is taken from it."""
    if ask.deadline_ms is None or waited < 0.001:
        return body, ask.headers
    left = max(1, ask.deadline_ms - round(1000 * waited))
    body = json.dumps({**ask.fields, "deadline_ms": left}, ensure_ascii=False).encode()
    return body, [(name, value) for name, value in ask.headers if name != "content-encoding"]
