"""Attacks on HTTP that no client library makes: connections that are silent, slow, cut, or speak something else."""

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import Callable

from loadtest.faults.attack import KEYS, Attack, Run, add, attack
from loadtest.faults.attacker import Attacker
from loadtest.faults.bodies import COMPLETIONS, MIB

MANY_CONNECTIONS = 4096
STREAM = b'{"prompt":"def f","max_tokens":900,"ignore_eos":true,"stream":true}'
LARGE = b'{"prompt":[' + b",".join([b"[" + b",".join([b"7"] * 900) + b"]"] * 4) + b'],"max_tokens":1,"prompt_logprobs":20}'
_numbers = itertools.count()
Bytes = Callable[[Attacker], bytes]


def call(body: bytes, path: str = COMPLETIONS) -> Bytes:
    """A whole call."""
    return lambda a: a.head(path, len(body)) + body


def hold(data: Bytes, at_once: int, seconds: float = 30.0, *, receive: int = 0) -> Run:
    """Connections that send this, and then neither read nor send for so long."""

    async def run(a: Attacker) -> None:
        async def one() -> None:
            async with a.connection(receive=receive) as (_, writer):
                writer.write(data(a))
                a.outcomes["unread"] += 1
                await asyncio.sleep(seconds)

        await a.repeat(one, at_once)

    return run


def by_byte(first: Bytes, slow: Bytes, at_once: int) -> Run:
    """Connections that send this, and then a byte at a time."""

    async def run(a: Attacker) -> None:
        async def one() -> None:
            async with a.connection() as (_, writer):
                writer.write(first(a))
                for byte in slow(a):
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.2)

        await a.repeat(one, at_once)

    return run


def exchange(data: Bytes, at_once: int, seconds: float = 5.0) -> Run:
    """Connections that send this and read to the end, for so long at most; counts how the last answer ended."""

    async def run(a: Attacker) -> None:
        async def one() -> None:
            answer = await a.raw(data(a), seconds=seconds)
            last = answer[answer.rfind(b"HTTP/1.1 ") :] if b"HTTP/1.1 " in answer else b""
            a.outcomes[last[9:12].decode() or "cut"] += 1

        await a.repeat(one, at_once)

    return run


def get(path: str, at_once: int, **headers: str) -> Run:
    """The same GET again and again."""
    return lambda a: a.repeat(lambda: a.get(path, **headers), at_once)


def in_chunks(a: Attacker) -> bytes:
    """A chunked call of 64 KB, a byte a chunk."""
    body = b'{"prompt":"a","max_tokens":1,"user":"' + b"x" * 200 + b'"' + b" " * 65_000 + b"}"
    return a.head(COMPLETIONS, None, connection="close") + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


CONNECTIONS: dict[str, tuple[str, Run, bool]] = {
    "slow heads": (
        "256 connections that send a byte of their head at a time",
        by_byte(lambda a: b"", lambda a: a.head(COMPLETIONS, 10), 256),
        False,
    ),
    "slow bodies": (
        "256 connections that send a byte of their body at a time",
        by_byte(lambda a: a.head(COMPLETIONS, MIB), lambda a: bytes(MIB), 256),
        False,
    ),
    "unread bodies": (
        "1100 POSTs of 100 bytes of which one comes",
        exchange(lambda a: a.head(COMPLETIONS, 100) + b"{", 1100, 60.0),
        False,
    ),
    "awaited bodies": (
        "512 POSTs that wait for 100 Continue, and send nothing then",
        exchange(lambda a: a.head(COMPLETIONS, 100, expect="100-continue"), 512, 60.0),
        False,
    ),
    "bytes in chunks": ("chunked bodies of 64 KB, a byte a chunk, 16 at a time", exchange(in_chunks, 16), False),
    "answers unread": (
        "answers of 5 MB that nobody reads, 64 at a time, receive buffers of 2 KB",
        hold(call(LARGE), 64, receive=2048),
        True,
    ),
    "pipelined streams": (
        "64 streams sent at once on each of 16 connections, and nothing read",
        hold(lambda a: call(STREAM)(a) * 64, 16, 5.0, receive=2048),
        True,
    ),
    "pipelined calls": (
        "500 calls sent at once on each of 16 connections",
        exchange(lambda a: call(b'{"prompt":"a"}', "/tokenize")(a) * 500, 16),
        False,
    ),
    "long heads": (
        "heads of 120 KB, 64 at a time",
        exchange(lambda a: a.head(COMPLETIONS, 0, **{"x-long": "x" * 120_000}), 64, 2.0),
        False,
    ),
    "scrapes": ("/metrics, 32 at a time, which needs no key", get("/metrics", 32), False),
    "new connections": ("a new connection for each /healthz, 64 at a time", get("/healthz", 64, connection="close"), False),
}
"""What each does, and whether it fills batch and queue."""
for _name, (_about, _run, _fills) in CONNECTIONS.items():
    add(_name, Attack(_about, _run, KEYS, _fills))


