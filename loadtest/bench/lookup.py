"""What guesses bring: attend bench lookup

The default model in bfloat16 with `draft_tokens` and without, 128 tokens after each prompt. In "again" it goes, greedily,
through a file that it has just read; in "anew" it goes on, at temperature 1, after a file that it reads for the first
time, so that little repeats itself.
"""

import argparse
import asyncio
import inspect
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from attend.model.config import DEFAULT_MODEL
from attend.model.engine.loop import AsyncEngine
from attend.model.text.tokenizer import Tokenizer
from loadtest.bench.figures import Comparison, file, show, take_turns
from loadtest.bench.machine import threads
from loadtest.bench.option import default_model, speed

AT_ONCE = (1, 4, 16)
TOKENS, BEGINNING = 300, 40
"""Of the file that is read, and of its second reading, after which the model goes on by itself."""


def texts() -> dict[str, tuple[list[int], float]]:
    """A prompt and a temperature of each kind."""
    tokens = Tokenizer.load(DEFAULT_MODEL).encode(inspect.getsource(textwrap))
    return {"again": ([*tokens[:TOKENS], *tokens[:BEGINNING]], 0.0), "anew": (tokens[:TOKENS], 1.0)}


async def measure(engines: dict[str, AsyncEngine], at_once: Sequence[int], turns: int) -> list[Comparison]:
    """Each kind of text at each number of streams; the engines take turns."""
    found = []
    for kind, (prompt, temperature) in texts().items():
        for count in at_once:
            contestants = {name: partial(speed, engine, [prompt] * count, temperature) for name, engine in engines.items()}
            found.append(Comparison(f"{count} at once, {kind}", "tokens/s", await take_turns(contestants, turns)))
    return found


def main(words: list[str] | None = None) -> None:
    """Read the flags, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft-tokens", type=int, default=15)
    parser.add_argument("--at-once", type=int, nargs="+", default=AT_ONCE)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(words)
    torch.set_num_threads(threads())
    modes = {"guessing": options.draft_tokens, "plain": 0}
    engines = {name: default_model(draft_tokens=most) for name, most in modes.items()}
    found = asyncio.run(measure(engines, options.at_once, options.turns))
    for engine in engines.values():
        engine.close()
    figures = [figure for each in found for figure in each.figures()]
    file(options.json, show(figures), figures, bench="lookup")


if __name__ == "__main__":
    main()
