"""How the bytes of a connection become requests: uvicorn's reading with httptools, and what it leaves open.

A body is read as a body whatever else its head offers, trailers are no header fields, and a head that HAProxy and others could
read differently is refused. Replicas of Ray Serve, Serve's own proxy and `--single` all read with it.
"""

import asyncio
import socket
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import httptools
import orjson
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from attend.service.generation.slow_reader import STALL_SECONDS
from attend.service.http_api.cors import cors_headers

MAX_TRAILER_BYTES = 16 << 10
"""Of all trailer fields of a request, as of its head."""
MAX_PIPELINED = 64
"""Requests of a connection that wait for the answer of one before them."""
LENGTHS = (b"content-length", b"transfer-encoding")
NO_HTTP = "the bytes sent are not a valid HTTP request"
OTHER_VERSIONS = ("Invalid HTTP version", "Pause on PRI/Upgrade")
"""The parser's words."""
SERVER = b"server", f"attend/{version('attend-server')}".encode()


class Refused(Exception):
    """A request that is not read any further: its answer."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class HttpProtocol(HttpToolsProtocol):
    """One connection of a caller."""

    cors_origins: Sequence[str] = ()
    """Whose pages may read the answers that are made here."""
    _in_head = _in_body = False
    _refusal: Refused | None = None
    """What is answered once earlier calls have their answers; nothing is read any more."""
    _body_again = False
    """True while a new parser is told how long a body is, whose head another has read."""
    _awaits_chunk = False
    """True between the size of a chunk and its first byte; behind the last chunk these are the trailers."""
    _trailer_bytes = _field_bytes = 0
    """Of the trailers that are read, and of one that has not ended."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Have the kernel end it when its peer takes nothing for so long. A server that stops waits for what is not yet sent,
        also to a machine that is lost.
        """
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        if peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(STALL_SECONDS * 1000))

    def data_received(self, data: bytes) -> None:
        """Read on. What is no request is answered here, and ends the connection."""
        self._unset_keepalive_if_required()
        if self._refusal is not None:
            return
        awaited, self._field_bytes = self._awaits_chunk, self._field_bytes + len(data)
        try:
            self._feed(memoryview(data))
        except httptools.HttpParserError as error:
            reason = error.__context__
            if not isinstance(reason, Refused):
                reason = _other_version() if str(error) in OTHER_VERSIONS else Refused(400, NO_HTTP)
            self.refuse(reason)
            return
        if not (awaited and self._awaits_chunk):
            self._field_bytes = 0
        elif self._field_bytes > MAX_TRAILER_BYTES:
            self.refuse(_long_trailers())

    def _feed(self, data: memoryview) -> None:
        """Have the parser read it all, also where it ends at the offer of another protocol, which nobody need accept (RFC 9110,
        7.8). It would take what follows for that, or for a request.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                lengths = b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] in LENGTHS)
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
                self._body_again = True
                self.parser.feed_data(b"POST / HTTP/1.1\r\n" + lengths + b"\r\n")
                self._body_again = False

    def _should_upgrade(self) -> bool:
        return False

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if not self._body_again:
            self._in_head = True
            super().on_message_begin()
            self.head_begun()

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        if not self._body_again:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or a trailer, which is dropped: it may name no caller, and nobody here reads any."""
        if self._in_head:
            super().on_header(name, value)
        elif not self._body_again:
            self._trailer_bytes, self._field_bytes = self._trailer_bytes + len(name) + len(value) + 4, 0
            if self._trailer_bytes > MAX_TRAILER_BYTES:
                raise _long_trailers()

    def on_headers_complete(self) -> None:
        """The head of a request is read."""
        if self._body_again:
            return
        self._in_head, self._trailer_bytes = False, 0
        self.check_head(self.parser.get_http_version())
        if len(self.pipeline) >= MAX_PIPELINED:
            raise Refused(429, f"at most {MAX_PIPELINED} requests of a connection may wait", "too_many_requests")
        super().on_headers_complete()
        self._in_body = True
        defaults = self.cycle.default_headers
        self.cycle.default_headers = [*(field for field in defaults if field[0] != SERVER[0]), SERVER]
        self.head_read()

    def check_head(self, http_version: str) -> None:
        """Raise Refused where it has another version, another coding of its body, or not one Host."""
        if http_version not in ("1.0", "1.1"):
            raise _other_version()
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and http_version == "1.1"):
            raise Refused(400, "a request must have one Host header")
        target = self.url.lower()
        if self.parser.get_method() == b"CONNECT" or not target.startswith((b"/", b"*", b"http://", b"https://")):
            raise Refused(404, "the target of a request must be a path", "not_found")
        if hosts and not target.startswith((b"/", b"*")) and target.split(b"/")[2] != hosts[0].lower():
            raise Refused(400, "the target and the Host header must name the same host")
        codings = [value.lower().strip() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and codings != [b"chunked"]:
            raise Refused(501, "Transfer-Encoding must be chunked alone")

    def head_begun(self) -> None:
        """The first byte of a head has come."""

    def head_read(self) -> None:
        """The last byte of a head has come, and its call begins."""

    def on_chunk_header(self) -> None:
        """The size of a chunk. That of the last one is 0, and trailers follow."""
        self._awaits_chunk = True

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        self._awaits_chunk = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A whole body. uvicorn pauses reading behind a long last part of it, and would not see the caller leave. No more
        is read where requests wait: their bodies are kept.
        """
        self._awaits_chunk = False
        if self.parser.should_upgrade():  # its body is yet to come
            return
        self._in_body = False
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()
        if not self.parser.should_keep_alive():  # it reads no further; a trailer may have said so
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to bytes that are no HTTP, in the shape of our errors."""
        self.refuse(Refused(400, msg))

    def on_response_complete(self) -> None:
        """An answer is sent."""
        super().on_response_complete()
        if (reason := self._refusal) is not None:
            self._refusal = None
            self.refuse(reason)

    def refuse(self, reason: Refused) -> None:
        """Answer outside the application, after all earlier calls, and close. A call that has an answer gets no second one."""
        cycle = self.cycle
        if self.transport.is_closing():
            return
        if self._in_body and cycle.response_started:
            self.transport.close()
            return
        if self.pipeline or (cycle is not None and not self._in_body and not cycle.response_complete):
            self._refusal = reason
            return
        kind = "rate_limit_error" if reason.status == 429 else "invalid_request_error"
        error = {"message": str(reason), "type": kind, "param": None, "code": reason.code}
        body = orjson.dumps({"error": error})
        origin = next((value.decode("latin-1") for name, value in self.headers or () if name == b"origin"), None)
        fields = {"content-type": "application/json", "connection": "close", "content-length": str(len(body))}
        fields |= {"server": SERVER[1].decode()} | cors_headers(self.cors_origins, origin)
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.transport.write(STATUS_LINE[reason.status] + lines.encode("latin-1") + b"\r\n" + body)
        self.transport.close()


def _other_version() -> Refused:
    return Refused(505, "the request must be HTTP/1.0 or HTTP/1.1")


def _long_trailers() -> Refused:
    return Refused(431, f"the trailers must be at most {MAX_TRAILER_BYTES} bytes together", "request_too_large")


def read_for_ray() -> list[Any]:
    """Have the HTTP servers that Ray starts in this process read so. Serve takes it for a callback that gives middlewares."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{HttpProtocol.__name__}"
    return []
