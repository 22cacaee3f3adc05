"""One process without Ray beside Ray Serve, both with the default model: attend bench single

Each turn starts either server, reads the memory of its processes (shared pages counted once), asks it for streams over both
transports, and stops it with SIGINT. The table shows both, and the first over the second.
"""

import asyncio
import signal
import sys
from collections import defaultdict
from contextlib import AsyncExitStack

from loadtest.bench.client import Prompts, closed_loop, grpc_caller, http_caller
from loadtest.bench.figures import Comparison, file, options_of, show
from loadtest.bench.running import answering
from loadtest.bench.shapes import FOLDER
from loadtest.measures import total
from loadtest.server import Address, StartError, memory, serve_command, wait_ready
from loadtest.stream import REFUSED, TOTAL

KINDS: dict[str, tuple[str, ...]] = {"single": ("--single",), "Ray": ()}
AT_ONCE = (1, 16, 64)
PROMPT, OUTPUT, STREAMS, WARM_UP = 64, 64, 4, 8
"""Tokens of a prompt and of an answer; answers one after another of each caller; calls before they count."""
Samples = dict[tuple[str, str], list[float]]
"""(what, unit) -> a value for each turn."""


async def speeds(address: Address, samples: Samples) -> None:
    """Tokens/s of streams over both transports, put into `samples`. The first calls of each warm up. Raises StartError."""
    prompts = Prompts()
    async with AsyncExitStack() as stack:
        for caller in (
            await stack.enter_async_context(http_caller(address.http)),
            await stack.enter_async_context(grpc_caller(address.grpc)),
        ):
            await closed_loop(caller, 1, [prompts.ids(PROMPT)] * WARM_UP, OUTPUT)
            for at_once in AT_ONCE:
                count = at_once * STREAMS
                rows, seconds = await closed_loop(caller, at_once, [prompts.ids(PROMPT) for _ in range(count)], OUTPUT)
                if total(rows, TOTAL).failures or total(rows, REFUSED).count:
                    raise StartError(f"calls over {caller.name} failed")
                samples[f"{caller.name}, {at_once} at once", "tokens/s"].append(count * OUTPUT / seconds)


def turn(kind: str, samples: Samples) -> None:
    """What one server takes and gives, from its start to its end. Raises StartError."""
    log = FOLDER / f"{kind}.log"
    with answering(kind, serve_command(*KINDS[kind]), log) as one:
        samples["the command to the first token", "s"].append(one.seconds)
        wait_ready(one.server, log)
        asyncio.run(speeds(one.server.address, samples))
        samples["memory after that", "MiB"].append(memory(one.server.processes()))
        samples["Ctrl-C to the end of every process", "s"].append(one.server.stop(signal.SIGINT))


def main(words: list[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    parser = options_of(__doc__, turns=3)
    options = parser.parse_args(words)
    FOLDER.mkdir(exist_ok=True)
    found: dict[str, Samples] = {kind: defaultdict(list) for kind in KINDS}
    try:
        for _ in range(options.turns):
            for kind in KINDS:
                turn(kind, found[kind])
    except StartError as error:
        sys.exit(str(error))
    pairs = [Comparison(*what, {kind: found[kind][what] for kind in KINDS}) for what in found["single"]]
    figures = [figure for pair in pairs for figure in pair.figures()]
    file(options.json, show(figures), figures, bench="single")


if __name__ == "__main__":
    main()
