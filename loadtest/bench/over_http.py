"""HTTP streams of a server beside the same engine in this process, 16 at once: the default model, or a shape.

The server must do nothing else meanwhile. Its client is this process, and takes part of the same cores.
"""

import asyncio
import itertools
from functools import partial
from pathlib import Path

from attend.model.engine.request import Request
from attend.model.params import SamplingParams
from attend.service.generation.generation import GenerationService
from loadtest.bench.busy import served_model
from loadtest.bench.client import Caller, Prompt, Prompts, closed_loop, http_caller
from loadtest.bench.figures import Comparison, Figure, take_turns
from loadtest.bench.shapes import PROMPT
from loadtest.measures import total
from loadtest.server import served
from loadtest.stream import TOTAL, Stream

STREAMS = 16


def engine_caller(service: GenerationService) -> Caller:
    """The engine itself, asked as a server is."""
    numbers = itertools.count()

    async def ask(prompt: Prompt, tokens: int, stream: Stream) -> None:
        assert not isinstance(prompt, str)
        request = Request(f"inside-{next(numbers)}", prompt, tokens, SamplingParams(temperature=0))
        async for outputs in service.engine.generate([request]):
            stream.heard()
            stream.tokens += sum(len(each.token_ids) for each in outputs)

    return Caller("in-process", "HTTP", service.engine.info.max_model_len, ask)


async def speed(caller: Caller, tokens: int, prompts: Prompts) -> float:
    """Tokens/s over all streams."""
    rows, seconds = await closed_loop(caller, STREAMS, [prompts.ids(PROMPT) for _ in range(STREAMS)], tokens)
    answers = total(rows, TOTAL)
    assert (answers.failures, answers.tokens) == (0, STREAMS * tokens), answers
    return answers.tokens / seconds


async def measure(turns: int, tokens: int, url: str, folder: Path, seed: int) -> list[Figure]:
    """Tokens/s of each, and the part of the engine's speed that is left over HTTP; the two take turns."""
    async with served_model(folder) as service, http_caller(url, "over HTTP") as http:
        prompts = Prompts(seed)
        turn = {caller.name: partial(speed, caller, tokens, prompts) for caller in (http, engine_caller(service))}
        return Comparison(f"{STREAMS} streams", "tokens/s", await take_turns(turn, turns)).figures()


def run(turns: int, tokens: int, url: str | None, folder: Path, log: Path, seed: int) -> list[Figure]:
    """`measure` in an event loop of its own; without a URL, of a server of its own. Raises StartError."""
    if url is not None:
        return asyncio.run(measure(turns, tokens, url, folder, seed))
    with served(log, [str(folder)]) as address:
        return asyncio.run(measure(turns, tokens, address.http, folder, seed))
