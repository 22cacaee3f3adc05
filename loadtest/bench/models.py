"""What the server of several models costs beside the process of the model itself, and a model's load: attend bench models

Both ways lead to the same process: through the server's port, and straight to the process's own socket.
"""

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import psutil

from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc
from loadtest.bench.figures import Comparison, Figure, file, show, take_turns
from loadtest.server import free_port, wait_ready

PROMPT, STREAMS, FIRSTS = "def fibonacci(n):", 16, 20
Stream = Callable[[int], Awaitable[tuple[float, int]]]
"""One stream of so many tokens: seconds to its first message, and tokens."""


async def over_http(session: aiohttp.ClientSession, model: str, tokens: int) -> tuple[float, int]:
    """A streamed completion."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    began, first, count = time.perf_counter(), 0.0, 0
    async with session.post("/v1/completions", json=body) as answer:
        async for piece in answer.content.iter_any():
            first = first or time.perf_counter() - began
            count += piece.count(b"\ndata: {") + piece.startswith(b"data: {")
    return first, count


async def over_grpc(stub: rpc.GenerationServiceStub, model: str, tokens: int) -> tuple[float, int]:
    """A GenerateStream call."""
    stopping = pb.StoppingCriteria(ignore_eos=True)
    request = pb.GenerateRequest(text=PROMPT, max_tokens=tokens, model=model, temperature=0, stopping=stopping)
    began, first, count = time.perf_counter(), 0.0, 0
    async for message in stub.GenerateStream(request):
        first = first or time.perf_counter() - began
        count = message.outputs[0].num_tokens
    return first, count


async def turn(stream: Stream, server: psutil.Process, tokens: int) -> tuple[float, float, float]:
    """Median milliseconds to the first message of calls one by one, tokens/s of STREAMS at once, and the cores that the server
    itself took for them.
    """
    firsts = sorted([(await stream(1))[0] for _ in range(FIRSTS)])
    before, began = server.cpu_times(), time.perf_counter()
    counts = [count for _, count in await asyncio.gather(*(stream(tokens) for _ in range(STREAMS)))]
    seconds, after = time.perf_counter() - began, server.cpu_times()
    assert min(counts) >= tokens / 2, counts
    return (
        firsts[FIRSTS // 2] * 1e3,
        STREAMS * tokens / seconds,
        (after.user + after.system - before.user - before.system) / seconds,
    )


async def measure(port: int, folder: Path, process: psutil.Process, turns: int, tokens: int) -> list[Figure]:
    """Every figure of a server that serves one model under the name `a`."""
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as through:
        began = time.perf_counter()
        await over_http(through, "a", 1)
        figures = [Figure("a first call, whose model loads", "s", (time.perf_counter() - began,))]
        [sockets] = sockets_in(folder)
        straight = aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(str(sockets / "http")))
        targets = {"through": f"127.0.0.1:{port + 100}", "straight": f"unix:{sockets / 'grpc'}"}
        async with (
            straight,
            grpc.aio.insecure_channel(targets["through"]) as one,
            grpc.aio.insecure_channel(targets["straight"]) as two,
        ):
            ways: dict[str, dict[str, Stream]] = {
                "HTTP": {"through": partial(over_http, through, "a"), "straight": partial(over_http, straight, "a")},
                "gRPC": {
                    "through": partial(over_grpc, rpc.GenerationServiceStub(one), "a"),
                    "straight": partial(over_grpc, rpc.GenerationServiceStub(two), "a"),
                },
            }
            for transport, contestants in ways.items():
                figures += await _compared(transport, contestants, process, turns, tokens)
    return figures


def sockets_in(folder: Path) -> list[Path]:
    """The folders of the sockets of a server's processes."""
    return [path.parent for path in folder.glob("attend-models-*/*/http")]


async def _compared(transport: str, ways: dict[str, Stream], server: psutil.Process, turns: int, tokens: int) -> list[Figure]:
    found = await take_turns({name: partial(turn, stream, server, tokens) for name, stream in ways.items()}, turns)
    first, rate = (
        Comparison(f"{transport}: {what}", unit, {name: [each[at] for each in values] for name, values in found.items()})
        for at, (what, unit) in enumerate((("first token of a stream alone", "ms"), (f"{STREAMS} streams", "tokens/s")))
    )
    cores = Figure(
        f"{transport}: the server itself, {STREAMS} streams through it", "cores", tuple(each[2] for each in found["through"])
    )
    return [*first.figures(), *rate.figures(), cores]


def run(model: str, flags: list[str], turns: int, tokens: int) -> list[Figure]:
    """Start a server of one model, and measure."""
    port, folder = free_port(), Path(tempfile.mkdtemp(prefix="attend-bench-"))
    models, log = folder / "models.yaml", folder / "log"
    models.write_text(f"idle_seconds: 0\nmodels:\n- {{name: a, model: '{model}'}}\n", encoding="utf-8")
    ports = ["--port", str(port), "--grpc-port", str(port + 100)]
    command = [sys.executable, "-m", "attend.service.commands.cli", "serve", "--models", str(models), *ports, *flags]
    environment: dict[str, Any] = os.environ | {"TMPDIR": str(folder)}
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=errors, stderr=errors, env=environment, start_new_session=True)
    try:
        wait_ready(process, log)
        return asyncio.run(measure(port, folder, psutil.Process(process.pid), turns, tokens))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        shutil.rmtree(folder)


def main(words: list[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="checkpoint folder; default: the shipped model")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--json", type=Path, help="write every value there")
    parser.add_argument("flags", nargs="*", help="of the server, behind --")
    given = parser.parse_args(words)
    figures = run(given.model, given.flags, given.turns, given.tokens)
    file(given.json, show(figures), figures, bench="models")


if __name__ == "__main__":
    main()
