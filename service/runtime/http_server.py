"""The HTTP server of a replica without Ray: uvicorn, with limits on heads, connections and calls."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from attend.model.errors import Overloaded
from attend.service.contract.routes import PROBES
from attend.service.generation.thread_pools import FairSemaphore
from attend.service.http_api.cors import with_cors
from attend.service.http_api.problems import error_response
from attend.service.http_api.request_ids import ABORT, RequestIds
from attend.service.runtime.client_disconnect import IS_LAST, LEAVING, CancelOnDisconnect
from attend.service.runtime.http_protocol import HttpProtocol, Refused

HEAD_SECONDS, IDLE_SECONDS, HANDSHAKE_SECONDS = 10, 75, 10
"""Seconds for all of a request's head, for which an idle connection is kept, and for the handshake of TLS. The second is longer
than load balancers and clients keep theirs, 60 s at most: a call that comes as the server closes its connection fails."""
MAX_HEAD_BYTES = 128 << 10
"""A longer head is not read to its end. The application's own limit is lower, and names what was sent."""
MAX_CONNECTIONS = 6144
ACCEPTS = 16
"""Connections that are accepted each time the event loop comes round: libuv takes one from each of its listening sockets. With
one alone, a hundred connections that come and go wait before a probe for as many rounds, each as long as a call's work."""
TICK_SECONDS = 1.0
"""How often the server sets the header Date."""
END_SECONDS = 2
"""Seconds in which answers are written to their end, once the drain is over."""


class Connections:
    """Those of a server that carry no call, by address, those first that have carried none for longest; and what all share."""

    def __init__(self) -> None:
        self.are_leaving = False
        """True once each answer is to be the last one of its connection: the caller is told, and goes elsewhere."""
        self._idle: dict[str, dict[Connection, None]] = {}

    def add(self, connection: "Connection") -> None:
        """It carries no call any more, or not yet."""
        self._idle.setdefault(connection.address, {})[connection] = None

    def remove(self, connection: "Connection") -> None:
        """It carries a call, or has ended."""
        same = self._idle.get(connection.address, {})
        same.pop(connection, None)
        if not same:
            self._idle.pop(connection.address, None)

    def oldest(self) -> "Connection":
        """The oldest connection of the address that has most of them: the one to end where there is one too many."""
        largest = max(self._idle, key=lambda address: len(self._idle[address]))
        return next(iter(self._idle[largest]))


