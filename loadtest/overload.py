"""`make overload`: a server of our own under three times its calls.

python -m loadtest.overload --minutes 5

First as many callers as the server can run, one call after the other: the answers a second are its capacity. Then calls come at
so many times that rate, over both transports in turn, whether or not earlier ones were answered. Then the capacity is measured
again, since a machine that others use too becomes faster and slower: the mean of both counts. Answers have unequal lengths:
those of equal ones would begin and end together as long as nobody but these callers calls, which is cheaper than any other
traffic. The exit code is 3 where a limit was missed.
"""

import argparse
import asyncio
import itertools
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import grpc

from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from loadtest.faults.judge import Measure
from loadtest.faults.target import Target, running
from loadtest.server import StartError

PROMPT, SHORTEST, TOKENS, LONGEST = "def fibonacci(n):", 128, 256, 384
"""Long answers, of TOKENS on average: the callers, who share the machine with the server, take little of it."""
CHANNELS = 16
"""Of gRPC: over one of them HAProxy lets 100 calls run; further ones would wait in the client."""
CALLERS, CAPACITY_SECONDS = 96, 60.0
WARM_SECONDS = 10.0
"""At the beginning of the overload, while the queue fills: not counted as goodput."""
REFUSAL_MS, GOODPUT, HUNG_SECONDS = 50.0, 0.9, 60.0
MADE = re.compile(r"^attend_generation_tokens_total\{[^}]*\} (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Call:
    """How long a call took, and how it ended."""

    seconds: float
    result: str
    """`ok`, `refused` (429 or RESOURCE_EXHAUSTED, with a time to come again), or what else came."""


class Callers:
    """Calls of both transports, in turn."""

    def __init__(self, target: Target, http: aiohttp.ClientSession, channels: Sequence[grpc.aio.Channel]) -> None:
        self.url, self.metrics, self.http = f"{target.address.http}/v1/completions", f"{target.address.http}/metrics", http
        self.stubs = itertools.cycle(map(GenerationServiceStub, channels))
        self.done: list[Call] = []
        self.dice = random.Random(0)
        self.turns = itertools.cycle((self.over_http, self.over_grpc))

    async def over_http(self) -> str:
        """A completion; what came."""
        body = {"prompt": PROMPT, "max_tokens": self.dice.randint(SHORTEST, LONGEST), "ignore_eos": True}
        async with self.http.post(self.url, json=body) as answer:
            await answer.read()
        if answer.status == 429 and int(answer.headers["retry-after"]) > 0:
            return "refused"
        return "ok" if answer.status == 200 else f"HTTP {answer.status}"

    async def over_grpc(self) -> str:
        """A Generate; what came."""
        tokens = self.dice.randint(SHORTEST, LONGEST)
        request = pb.GenerateRequest(text=PROMPT, max_tokens=tokens, stopping=pb.StoppingCriteria(ignore_eos=True))
        call = next(self.stubs).Generate(request)
        if await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return "refused" if int(dict(await call.trailing_metadata())["retry-after"]) > 0 else "refused without a time"
        return "ok" if await call.code() is grpc.StatusCode.OK else f"gRPC {(await call.code()).name}"

    async def one(self) -> None:
        """Make a call and note it."""
        began = time.monotonic()
        try:
            result = await next(self.turns)()
        except (aiohttp.ClientError, grpc.RpcError) as error:
            result = type(error).__name__
        self.done.append(Call(time.monotonic() - began, result))

    async def closed_loop(self, seconds: float) -> float:
        """CALLERS who each make one call after the other; answers a second, but for the first third of the time."""
        end = time.monotonic() + seconds

        async def caller() -> None:
            while time.monotonic() < end:
                await self.one()

        async with asyncio.TaskGroup() as group:
            pace = group.create_task(self.pace(seconds / 3, seconds))
            for _ in range(CALLERS):
                group.create_task(caller())
        return pace.result()

    async def pace(self, begin: float, end: float) -> float:
        """Answers a second from `begin` to `end`, in seconds from now: those that the tokens of this time are worth."""
        now = time.monotonic()
        moments = []
        for at in (begin, end):
            await asyncio.sleep(now + at - time.monotonic())
            moments.append((await self.tokens(), time.monotonic()))
        (before, since), (after, until) = moments
        return (after - before) / TOKENS / (until - since)

    async def tokens(self) -> float:
        """Those that the server has made."""
        async with self.http.get(self.metrics) as answer:
            return sum(map(float, MADE.findall(await answer.text())))

    async def open(self, rate: float, seconds: float, seed: int = 0) -> tuple[float, int]:
        """Poisson arrivals at `rate` calls a second. Returns the answers a second after WARM_SECONDS, and how many calls had
        not ended HUNG_SECONDS after the last.
        """
        self.done, started = [], time.monotonic()
        pace = asyncio.create_task(self.pace(WARM_SECONDS, seconds))
        gaps, calls, at = random.Random(seed), set(), 0.0
        while (at := at + gaps.expovariate(rate)) < seconds:
            await asyncio.sleep(started + at - time.monotonic())
            calls.add(task := asyncio.create_task(self.one()))
            task.add_done_callback(calls.discard)
        _, hung = await asyncio.wait(calls, timeout=HUNG_SECONDS) if calls else (None, ())
        return await pace, len(hung)


def percentile(values: Sequence[float], percent: int) -> float:
    """The nearest rank; 0 of no values."""
    return sorted(values)[(len(values) - 1) * percent // 100] if values else 0.0


def verdict(calls: Sequence[Call], hung: int, capacities: tuple[float, float], good: float) -> list[Measure]:
    """What an overload with so many answers a second must keep, where these are the capacities before and after it."""
    before, after = capacities
    share = good / ((before + after) / 2)
    refused = [1000 * call.seconds for call in calls if call.result == "refused"]
    answered = sum(call.result == "ok" for call in calls)
    others = sorted({call.result for call in calls} - {"ok", "refused"})
    return [
        Measure("calls", len(calls), "", note=f"{answered} answered, {len(refused)} refused"),
        Measure("refused at p50", percentile(refused, 50), "ms"),
        Measure("refused at p99", percentile(refused, 99), "ms", REFUSAL_MS),
        Measure(
            "capacity lost",
            1 - share,
            "",
            1 - GOODPUT,
            f"{good:.1f} answers a second, where {before:.1f} were possible before and {after:.1f} after",
        ),
        Measure("hung", hung, "calls", 0),
        Measure("other ends", len(calls) - answered - len(refused), "calls", 0, ", ".join(others)),
    ]


async def overload(target: Target, times: float, seconds: float) -> list[Measure]:
    """Measure the capacity, load the server with `times` as much, and measure the capacity again."""
    forever = aiohttp.ClientTimeout(total=None)  # a call without an end is to be seen
    http = aiohttp.ClientSession(timeout=forever, connector=aiohttp.TCPConnector(limit=0))
    own = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(target.address.grpc, options=own) for _ in range(CHANNELS)]
    async with http:
        callers = Callers(target, http, channels)
        capacity = await callers.closed_loop(CAPACITY_SECONDS)
        good, hung = await callers.open(times * capacity, seconds)
        calls, callers.done = callers.done, []
        again = await callers.closed_loop(CAPACITY_SECONDS)
        for channel in channels:
            await channel.close(None)
        return verdict(calls, hung, (capacity, again), good)


def main(arguments: Sequence[str]) -> int:
    """0 where every limit was kept, 1 where no server came up, 3 where one was missed."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5, help="length of the overload (default 5)")
    parser.add_argument("--times", type=float, default=3, help="load in units of the capacity (default 3)")
    options, flags = parser.parse_known_args(arguments)
    try:
        with running(flags) as target:
            measures = asyncio.run(overload(target, options.times, 60 * options.minutes))
    except StartError as error:
        print(error, file=sys.stderr)
        return 1
    for measure in measures:
        print(f"{measure.text()}{'' if measure.within_limit else '  MISSED'}{f'  ({measure.note})' if measure.note else ''}")
    return 0 if all(measure.within_limit for measure in measures) else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
