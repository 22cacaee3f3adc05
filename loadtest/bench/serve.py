"""Throughput, TTFT and inter-token time of servers, side by side: attend bench serve [[NAME=]URL ...] [--grpc HOST:PORT]

Each URL is a server that speaks OpenAI's protocol, and --start NAME=COMMAND one that is started here. They take turns, each
turn prompts of --prompt tokens and answers of 128, so many at once; all servers get the same prompts. Without any, or with
--shape or --model, an Attend takes part over HTTP, first of all, and over gRPC.

    attend bench serve --model M.gguf --single --start "llama.cpp=llama-cpp-server -m M.gguf --port {port}" --prompt 128 1024

Server and client share this machine. The servers of --start stand still (SIGSTOP) while another one is asked: what spins for
the next request would take the others' cores. Attend's own rests without that, and so must those of the URLs.

Each turn is told on standard error; a row is printed and filed when its turns are over, or when the run is ended.
"""

import argparse
import asyncio
import itertools
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from attend.model.shapes import SHAPES
from loadtest.bench.client import Caller, Prompts, closed_loop, grpc_caller, http_caller
from loadtest.bench.contestant import FORMS
from loadtest.bench.figures import Comparison, Report, options_of, take_turns
from loadtest.bench.running import Running, answering, parse_command
from loadtest.bench.shapes import FILES, FOLDER, OUTPUT, PROMPT, shape, write_shape
from loadtest.measures import total
from loadtest.options import add_seed
from loadtest.provenance import identity
from loadtest.server import Server, StartError, memory, serve_command
from loadtest.stream import ITL, REFUSED, TOTAL, TTFT


class Load(NamedTuple):
    """What one turn at one load gave; milliseconds. `memory`: MiB after it, where it is known."""

    speed: float
    first: float
    late: float
    gap: float
    failed: float
    memory: float | None


class Contender(NamedTuple):
    """Somebody who is asked, and the prompts for them."""

    caller: Caller
    prompts: Prompts
    server: Server | None = None
    """The server that stands still but for its turns."""


SETTLE_SECONDS = 1.0
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
    caller = contender.caller
    prompts = [contender.prompts.ids(length) for _ in range(at_once * rounds)]
    async with awake(contender.server):
        rows, seconds = await closed_loop(caller, at_once, prompts, OUTPUT)
    answers, first, gap = (total(rows, measure) for measure in (TOTAL, TTFT, ITL))
    failed = answers.failures + total(rows, REFUSED).count
    p50, p95, p99 = (times.percentile(percent) or 0.0 for times, percent in ((first, 50), (first, 95), (gap, 99)))
    return Load(answers.tokens / seconds, p50, p95, p99, failed, caller.memory() if caller.memory else None)


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
            if values:
                ordered = {each: values[each] for each in names if each in values}
                found = [one for at in range(len(MEASURES)) if (one := comparison_of(name, ordered, at)).values]
                report.add([figure for each in found for figure in each.figures()], [cells(each, names) for each in found])


def comparison_of(load: str, values: Mapping[str, Sequence[Load]], at: int) -> Comparison:
    """One of MEASURES at one load, of those of whom it is known."""
    what, unit = MEASURES[at]
    columns = {name: [turn[at] for turn in turns] for name, turns in values.items()}
    known = {name: [float(each) for each in column if each is not None] for name, column in columns.items()}
    return Comparison(load + what, unit, {name: column for name, column in known.items() if column})


def parse_url(text: str) -> tuple[str, str]:
    """(name, URL) of [NAME=]URL."""
    name, _, url = text.rpartition("=")
    return name or urlsplit(url).netloc, url.rstrip("/")


