"""Chunked prefill: inter-token time of running streams while long prompts arrive: attend bench arrivals

In-process: streams decode, greedy, while prompts arrive at random moments. The table shows the inter-token latency (ITL) of
the streams while they do, the same before the first has come, and the time to first token (TTFT) of the prompts. ITL is the
time between two messages: one holds several tokens where steps are short (model/engine/output_coalescer.py).
"""

import asyncio
import itertools
import random
import time
from pathlib import Path

import torch

from attend.model.config import DEFAULT_MODEL
from attend.model.engine.build import build_engine
from attend.model.engine.loop import AsyncEngine
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import FinishReason, Request
from attend.model.params import SamplingParams
from loadtest.bench.figures import Figure, Report, options_of, percentile
from loadtest.bench.machine import Neighbours, threads

STREAMS, PROMPTS, LENGTH, OUTPUT, GAP = 8, 12, 1000, 16, 0.3
"""Running streams; prompts that arrive in a turn, tokens of each and of its answer; mean seconds between two arrivals."""
GREEDY = SamplingParams(temperature=0)
QUIET_SECONDS = 1.0
"""Before the first prompt arrives."""


async def moments(engine: AsyncEngine, name: str, prompt: list[int], output: int) -> list[float]:
    """When the request was sent, and when tokens of it came, one or several together."""
    found = [time.perf_counter()]
    async for outputs in engine.generate([Request(name, prompt, output, GREEDY)]):
        if any(each.token_ids for each in outputs):
            found.append(time.perf_counter())
    return found


async def turn(engine: AsyncEngine, seed: int) -> dict[str, list[float]]:
    """One measurement, in milliseconds by what was measured."""
    dice = random.Random(seed)
    words = [dice.choices(range(100, 8000), k=32) for _ in range(STREAMS)]
    longest = engine.info.max_model_len - 32
    running = [asyncio.create_task(moments(engine, f"s{at}", prompt, longest)) for at, prompt in enumerate(words)]
    await asyncio.sleep(QUIET_SECONDS)
    begun, arriving = time.perf_counter(), []
    for at in range(PROMPTS):
        prompt = dice.choices(range(100, 8000), k=LENGTH)
        arriving.append(asyncio.create_task(moments(engine, f"p{at}", prompt, OUTPUT)))
        await asyncio.sleep(dice.expovariate(1 / GAP))
    firsts = [(found := await each)[1] - found[0] for each in arriving]
    ended = time.perf_counter()
    for at in range(STREAMS):
        engine.abort(f"s{at}", FinishReason.ABORT)
    pairs = [pair for each in running for pair in itertools.pairwise((await each)[1:])]
    return {
        "ITL, no prompts": [(b - a) * 1e3 for a, b in pairs if b <= begun],
        "ITL, prompts arriving": [(b - a) * 1e3 for a, b in pairs if begun < b <= ended],
        "TTFT of an arriving prompt": [each * 1e3 for each in firsts],
    }


def main(words: list[str] | None = None) -> None:
    """Read the flags, print the table."""
    parser = options_of(__doc__, turns=6)
    parser.add_argument(
        "--model", type=Path, default=DEFAULT_MODEL, help="checkpoint folder or GGUF file; default: the shipped one"
    )
    options = parser.parse_args(words)
    torch.set_num_threads(threads())
    engine = build_engine(options.model, EngineOptions(num_threads=threads(), kv_cache_memory=2 << 30, prefix_caching=False))
    engine.start()
    neighbours, found = Neighbours(), []
    with asyncio.Runner() as runner:
        for seed in range(options.turns + 1):
            try:
                found.append(runner.run(turn(engine, seed)))
            except KeyboardInterrupt:
                break  # with the turns that there are
            neighbours.lap()
    engine.close()
    report = Report(options.json, bench="arrivals", model=options.model.name)
    report.add(
        Figure(f"{what}, p{percent}", "ms", tuple(percentile(each[what], percent) for each in found[1:]))
        for what in (found or [{}])[0]
        for percent in (50, 99)
        if found[1:]
    )
    if neighbours.laps:
        print(f"\n{neighbours.sentence()}")


if __name__ == "__main__":
    main()
