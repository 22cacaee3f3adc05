"""Throughput with the values of one engine option side by side: attend bench option deterministic true false

The default model in bfloat16, 16 requests of 128 -> 128 tokens, greedy and sampled. The table shows the first value over each
other one. Options are the fields of `EngineOptions`.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attend.model.config import DEFAULT_MODEL
from attend.model.engine.build import build_engine
from attend.model.engine.loop import AsyncEngine
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import Request
from attend.model.params import SamplingParams
from loadtest.bench.figures import Comparison, Report, options_of, report_each, take_turns
from loadtest.bench.machine import threads

AT_ONCE, PROMPT, OUTPUT = 16, 128, 128
PROMPTS = [[100 + at] * PROMPT for at in range(AT_ONCE)]


async def speed(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], temperature: float, owners: Sequence[str] = (), seed: int = 0
) -> float:
    """Output tokens/s of all prompts at once. `owners`: one of each request; none are one. `seed`: that of the first."""
    sampling = SamplingParams(temperature=temperature)
    requests = [Request(f"{at}", prompt, OUTPUT, sampling, seed=seed + at) for at, prompt in enumerate(prompts)]
    for request, owner in zip(requests, owners, strict=False):
        request.owner = owner
    started = time.perf_counter()
    async for _ in engine.generate(requests):
        pass
    return len(prompts) * OUTPUT / (time.perf_counter() - started)


def default_model(folder: Path = DEFAULT_MODEL, **options: Any) -> AsyncEngine:
    """The default model, or another one, in bfloat16, without a prefix cache, and started."""
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "num_threads": threads(),
        "kv_cache_memory": 1 << 28,
        "prefix_caching": False,
    }
    engine = build_engine(folder, EngineOptions(**settings | options))
    engine.start()
    return engine


async def measure(engines: dict[str, AsyncEngine], turns: int) -> AsyncIterator[Comparison]:
    """Greedy and sampled; the engines take turns."""
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        contestants = {value: partial(speed, engine, PROMPTS, temperature) for value, engine in engines.items()}
        yield Comparison(f"{AT_ONCE} requests, {name}", "tokens/s", await take_turns(contestants, turns))


def parse(text: str) -> Any:
    """JSON, or else a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main(words: list[str] | None = None) -> None:
    """Read the flags, print the table."""
    parser = options_of(__doc__, turns=7)
    parser.add_argument(
        "option", choices=EngineOptions.__dataclass_fields__, metavar="option", help="a field of `EngineOptions`"
    )
    parser.add_argument("values", nargs="+", type=parse, help="its values, as true, 64 or native")
    options = parser.parse_args(words)
    torch.set_num_threads(threads())
    engines = {f"{options.option} {value}": default_model(**{options.option: value}) for value in options.values}
    asyncio.run(report_each(measure(engines, options.turns), Report(options.json, bench="option")))
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
