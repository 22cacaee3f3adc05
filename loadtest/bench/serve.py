"""Streams of running servers at several loads, side by side: attend bench serve [[NAME=]URL ...] [--grpc HOST:PORT]

Each URL is a server that speaks OpenAI's protocol; they take turns, each turn 128 -> 128 tokens of different prompts, so
many at once. --goodput instead: the highest rate of Poisson arrivals, with prompts of 16 to 1024 tokens and answers of 8 to
256, that keeps TTFT p95 <= 1 s and inter-token p95 <= 100 ms. Without a URL, or with --shape, a server of its own takes part
over HTTP, first of all, and over gRPC.

Server and client share this machine. The servers of the URLs stand still (SIGSTOP) while another one is asked, if they are on
this machine: what spins for the next request would take the others' cores. The server of its own rests without that.
"""

import argparse
import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from loadtest.bench.client import Caller, Prompt, closed_loop, grpc_caller, http_caller, ids, words
from loadtest.bench.figures import Comparison, file, table, take_turns
from loadtest.bench.goodput import best_rate
from loadtest.bench.shapes import FOLDER, OUTPUT, PROMPT, SHAPES, write_shape
from loadtest.bench.still import awake, processes_at, still
from loadtest.measures import total
from loadtest.server import StartError, served
from loadtest.stream import ITL, REFUSED, TOTAL, TTFT


class Load(NamedTuple):
    """What one turn at one load gave; milliseconds."""

    speed: float
    first: float
    gap: float
    failed: float


SETTLE_SECONDS = 1.0
MEASURES = (("output", "tokens/s"), ("TTFT p50", "ms"), ("inter-token p99", "ms"), ("failed or refused", "requests"))


@asynccontextmanager
async def asked(caller: Caller) -> AsyncIterator[None]:
    """Wakes the caller's server, if it stands still, and gives it time to end the connections that it kept for too long."""
    with awake(caller.processes):
        if caller.processes:
            await asyncio.sleep(SETTLE_SECONDS)
        yield


async def load(caller: Caller, at_once: int, rounds: int, prompt: Callable[[int], Prompt]) -> Load:
    """One turn of one server."""
    prompts = [prompt(PROMPT) for _ in range(at_once * rounds)]
    async with asked(caller):
        rows, seconds = await closed_loop(caller, at_once, prompts, OUTPUT)
    answers, first, gap = (total(rows, measure) for measure in (TOTAL, TTFT, ITL))
    failed = answers.failures + total(rows, REFUSED).count
    return Load(answers.tokens / seconds, first.percentile(50) or 0.0, gap.percentile(99) or 0.0, failed)


async def loads(callers: Sequence[Caller], options: argparse.Namespace) -> list[Comparison]:
    """Every load, one after the other, with the callers in turns."""
    found = []
    for at_once in options.at_once:
        prompt = words if options.text else ids
        turns = {each.name: partial(load, each, at_once, options.rounds, prompt) for each in callers}
        values = await take_turns(turns, options.turns)
        found += [compared(f"{at_once} at once, ", values, at) for at in range(len(MEASURES))]
    return found


def compared(load: str, values: Mapping[str, Sequence[Load]], at: int) -> Comparison:
    """One of MEASURES at one load."""
    what, unit = MEASURES[at]
    return Comparison(load + what, unit, {name: [turn[at] for turn in turns] for name, turns in values.items()})


async def goodput(callers: Sequence[Caller], options: argparse.Namespace) -> list[Comparison]:
    """The best rate of each, in turns; a turn is a whole search."""
    prompt = words if options.text else ids

    async def best(caller: Caller, seeds: Iterator[int]) -> float:
        async with asked(caller):
            return await best_rate(caller, options.seconds, prompt, seeds)

    turns = {each.name: partial(best, each, itertools.count()) for each in callers}
    return [Comparison("goodput", "requests/s", await take_turns(turns, options.turns, warm_up=0))]


def parse_url(text: str) -> tuple[str, str]:
    """(name, URL) of [NAME=]URL."""
    name, _, url = text.rpartition("=")
    return name or urlsplit(url).netloc, url.rstrip("/")


async def measure(options: argparse.Namespace) -> list[Comparison]:
    """Ask everybody."""
    async with AsyncExitStack() as stack:
        callers = []
        for name, url in options.urls:
            caller = await stack.enter_async_context(http_caller(url, name, ignore_eos=not options.eos))
            callers.append(caller if url == options.own else replace(caller, processes=processes_at(url)))
        if options.grpc:
            callers.append(await stack.enter_async_context(grpc_caller(options.grpc)))
        stack.enter_context(still([process for each in callers for process in each.processes]))
        return await (goodput if options.goodput else loads)(callers, options)


def read_flags(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="*", type=parse_url, metavar="[NAME=]URL", help="servers; default: one of its own")
    parser.add_argument("--grpc", metavar="HOST:PORT", help="Attend's gRPC address, which takes part too")
    parser.add_argument("--shape", choices=SHAPES, help="with a server of its own on this model, beside the URLs")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 16, 32, 64, 256], help="default 1 8 16 32 64 256")
    parser.add_argument("--rounds", type=int, default=2, help="requests of a turn, as a multiple of those at once (default 2)")
    parser.add_argument("--turns", type=int, default=6, help="turns of each server (default 6)")
    parser.add_argument("--text", action="store_true", help="prompts of words, for servers that take no token ids")
    parser.add_argument("--eos", action="store_true", help="let answers end by themselves, for servers without ignore_eos")
    parser.add_argument("--goodput", action="store_true", help="search the highest rate that keeps the service level")
    parser.add_argument("--seconds", type=float, default=20.0, help="arrivals of one trial of --goodput (default 20)")
    parser.add_argument("--json", type=Path, help="write the figures here too, with every value")
    return parser.parse_args(arguments)


def cells(found: Sequence[Comparison]) -> Iterator[Sequence[str]]:
    """The table: each load and measure, the medians, and the first over each other one."""
    names = list(found[0].values)
    yield ("what", "unit", *names, *(f"{names[0]} / {name}" for name in names[1:]))
    for each in found:
        yield (each.what, each.unit, *each.cells())


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    options = read_flags(arguments)
    options.own = None
    with ExitStack() as stack:
        if options.shape or not options.urls:
            FOLDER.mkdir(exist_ok=True)
            flags = [str(write_shape(options.shape))] if options.shape else []
            try:
                address = stack.enter_context(served(FOLDER / "serve.log", flags))
            except StartError as error:
                sys.exit(str(error))
            options.own = address.http
            options.urls, options.grpc = [("HTTP", address.http), *options.urls], address.grpc
        found = asyncio.run(measure(options))
    head, *rows = cells(found)
    figures = [figure for each in found for figure in each.figures()]
    servers = dict(options.urls) | ({"gRPC": options.grpc} if options.grpc else {})
    file(options.json, table(head, rows), figures, bench="serve", servers=servers)


if __name__ == "__main__":
    main()
