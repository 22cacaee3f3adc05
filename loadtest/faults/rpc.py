"""Attacks on gRPC: by its own library, and by frames of HTTP/2 that no library sends."""

import asyncio
import contextlib
import gzip
import itertools
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from attend.v1 import generation_pb2 as pb
from loadtest.faults.attack import attack
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

SHORT = pb.GenerateRequest(text="a", max_tokens=4)
LONG = pb.GenerateRequest(text="def f(", max_tokens=900, stopping=pb.StoppingCriteria(ignore_eos=True))
_numbers = itertools.count()


@attack(("each",))
async def rpcs_of_a_limited_key(a: Attacker) -> None:
    """322 gRPC calls at a time with a key that is at its limit"""
    await a.repeat(lambda: a.rpc("Generate", SHORT, "limited"), 322)


@attack()
async def refused_token_ids(a: Attacker) -> None:
    """3.9 MB of token ids over gRPC, the last of them wrong"""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * 1_900_000 + [1 << 40]), max_tokens=1)
    await a.repeat(lambda: a.rpc("Generate", request), 4)


@attack()
async def detokenizing_over_grpc(a: Attacker) -> None:
    """3.9 MB of token ids to be made a text over gRPC, 4 at a time"""
    request = pb.DetokenizeRequest(token_ids=[300] * 1_900_000)
    await a.repeat(lambda: a.rpc("Detokenize", request), 4)


@attack()
async def explained_texts_over_grpc(a: Attacker) -> None:
    """explanations over gRPC, with all heads of short texts, 8 at a time"""
    request = pb.ExplainRequest(text="def f(x):\n    return x\n" * 3, scores=True, logit_lens=5)
    await a.repeat(lambda: a.rpc("Explain", request), 8)


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


@attack()
async def health_checks(a: Attacker) -> None:
    """checks of grpc.health.v1 on one connection, 64 at a time"""
    stub = health_pb2_grpc.HealthStub(a.channel)
    await a.repeat(lambda: check_health(a, stub), 64)


async def check_health(a: Attacker, stub: health_pb2_grpc.HealthStub) -> None:
    """One check of health."""
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), metadata=[("application", "default")], timeout=10)
        a.outcomes["OK"] += 1
    except grpc.RpcError as error:
        a.outcomes[error.code().name] += 1


@attack()
async def grpc_connections(a: Attacker) -> None:
    """a new gRPC connection for each call, 16 at a time"""

    async def one() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(a.target.address.grpc, options=options) as channel:
            await check_health(a, health_pb2_grpc.HealthStub(channel))
        await asyncio.sleep(PAUSE)

    await a.repeat(one, 16)


@attack()
async def reflections(a: Attacker) -> None:
    """questions of reflection, which needs no key, 64 at a time"""
    stub = reflection_pb2_grpc.ServerReflectionStub(a.channel)
    ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol="attend.v1.GenerationService")

    async def one() -> None:
        try:
            async for _ in stub.ServerReflectionInfo(iter([ask] * 10), metadata=a.metadata(), timeout=10):
                a.outcomes["OK"] += 1
        except grpc.RpcError as error:
            a.outcomes[error.code().name] += 1

    await a.repeat(one, 64)


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


@attack(fills=True)
async def short_timeouts(a: Attacker) -> None:
    """calls over gRPC whose callers wait 1 to 10 ms, 64 at a time"""
    await a.repeat(lambda: a.rpc("Generate", LONG, seconds=next(_numbers) % 10 / 1000 + 0.001), 64)


@attack()
async def messages_of_noise(a: Attacker) -> None:
    """1 MB of bytes that are no message, 16 at a time"""
    call = a.channel.unary_unary("/attend.v1.GenerationService/Generate", None, None)
    noise = bytes(range(256)) * 4096

    async def one() -> None:
        try:
            await call(noise, metadata=a.metadata(), timeout=10)
        except grpc.RpcError as error:
            a.outcomes[error.code().name] += 1

    await a.repeat(one, 16)


@attack()
async def long_metadata(a: Attacker) -> None:
    """15 KB of metadata in 500 fields, 32 at a time"""
    more = [(f"x-field-{number}", "1" * 20) for number in range(300)]

    async def one() -> None:
        try:
            await a.stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=[*a.metadata(), *more], timeout=10)
            a.outcomes["OK"] += 1
        except grpc.RpcError as error:
            a.outcomes[error.code().name] += 1

    await a.repeat(one, 32)


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


