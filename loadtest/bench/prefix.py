"""Prefix caching: TTFT with a cached prefix and without: attend bench prefix

In-process: two prompts with the same prefix, one after the other; the second finds the first one's blocks. The table shows the
time to first token (TTFT) of each, and cached over cold. With --restart a third prompt comes after the engine was drained and
built again, and finds the blocks on disk (KV offloading).
"""

import asyncio
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from attend.model.engine.build import build_engine
from attend.model.engine.loop import AsyncEngine
from attend.model.engine.options import EngineOptions
from loadtest.bench.arrivals import moments
from loadtest.bench.figures import Comparison, Report, options_of, take_turns
from loadtest.bench.machine import threads
from loadtest.bench.shapes import write_shape

OWN = 16
"""Tokens that a prompt has for itself, after the shared prefix."""


class Pair:
    """Prompts in pairs with the same prefix, another one for each pair."""

    def __init__(self, engine: AsyncEngine, num_shared: int) -> None:
        self.engine = engine
        self._num_shared = num_shared
        self._dice = random.Random(0)
        self._asked = 0
        self._prefix: list[int] = []

    async def cold(self) -> float:
        """Milliseconds to the first token after a prefix that nobody has sent."""
        self._prefix = self._dice.choices(range(100, 8000), k=self._num_shared)
        return await self._first_token()

    async def cached_ttft(self) -> float:
        """The same after the prefix of the last prompt."""
        return await self._first_token()

    async def _first_token(self) -> float:
        self._asked += 1
        prompt = self._prefix + self._dice.choices(range(100, 8000), k=OWN)
        asked, first = await moments(self.engine, f"{self._asked}", prompt, output=1)
        return (first - asked) * 1e3


async def measure(
    engine: AsyncEngine, num_shared: int, turns: int, rebuild: Callable[[], AsyncEngine] | None = None
) -> Comparison:
    """The cached prefix, and the cold one, turn by turn. `rebuild` builds the engine again, for one more each turn."""
    pair = Pair(engine, num_shared)

    async def each() -> tuple[float, ...]:
        cold = await pair.cold()
        cached = await pair.cached_ttft()
        if rebuild is None:
            return cached, cold
        await pair.engine.drain(0)
        pair.engine.close()
        pair.engine = rebuild()
        return await pair.cached_ttft(), cached, cold

    found = zip(*(await take_turns({"each": each}, turns, warm_up=int(rebuild is None)))["each"], strict=True)
    names = ("after a restart", "cached", "cold")[0 if rebuild else 1 :]
    pair.engine.close()
    return Comparison(f"TTFT, {num_shared} shared tokens", "ms", dict(zip(names, found, strict=True)))


def main(words: list[str] | None = None) -> None:
    """Read the flags, print the table."""
    parser = options_of(__doc__, turns=20)
    parser.add_argument("--shared", type=int, default=1024, help="tokens of the prefix (default 1024)")
    parser.add_argument("--model", type=Path, help="checkpoint folder or GGUF file; default: shape S with random weights")
    parser.add_argument("--restart", action="store_true", help="build the engine again in each turn, with KV offloading")
    options = parser.parse_args(words)
    torch.set_num_threads(threads())
    checkpoint = options.model or write_shape("S")
    length = options.shared + OWN + 1
    with tempfile.TemporaryDirectory() as disk:
        kept = disk if options.restart else ""
        asked = EngineOptions(num_threads=threads(), max_model_len=length, kv_cache_memory=1 << 30, kv_disk_folder=kept)

        def start_engine() -> AsyncEngine:
            engine = build_engine(checkpoint, asked)
            engine.start()
            return engine

        found = asyncio.run(measure(start_engine(), options.shared, options.turns, start_engine if options.restart else None))
    Report(options.json, bench="prefix", model=checkpoint.name).add(found.figures())


if __name__ == "__main__":
    main()
