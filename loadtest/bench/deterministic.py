"""What the deterministic mode costs: the default model in bfloat16 with it and without, 16 requests of 128 -> 128 tokens."""

import argparse
import asyncio
import time
from functools import partial
from pathlib import Path

import torch

from loadtest.bench.figures import Comparison, file, show, take_turns
from loadtest.bench.machine import threads
from model.config import DEFAULT_MODEL
from model.engine.build import EngineOptions, build_engine
from model.engine.loop import AsyncEngine
from model.engine.request import Request
from model.params import SamplingParams

AT_ONCE, PROMPT, OUTPUT = 16, 128, 128


async def at_once(engine: AsyncEngine, temperature: float) -> float:
    """Output tokens/s of all requests."""
    sampling = SamplingParams(temperature=temperature)
    prompts = [[100 + at] * PROMPT for at in range(AT_ONCE)]
    requests = [Request(f"{at}", prompt, OUTPUT, sampling, seed=at) for at, prompt in enumerate(prompts)]
    started = time.perf_counter()
    async for _ in engine.generate(requests):
        pass
    return AT_ONCE * OUTPUT / (time.perf_counter() - started)


async def measure(engines: dict[str, AsyncEngine], turns: int) -> list[Comparison]:
    """Greedy and drawn; the engines take turns."""
    found = []
    for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        contestants = {mode: partial(at_once, engine, temperature) for mode, engine in engines.items()}
        found.append(Comparison(f"{AT_ONCE} requests, {name}", "tokens/s", await take_turns(contestants, turns)))
    return found


def main(words: list[str] | None = None) -> None:
    """Read the flags, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(words)
    torch.set_num_threads(threads())
    modes = {"free": False, "deterministic": True}
    settings = {"dtype": "bfloat16", "num_threads": threads(), "kv_cache_memory": 1 << 28, "prefix_caching": False}
    engines = {name: build_engine(DEFAULT_MODEL, EngineOptions(**settings, deterministic=mode)) for name, mode in modes.items()}
    for engine in engines.values():
        engine.start()
    found = asyncio.run(measure(engines, options.turns))
    for engine in engines.values():
        engine.close()
    figures = [figure for each in found for figure in (*map(each.figure, modes), each.ratio("deterministic"))]
    file(options.json, show(figures), figures, bench="deterministic")


if __name__ == "__main__":
    main()
