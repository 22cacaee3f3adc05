"""gRPC streams beside HTTP streams of one running server: python -m loadtest.bench.transports

16 streams at once of 128 tokens each, greedy, end-of-text ignored; the transports take turns. Prints tokens/s of
each, the ratio, and the time to the first token of a stream alone.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import grpc
import httpx
import orjson

from protos.attend.v1 import generation_pb2 as pb
from protos.attend.v1 import generation_pb2_grpc as rpc

PROMPT = "def read(self, path):\n    "
Stream = Callable[[int], Awaitable[float]]
"""Tokens to ask for -> seconds to the first of them."""


def http_stream(client: httpx.AsyncClient) -> Stream:
    """One /v1/completions stream."""

    async def run(tokens: int) -> float:
        body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        started, first, seen = time.perf_counter(), 0.0, 0
        async with client.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - started
                    seen += sum(len(choice["token_ids"]) for choice in orjson.loads(line[6:])["choices"])
        assert seen == tokens
        return first

    return run


def grpc_stream(stub: rpc.GenerationServiceStub) -> Stream:
    """One GenerateStream call."""

    async def run(tokens: int) -> float:
        stopping = pb.StoppingCriteria(ignore_eos=True)
        request = pb.GenerateRequest(text=PROMPT, max_tokens=tokens, temperature=0, stopping=stopping)
        started, first, seen = time.perf_counter(), 0.0, 0
        async for message in stub.GenerateStream(request):
            first = first or time.perf_counter() - started
            seen = message.outputs[-1].num_tokens
        assert seen == tokens
        return first

    return run


async def throughput(stream: Stream, at_once: int, tokens: int) -> float:
    """Tokens/s over all streams."""
    started = time.perf_counter()
    await asyncio.gather(*(stream(tokens) for _ in range(at_once)))
    return at_once * tokens / (time.perf_counter() - started)


async def run(options: argparse.Namespace) -> None:
    """Take turns, print the medians."""
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=options.http, timeout=300, limits=limits) as client,
        grpc.aio.insecure_channel(options.grpc) as channel,
    ):
        streams = {"HTTP": http_stream(client), "gRPC": grpc_stream(rpc.GenerationServiceStub(channel))}
        speeds: dict[str, list[float]] = {name: [] for name in streams}
        firsts: dict[str, list[float]] = {name: [] for name in streams}
        for turn in range(options.pairs + 1):
            for name, stream in streams.items():
                first, speed = await stream(8), await throughput(stream, options.at_once, options.tokens)
                if turn:  # the first turn is warm-up
                    firsts[name].append(first)
                    speeds[name].append(speed)
    for name in streams:
        alone = statistics.median(firsts[name]) * 1e3
        print(f"{name}: {statistics.median(speeds[name]):.0f} tokens/s at {options.at_once}, first token alone {alone:.1f} ms")
    ratios = [g / h for g, h in zip(speeds["gRPC"], speeds["HTTP"], strict=True)]
    print(f"gRPC / HTTP: {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})")


def main() -> None:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", default="http://127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:9000")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=5)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
