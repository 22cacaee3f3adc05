"""HTTP clients, sync and async: completions resume after a broken stream; chats are retried until they begin."""

import asyncio
import http.client
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import aclosing, closing
from functools import partial
from typing import Any, Unpack
from urllib.parse import urlsplit

from attend.service.client import events
from attend.service.client.errors import Answer, InvalidRequest
from attend.service.client.events import CHAT, COMPLETIONS, MOST_ERROR_BYTES, SILENT_SECONDS, Events
from attend.service.client.fields import Chat, Completion
from attend.service.client.retry import Call, Delta, Means, TryFailed, collect, gathered_async, resume, resumed_async

PIECE = 64 << 10


class HttpClient:
    """A client of the server at `url`. It holds no connection between calls, and threads may share it."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        means: Means | None = None,
        sleep: Callable[[float], None] = time.sleep,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"url must be as http://HOST:PORT; got {url[:128]!r}", "url")
        self._secure, self._host, self._port, self._path = parts.scheme == "https", parts.hostname, parts.port, parts.path
        self._headers, self._tls = events.headers_of(key), tls
        self._means, self._sleep = means or Means(), sleep

    def stream(self, **fields: Unpack[Completion]) -> Iterator[Delta]:
        """The answer as it is made, over as many tries as it takes. Raises CallFailed, InvalidRequest."""
        return resume(*self._completion(fields), self._sleep)

    def generate(self, **fields: Unpack[Completion]) -> Answer:
        """The whole answer. Raises as `stream` does."""
        return collect(*self._completion(fields), self._sleep)

    def stream_chat(self, **fields: Unpack[Chat]) -> Iterator[Delta]:
        """The content of a chat's answer as it is made. Raises Broken where the stream breaks after it began."""
        return resume(*self._chat(fields), self._sleep)

    def chat(self, **fields: Unpack[Chat]) -> Answer:
        """The whole content of a chat's answer. Raises as `stream_chat` does."""
        return collect(*self._chat(fields), self._sleep)

    def _completion(self, fields: Completion) -> tuple[Call, Callable[[Call], Generator[Delta, None, None]]]:
        asked = events.check_fields(fields, Completion)
        return Call(self._means, asked.get("seed"), asked.get("resume_token_ids", ())), partial(
            self._attempt, COMPLETIONS, asked
        )

    def _chat(self, fields: Chat) -> tuple[Call, Callable[[Call], Generator[Delta, None, None]]]:
        asked = events.check_fields(fields, Chat)
        return Call(self._means, asked.get("seed"), resumable=False), partial(self._attempt, CHAT, asked)

    def _attempt(self, path: str, fields: Mapping[str, Any], call: Call) -> Generator[Delta, None, None]:
        """One try. Each wait for the socket ends at the call's deadline."""
        try:
            with closing(self._connection(call)) as connection:
                connection.request("POST", self._path.rstrip("/") + path, events.body_of(fields, call), self._headers)
                sock = connection.sock
                sock.settimeout(call.remaining())
                answer = connection.getresponse()
                if answer.status != 200:
                    raise events.refused_call(answer.status, answer.headers, answer.read(MOST_ERROR_BYTES))
                incoming = Events()
                while not incoming.done:
                    sock.settimeout(min(call.remaining(), SILENT_SECONDS))
                    data = answer.read1(PIECE)
                    if not data:
                        return
                    yield from incoming.feed(data)
        except (OSError, http.client.HTTPException) as error:
            call.remaining()
            raise TryFailed(f"the connection broke: {error or type(error).__name__}", again=True) from error

    def _connection(self, call: Call) -> http.client.HTTPConnection:
        if self._secure:
            return http.client.HTTPSConnection(self._host, self._port, timeout=call.remaining(), context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=call.remaining())


class AsyncHttpClient:
    """As HttpClient, for asyncio, over httpx2. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        means: Means | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: Any = None,
    ) -> None:
        """`transport` is one of httpx2, in place of a network."""
        import httpx2

        limits = httpx2.Limits(max_connections=None)
        self._http = httpx2.AsyncClient(
            base_url=url, headers=events.headers_of(key), timeout=None, limits=limits, transport=transport, trust_env=False
        )
        self._broken = httpx2.TransportError
        self._means, self._sleep = means or Means(), sleep

    async def __aenter__(self) -> "AsyncHttpClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the HTTP connections."""
        await self._http.aclose()

    def stream(self, **fields: Unpack[Completion]) -> AsyncIterator[Delta]:
        """As `HttpClient.stream`."""
        return resumed_async(*self._completion(fields), self._sleep)

    async def generate(self, **fields: Unpack[Completion]) -> Answer:
        """As `HttpClient.generate`."""
        return await gathered_async(*self._completion(fields), self._sleep)

    def stream_chat(self, **fields: Unpack[Chat]) -> AsyncIterator[Delta]:
        """As `HttpClient.stream_chat`."""
        return resumed_async(*self._chat(fields), self._sleep)

    async def chat(self, **fields: Unpack[Chat]) -> Answer:
        """As `HttpClient.chat`."""
        return await gathered_async(*self._chat(fields), self._sleep)

    def _completion(self, fields: Completion) -> tuple[Call, Callable[[Call], AsyncGenerator[Delta, None]]]:
        asked = events.check_fields(fields, Completion)
        return Call(self._means, asked.get("seed"), asked.get("resume_token_ids", ())), partial(
            self._attempt, COMPLETIONS, asked
        )

    def _chat(self, fields: Chat) -> tuple[Call, Callable[[Call], AsyncGenerator[Delta, None]]]:
        asked = events.check_fields(fields, Chat)
        return Call(self._means, asked.get("seed"), resumable=False), partial(self._attempt, CHAT, asked)

    async def _attempt(self, path: str, fields: Mapping[str, Any], call: Call) -> AsyncGenerator[Delta, None]:
        """One try. Whoever asks for the next delta ends it at the call's deadline."""
        try:
            async with self._http.stream("POST", path, content=events.body_of(fields, call)) as answer:
                if answer.status_code != 200:
                    raise events.refused_call(answer.status_code, answer.headers, (await answer.aread())[:MOST_ERROR_BYTES])
                incoming = Events()
                async with aclosing(answer.aiter_raw()) as pieces:
                    while not incoming.done:
                        async with asyncio.timeout(SILENT_SECONDS):
                            data = await anext(pieces, b"")
                        if not data:
                            return
                        for delta in incoming.feed(data):
                            yield delta
        except (self._broken, TimeoutError) as error:
            raise TryFailed(f"the connection broke: {error or type(error).__name__}", again=True) from error
