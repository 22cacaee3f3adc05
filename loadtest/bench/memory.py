"""Whether memory grows with the requests that were answered: attend bench memory

A server of its own answers them in parts, half over HTTP and half over gRPC. After each part the resident memory of its
replica, and of all its processes, is read; the table shows how much a part of requests added. The first parts warm up
and do not count.
"""

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise

import psutil

from attend.model.shapes import SHAPES
from loadtest.bench.client import Prompts, closed_loop, grpc_caller, http_caller
from loadtest.bench.figures import Figure, file, options_of, show
from loadtest.bench.shapes import FOLDER, write_shape
from loadtest.measures import total
from loadtest.server import Server, serve_command, start_server, wait_ready
from loadtest.stream import REFUSED, TOTAL

PROMPT, OUTPUT = 64, 16
WARM_UP = 4
"""Parts: buffers of the allocators grow until each has met its largest load."""


def resident(server: Server) -> tuple[float, float]:
    """MiB of the largest process of a server, which is its replica, and of all of them."""
    sizes = []
    for process in server.processes():
        try:
            sizes.append(process.memory_info().rss / (1 << 20))
        except psutil.NoSuchProcess:
            continue
    return max(sizes), sum(sizes)


async def ask(server: Server, parts: int, part: int, at_once: int) -> tuple[list[tuple[float, float]], int]:
    """Memory after each part, and how many requests failed."""
    found, failed, prompts = [], 0, Prompts()
    async with AsyncExitStack() as stack:
        callers = [
            await stack.enter_async_context(http_caller(server.address.http)),
            await stack.enter_async_context(grpc_caller(server.address.grpc)),
        ]
        for _ in range(WARM_UP + parts):
            for caller in callers:
                rows, _ = await closed_loop(caller, at_once, [prompts.ids(PROMPT) for _ in range(part // 2)], OUTPUT)
                failed += total(rows, TOTAL).failures + total(rows, REFUSED).count
            found.append(resident(server))
    return found[WARM_UP - 1 :], failed


def main(words: list[str] | None = None) -> None:
    """Ask, print the table."""
    parser = options_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="random weights instead of the default model")
    parser.add_argument("--parts", type=int, default=20, help="default 20")
    parser.add_argument("--part", type=int, default=500, help="requests of a part (default 500)")
    parser.add_argument("--at-once", type=int, default=32, help="default 32")
    options = parser.parse_args(words)
    FOLDER.mkdir(exist_ok=True)
    flags = [str(write_shape(options.shape))] if options.shape else []
    log = FOLDER / "memory.log"
    with log.open("wb") as output, start_server(serve_command(*flags), output) as server:
        wait_ready(server, log)
        found, failed = asyncio.run(ask(server, options.parts, options.part, options.at_once))
    figures = [Figure(f"failed of {options.parts * options.part} requests", "requests", (float(failed),))]
    for name, sizes in zip(("the replica", "all processes"), zip(*found, strict=True), strict=True):
        added = [(after - before) * 1024 for before, after in pairwise(sizes)]
        figures.append(Figure(f"{name}, at the end", "MiB", (sizes[-1],)))
        figures.append(Figure(f"{name}, added by {options.part} requests", "KiB", tuple(added)))
        figures.append(Figure(f"{name}, added by all {options.parts * options.part}", "KiB", (sum(added),)))
    file(options.json, show(figures), figures, bench="memory")


if __name__ == "__main__":
    main()
