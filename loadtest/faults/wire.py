"""Attacks on HTTP that no client library makes: connections that are silent, slow, cut, or speak something else."""

import asyncio
import contextlib
import itertools
import socket
import struct

from loadtest.faults.attack import attack
from loadtest.faults.attacker import Attacker
from loadtest.faults.bodies import COMPLETIONS, MIB
from loadtest.faults.frames import DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, fields, frame

MANY_CONNECTIONS = 4096
STREAM = b'{"prompt":"def f","max_tokens":900,"ignore_eos":true,"stream":true}'
LARGE = b'{"prompt":[' + b",".join([b"[" + b",".join([b"7"] * 900) + b"]"] * 4) + b'],"max_tokens":1,"prompt_logprobs":20}'
_numbers = itertools.count()


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
    """4096 connections that say nothing"""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MANY_CONNECTIONS):
            with contextlib.suppress(OSError):
                await stack.enter_async_context(a.connection())
                a.outcomes["connected"] += 1
        await asyncio.Event().wait()


@attack()
async def kept_connections(a: Attacker) -> None:
    """1024 connections that ask once and are then kept open"""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(1024):
            with contextlib.suppress(OSError):
                reader, writer = await stack.enter_async_context(a.connection())
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


@attack()
async def slow_heads(a: Attacker) -> None:
    """256 connections that send a byte of their head at a time"""

    async def one() -> None:
        async with a.connection() as (_, writer):
            for byte in a.head(COMPLETIONS, 10):
                writer.write(bytes([byte]))
                await asyncio.sleep(0.2)

    await a.repeat(one, 256)


@attack()
async def slow_bodies(a: Attacker) -> None:
    """256 connections that send a byte of their body at a time"""

    async def one() -> None:
        async with a.connection() as (_, writer):
            writer.write(a.head(COMPLETIONS, MIB))
            while True:
                writer.write(b" ")
                await asyncio.sleep(0.2)

    await a.repeat(one, 256)


@attack()
async def unread_bodies(a: Attacker) -> None:
    """1100 POSTs of 100 bytes of which one comes"""

    async def one() -> None:
        async with a.connection() as (reader, writer):
            writer.write(a.head(COMPLETIONS, 100) + b"{")
            line = await reader.readline()
            a.outcomes[line.decode().split()[1] if line else "cut"] += 1

    await a.repeat(one, 1100)


@attack()
async def awaited_bodies(a: Attacker) -> None:
    """512 POSTs that wait for 100 Continue, and send nothing then"""

    async def one() -> None:
        async with a.connection() as (reader, writer):
            writer.write(a.head(COMPLETIONS, 100, expect="100-continue"))
            while line := await reader.readline():
                a.outcomes.update([line.decode().split()[1]] if line.startswith(b"HTTP/1.1 ") else ())

    await a.repeat(one, 512)


@attack()
async def bytes_in_chunks(a: Attacker) -> None:
    """chunked bodies of 64 KB, a byte a chunk, 16 at a time"""
    body = b'{"prompt":"a","max_tokens":1,"user":"' + b"x" * 200 + b'"' + b" " * 65_000 + b"}"
    data = a.head(COMPLETIONS, None, connection="close") + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"

    async def one() -> None:
        answer = await a.raw(data)
        a.outcomes[answer[9:12].decode() or "cut"] += 1

    await a.repeat(one, 16)


@attack(fills=True)
async def slow_readers(a: Attacker) -> None:
    """16 answers of a MB or more that nobody reads"""
    body = STREAM[:-1] + b',"logprobs":5,"n":1}'

    async def one() -> None:
        async with a.connection() as (_, writer):
            writer.write(a.head(COMPLETIONS, len(body)) + body)
            a.outcomes["unread"] += 1
            await asyncio.sleep(5)

    await a.repeat(one, 16)


