"""Throughput, TTFT and inter-token time of servers, side by side: attend bench serve [--start NAME=COMMAND] [[NAME=]URL ...]

Each URL is a server that speaks OpenAI's protocol, and --start NAME=COMMAND one that is started here, on {port}; with {grpc} in
the command it is an Attend that is asked over gRPC too. They take turns, each turn prompts of --prompt tokens and answers of
128, so many at once; all servers get the same prompts. The first is divided by each other one.

    attend bench serve --start "Attend=attend serve --single M.gguf --port {port} --grpc-port {grpc}" \\
        --start "llama.cpp=llama-cpp-server -m M.gguf --port {port}" --prompt 128 1024

Server and client share this machine. The servers of --start stand still (SIGSTOP) while another one is asked: what spins for
the next request would take the others' cores. Those of the URLs must rest by themselves.

Each turn is told on standard error; a row is printed and filed when its turns are over, or when the run is ended.
"""

import argparse
import asyncio
import itertools
import shlex
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from loadtest.bench.client import Caller, Prompts, closed_loop, grpc_caller, http_caller
from loadtest.bench.figures import Comparison, Report, options_of, take_turns
from loadtest.bench.shapes import FOLDER, OUTPUT, PROMPT
from loadtest.measures import total
from loadtest.options import add_seed
from loadtest.provenance import identity
from loadtest.server import START_SECONDS, Server, StartError, memory, start_server
from loadtest.stream import ITL, REFUSED, TOTAL, TTFT


class Load(NamedTuple):
    """What one turn at one load gave; milliseconds. `memory`: MiB after it, where it is known."""

    speed: float
    first: float
    late: float
    gap: float
    failed: float
    memory: float | None


@dataclass(frozen=True, slots=True)
class Running:
    """A server: one that was started here, which stands still but for its turns, with the seconds to its first token."""

    name: str
    url: str
    server: Server | None = None
    seconds: float = 0.0
    grpc: str | None = None


class Contender(NamedTuple):
    """Somebody who is asked over one transport, and the prompts for them."""

    caller: Caller
    prompts: Prompts
    server: Server | None


SETTLE_SECONDS, PAUSE = 1.0, 0.05
ONE_TOKEN = b'{"prompt":"a","max_tokens":1}'
MEASURES = (
    ("output", "tokens/s"),
    ("TTFT p50", "ms"),
    ("TTFT p95", "ms"),
    ("inter-token p99", "ms"),
    ("failed or refused", "requests"),
    ("memory", "MiB"),
)


def send(server: Server, number: signal.Signals) -> None:
    """A signal to each process of a server that is still there."""
    for process in server.processes():
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@asynccontextmanager
async def awake(server: Server | None) -> AsyncIterator[None]:
    """The server runs for the length of the block, with time to end the connections that it kept, and stands still after it."""
    if server is None:
        yield
        return
    send(server, signal.SIGCONT)
    try:
        await asyncio.sleep(SETTLE_SECONDS)
        yield
    finally:
        send(server, signal.SIGSTOP)


async def load(contender: Contender, at_once: int, rounds: int, length: int) -> Load:
    """One turn of one server, with prompts of so many tokens."""
    caller, server = contender.caller, contender.server
    prompts = [contender.prompts.ids(length) for _ in range(at_once * rounds)]
    async with awake(server):
        rows, seconds = await closed_loop(caller, at_once, prompts, OUTPUT)
    answers, first, gap = (total(rows, measure) for measure in (TOTAL, TTFT, ITL))
    failed = answers.failures + total(rows, REFUSED).count
    p50, p95, p99 = (times.percentile(percent) or 0.0 for times, percent in ((first, 50), (first, 95), (gap, 99)))
    return Load(answers.tokens / seconds, p50, p95, p99, failed, memory(server.processes()) if server else None)


async def loads(everybody: Sequence[Contender], options: argparse.Namespace, report: Report) -> None:
    """Every load, one after the other, with the callers in turns; what an end in the middle leaves is reported too."""
    names = [each.caller.name for each in everybody]
    for length, at_once in itertools.product(options.prompt, options.at_once):
        turns = {each.caller.name: partial(load, each, at_once, options.rounds, length) for each in everybody}
        name = f"{at_once} at once, " if len(options.prompt) == 1 else f"prompts of {length}, {at_once} at once, "
        values: dict[str, list[Load]] = {}
        try:
            await take_turns(turns, options.turns, values=values, show=lambda one: f"{name}{one.speed:.4g} tokens/s")  # noqa: B023
        finally:
            if values.keys() == turns.keys():
                ordered = {each: values[each] for each in names}
                found = [one for at in range(len(MEASURES)) if (one := comparison_of(name, ordered, at)).values]
                report.add([figure for each in found for figure in each.figures()], [cells(each, names) for each in found])


