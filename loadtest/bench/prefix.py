"""What a shared beginning saves, in one process: attend bench prefix

Two prompts with the same beginning, one after the other: the second finds the first one's blocks. The table shows the
milliseconds to the first token of each, and the second over the first.
"""

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

import torch

from attend.model.engine.build import build_engine
from attend.model.engine.loop import AsyncEngine
from attend.model.engine.options import EngineOptions
from loadtest.bench.arrivals import moments
from loadtest.bench.figures import Comparison, file, show, take_turns
from loadtest.bench.machine import threads
from loadtest.bench.shapes import SHAPES, write_shape

OWN = 16
"""Tokens that a prompt has for itself, after the shared beginning."""


class Pair:
    """Prompts in pairs with the same beginning, another one for each pair."""

    def __init__(self, engine: AsyncEngine, shared: int) -> None:
        self._engine = engine
        self._shared = shared
        self._dice = random.Random(0)
        self._asked = 0
        self._beginning: list[int] = []

    async def unknown(self) -> float:
        """Milliseconds to the first token after a beginning that nobody has asked for."""
        self._beginning = self._dice.choices(range(100, 8000), k=self._shared)
        return await self._first_token()

    async def known(self) -> float:
        """The same after the beginning of the last prompt."""
        return await self._first_token()

    async def _first_token(self) -> float:
        self._asked += 1
        prompt = self._beginning + self._dice.choices(range(100, 8000), k=OWN)
        asked, first = await moments(self._engine, f"{self._asked}", prompt, output=1)
        return (first - asked) * 1e3


async def measure(engine: AsyncEngine, shared: int, turns: int) -> Comparison:
    """The known beginning, and the unknown one, turn by turn."""
    pair = Pair(engine, shared)

    async def both() -> tuple[float, float]:
        unknown = await pair.unknown()
        return await pair.known(), unknown

    known, unknown = zip(*(await take_turns({"both": both}, turns))["both"], strict=True)
    return Comparison(f"first token, {shared} shared tokens", "ms", {"known": known, "unknown": unknown})


def main(words: list[str] | None = None) -> None:
    """Read the flags, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--shared", type=int, default=1024, help="tokens of the beginning (default 1024)")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "attend-shapes", help="for the checkpoint")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(words)
    torch.set_num_threads(threads())
    checkpoint = write_shape(options.shape, options.folder)
    engine = build_engine(checkpoint, EngineOptions(num_threads=threads(), kv_cache_memory=1 << 30))
    engine.start()
    found = asyncio.run(measure(engine, options.shared, options.turns))
    engine.close()
    figures = found.figures()
    file(options.json, show(figures), figures, bench="prefix", shape=options.shape)


if __name__ == "__main__":
    main()
