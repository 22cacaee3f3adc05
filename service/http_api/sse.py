"""Server-sent events. A stream that says nothing for a while sends a comment line, and no empty line, so that proxies keep
it."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import orjson
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from attend.model.errors import AttendError
from attend.model.text.tokenizer import Tokenizer
from attend.service.contract import answers
from attend.service.contract.requests import StreamOptions
from attend.service.errors import sentence
from attend.service.generation.cooperative import in_turns
from attend.service.http_api.json_pieces import PIECE, json_pieces
from attend.service.http_api.problems import error_body
from attend.service.merging import MergedAnswers
from attend.service.records import Chunk, Command, TokenCounts

log = logging.getLogger("attend.http")

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n"
KEEP_ALIVE_SECONDS = 15.0


@dataclass(slots=True)
class Writer:
    """Makes the objects of one call: of completions, chats, responses or messages. `usage` follows the chunks that it wrote."""

    body: Any
    request_id: str
    model: str
    """As the request has it."""
    fingerprint: str
    usage: TokenCounts
    tokenizer: Tokenizer
    command: Command | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    is_named: ClassVar[bool] = False
    """True if an event has its `type` as its name, and no `[DONE]` follows the last one."""
    keep_alive: ClassVar[bytes] = KEEP_ALIVE
    """What is sent while nothing comes."""

    @property
    def stream_options(self) -> StreamOptions | None:
        """What the stream carries beside the text."""
        return getattr(self.body, "stream_options", None)

    def opening(self) -> Sequence[Any]:
        """The objects that a stream begins with, before anything is known of the answer."""
        return ()

    def events(self, chunk: Chunk) -> Sequence[Any]:
        """The streamed objects of a chunk. Long lists in them are iterators, as `json_pieces` takes them."""
        raise NotImplementedError

    def ending(self) -> Sequence[Any]:
        """The objects at the end of a stream whose answers have all ended."""
        return ()

    def failure(self, error: BaseException) -> Any:
        """The last object of a stream that fails."""
        return error_body(error, self.request_id)

    def gather(self) -> Any:
        """What puts the chunks together of a call that is not streamed, as `MergedAnswers` does."""
        return MergedAnswers()

    def full_response(self, chunks: list[Chunk]) -> Any:
        """The object of a call that is not streamed, of one chunk for each answer. Long lists are iterators, as in `events`."""
        raise NotImplementedError


class EventStream(StreamingResponse):
    """The response that writes events, and comments between them while nothing comes."""

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        seconds: float = KEEP_ALIVE_SECONDS,
        keep_alive: bytes = KEEP_ALIVE,
        *,
        is_late: bool = False,
        resources: AsyncExitStack | None = None,
    ) -> None:
        """`keep_alive` is sent after so many seconds of silence; where the first token is late, also at once. `resources`
        are closed in the end.
        """
        super().__init__(content, media_type="text/event-stream", headers=HEADERS)
        self._content = content
        self._seconds = seconds
        self._keep_alive = keep_alive
        self._is_late = is_late
        self._resources = AsyncExitStack() if resources is None else resources
        self._wrote = False
        self._inside = False
        """True if a part of an event has been written, and not all of it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the content, then close it, and release what the call holds."""
        async with self._resources, aclosing(self._content):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Write the content as it is made."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._is_late:
            await send({"type": "http.response.body", "body": self._keep_alive, "more_body": True})
        idle = asyncio.create_task(self._keep_alive_while_idle(send))
        try:
            async for piece in self._content:
                self._wrote, self._inside = True, not piece.endswith(b"\n")
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            idle.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive_while_idle(self, send: Send) -> None:
        """A comment may stand between any two events, and not inside one, of which a long one is several writes."""
        while True:
            self._wrote = False
            await asyncio.sleep(self._seconds)
            if not self._wrote and not self._inside:
                await send({"type": "http.response.body", "body": self._keep_alive, "more_body": True})


async def begin(batches: AsyncGenerator[list[Chunk], None], writer: Writer) -> EventStream:
    """The stream of a call, once its first chunks are there, or after KEEP_ALIVE_SECONDS. Raises what the call raises
    before.
    """
    first = asyncio.ensure_future(anext(batches))
    async with AsyncExitStack() as resources:
        resources.push_async_callback(_end_call, first, batches)
        done, _ = await asyncio.wait((first,), timeout=KEEP_ALIVE_SECONDS)
        if done:
            first.result()
        content = events(first, batches, writer)
        return EventStream(content, keep_alive=writer.keep_alive, is_late=not done, resources=resources.pop_all())


async def _end_call(first: asyncio.Future[list[Chunk]], rest: AsyncGenerator[list[Chunk], None]) -> None:
    """End a call, wherever it is: until `first` is done, it runs `rest`, which cannot be closed then."""
    if first.cancel():
        await asyncio.wait((first,))
    await rest.aclose()


async def events(
    first: Awaitable[list[Chunk]], rest: AsyncIterator[list[Chunk]], writer: Writer
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of a stream: each batch of chunks is one write unless it is long."""
    lines = EventLines(writer)
    try:
        if opening := writer.opening():
            yield b"".join(map(lines.event, opening))
        async for piece in in_turns(lines.of(await first)):
            yield piece
        async for chunks in rest:
            if all(map(lines.is_filled_in, chunks)):
                yield b"".join(map(lines.fill_in, chunks))
                continue
            async for piece in in_turns(lines.of(chunks)):
                yield piece
    except AttendError as error:
        yield lines.event(writer.failure(error))
    except Exception as error:
        log.exception("request %s failed in its stream: %s", writer.request_id, sentence(error, writer.request_id))
        yield lines.event(writer.failure(error))
    else:
        for event in writer.ending():
            yield lines.event(event)
    if not writer.is_named:
        yield DONE


