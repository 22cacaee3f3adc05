"""Attacks on gRPC."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attend.v1 import generation_pb2 as pb
from loadtest.faults.attack import attack
from loadtest.faults.attacker import Attacker

LONG = pb.GenerateRequest(text="def f(", max_tokens=900, stopping=pb.StoppingCriteria(ignore_eos=True))
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
CALLS = 100
"""On one connection: as many as HAProxy lets run."""
_numbers = itertools.count()


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


@attack()
async def grpc_gzip_bombs(a: Attacker) -> None:
    """messages over gRPC of 32 MiB that gzip makes small, 2 at a time"""
    request = pb.TokenizeRequest(text=" " * (32 << 20))
    await a.repeat(lambda: a.rpc("Tokenize", request, compression=grpc.Compression.Gzip), 2)


@attack(fills=True)
async def unread_rpcs(a: Attacker) -> None:
    """gRPC streams of 8 answers with log probabilities that nobody reads, 50 on each of 2 connections"""
    request = pb.GenerateRequest()
    request.CopyFrom(LONG)
    request.sampling.n, request.response.logprobs, request.response.top_logprobs = 8, True, 5

    async def one() -> None:
        async with grpc.aio.insecure_channel(a.target.address.grpc, options=OWN_CONNECTION) as channel:
            calls = [_begin(channel, "GenerateStream", a.metadata(), request) for _ in range(50)]
            a.outcomes["unread"] += len(calls)
            await asyncio.sleep(60)

    await a.repeat(one, 2)


async def nothing() -> AsyncIterator[bytes]:
    """A message that never comes."""
    await asyncio.Event().wait()
    yield b""


def _begin(channel: grpc.aio.Channel, method: str, metadata: Any, request: Any = None) -> Any:
    """A call whose answer is not read; without a request its message never comes."""
    path = f"/attend.v1.GenerationService/{method}"
    if request is None:
        return channel.stream_stream(path, bytes, bytes)(nothing(), metadata=metadata)
    return channel.unary_stream(path, bytes, bytes)(request.SerializeToString(), metadata=metadata)


async def _silent(a: Attacker, metadata: Any) -> None:
    async def one() -> None:
        async with grpc.aio.insecure_channel(a.target.address.grpc, options=OWN_CONNECTION) as channel:
            calls = [_begin(channel, "Generate", metadata) for _ in range(CALLS)]
            ends = await asyncio.gather(*(call.code() for call in calls))
            a.outcomes.update(end.name for end in ends)

    await a.repeat(one, 16)


@attack()
async def silent_rpcs(a: Attacker) -> None:
    """1600 calls over 16 gRPC connections whose message never comes"""
    await _silent(a, a.metadata())


@attack()
async def silent_rpcs_without_a_key(a: Attacker) -> None:
    """the same by callers who show no key"""
    await _silent(a, [("application", "default")])
