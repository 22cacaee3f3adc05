"""Requests whose framing is odd, and what they are answered: one request has one answer, and a body is never a request."""

import http.client
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import BinaryIO

PATH = b"/tokenize"
BODY = b'{"prompt": "abc"}'
LENGTH = b"Content-Length: %d" % len(BODY)
TYPE = b"Content-Type: application/json"
HOST, CHUNKED = b"Host: localhost", b"Transfer-Encoding: chunked"
PROBE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
HIDDEN = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
H2C = b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA"
WEBSOCKET = (
    *(b"Connection: Upgrade", b"Upgrade: websocket"),
    *(b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="),
)
STOLEN = "stolen"
"""What no trailer may make the id of a call."""
NAME = f"attend/{version('attend-server')}"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(frozen=True)
class Row:
    """What is sent, in packets, and the statuses of the answers; the last one may be that of a probe sent afterwards."""

    name: str
    packets: tuple[bytes, ...]
    answers: tuple[int, ...]
    behind_haproxy: tuple[int, ...]


def row(name: str, *packets: bytes, answers: tuple[int, ...] = (200, 200), haproxy: tuple[int, ...] = ()) -> Row:
    return Row(name, packets, answers, haproxy or answers)


def refused(name: str, *packets: bytes, status: int = 400) -> Row:
    return row(name, *packets, answers=(status,))


def head(*fields: bytes, line: bytes = b"POST %b HTTP/1.1" % PATH, host: bytes = HOST) -> bytes:
    return b"\r\n".join([line, *([host] if host else []), TYPE, *fields, b"", b""])


def hidden_in(*fields: bytes, line: bytes = b"POST %b HTTP/1.1" % PATH) -> tuple[bytes, bytes]:
    """A request whose body is one too, in a second packet."""
    return head(*fields, b"Content-Length: %d" % len(HIDDEN), line=line), HIDDEN


def trailers(*fields: bytes, end: bytes = b"\r\n") -> bytes:
    return CHUNKS[:-2] + b"".join(field + b"\r\n" for field in fields) + end


LONG = [b"X-Long-%d: %b" % (number, b"a" * 1000) for number in range(20)]
ROWS = [
    # Lengths.
    row("a length", head(LENGTH) + BODY),
    row("a length, the body in a second packet", head(LENGTH), BODY),
    row("a length, the body in single bytes", head(LENGTH), *(bytes([byte]) for byte in BODY)),
    row("chunks", head(CHUNKED) + CHUNKS),
    row("chunks in a second packet", head(CHUNKED), CHUNKS),
    row("chunks of one byte", head(CHUNKED) + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"),
    row("one length twice", head(LENGTH, LENGTH) + BODY, answers=(400,), haproxy=(200, 200)),
    refused("two lengths", head(LENGTH, b"Content-Length: 3") + BODY),
    refused("two lengths in one field", head(b"Content-Length: %d, 3" % len(BODY)) + BODY),
    row(
        "one length twice in one field",
        head(b"Content-Length: %d, %d" % (len(BODY), len(BODY))) + BODY,
        answers=(400,),
        haproxy=(200, 200),
    ),
    refused("a length with a plus", head(b"Content-Length: +%d" % len(BODY)) + BODY),
    refused("a negative length", head(b"Content-Length: -1") + BODY),
    refused("a length of 2^64 and more", head(b"Content-Length: %d" % (2**64 + len(BODY))) + BODY),
    refused("a length in hexadecimal", head(b"Content-Length: 0x11") + BODY),
    refused("an empty length", head(b"Content-Length:") + BODY),
    row("a length with zeros", head(b"Content-Length: 000%d" % len(BODY)) + BODY),
    # Chunks.
    row("chunk extensions", head(CHUNKED) + b'%x;a=b;c\r\n%b\r\n0;d="e f"\r\n\r\n' % (len(BODY), BODY)),
    row("a chunk size with zeros", head(CHUNKED) + b"000%x\r\n%b\r\n000\r\n\r\n" % (len(BODY), BODY)),
    refused("a chunk without a size", head(CHUNKED) + b"\r\n%b\r\n0\r\n\r\n" % BODY),
    refused("a chunk of no number", head(CHUNKED) + b"zz\r\n%b\r\n0\r\n\r\n" % BODY),
    refused("a negative chunk", head(CHUNKED) + b"-1\r\n%b\r\n0\r\n\r\n" % BODY),
    refused("a chunk in 0x", head(CHUNKED) + b"0x11\r\n%b\r\n0\r\n\r\n" % BODY),
    refused("a chunk of 2^64 and more", head(CHUNKED) + b"%x\r\n%b\r\n0\r\n\r\n" % (2**64 + len(BODY), BODY)),
    refused("a chunk longer than its size", head(CHUNKED) + b"5\r\n%b\r\n0\r\n\r\n" % BODY),
    refused("a chunk ended by a line feed", head(CHUNKED) + b"%x\n%b\n0\n\n" % (len(BODY), BODY)),
    refused("a line feed in a chunk extension", head(CHUNKED) + b"%x;a\nb\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    # Both.
    row("a length and chunks", head(LENGTH, CHUNKED) + CHUNKS, answers=(400,), haproxy=(200,)),
    row("chunks and a length", head(CHUNKED, LENGTH) + CHUNKS, answers=(400,), haproxy=(200,)),
    refused("a length that hides a request behind chunks", head(b"Content-Length: 5", CHUNKED) + b"0\r\n\r\n" + HIDDEN),
    # Codings.
    row("chunked in capitals", head(b"Transfer-Encoding: CHUNKED") + CHUNKS),
    row("chunked with spaces", head(b"Transfer-Encoding: \t chunked") + CHUNKS),
    row("chunked with spaces behind it", head(b"Transfer-Encoding: chunked \t") + CHUNKS, answers=(400,), haproxy=(200, 200)),
    row("gzip and chunked", head(b"Transfer-Encoding: gzip, chunked") + CHUNKS, answers=(501,), haproxy=(422,)),
    row("gzip and chunked in two fields", head(b"Transfer-Encoding: gzip", CHUNKED) + CHUNKS, answers=(501,), haproxy=(422,)),
    refused("chunked twice", head(b"Transfer-Encoding: chunked, chunked") + CHUNKS),
    refused("chunked in two fields", head(CHUNKED, CHUNKED) + CHUNKS),
    refused("chunked and gzip", head(b"Transfer-Encoding: chunked, gzip") + CHUNKS),
    row("gzip alone", head(b"Transfer-Encoding: gzip") + CHUNKS, answers=(501,), haproxy=(400,)),
    refused("identity", head(b"Transfer-Encoding: identity", LENGTH) + BODY),
    row("xchunked", head(b"Transfer-Encoding: xchunked") + CHUNKS, answers=(501,), haproxy=(400,)),
    refused("an empty coding", head(b"Transfer-Encoding:") + CHUNKS),
    row("chunked in quotes", head(b'Transfer-Encoding: "chunked"') + CHUNKS, answers=(501,), haproxy=(400,)),
    refused("chunked behind a vertical tab", head(b"Transfer-Encoding: \x0bchunked") + CHUNKS),
    refused("a space before the colon of a coding", head(b"Transfer-Encoding : chunked") + CHUNKS),
    row("a coding in a folded line", head(b"Transfer-Encoding:\r\n chunked") + CHUNKS, answers=(400,), haproxy=(200, 200)),
    # Trailers.
    row("a trailer", head(CHUNKED) + trailers(b"X-Tenant: acme", b"X-Request-Id: stolen")),
    row("trailers in a second packet", head(CHUNKED) + CHUNKS[:-2], b"Authorization: Bearer a\r\nX-Request-Id: stolen\r\n\r\n"),
    row(
        "trailers that frame a body",
        head(CHUNKED) + trailers(b"Content-Length: 5", b"X-Request-Id: stolen"),
        answers=(400,),
        haproxy=(400, 200),
    ),
    row("a trailer that was announced", head(CHUNKED, b"Trailer: X-Request-Id") + trailers(b"X-Request-Id: stolen")),
    refused("trailers without a colon", head(CHUNKED) + trailers(b"abc")),
    row("long trailers", head(CHUNKED) + trailers(*LONG), answers=(431,), haproxy=(431, 200)),
    row(
        "long trailers, each in its packet",
        *(head(CHUNKED) + CHUNKS[:-2], *(field + b"\r\n" for field in LONG), b"\r\n"),
        answers=(431,),
        haproxy=(431, 200),
    ),
    row(
        "a trailer without an end",
        *(head(CHUNKED) + CHUNKS[:-2] + b"X-Long: ", *[b"a" * 20_000] * 10),
        answers=(431,),
        haproxy=(400,),
    ),
    row("trailers that offer h2c", head(CHUNKED) + trailers(*H2C) + HIDDEN, answers=(200, 200, 200)),
    row("a trailer that is a coding", head(CHUNKED) + trailers(CHUNKED), answers=(400,), haproxy=(400, 200)),
    row("a trailer that closes", head(CHUNKED) + trailers(b"Connection: close"), answers=(200,), haproxy=(200, 200)),
    # Offers of another protocol.
    row("h2c", head(*H2C, LENGTH) + BODY),
    row("h2c, the body in a second packet", head(*H2C, LENGTH), BODY),
    row("h2c, in chunks", head(*H2C, CHUNKED) + CHUNKS),
    row("h2c, in chunks, in a second packet", head(*H2C, CHUNKED), CHUNKS),
    row("h2c without a body", head(*H2C, line=b"GET /version HTTP/1.1")),
    row("h2c, with trailers", head(*H2C, CHUNKED) + trailers(b"X-Request-Id: stolen")),
    row("h2c, and another request", head(*H2C, LENGTH) + BODY + HIDDEN, answers=(200, 200, 200)),
    row("h2c twice at once", (head(*H2C, CHUNKED) + CHUNKS) * 2 + HIDDEN, answers=(200,) * 4),
    row("h2c with two lengths", head(*H2C, LENGTH, b"Content-Length: 3") + BODY, answers=(400,)),
    row("h2c with a length and chunks", head(*H2C, LENGTH, CHUNKED) + CHUNKS, answers=(400,), haproxy=(200,)),
    row("h2c, a bad chunk", head(*H2C, CHUNKED) + b"zz\r\n", answers=(400,)),
    row("h2c and close", head(b"Connection: Upgrade, close", b"Upgrade: h2c", LENGTH) + BODY, answers=(200,)),
    *(
        row(f"{offer.decode()}", head(b"Connection: upgrade", b"Upgrade: " + offer, LENGTH), BODY)
        for offer in (b"foo", b"TLS/1.0", b"HTTP/2.0", b"a, b")
    ),
    row("a websocket", head(*WEBSOCKET, line=b"GET /version HTTP/1.1")),
    row("a websocket, a request in its body", *hidden_in(*WEBSOCKET), answers=(400, 200)),
    row("h2c, a request in its body", *hidden_in(*H2C), answers=(400, 200)),
    row("foo, a request in its body", *hidden_in(b"Connection: Upgrade", b"Upgrade: foo"), answers=(400, 200)),
    row("CONNECT, a request in its body", *hidden_in(line=b"CONNECT localhost:80 HTTP/1.1"), answers=(404,)),
    row("CONNECT of a path", *hidden_in(line=b"CONNECT /tokenize HTTP/1.1"), answers=(404,), haproxy=(400,)),
    row("an upgrade over HTTP/1.0", head(*H2C, LENGTH, line=b"POST /tokenize HTTP/1.0") + BODY, answers=(200,)),
    # Versions.
    row("the preface of HTTP/2", PREFACE + bytes(9), answers=(505,), haproxy=(400,)),
    row("HTTP/2.0", head(LENGTH, line=b"POST /tokenize HTTP/2.0") + BODY, answers=(505,), haproxy=(505, 200)),
    row("HTTP/3.7", head(LENGTH, line=b"POST /tokenize HTTP/3.7") + BODY, answers=(505,), haproxy=(505, 200)),
    row("HTTP/1.2", head(LENGTH, line=b"POST /tokenize HTTP/1.2") + BODY, answers=(505,), haproxy=(505, 200)),
    row("HTTP/0.9", b"GET /version\r\n\r\n", answers=(505,), haproxy=(400,)),
    row("HTTP/0.9 by name", b"GET /version HTTP/0.9\r\n\r\n", answers=(505,)),
    row("HTTP/1.0", head(LENGTH, line=b"POST /tokenize HTTP/1.0") + BODY + HIDDEN, answers=(200,)),
    row("HTTP/1.0 without a host", head(LENGTH, line=b"POST /tokenize HTTP/1.0", host=b"") + BODY, answers=(200,)),
    row("HTTP/1.0 in chunks", head(CHUNKED, line=b"POST /tokenize HTTP/1.0") + CHUNKS + HIDDEN, answers=(200,)),
    row("http/1.1 in small letters", head(LENGTH, line=b"POST /tokenize http/1.1") + BODY, answers=(400,)),
    # Hosts and targets.
    row("no host", head(LENGTH, host=b"") + BODY, answers=(400,), haproxy=(400, 200)),
    row("two hosts", head(b"Host: other", LENGTH) + BODY, answers=(400,)),
    row("one host twice", head(HOST, LENGTH) + BODY, answers=(400,), haproxy=(200, 200)),
    row("an absolute target", head(LENGTH, line=b"POST http://localhost/tokenize HTTP/1.1") + BODY),
    row("an absolute target of another host", head(LENGTH, line=b"POST http://other/tokenize HTTP/1.1") + BODY, answers=(400,)),
    row(
        "an absolute target without a host",
        head(LENGTH, line=b"POST http://localhost/tokenize HTTP/1.1", host=b"") + BODY,
        answers=(400,),
        haproxy=(400, 200),
    ),
    row("a target of an asterisk", head(line=b"OPTIONS * HTTP/1.1"), answers=(404, 200), haproxy=(404,)),
    row("a space in a target", head(LENGTH, line=b"POST /toke nize HTTP/1.1") + BODY, answers=(400,)),
    row("a fragment in a target", head(LENGTH, line=b"POST /tokenize#a HTTP/1.1") + BODY, answers=(200, 200), haproxy=(400,)),
    row("a byte that is no ASCII in a target", head(LENGTH, line=b"POST /tokenize\xff HTTP/1.1") + BODY, answers=(400,)),
    # Methods.
    row("a method in small letters", head(LENGTH, line=b"post /tokenize HTTP/1.1") + BODY, answers=(400,), haproxy=(400, 200)),
    row("an unknown method", head(LENGTH, line=b"BREW /tokenize HTTP/1.1") + BODY, answers=(400,), haproxy=(400, 200)),
    row("a method of WebDAV", head(LENGTH, line=b"PROPFIND /tokenize HTTP/1.1") + BODY, answers=(405, 200)),
    row("TRACE", head(line=b"TRACE /version HTTP/1.1"), answers=(405, 200)),
    refused("PRI", head(line=b"PRI /version HTTP/1.1")),
    row("a method of RTSP", head(line=b"DESCRIBE /version RTSP/1.0"), answers=(405,), haproxy=(400,)),
    row("GET with a body", head(LENGTH, line=b"GET /version HTTP/1.1") + BODY),
    row("GET with a request in its body", *hidden_in(line=b"GET /version HTTP/1.1")),
    row("HEAD", head(line=b"HEAD /healthz HTTP/1.1")),
    # Lines.
    row("empty lines first", b"\r\n\r\n" + head(LENGTH) + BODY),
    row("line feeds alone", head(LENGTH).replace(b"\r", b"") + BODY, answers=(400,), haproxy=(200, 200)),
    row("a carriage return in a value", head(b"X-A: b\rX-B: c", LENGTH) + BODY, answers=(400,)),
    row("carriage returns alone", head(LENGTH).replace(b"\r\n", b"\r") + BODY, answers=(400,)),
    row("a folded value", head(b"X-A: b\r\n c", LENGTH) + BODY, answers=(400,), haproxy=(200, 200)),
    row("a first field that is folded", head(LENGTH).replace(HOST, b" " + HOST) + BODY, answers=(400,)),
    row("a NUL in a value", head(b"X-A: a\0b", LENGTH) + BODY, answers=(400,)),
    row("a NUL in a name", head(b"X-\0A: b", LENGTH) + BODY, answers=(400,)),
    row("a space before a colon", head(b"X-A : b", LENGTH) + BODY, answers=(400,)),
    row("a space in a name", head(b"X A: b", LENGTH) + BODY, answers=(400,)),
    row("no name", head(b": b", LENGTH) + BODY, answers=(400,)),
    row("no colon", head(b"X-A", LENGTH) + BODY, answers=(400,)),
    row("a name that is no ASCII", head(b"X-\xc3\xa4: b", LENGTH) + BODY, answers=(400,)),
    row("a value that is no ASCII", head(b"X-A: \xc3\xa4\xff", LENGTH) + BODY),
    row("an underscore for a hyphen", head(b"Transfer_Encoding: chunked", LENGTH) + BODY),
    # Whose turn it is.
    row("a body that is awaited", head(b"Expect: 100-continue", LENGTH), BODY, answers=(100, 200, 200)),
    row("a body that is awaited and here", head(b"Expect: 100-continue", LENGTH) + BODY, answers=(100, 200, 200)),
    row("an unknown expectation", head(b"Expect: foo", LENGTH) + BODY),
    row("two requests at once", head(LENGTH) + BODY + HIDDEN, answers=(200, 200, 200)),
    row("ten requests at once", (head(LENGTH) + BODY) * 10, answers=(200,) * 11),
    row("a request and text", head(LENGTH) + BODY + b"text\r\n\r\n", answers=(200, 400)),
    row("a request behind the last", head(LENGTH, b"Connection: close") + BODY + HIDDEN, answers=(200,)),
    row("fields named by Connection", head(b"Connection: content-length", LENGTH) + BODY),
    row("a Content-Length of a proxy's", head(b"Connection: keep-alive, transfer-encoding", CHUNKED) + CHUNKS),
]


def misread(port: int, *, haproxy: bool = False) -> list[str]:
    """The rows that a server on this port does not answer as they say, and how it answers."""

    def wrong(sent: Row) -> str:
        answers = exchange(("127.0.0.1", port), sent)
        statuses = tuple(status for status, _ in answers)
        heads = [headers for status, headers in answers if status >= 200]
        unsigned = [h for h in heads if h["server"] != NAME and not haproxy]  # HAProxy's own answers name nobody
        stolen = any(STOLEN in str(headers) for headers in heads)
        if statuses == (sent.behind_haproxy if haproxy else sent.answers) and not unsigned and not stolen:
            return ""
        return f"{sent.name}: {statuses}{' without a server' * bool(unsigned)}{' by a trailer' * stolen}"

    with ThreadPoolExecutor(8) as pool:
        return [line for line in pool.map(wrong, ROWS) if line]


def exchange(address: tuple[str, int], sent: Row) -> list[tuple[int, http.client.HTTPMessage]]:
    """The answers to a row and, where the connection still is, to a probe: status and headers."""
    answers: list[tuple[int, http.client.HTTPMessage]] = []
    with socket.create_connection(address, 30) as caller, caller.makefile("rb") as reader, suppress(OSError):
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            for number, packet in enumerate(sent.packets):
                time.sleep(0.02 if number else 0)  # so that it arrives by itself
                caller.sendall(packet)
        answers += _answers(reader, sent.packets[0], 1)
        with suppress(OSError):
            caller.sendall(PROBE)
        answers += _answers(reader, b"", 1000)
    return answers


def _answers(reader: BinaryIO, sent: bytes, most: int) -> Iterator[tuple[int, http.client.HTTPMessage]]:
    while most and (line := reader.readline()):
        status, headers = int(line.split()[1]), http.client.parse_headers(reader)
        has_body = status >= 200 and not sent.startswith(b"HEAD")
        if has_body and headers["transfer-encoding"]:  # of Serve's own proxy
            while size := int(reader.readline(), 16):
                reader.read(size + 2)
            reader.readline()
        elif has_body:
            length = int(headers["content-length"])
            assert len(reader.read(length)) == length
        yield status, headers
        most -= 1