class Connection(HttpProtocol):
    """One connection of a caller. It ends where a head is too slow or too long.

    One too many takes the place of one that carries no call: so whoever holds many open keeps nobody out.
    """

    address = ""
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def __init__(self, *arguments: Any, most: int, idle: Connections, cors_origins: Sequence[str], **keywords: Any) -> None:
        """`most`: connections at a time. `idle`: those of the server. `cors_origins`: whose pages may read its own answers."""
        super().__init__(*arguments, **keywords)
        self._most, self._idle, self.cors_origins = most, idle, cors_origins
        self._leaving: set[Callable[[], None]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Start the time limit of the first request head."""
        super().connection_made(transport)
        self.address = "" if self.client is None else self.client[0]
        self._await_head()
        self._idle.add(self)
        if len(self.connections) > self._most:
            self._idle.oldest().give_up()

    def give_up(self) -> None:
        """End at once, for another one."""
        self._idle.remove(self)  # not only when the transport says that it has ended: there may be a third by then
        self.connections.discard(self)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it, and its timer; end the calls."""
        self._stop_timer()
        self._idle.remove(self)
        super().connection_lost(exc)
        for leave in tuple(self._leaving):
            leave()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on. Where they leave a head unfinished, it must not be too long."""
        self._head_bytes = len(data) + (self._head_bytes if self._head_timer is not None else 0)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            long = f"the target and the headers must be at most {MAX_HEAD_BYTES} bytes together"
            self.refuse(Refused(431, long, "request_too_large"))

    def head_begun(self) -> None:
        """The first byte of a head has come."""
        self._head_bytes += 1
        self._await_head()

    def head_read(self) -> None:
        """The last byte of a head has come, and its call begins."""
        self._stop_timer()
        self._idle.remove(self)
        own = {ABORT: self.transport.abort, LEAVING: self._leaving, IS_LAST: self._is_last}
        self.scope["extensions"] = own  # type: ignore[typeddict-item]
        if self.scope["http_version"] == "1.0":
            self.cycle.waiting_for_100_continue = False
            self.cycle.send = _send_unchunked(self.cycle)  # type: ignore[assignment, method-assign]  # of this call alone

    def on_response_complete(self) -> None:
        """A response is sent, and the connection may rest."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._idle.add(self)

    def _is_last(self) -> bool:
        return self._idle.are_leaving and not self.pipeline

    def refuse(self, reason: Refused) -> None:
        """Answer outside the application, and close."""
        self._stop_timer()
        super().refuse(reason)

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer, self._head_bytes = None, 0

    def _too_slow(self) -> None:
        if self._head_bytes:
            self.refuse(Refused(408, "the request was sent too slowly", "request_timeout"))
        else:
            self.transport.close()


def _send_unchunked(cycle: RequestResponseCycle) -> Callable[[ASGISendEvent], Coroutine[Any, Any, None]]:
    """`cycle.send` for a caller of HTTP/1.0, who knows no chunks: an answer of unknown length ends with the connection.

    uvicorn closes that after each such call, and would write chunks nevertheless.
    """
    send, has_length = cycle.send, True

    async def send_unchunked(message: ASGISendEvent) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif message["type"] == "http.response.body" and not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unchunked


class ConcurrencyLimit:
    """Refuses calls (429) while `most` of them run. One whose body has not come is none of them yet: see `UnreadBodies`.

    Probes of the process are always answered.
    """

    def __init__(self, app: ASGIApp, most: int, cors_origins: Sequence[str] = ()) -> None:
        self.app = app
        self.places = FairSemaphore(most, "calls are running")
        self.refused = with_cors(RequestIds(self._refuse, behind_serve=False), cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, or refuse it."""
        if scope["path"] in PROBES:
            await self.app(scope, receive, send)
            return
        with ExitStack() as held:
            if _has_body(scope):
                receive = self._reading(receive, held)
            else:
                try:
                    held.enter_context(self.places.hold(None))
                except Overloaded:
                    await self.refused(scope, receive, send)
                    return
            await self.app(scope, receive, send)

    def _reading(self, receive: Receive, resources: ExitStack) -> Receive:
        """What the application reads a body by. With its end the call takes a place; where none is free that is Overloaded."""
        is_whole = False

        async def read() -> Message:
            nonlocal is_whole
            message = await receive()
            if not is_whole and not message.get("more_body", False):
                is_whole = True
                if message["type"] == "http.request":
                    resources.enter_context(self.places.hold(None))
            return message

        return read

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = Overloaded(f"{self.places.most} calls are running already")
        await error_response(error, scope["state"]["request_id"])(scope, receive, send)


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in scope["headers"]
    )


class Loop(uvloop.Loop):
    """An event loop whose servers end slow handshakes of TLS; uvicorn leaves them a minute."""

    def create_server(self, *arguments: Any, **keywords: Any) -> Any:
        """A server, as any loop makes it."""
        if keywords.get("ssl") is not None:
            keywords["ssl_handshake_timeout"] = HANDSHAKE_SECONDS
        return super().create_server(*arguments, **keywords)


class HttpServer(uvicorn.Server):
    """uvicorn without its own handlers of signals. `end` ends it."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.connections = connections
        self._ended = asyncio.Event()

    def close_idle(self) -> None:
        """Close each connection that carries no call, and have the others carry no other."""
        for connection in tuple(self.server_state.connections):
            connection.shutdown()

    def end(self) -> None:
        """Serve no more, once the running answers are written, which have END_SECONDS. For the thread of its event loop."""
        self.should_exit = True
        self._ended.set()

    async def main_loop(self) -> None:
        """Once a second, for the header Date, until the end; uvicorn's own comes round ten times as often."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), TICK_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield


def http_server(
    app: ASGIApp,
    most_calls: int,
    tls: ssl.SSLContext | None = None,
    *,
    cors_origins: Sequence[str] = (),
    most_connections: int = MAX_CONNECTIONS,
) -> HttpServer:
    """The server of an application: `await server.serve([socket])`. With `tls` for TLS alone.

    Pages of `cors_origins` may read its own answers too; see `cors.py` for those of the application.
    """
    connections = Connections()
    config = uvicorn.Config(
        CancelOnDisconnect(ConcurrencyLimit(app, most_calls, cors_origins)),
        http=partial(Connection, most=most_connections, idle=connections, cors_origins=cors_origins),  # type: ignore[arg-type]  # it only calls it
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=END_SECONDS,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
    )
    return HttpServer(config, connections)


def listening(listener: socket.socket) -> list[socket.socket]:
    """What the server is to listen on: the same socket ACCEPTS times."""
    return [listener, *(listener.dup() for _ in range(ACCEPTS - 1))]


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket that owns the port and does not listen yet: callers are refused until the server serves. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made
