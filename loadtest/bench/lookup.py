"""Speculative decoding by prompt lookup, beside decoding without draft tokens: attend bench lookup

A model in bfloat16 with `draft_tokens` and without, 128 tokens after each prompt. In "again" it goes, greedily, through a file
that it has just read; in "anew" it goes on, at temperature 1, after a file that it reads for the first time, so that little
repeats itself; each request has an owner of its own. In "alike" twenty requests come one after the other, each for a class
that differs from the others in its names alone: of one owner, of an owner each, and without drafts. The model is the default
one, or with --model another one.
"""

import asyncio
import inspect
import statistics
import textwrap
from collections.abc import AsyncIterator
from functools import partial
from itertools import count
from pathlib import Path

import torch

from attend.model.config import DEFAULT_MODEL
from attend.model.engine.loop import AsyncEngine
from attend.model.text.tokenizer import Tokenizer
from loadtest.bench.figures import Comparison, Figure, Report, options_of, report_each, take_turns
from loadtest.bench.machine import threads
from loadtest.bench.option import default_model, speed

AT_ONCE, DRAFT_TOKENS = (1, 4, 16), 15
TOKENS, BEGINNING = 300, 40
"""Of the file that is read, and of its second reading, after which the model goes on by itself."""
KINDS = (
    *("string", "number", "user", "order", "file", "word", "date", "item", "point", "record"),
    *("line", "price", "name", "score", "task", "event", "node", "edge", "row", "key"),
)
CLASS = '''class {0}Stack:
    """A stack of {1}s, with the methods push, pop, peek, is_empty and size."""

    def __init__(self, {1}s):
'''
TEMPERATURES = {"alike, greedy": 0.0, "alike, temperature 0.7": 0.7}
_owners = map(str, count())


def texts(tokenizer: Tokenizer) -> dict[str, tuple[list[int], float]]:
    """A prompt and a temperature of each kind."""
    tokens = tokenizer.encode(inspect.getsource(textwrap))
    return {"again": ([*tokens[:TOKENS], *tokens[:BEGINNING]], 0.0), "anew": (tokens[:TOKENS], 1.0)}


async def one_owner_each(engine: AsyncEngine, prompt: list[int], number: int, temperature: float) -> float:
    """Tokens/s of so many requests of an owner each."""
    return await speed(engine, [prompt] * number, temperature, [next(_owners) for _ in range(number)])


async def in_turn(
    engine: AsyncEngine, prompts: list[list[int]], temperature: float, rates: list[float], *, same_owner: bool
) -> float:
    """Tokens/s of requests one after the other, of one owner or of an owner each. Adds the acceptance rate to `rates`."""
    before, owner = engine.stats(), next(_owners)
    speeds = [
        await speed(engine, [prompt], temperature, [owner if same_owner else next(_owners)], at)
        for at, prompt in enumerate(prompts)
    ]
    after = engine.stats()
    rates.append((after.num_accepted - before.num_accepted) / max(1, after.num_drafted - before.num_drafted))
    return statistics.harmonic_mean(speeds)


async def measure(engines: dict[str, AsyncEngine], tokenizer: Tokenizer, turns: int) -> AsyncIterator[Comparison | Figure]:
    """Each kind of text at each number of streams, and requests that are alike; the engines take turns."""
    for kind, (prompt, temperature) in texts(tokenizer).items():
        for number in AT_ONCE:
            contestants = {
                name: partial(one_owner_each, engine, prompt, number, temperature) for name, engine in engines.items()
            }
            yield Comparison(f"{number} at once, {kind}", "tokens/s", await take_turns(contestants, turns))
    prompts = [tokenizer.encode(CLASS.format(kind.title(), kind)) for kind in KINDS]
    for kind, temperature in TEMPERATURES.items():
        rates: dict[str, list[float]] = {"one owner": [], "an owner each": [], "plain": []}
        contestants = {
            name: partial(
                in_turn,
                engines["plain" if name == "plain" else "drafts"],
                prompts,
                temperature,
                seen,
                same_owner=name == "one owner",
            )
            for name, seen in rates.items()
        }
        yield Comparison(kind, "tokens/s", await take_turns(contestants, turns))
        for name in list(rates)[:2]:
            yield Figure(f"{kind}, {name}: accepted", "of 1", tuple(rates[name]))


def main(words: list[str] | None = None) -> None:
    """Read the flags, print the table."""
    parser = options_of(__doc__, turns=7)
    parser.add_argument(
        "--model", type=Path, default=DEFAULT_MODEL, help="checkpoint folder or GGUF file; default: the shipped one"
    )
    options = parser.parse_args(words)
    torch.set_num_threads(threads())
    modes = {"drafts": DRAFT_TOKENS, "plain": 0}
    engines = {name: default_model(options.model, draft_tokens=most) for name, most in modes.items()}
    report = Report(options.json, bench="lookup", model=options.model.name)
    asyncio.run(report_each(measure(engines, Tokenizer.load(options.model), options.turns), report))
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
