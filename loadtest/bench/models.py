"""Overhead of the server of several models beside the model's own process, and a model's load: attend bench models

Both ways lead to the same process: through the server's port, and directly to the process's own socket.
"""

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from loadtest.bench.client import Caller, closed_loop, grpc_caller, http_caller
from loadtest.bench.figures import Comparison, Figure, file, options_of, show, take_turns
from loadtest.measures import total
from loadtest.server import Server, serve_command, start_server, wait_ready
from loadtest.stream import TOTAL, TTFT

PROMPT, STREAMS, FIRSTS = "def fibonacci(n):", 16, 20


class Turn(NamedTuple):
    """What one turn of one way gave."""

    first: float
    """Median milliseconds to the first token of streams one by one."""
    rate: float
    """Tokens/s of STREAMS at once."""
    cores: float
    """That the server itself took for them."""


async def turn(caller: Caller, server: psutil.Process, tokens: int) -> Turn:
    """One measurement of one way."""
    rows, _ = await closed_loop(caller, 1, [PROMPT] * FIRSTS, 1)
    first = total(rows, TTFT).percentile(50)
    before = server.cpu_times()
    rows, seconds = await closed_loop(caller, STREAMS, [PROMPT] * STREAMS, tokens)
    after, answers = server.cpu_times(), total(rows, TOTAL)
    assert first is not None and not answers.failures, answers
    cores = (after.user + after.system - before.user - before.system) / seconds
    return Turn(first, answers.tokens / seconds, cores)


async def measure(server: Server, folder: Path, turns: int, tokens: int) -> list[Figure]:
    """Every figure of a server that serves one model under the name `a`."""
    async with AsyncExitStack() as stack:
        through = await stack.enter_async_context(http_caller(server.address.http))
        began = time.perf_counter()
        await closed_loop(through, 1, [PROMPT], 1)
        figures = [Figure("a first call, whose model loads", "s", (time.perf_counter() - began,))]
        sockets = sockets_in(folder)
        callers = [through, await stack.enter_async_context(http_caller("http://localhost", socket=str(sockets / "http")))]
        for target in (server.address.grpc, f"unix:{sockets / 'grpc'}"):
            callers.append(await stack.enter_async_context(grpc_caller(target, model="a")))
        for two in (callers[:2], callers[2:]):
            ways = dict(zip(("through", "direct"), two, strict=True))
            one = psutil.Process(server.process.pid)
            found = await take_turns({name: partial(turn, each, one, tokens) for name, each in ways.items()}, turns)
            figures += figures_of(two[0].name, found)
    return figures


def sockets_in(folder: Path) -> Path:
    """The folder of the sockets of the server's one process."""
    [http] = folder.glob("attend-models-*/*/http")
    return http.parent


def figures_of(transport: str, turns: dict[str, list[Turn]]) -> list[Figure]:
    """The figures of one transport."""
    firsts = {name: [each.first for each in values] for name, values in turns.items()}
    rates = {name: [each.rate for each in values] for name, values in turns.items()}
    cores = tuple(each.cores for each in turns["through"])
    return [
        *Comparison(f"{transport}: TTFT of a stream alone", "ms", firsts).figures(),
        *Comparison(f"{transport}: {STREAMS} streams", "tokens/s", rates).figures(),
        Figure(f"{transport}: the server itself, {STREAMS} streams through it", "cores", cores),
    ]


def run(model: str, flags: list[str], turns: int, tokens: int) -> list[Figure]:
    """Start a server of one model, and measure. Raises StartError."""
    with tempfile.TemporaryDirectory(prefix="attend-bench-") as name:
        folder = Path(name)
        models, log = folder / "models.yaml", folder / "log"
        models.write_text(f"idle_seconds: 0\nmodels:\n- {{name: a, model: '{model}'}}\n", encoding="utf-8")
        command = serve_command("--models", str(models), *flags)
        with log.open("wb") as output, start_server(command, output, {"TMPDIR": name}) as server:
            wait_ready(server, log)
            return asyncio.run(measure(server, folder, turns, tokens))


def main(words: list[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    parser = options_of(__doc__, turns=7)
    parser.add_argument("--model", default="", help="checkpoint folder or GGUF file; default: the shipped model")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each stream (default 256)")
    parser.add_argument("flags", nargs="*", help="further flags of `attend serve`, behind --")
    options = parser.parse_args(words)
    figures = run(options.model, options.flags, options.turns, options.tokens)
    file(options.json, show(figures), figures, bench="models")


if __name__ == "__main__":
    main()