class EventLines:
    """Chunks as events. Between an answer's ends objects differ in text and token ids alone: one is made, and filled in."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        options = writer.stream_options
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._tells_usage = self._continuous or (options is not None and bool(options.include_usage))
        self._objects: dict[int, Any] = {}

    def is_filled_in(self, chunk: Chunk) -> bool:
        """True if a chunk's object is the one before it, with another text and other tokens."""
        return chunk.is_plain and not self._continuous and not self._writer.is_named

    def fill_in(self, chunk: Chunk) -> bytes:
        """The event of such a chunk."""
        made = self._objects.get(chunk.index)
        if made is None:
            (made,) = self._objects_of(chunk)
            self._objects[chunk.index] = made
        choice = made["choices"][0]
        if "token_ids" in choice:
            choice["token_ids"] = chunk.token_ids
        if "delta" in choice:
            choice["delta"]["content"] = chunk.text
        else:
            choice["text"] = chunk.text
        return b"data: %s\n\n" % one_line(orjson.dumps(made, default=list))

    def of(self, chunks: Sequence[Chunk]) -> Iterator[bytes]:
        """The events of chunks that arrived together, in pieces of PIECE bytes and a little more."""
        held = bytearray()
        for chunk in chunks:
            for piece in (self.fill_in(chunk),) if self.is_filled_in(chunk) else self.written_out(chunk):
                held += piece
                if len(held) >= PIECE:
                    yield bytes(held)
                    held.clear()
        if held:
            yield bytes(held)

    def written_out(self, chunk: Chunk) -> Iterator[bytes]:
        """The events of any chunk, in pieces."""
        self._writer.usage.add((chunk,))
        return chain.from_iterable(map(self._pieces, self._objects_of(chunk)))

    def event(self, document: Any) -> bytes:
        """An object as an event."""
        return b"".join(self._pieces(document))

    def _objects_of(self, chunk: Chunk) -> Sequence[Any]:
        made = self._writer.events(chunk)
        if self._tells_usage:
            usage = answers.usage(self._writer.usage) if self._continuous else None
            for event in made:
                event["usage"] = usage
        return made

    def _pieces(self, document: Any) -> Iterator[bytes]:
        yield b"event: %s\ndata: " % document["type"].encode() if self._writer.is_named else b"data: "
        yield from map(one_line, json_pieces(document))
        yield b"\n\n"


LINE_ENDS = (("\u2028".encode(), b"\\u2028"), ("\u2029".encode(), b"\\u2029"), ("\u0085".encode(), b"\\u0085"))
"""Characters that some clients take for the end of a line, and how JSON escapes them."""


def one_line(text: bytes) -> bytes:
    """JSON that is one line to every client."""
    if not text.isascii():
        for character, escaped in LINE_ENDS:
            text = text.replace(character, escaped)
    return text