@attack(fills=True)
async def answers_unread(a: Attacker) -> None:
    """answers of 5 MB that nobody reads, 64 at a time, receive buffers of 2 KB"""

    async def one() -> None:
        async with a.connection(receive=2048) as (_, writer):
            writer.write(a.head(COMPLETIONS, len(LARGE)) + LARGE)
            a.outcomes["unread"] += 1
            await asyncio.sleep(30)

    await a.repeat(one, 64)


@attack(fills=True)
async def half_closed(a: Attacker) -> None:
    """streams whose callers say that they send no more, and do not read, 32 at a time"""

    async def one() -> None:
        async with a.connection(receive=2048) as (_, writer):
            writer.write(a.head(COMPLETIONS, len(STREAM)) + STREAM)
            writer.write_eof()
            a.outcomes["half closed"] += 1
            await asyncio.sleep(5)

    await a.repeat(one, 32)


@attack(fills=True)
async def callers_who_leave(a: Attacker) -> None:
    """streams that are given up as soon as they begin, 32 at a time"""

    async def one() -> None:
        async with a.connection() as (reader, writer):
            writer.write(a.head(COMPLETIONS, len(STREAM)) + STREAM)
            await reader.readline()
            a.outcomes["left"] += 1

    await a.repeat(one, 32)


@attack(fills=True)
async def callers_who_never_stay(a: Attacker) -> None:
    """calls of 128 answers whose callers are gone before the first byte, 32 at a time"""
    body = b'{"prompt":["a","b","c","d","e","f","g","h","i","j","k","l","m","n","o","p"],"n":8,"max_tokens":900}'

    async def one() -> None:
        async with a.connection() as (_, writer):
            writer.write(a.head(COMPLETIONS, len(body)) + body)
            await writer.drain()
            await asyncio.sleep(next(_numbers) % 5 * 0.002)
            a.outcomes["left"] += 1

    await a.repeat(one, 32)


@attack()
async def long_heads(a: Attacker) -> None:
    """heads of 120 KB, 64 at a time"""
    data = a.head(COMPLETIONS, 0, **{"x-long": "x" * 120_000})

    async def one() -> None:
        answer = await a.raw(data, seconds=2)
        a.outcomes[answer[9:12].decode() or "cut"] += 1

    await a.repeat(one, 64)


@attack()
async def many_headers(a: Attacker) -> None:
    """heads of 1000 fields in 15 KB, 32 at a time"""
    many = {f"x-{number}": "1" for number in range(1000)}
    await a.repeat(lambda: a.get("/v1/models", "open", **many), 32)


@attack()
async def pipeline_calls(a: Attacker) -> None:
    """500 calls sent at once on each of 16 connections"""
    call = a.head("/tokenize", 14) + b'{"prompt":"a"}'

    async def one() -> None:
        async with a.connection() as (reader, writer):
            writer.write(call * 500)
            while piece := await reader.read(1 << 16):
                a.outcomes["200"] += piece.count(b"HTTP/1.1 200")
                a.outcomes["429"] += piece.count(b"HTTP/1.1 429")

    await a.repeat(one, 16)


@attack(fills=True)
async def pipelined_streams(a: Attacker) -> None:
    """64 streams sent at once on each of 16 connections, and nothing read"""
    call = a.head(COMPLETIONS, len(STREAM)) + STREAM

    async def one() -> None:
        async with a.connection(receive=2048) as (_, writer):
            writer.write(call * 64)
            a.outcomes["sent"] += 64
            await asyncio.sleep(5)

    await a.repeat(one, 16)


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
async def trailers(a: Attacker) -> None:
    """chunked calls whose trailers are header fields of another caller, 16 at a time"""
    more = b"x-request-id: of-a-trailer\r\nauthorization: Bearer another\r\nx-tenant: another\r\nx-forwarded-for: 10.0.0.1\r\n"
    data = a.head("/tokenize", None, connection="close") + b'e\r\n{"prompt":"a"}\r\n0\r\n' + more + b"\r\n"
    wrong = 0

    async def one() -> None:
        nonlocal wrong
        answer = await a.raw(data)
        a.outcomes[answer[9:12].decode() or "cut"] += 1
        wrong += b"of-a-trailer" in answer or answer.startswith(b"HTTP/1.1 401")

    try:
        await a.repeat(one, 16)
    finally:
        a.check("calls that their trailers named", wrong)