def comparison_of(load: str, values: Mapping[str, Sequence[Load]], at: int) -> Comparison:
    """One of MEASURES at one load, of those of whom it is known."""
    what, unit = MEASURES[at]
    columns = {name: [turn[at] for turn in turns] for name, turns in values.items()}
    known = {name: [float(each) for each in column if each is not None] for name, column in columns.items()}
    return Comparison(load + what, unit, {name: column for name, column in known.items() if column})


def cells(comparison: Comparison, names: Sequence[str]) -> Sequence[str]:
    """A row: a measure at a load, the medians of all, and the first over each other one."""
    medians = [f"{comparison.figure(name).median:.4g}" if name in comparison.values else "" for name in names]
    ratios = [comparison.ratio(name).short() if name in comparison.others() else "" for name in names[1:]]
    return (comparison.what, comparison.unit, *medians, *ratios)


async def measure(options: argparse.Namespace, running: Sequence[Running]) -> None:
    """Ask everybody, and report."""
    servers = {one.name: identity(one.url) for one in running}
    async with AsyncExitStack() as stack:
        everybody: list[Contender] = []
        for one in running:
            asked = [http_caller(one.url, one.name, do_sample=options.sampled)]
            asked += [grpc_caller(one.grpc, f"{one.name} gRPC", do_sample=options.sampled)] if one.grpc else []
            for each in asked:
                caller = await stack.enter_async_context(each)
                # the same prompts for all over HTTP; gRPC's are others, since its server is one of them
                everybody.append(Contender(caller, Prompts(f"{options.seed} {caller.transport}"), one.server))
            if one.server:
                send(one.server, signal.SIGSTOP)
                stack.callback(send, one.server, signal.SIGCONT)
        names = [each.caller.name for each in everybody]
        head = ("what", "unit", *names, *(f"{names[0]} / {name}" for name in names[1:]))
        report = Report(options.json, head, bench="serve", seed=options.seed, servers=servers)
        if seconds := {one.name: [one.seconds] for one in running if one.server}:
            starts = Comparison("the command to the first token", "s", seconds)
            report.add(starts.figures(), [cells(starts, names)])
        await loads(everybody, options, report)


def parse_url(text: str) -> Running:
    """[NAME=]URL."""
    name, _, url = text.rpartition("=")
    return Running(name or urlsplit(url).netloc, url.rstrip("/"))


def parse_command(text: str) -> tuple[str, list[str]]:
    """(name, words) of NAME=COMMAND. Raises ArgumentTypeError."""
    name, _, command = text.partition("=")
    if not name or "{port}" not in command:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND with {{port}} in the command")
    return name, shlex.split(command)


@contextmanager
def answering(name: str, command: Sequence[str], log: Path) -> Iterator[Running]:
    """A server that has answered. Raises StartError with the last lines of its log. In the main thread only."""
    began = time.monotonic()
    with ExitStack() as stack:
        try:
            server = stack.enter_context(start_server(command, stack.enter_context(log.open("wb"))))
        except StartError as error:
            raise StartError(f"{name}: {error}") from None
        while not _has_answered(server.address.http):
            if server.process.poll() is not None or time.monotonic() - began > START_SECONDS:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
                raise StartError(f"{name}: the server was not ready; the end of {log}:\n{last}")
            time.sleep(PAUSE)
        grpc = server.address.grpc if any("{grpc}" in word for word in command) else None
        yield Running(name, server.address.http, server, time.monotonic() - began, grpc)


def _has_answered(url: str) -> bool:
    """True if one token came."""
    asked = urllib.request.Request(f"{url}/v1/completions", ONE_TOKEN, {"content-type": "application/json"})
    with suppress(OSError), urllib.request.urlopen(asked, timeout=5) as answer:  # nobody listens yet, or not ready: 503
        answer.read()
        return True
    return False


def read_flags(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = options_of(__doc__, turns=6)
    parser.add_argument("urls", nargs="*", type=parse_url, metavar="[NAME=]URL", help="servers that run")
    about = "a server that is started here; its time to the first token counts too"
    parser.add_argument("--start", action="append", default=[], type=parse_command, metavar="NAME=COMMAND", help=about)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 16, 32, 64, 256], help="default 1 8 16 32 64 256")
    parser.add_argument("--prompt", type=int, nargs="+", default=[PROMPT], help=f"tokens of a prompt (default {PROMPT})")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.7 and top_p 0.95, instead of greedy answers")
    parser.add_argument("--rounds", type=int, default=2, help="requests of a turn, as a multiple of those at once (default 2)")
    add_seed(parser)
    options = parser.parse_args(arguments)
    if not options.urls and not options.start:
        parser.error("name a server: a URL, or --start NAME=COMMAND")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    options = read_flags(arguments)
    FOLDER.mkdir(exist_ok=True)
    with ExitStack() as stack:
        try:
            started = [
                stack.enter_context(answering(name, command, FOLDER / f"serve-{at}.log"))
                for at, (name, command) in enumerate(options.start)
            ]
        except StartError as error:
            sys.exit(str(error))
        asyncio.run(measure(options, [*started, *options.urls]))


if __name__ == "__main__":
    main()