async def measure(options: argparse.Namespace, running: Mapping[str, Running]) -> None:
    """Ask everybody, and report. `running`: those who were started here, by URL."""
    servers = {name: identity(url) for name, url in options.urls}
    async with AsyncExitStack() as stack:
        everybody: list[Contender] = []

        def add(caller: Caller, server: Server | None = None) -> None:
            # the same prompts for all over HTTP; gRPC's are others, since its server is one of them
            everybody.append(Contender(caller, Prompts(f"{options.seed} {caller.transport}"), server))

        for name, url in options.urls:
            caller = await stack.enter_async_context(http_caller(url, name, do_sample=options.sampled))
            server = running[url].server if url in running else None
            if server:
                caller = replace(caller, memory=partial(memory_of, server))
            stopped = server if url != options.own else None
            if stopped:
                send(stopped, signal.SIGSTOP)
                stack.callback(send, stopped, signal.SIGCONT)
            add(caller, stopped)
        if options.grpc:
            add(await stack.enter_async_context(grpc_caller(options.grpc, do_sample=options.sampled)))
        names = [each.caller.name for each in everybody]
        head = ("what", "unit", *names, *(f"{names[0]} / {name}" for name in names[1:]))
        report = Report(options.json, head, bench="serve", seed=options.seed, servers=servers)
        if running:
            seconds = {one.name: [one.seconds] for one in running.values()}
            starts = Comparison("the command to the first token", "s", seconds)
            report.add(starts.figures(), [cells(starts, names)])
        await loads(everybody, options, report)


def memory_of(server: Server) -> float:
    """MiB of the processes as they are now."""
    return memory(server.processes())


def read_flags(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = options_of(__doc__, turns=6)
    parser.add_argument("urls", nargs="*", type=parse_url, metavar="[NAME=]URL", help="servers; default: one of its own")
    parser.add_argument("--grpc", metavar="HOST:PORT", help="Attend's gRPC address, which takes part too")
    own = parser.add_mutually_exclusive_group()
    own.add_argument("--shape", type=shape, help=f"with an Attend of its own on one of {', '.join(SHAPES)}, beside the URLs")
    parser.add_argument("--weights", choices=FORMS, default="bf16", help="those of --shape (default bf16)")
    own.add_argument("--model", help="the same on a checkpoint: a folder or a GGUF file")
    parser.add_argument("--single", action="store_true", help="the Attend of its own is one process without Ray")
    parser.add_argument(
        "--start",
        action="append",
        default=[],
        type=parse_command,
        metavar="NAME=COMMAND",
        help="a server that is started here, on {port} of 127.0.0.1; its time to the first token counts too",
    )
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 16, 32, 64, 256], help="default 1 8 16 32 64 256")
    parser.add_argument("--prompt", type=int, nargs="+", default=[PROMPT], help=f"tokens of a prompt (default {PROMPT})")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.7 and top_p 0.95, instead of greedy answers")
    parser.add_argument("--rounds", type=int, default=2, help="requests of a turn, as a multiple of those at once (default 2)")
    add_seed(parser)
    return parser.parse_args(arguments)


def cells(comparison: Comparison, names: Sequence[str]) -> Sequence[str]:
    """A row: a measure at a load, the medians of all, and the first over each other one."""
    medians = [f"{comparison.figure(name).median:.4g}" if name in comparison.values else "" for name in names]
    others = comparison.others() if names[0] in comparison.values else []
    ratios = [comparison.ratio(name).short() if name in others else "" for name in names[1:]]
    return (comparison.what, comparison.unit, *medians, *ratios)


def start(stack: ExitStack, commands: Sequence[tuple[str, list[str]]]) -> list[Running]:
    """A server of each command. Raises StartError."""
    logs = (FOLDER / f"serve-{at}.log" for at in itertools.count())
    return [stack.enter_context(answering(name, command, log)) for (name, command), log in zip(commands, logs, strict=False)]


def own_command(options: argparse.Namespace) -> list[str]:
    """That of the Attend of its own."""
    model = [options.model] if options.model else []
    if options.shape:
        model = [str(write_shape(options.shape, options.weights if options.weights in FILES else "bf16"))]
        model += ["--quantize", options.weights] if options.weights.startswith("int") else []
    return serve_command(*model, *(["--single"] if options.single else []))


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    options = read_flags(arguments)
    options.own = None
    FOLDER.mkdir(exist_ok=True)
    is_own = options.shape or options.model or not (options.urls or options.start)
    commands = [*([("HTTP", own_command(options))] if is_own else []), *options.start]
    with ExitStack() as stack:
        try:
            running = start(stack, commands)
        except StartError as error:
            sys.exit(str(error))
        if is_own:
            options.own, options.grpc = running[0].url, running[0].grpc
        options.urls = [*((one.name, one.url) for one in running), *options.urls]
        asyncio.run(measure(options, {one.url: one for one in running}))


if __name__ == "__main__":
    main()
