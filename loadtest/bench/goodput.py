"""The highest rate of requests that keeps a service level: Poisson arrivals, mixed lengths, bisection over short trials."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator

from loadtest.bench.client import Caller, Prompt, answer, rows
from loadtest.capacity import highest
from loadtest.measures import Rows
from loadtest.slo import Objectives

LEVEL = Objectives(ttft_p95_ms=1000.0, itl_p95_ms=100.0)
PROMPTS, OUTPUTS = (16, 1024), (8, 256)
UNIT, FIRST, MOST, PRECISION = 0.1, 10, 10_000, 0.05
"""Rates are multiples of UNIT requests a second; the search begins at FIRST and ends at PRECISION of the rate."""


def arrivals(rate: float, seconds: float, longest: int, seed: int) -> Iterator[tuple[float, int, int]]:
    """(moment, prompt tokens, answer tokens) of each request; a prompt and its answer have at most `longest` tokens."""
    chance = random.Random(seed)
    at = chance.expovariate(rate)
    while at < seconds:
        output = chance.randint(OUTPUTS[0], min(OUTPUTS[1], longest - PROMPTS[0]))
        yield at, chance.randint(PROMPTS[0], min(PROMPTS[1], longest - output)), output
        at += chance.expovariate(rate)


async def trial(caller: Caller, rate: float, seconds: float, prompt: Callable[[int], Prompt], seed: int) -> Rows:
    """Ask at this rate for so long, waiting for nothing, and then for the last answer."""
    begun, tasks = time.perf_counter() + 0.1, []
    for at, length, output in arrivals(rate, seconds, caller.max_model_len, seed):
        asked = prompt(length)
        await asyncio.sleep(begun + at - time.perf_counter())
        tasks.append(asyncio.create_task(answer(caller, asked, output, due=begun + at)))
    return rows(caller.transport, await asyncio.gather(*tasks))


async def best_rate(caller: Caller, seconds: float, prompt: Callable[[int], Prompt], seeds: Iterator[int]) -> float:
    """Requests a second; 0 where none was kept. The arrivals of a search are those of the next seed."""
    loop, seed = asyncio.get_running_loop(), next(seeds)

    def keeps(units: int) -> bool:
        found = trial(caller, units * UNIT, seconds, prompt, seed)
        return not any(LEVEL.missed_objectives(asyncio.run_coroutine_threadsafe(found, loop).result()))

    kept, _ = await asyncio.to_thread(highest, keeps, FIRST, MOST, PRECISION)
    return kept * UNIT