@attack()
async def standard_error_unread(a: Attacker) -> None:
    """refused calls while nobody reads the server's lines"""
    a.target.reading.clear()
    try:
        await a.repeat(lambda: a.post(COMPLETIONS, {"prompt": 1}), 16)
    finally:
        a.target.reading.set()


@attack()
async def idle_connections(a: Attacker) -> None:
    """4096 connections, a quarter of which ask once and are then kept open"""
    async with contextlib.AsyncExitStack() as stack:
        for number in range(MANY_CONNECTIONS):
            with contextlib.suppress(OSError):
                reader, writer = await stack.enter_async_context(a.connection())
                a.outcomes["connected"] += 1
                if number % 4 == 0:
                    writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    line = await reader.readline()
                    a.outcomes[line.decode().split()[1] if line else "cut"] += 1
        await asyncio.Event().wait()


@attack()
async def tiny_connections(a: Attacker) -> None:
    """connections that are reset at once, half of them after a byte, 128 at a time"""

    async def one() -> None:
        number = next(_numbers)
        async with a.connection(a.grpc_port if number % 4 > 1 else 0) as (_, writer):
            if number % 2:
                writer.write(b"P")
            made = writer.get_extra_info("socket")
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            a.outcomes["reset"] += 1

    await a.repeat(one, 128)


@attack(fills=True)
async def callers_who_leave(a: Attacker) -> None:
    """streams that are given up as soon as they begin, or before, 32 at a time"""

    async def one() -> None:
        async with a.connection() as (reader, writer):
            writer.write(call(STREAM)(a))
            await (reader.readline() if next(_numbers) % 2 else asyncio.sleep(0.004))
            a.outcomes["left"] += 1

    await a.repeat(one, 32)


@attack()
async def other_protocols(a: Attacker) -> None:
    """TLS, HTTP/2, WebSocket and noise on the HTTP port, noise on the gRPC port, 32 at a time"""
    lines = ("GET /v1/models HTTP/1.1", "host: localhost", "connection: upgrade", "upgrade: websocket", "sec-websocket-key: a")
    upgrade = "\r\n".join([*lines, "", ""]).encode()
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(508)
    texts = [hello, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100), upgrade, bytes(range(256)) * 64, b"GET " + b"/" * 200_000]

    async def one() -> None:
        number = next(_numbers)
        await a.raw(texts[number % len(texts)], seconds=0.5, port=a.grpc_port if number % 7 == 0 else 0)
        a.outcomes["ended"] += 1

    await a.repeat(one, 32)


@attack()
async def trailers_without_end(a: Attacker) -> None:
    """chunked calls whose trailers go on until the connection ends, 16 at a time"""

    async def one() -> None:
        async with a.connection() as (_, writer):
            writer.write(a.head("/tokenize", None) + b"2\r\n{}\r\n0\r\n")
            try:
                while True:
                    writer.write(b"a: b\r\n" * 10_000)
                    await writer.drain()
            finally:
                a.outcomes["ended"] += 1

    await a.repeat(one, 16)
