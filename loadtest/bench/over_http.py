"""HTTP streams of a running server beside the same engine in this process, 16 at once, default model.

The server must serve the default model on this machine, and do nothing else meanwhile. Its client is this process, and
takes part of the same cores.
"""

import asyncio
import itertools
from functools import partial

import httpx

from loadtest.bench.busy import served_model
from loadtest.bench.figures import Figure, ratios, take_turns
from loadtest.bench.transports import PROMPT, Stream, http_stream, throughput
from model.engine.request import Request
from model.params import SamplingParams
from service.generation import GenerationService

STREAMS = 16


def engine_stream(service: GenerationService) -> Stream:
    """The call of `http_stream`, made to the engine itself; nobody asks when its first token came."""
    numbers = itertools.count()
    prompt = service.tokenizer.encode(PROMPT)

    async def run(tokens: int) -> float:
        seen = 0
        request = Request(f"inside-{next(numbers)}", prompt, tokens, SamplingParams(temperature=0))
        async for outputs in service.engine.generate([request]):
            seen += sum(len(each.token_ids) for each in outputs)
        assert seen == tokens
        return 0.0

    return run


async def measure(turns: int, tokens: int, url: str) -> list[Figure]:
    """Tokens/s of each, and the part of the engine's speed that is left over HTTP; the two take turns."""
    limits = httpx.Limits(max_connections=None)
    async with served_model() as service, httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        streams = {"in-process": engine_stream(service), "over HTTP": http_stream(client)}
        contestants = {name: partial(throughput, stream, STREAMS, tokens) for name, stream in streams.items()}
        found = await take_turns(contestants, turns)
    figures = [Figure(f"{STREAMS} streams, {name}", "tokens/s", tuple(values)) for name, values in found.items()]
    return [*figures, Figure("over HTTP / in-process", "ratio", ratios(found["over HTTP"], found["in-process"]))]


def run(turns: int, tokens: int, url: str) -> list[Figure]:
    """`measure` in an event loop of its own."""
    return asyncio.run(measure(turns, tokens, url))
