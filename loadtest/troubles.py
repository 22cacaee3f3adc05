"""Callers who do harm beside a load: they leave, send what must be refused, let deadlines pass, or ask for what fails.

Each is a coroutine that makes one call and returns how it ended, and is listed with the end that it must have.
"""

import asyncio
import io
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

import aiohttp
import grpc

from attend.v1 import generation_pb2 as pb
from loadtest.faults.attacker import Attacker, attacker
from loadtest.faults.target import Target

EVERY = 0.25
"""Seconds between two of them."""
PATH, PROMPT, TOKENS = "/v1/completions", "def f(", 400
BODY = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
Trouble = Callable[[Attacker], Awaitable[str]]
REFUSED: dict[str, tuple[Any, int]] = {
    "a mistyped field": (BODY | {"max_token": 1}, 400),
    "no JSON": (b'{"prompt": ', 400),
    "an unknown model": (BODY | {"model": "nobody"}, 404),
    "a token that does not exist": (BODY | {"prompt": [1 << 30]}, 400),
    "a prompt that is too long": (BODY | {"prompt": [5] * 5000}, 400),
    "a regex that is none": (BODY | {"structured_outputs": {"regex": "("}}, 400),
    "a body that is too large": (b" " * (2 << 20), 413),
}
"""Over HTTP, with the status of the answer."""


def request() -> pb.GenerateRequest:
    """A long answer."""
    return pb.GenerateRequest(text=PROMPT, max_tokens=TOKENS, stopping=pb.StoppingCriteria(ignore_eos=True))


async def leave_http(a: Attacker) -> str:
    """Close the connection after the first event of a stream."""
    headers = a.target.headers()
    async with a.session.post(a.target.address.http + PATH, json=BODY | {"stream": True}, headers=headers) as answer:
        await answer.content.readany()
        return str(answer.status)


async def leave_grpc(a: Attacker) -> str:
    """Cancel a stream after its first message."""
    call = a.stub.GenerateStream(request())
    first = await call.read()
    call.cancel()
    return "a message" if isinstance(first, pb.GenerateResponse) else "no message"


async def leave_body(a: Attacker) -> str:
    """Close the connection in the middle of a call's body."""
    async with a.connection() as (_, writer):
        writer.write(a.head(PATH, 1000) + b'{"prompt": "')
        await writer.drain()
    return "left"


async def pass_deadline(a: Attacker) -> str:
    """Give a long answer 50 ms."""
    try:
        await a.stub.Generate(request(), timeout=0.05)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def post_body(body: Any, a: Attacker) -> str:
    """Send a body."""
    headers = a.target.headers()
    data = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
    async with a.session.post(a.target.address.http + PATH, headers=headers, **data) as answer:
        await answer.read()
        return str(answer.status)


TROUBLES: dict[str, tuple[Trouble, str]] = {
    "HTTP caller leaves": (leave_http, "200"),
    "gRPC caller leaves": (leave_grpc, "a message"),
    "caller leaves in a body": (leave_body, "left"),
    "deadline passes": (pass_deadline, "DEADLINE_EXCEEDED"),
    **{name: (partial(post_body, body), str(status)) for name, (body, status) in REFUSED.items()},
}


@dataclass
class TroubleCounts:
    """How the calls ended: `done` as they must, `otherwise` in another way."""

    as_expected: Counter[str]
    otherwise: Counter[str]

    @property
    def good(self) -> bool:
        """True if each kind was tried, and none ended otherwise."""
        return not self.otherwise and self.as_expected.keys() == TROUBLES.keys()

    def line(self) -> str:
        """For a report."""
        wrong = "; ".join(f"{count} x {what}" for what, count in self.otherwise.items())
        calls = f"{self.as_expected.total()} calls of {len(self.as_expected)} kinds"
        return f"callers who do harm: {calls}, otherwise ended: {wrong or 'none'}"


async def trouble(target: Target, over: Event, counts: TroubleCounts) -> None:
    """One after the other, round and round, until `over`."""
    async with attacker(target) as one:
        for name in itertools.cycle(TROUBLES):
            if over.is_set():
                return
            make, wanted = TROUBLES[name]
            try:
                ended = await make(one)
            except (aiohttp.ClientError, grpc.RpcError, OSError, TimeoutError) as error:
                ended = f"{type(error).__name__}: {error}"[:100]
            if ended == wanted:
                counts.as_expected[name] += 1
            else:
                counts.otherwise[f"{name}: {ended}"] += 1
            await asyncio.sleep(EVERY)
