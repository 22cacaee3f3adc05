"""What arriving prompts do to running streams, in one process: attend bench arrivals

Streams decode, greedy, while prompts arrive at random moments. The table shows the milliseconds between two messages of a
stream while they do, the same before the first has come, and the milliseconds to the first token of an arriving prompt. A
message holds several tokens where steps are short (model/engine/pace.py).
"""

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from pathlib import Path

import torch

from attend.model.config import DEFAULT_MODEL
from attend.model.engine.build import build_engine
from attend.model.engine.loop import AsyncEngine
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import FinishReason, Request
from attend.model.params import SamplingParams
from loadtest.bench.figures import Figure, file, percentile, show
from loadtest.bench.machine import Neighbours, threads
from loadtest.bench.shapes import SHAPES, write_shape

OUTPUT = 16
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


async def turn(engine: AsyncEngine, seed: int, streams: int, prompts: int, length: int, gap: float) -> dict[str, list[float]]:
    """One measurement, in milliseconds by what was measured."""
    dice = random.Random(seed)
    words = [dice.choices(range(100, 8000), k=32) for _ in range(streams)]
    longest = engine.info.max_model_len - 32
    running = [asyncio.create_task(moments(engine, f"s{at}", prompt, longest)) for at, prompt in enumerate(words)]
    await asyncio.sleep(QUIET_SECONDS)
    begun, arriving = time.perf_counter(), []
    for at in range(prompts):
        prompt = dice.choices(range(100, 8000), k=length)
        arriving.append(asyncio.create_task(moments(engine, f"p{at}", prompt, OUTPUT)))
        await asyncio.sleep(dice.expovariate(1 / gap))
    firsts = [(found := await each)[1] - found[0] for each in arriving]
    ended = time.perf_counter()
    for at in range(streams):
        engine.abort(f"s{at}", FinishReason.ABORT)
    pairs = [pair for each in running for pair in itertools.pairwise((await each)[1:])]
    return {
        "between messages, quiet": [(b - a) * 1e3 for a, b in pairs if b <= begun],
        "between messages, prompts arriving": [(b - a) * 1e3 for a, b in pairs if begun < b <= ended],
        "first token of an arriving prompt": [each * 1e3 for each in firsts],
    }


def main(words: list[str] | None = None) -> None:
    """Read the flags, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["default", *SHAPES], default="default")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=12, help="that arrive in a turn (default 12)")
    parser.add_argument("--length", type=int, default=1000, help="tokens of an arriving prompt (default 1000)")
    parser.add_argument("--gap", type=float, default=0.3, help="mean seconds between two arrivals (default 0.3)")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "attend-shapes", help="for the checkpoints"
    )
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(words)
    checkpoint = DEFAULT_MODEL if options.model == "default" else write_shape(options.model, options.folder)
    torch.set_num_threads(threads())
    engine = build_engine(checkpoint, EngineOptions(num_threads=threads(), kv_cache_memory=2 << 30, prefix_caching=False))
    engine.start()
    neighbours, found = Neighbours(), []
    with asyncio.Runner() as runner:
        for seed in range(options.turns + 1):
            found.append(runner.run(turn(engine, seed, options.streams, options.prompts, options.length, options.gap)))
            neighbours.lap()
    engine.close()
    figures = [
        Figure(f"{what}, p{percent}", "ms", tuple(percentile(each[what], percent) for each in found[1:]))
        for what in found[0]
        for percent in (50, 99)
    ]
    file(options.json, f"{show(figures)}\n\n{neighbours.sentence()}", figures, bench="arrivals", model=options.model)


if __name__ == "__main__":
    main()
