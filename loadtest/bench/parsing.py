"""What it takes to read a request: from the bytes of its body to the Command that the service carries out."""

import argparse
import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request

from attend.service.contract import messages
from attend.service.contract.commands import to_command
from attend.service.contract.requests import read_completion
from attend.service.generation.unread_bodies import UnreadBodies
from attend.service.http_api.body import MAX_BYTES, Reading, read_json
from attend.service.records import Arrival, Command
from attend.v1 import generation_pb2 as pb
from loadtest.bench.figures import Figure, take_turns

LONG, ORDINARY = 100_000, 60
"""Characters of the prompts; with its other fields the ordinary body has 200 bytes."""
MAX_MS = 5.0


def source_text(length: int) -> str:
    """So many characters of Python source: quotes and line ends, which JSON escapes, and no other alphabet."""
    source = Path(argparse.__file__).read_text(encoding="ascii")
    return (source * (length // len(source) + 1))[:length]


def http_body(prompt: str) -> bytes:
    """A /v1/completions body as clients send it."""
    fields = {"max_tokens": 128, "temperature": 0.8, "top_p": 0.95, "seed": 7, "stream": True, "stop": ["\n\n\n"]}
    return orjson.dumps({"model": "attend-default", "prompt": prompt} | fields)


def grpc_body(prompt: str) -> bytes:
    """The same call as a serialized GenerateRequest."""
    return pb.GenerateRequest(
        model="attend-default",
        text=prompt,
        max_tokens=128,
        temperature=0.8,
        sampling=pb.SamplingParameters(top_p=0.95, seed=7),
        stopping=pb.StoppingCriteria(stop_strings=["\n\n\n"]),
    ).SerializeToString()


async def read_http(body: bytes) -> Command:
    """What the HTTP route does with a body before it calls the service."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    pieces = [body[start : start + (1 << 16)] for start in range(0, len(body), 1 << 16)]  # as a socket is read
    messages = iter([{"type": "http.request", "body": piece, "more_body": True} for piece in pieces])

    async def receive() -> dict[str, Any]:
        return next(messages, {"type": "http.request", "body": b"", "more_body": False})

    request = Request({"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}, receive)
    request.state.reading = Reading(Arrival(at=asyncio.get_running_loop().time()), UnreadBodies())
    return await read_json(request, lambda fields: to_command(read_completion(fields), "bench"), MAX_BYTES)


async def read_grpc(body: bytes) -> Command:
    """What the gRPC method does with a message before it calls the service."""
    return to_command(messages.generation(pb.GenerateRequest.FromString(body)), "bench")


async def measure(turns: int) -> list[Figure]:
    """Milliseconds of each kind of request; the kinds take turns."""
    Read = Callable[[bytes], Coroutine[Any, Any, Command]]  # noqa: N806 - a type
    kinds: dict[str, tuple[Read, bytes, float | None]] = {
        "read a completion, prompt of 100 KB, HTTP": (read_http, http_body(source_text(LONG)), MAX_MS),
        "read a completion, prompt of 100 KB, gRPC": (read_grpc, grpc_body(source_text(LONG)), MAX_MS),
        "read a completion, 200 bytes, HTTP": (read_http, http_body(source_text(ORDINARY)), None),
        "read a completion, 200 bytes, gRPC": (read_grpc, grpc_body(source_text(ORDINARY)), None),
    }

    async def time_read(read: Read, body: bytes) -> float:
        started = time.perf_counter()
        await read(body)
        return (time.perf_counter() - started) * 1e3

    found = await take_turns({what: partial(time_read, read, body) for what, (read, body, _) in kinds.items()}, turns)
    return [Figure(what, "ms", tuple(found[what]), most) for what, (*_, most) in kinds.items()]


def run(turns: int) -> list[Figure]:
    """`measure` in an event loop of its own."""
    return asyncio.run(measure(turns))