@attack()
async def silent_rpcs(a: Attacker) -> None:
    """1600 calls over 16 gRPC connections whose message never comes"""

    async def job(connection: Http2) -> None:
        start = fields(a, "Generate")
        await connection.send(*(frame(HEADERS, END_HEADERS, stream, start) for stream in range(1, 201, 2)))
        a.outcomes["silent"] += 100
        await asyncio.sleep(60)

    await over_frames(a, job, 16)


@attack()
async def silent_rpcs_without_a_key(a: Attacker) -> None:
    """the same by callers who show no key"""

    async def job(connection: Http2) -> None:
        start = fields(a, "Generate").replace(b"\rauthorization", b"\rx-no-key-sent")
        await connection.send(*(frame(HEADERS, END_HEADERS, stream, start) for stream in range(1, 201, 2)))
        await asyncio.sleep(60)

    await over_frames(a, job, 16)


@attack()
async def rapid_resets(a: Attacker) -> None:
    """streams of HTTP/2 that are reset as soon as they are opened, 50 at a time on 4 connections"""
    data = message(LONG.SerializeToString())

    async def job(connection: Http2) -> None:
        start, first = fields(a, "GenerateStream"), 1
        while True:
            for stream in range(first, first + 100, 2):
                await connection.send(
                    frame(HEADERS, END_HEADERS, stream, start),
                    frame(DATA, END_STREAM, stream, data),
                    frame(RST_STREAM, 0, stream, bytes(4)),
                )
            a.outcomes["reset"] += 50
            first += 100
            await asyncio.sleep(PAUSE)

    await over_frames(a, job, 4)


async def repeat_frames(a: Attacker, piece: bytes, at_once: int = 4, *, reads: bool = True) -> None:
    """The same frames again and again on some connections."""

    async def job(connection: Http2) -> None:
        while True:
            await connection.send(piece)
            a.outcomes["sent"] += 1
            await asyncio.sleep(PAUSE)

    await over_frames(a, job, at_once, reads=reads)


@attack()
async def floods_of_settings(a: Attacker) -> None:
    """1000 SETTINGS frames of HTTP/2 at a time, whose answers nobody reads, on 4 connections"""
    await repeat_frames(a, settings(_4=1000, _3=7) * 1000, reads=False)


@attack()
async def floods_of_pings(a: Attacker) -> None:
    """1000 PING frames of HTTP/2 at a time, whose answers nobody reads, on 4 connections"""
    await repeat_frames(a, frame(PING, payload=bytes(8)) * 1000, reads=False)


@attack()
async def empty_frames(a: Attacker) -> None:
    """1000 empty DATA frames of HTTP/2 at a time on an open call, on 4 connections"""

    async def job(connection: Http2) -> None:
        await connection.send(frame(HEADERS, END_HEADERS, 1, fields(a, "Generate")))
        while True:
            await connection.send(frame(DATA, 0, 1) * 1000)
            a.outcomes["sent"] += 1
            await asyncio.sleep(PAUSE)

    await over_frames(a, job, 4)


@attack()
async def endless_fields(a: Attacker) -> None:
    """fields of HTTP/2 that go on in CONTINUATION frames without end, on 4 connections"""

    async def job(connection: Http2) -> None:
        await connection.send(frame(HEADERS, 0, 1, fields(a, "Generate")))
        while True:
            await connection.send(frame(CONTINUATION, 0, 1, field("x-more", "y" * 8000)) * 16)
            a.outcomes["sent"] += 1
            await asyncio.sleep(PAUSE)

    await over_frames(a, job, 4)


@attack()
async def header_bombs(a: Attacker) -> None:
    """HPACK bombs: calls of 16 KB whose fields become 4 KB each, on 4 connections"""

    async def job(connection: Http2) -> None:
        stream = 1
        while True:
            start = fields(a, "Generate") + field("x-bomb", "y" * 3900, keep=True) + b"\xbe" * 12_000
            await connection.send(frame(HEADERS, END_HEADERS, stream, start))
            a.outcomes["sent"] += 1
            stream += 2
            await asyncio.sleep(PAUSE)

    await over_frames(a, job, 4)


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
