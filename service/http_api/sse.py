"""Server-sent events: an answer as it is made.

Each list of chunks is one write. A stream that has nothing to say for a while sends a comment, so that no proxy takes it
for dead: one line without the empty line that would end an event, since some decoders make an event of that.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

import orjson
from fastapi.responses import StreamingResponse
from starlette.types import Send

from model.errors import AttendError
from service.errors import sentence
from service.http_api.problems import error_body
from service.http_api.schemas import StreamOptions
from service.records import Chunk, Usage

log = logging.getLogger("attend.http")

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n"
KEEP_ALIVE_SECONDS = 15.0


class Writer(Protocol):
    """Makes the objects of one call: `CompletionWriter` or `ChatWriter`."""

    request_id: str
    usage: Usage

    @property
    def stream_options(self) -> StreamOptions | None:
        """What the stream carries beside the text."""
        ...

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The streamed objects of a chunk."""
        ...

    def last_chunk(self) -> dict[str, Any]:
        """The object with the usage at the end of a stream."""
        ...

    def whole(self, chunks: list[Chunk]) -> dict[str, Any]:
        """The object of a call that is not streamed."""
        ...


class EventStream(StreamingResponse):
    """The response that writes events, and comments between them while nothing comes."""

    def __init__(self, content: AsyncIterator[bytes], keep_alive: float = KEEP_ALIVE_SECONDS) -> None:
        super().__init__(content, media_type="text/event-stream", headers=HEADERS)
        self._keep_alive = keep_alive
        self._wrote = False

    async def stream_response(self, send: Send) -> None:
        """Write the content as it comes."""

        async def noting(message: Any) -> None:
            self._wrote = True
            await send(message)

        idle = asyncio.create_task(self._keep_alive_while_idle(send))
        try:
            await super().stream_response(noting)
        finally:
            idle.cancel()

    async def _keep_alive_while_idle(self, send: Send) -> None:
        """Each write is whole events, so that a comment may stand between any two."""
        while True:
            self._wrote = False
            await asyncio.sleep(self._keep_alive)
            if not self._wrote:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


async def events(first: list[Chunk], rest: AsyncGenerator[list[Chunk], None], writer: Writer) -> AsyncIterator[bytes]:
    """Server-sent events of a stream: each batch of chunks is one write, and `[DONE]` is always last."""
    async with aclosing(rest):
        yield _batch(first, writer)
        try:
            async for chunks in rest:
                yield _batch(chunks, writer)
        except AttendError as error:
            yield _event(error_body(error, writer.request_id))
        except Exception as error:
            log.exception("request %s failed in its stream: %s", writer.request_id, sentence(error, writer.request_id))
            yield _event(error_body(error, writer.request_id))
        else:
            options = writer.stream_options
            if options is not None and options.include_usage:
                yield _event(writer.last_chunk())
        yield DONE


def _batch(chunks: list[Chunk], writer: Writer) -> bytes:
    options = writer.stream_options
    continuous = options is not None and bool(options.continuous_usage_stats)
    extra: dict[str, Any] = {"usage": None} if options is not None and options.include_usage else {}
    events = []
    for chunk in chunks:
        writer.usage.add((chunk,))
        if continuous:
            extra = {"usage": writer.usage.document()}
        events += [_event(event | extra) for event in writer.events(chunk)]
    return b"".join(events)


def _event(document: dict[str, object]) -> bytes:
    return b"data: %s\n\n" % orjson.dumps(document)
