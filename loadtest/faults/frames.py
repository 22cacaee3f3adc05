"""Frames of HTTP/2, written by hand: what no client library would send (RFC 9113, and RFC 7541 for the fields)."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Iterable

from loadtest.faults.attacker import Attacker

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW = 4
MAX_PAYLOAD = 1 << 14
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SERVICE = "/attend.v1.GenerationService"


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def settings(**values: int) -> bytes:
    """A frame of settings, by their numbers: `_4=0`."""
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", int(name[1:]), value) for name, value in values.items()))


def integer(value: int, bits: int, first: int = 0) -> bytes:
    """An integer with a prefix of so many bits (RFC 7541, 5.1)."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    rest, value = [first | most], value - most
    while value >= 128:
        rest.append(value % 128 + 128)
        value //= 128
    return bytes([*rest, value])


def field(name: str, value: str, *, keep: bool = False) -> bytes:
    """One field, in letters; with `keep` the other side puts it into its table, as entry 62."""
    written = b"".join(integer(len(text), 7) + text.encode() for text in (name, value))
    return (b"\x40" if keep else b"\x00") + written


def fields(a: Attacker, method: str, more: Iterable[tuple[str, str]] = ()) -> bytes:
    """The fields of a call of our service."""
    path = method if method.startswith("/") else f"{SERVICE}/{method}"
    pairs = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    pairs += [("content-type", "application/grpc"), ("te", "trailers"), *a.metadata(), *more]
    return b"".join(field(name, value) for name, value in pairs)


def message(data: bytes, *, is_compressed: bool = False) -> bytes:
    """A message of gRPC, as the payload of DATA frames. `is_compressed` sets its flag; `data` is sent as it is."""
    return struct.pack(">BI", is_compressed, len(data)) + data


class Http2:
    """One connection. What the server sends is thrown away, and counted by the kind of frame."""

    def __init__(self, a: Attacker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.a, self.reader, self.writer = a, reader, writer
        self.ended = False

    async def read(self) -> None:
        """Count frames until the connection ends."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await self.reader.readexactly(9)
                size, kind = int.from_bytes(head[:3]), head[3]
                await self.reader.readexactly(size)
                if kind == 7:
                    self.a.outcomes["GOAWAY"] += 1
                if kind == RST_STREAM:
                    self.a.outcomes["RST_STREAM"] += 1
        self.ended = True

    async def send(self, *frames: bytes) -> None:
        """Write frames. Raises ConnectionError where the server has ended the connection."""
        if self.ended:
            raise ConnectionResetError
        self.writer.write(b"".join(frames))
        await self.writer.drain()


@contextlib.asynccontextmanager
async def http2(a: Attacker, *, window: int = 65_535, reads: bool = True) -> AsyncIterator[Http2]:
    """A connection to the gRPC port that has said hello. Without `reads` nothing is read after the server's first bytes."""
    async with a.connection(a.grpc_port) as (reader, writer):
        made = Http2(a, reader, writer)
        await made.send(PREFACE, settings(**{f"_{INITIAL_WINDOW}": window}))
        async with asyncio.timeout(5):
            first = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(first[:3]))
        await made.send(frame(SETTINGS, ACK))
        reading = asyncio.create_task(made.read()) if reads else None
        try:
            yield made
        finally:
            if reading is not None:
                reading.cancel()