@attack()
async def trailers_without_end(a: Attacker) -> None:
    """chunked calls whose trailers go on until the connection ends, 16 at a time"""
    await a.repeat(lambda: _send_on(a, a.head("/tokenize", None) + b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 10_000), 16)


@attack()
async def calls_over_http_2(a: Attacker) -> None:
    """HTTP/2 on the HTTP port, a hundred unfinished bodies on each of 64 connections"""
    head, body = fields(a, COMPLETIONS), b" " * 600
    calls = (frame(HEADERS, END_HEADERS, n, head) + frame(DATA, 0, n, body) for n in range(1, 200, 2))
    data = PREFACE + frame(SETTINGS) + b"".join(calls)
    await a.repeat(lambda: _send_on(a, data, b""), 64)


@attack()
async def upgrade_offers(a: Attacker) -> None:
    """calls that offer h2c and others, each with a call in its body, which must not be answered, 16 at a time"""
    offers, hidden, wrong = ("h2c", "websocket", "TLS/1.0", "foo"), b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n", 0

    async def one() -> None:
        nonlocal wrong
        offer = {"connection": "Upgrade", "upgrade": offers[next(_numbers) % len(offers)]}
        answer = await a.raw(a.head("/tokenize", len(hidden), **offer) + hidden, seconds=1)
        a.outcomes[answer[9:12].decode() or "cut"] += 1
        wrong += answer.count(b"HTTP/1.1 ") > 1

    try:
        await a.repeat(one, 16)
    finally:
        a.check("bodies that were answered", wrong)


async def _send_on(a: Attacker, first: bytes, piece: bytes) -> None:
    """Send the first bytes, and then a piece again and again, until the connection ends or for thirty seconds."""
    async with a.connection() as (reader, writer):
        with contextlib.suppress(OSError, TimeoutError, ExceptionGroup):
            async with asyncio.timeout(30), asyncio.TaskGroup() as group:
                end = group.create_task(reader.read())
                writer.write(first)
                while not end.done():
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0 if piece else 0.1)
        a.outcomes["ended"] += 1


@attack()
async def scrapes(a: Attacker) -> None:
    """/metrics, 32 at a time, which needs no key"""
    await a.repeat(lambda: a.get("/metrics"), 32)


@attack()
async def new_connections(a: Attacker) -> None:
    """a new connection for each /healthz, 64 at a time"""
    await a.repeat(lambda: a.get("/healthz", connection="close"), 64)


@attack()
async def many_probes(a: Attacker) -> None:
    """/healthz and /readyz from the address of the real probes, 16 at a time"""
    await a.repeat(lambda: a.get(("/healthz", "/readyz")[next(_numbers) % 2]), 16)


@attack()
async def encoded_paths(a: Attacker) -> None:
    """/%68ealthz and /metric%73, 16 at a time"""
    await a.repeat(lambda: _get_raw_path(a, ("/%68ealthz", "/metric%73")[next(_numbers) % 2]), 16)


async def _get_raw_path(a: Attacker, path: str) -> None:
    """A GET whose path stays as it is written."""
    answer = await a.raw(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    a.outcomes[answer[9:12].decode() or "cut"] += 1


@attack()
async def plain_gets(a: Attacker) -> None:
    """/v1/models, /v1/capacity, /tokenizer_info and /version, 32 at a time"""
    paths = ("/v1/models", "/v1/capacity?prompt_tokens=10", "/tokenizer_info", "/version")
    await a.repeat(lambda: a.get(paths[next(_numbers) % len(paths)], "open"), 32)


@attack()
async def documents(a: Attacker) -> None:
    """/openapi.json, the page and its files, 16 at a time"""
    await a.repeat(lambda: a.get(("/openapi.json", "/", "/docs")[next(_numbers) % 3]), 16)
