"""HTTP streams of a server beside the same engine in this process, 16 at once: the default model, or a shape.

The client of the server is this process, and takes part of the same cores.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from attend.model.config import DEFAULT_MODEL
from attend.model.engine.build import build_engine
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import Request
from attend.model.params import SamplingParams
from attend.model.text.tokenizer import Tokenizer
from attend.service.generation.generation import GenerationService
from loadtest.bench.client import Caller, Prompt, Prompts, closed_loop, http_caller
from loadtest.bench.figures import Comparison, Figure, take_turns
from loadtest.bench.machine import threads
from loadtest.bench.shapes import PROMPT
from loadtest.measures import total
from loadtest.server import ready_server
from loadtest.stream import TOTAL, Stream

STREAMS = 16


@asynccontextmanager
async def served_model(folder: Path = DEFAULT_MODEL) -> AsyncIterator[GenerationService]:
    """The service round a checkpoint, with the engine's settings of `attend serve`, without Ray."""
    engine = build_engine(folder, EngineOptions(num_threads=threads(), kv_cache_memory=1 << 28))
    service = GenerationService(engine, Tokenizer.load(folder), model_name="attend-default")
    engine.start()
    try:
        yield service
    finally:
        engine.close()


def engine_caller(service: GenerationService) -> Caller:
    """The engine itself, asked as a server is."""
    numbers = itertools.count()

    async def ask(prompt: Prompt, tokens: int, stream: Stream) -> None:
        assert not isinstance(prompt, str)
        request = Request(f"inside-{next(numbers)}", prompt, tokens, SamplingParams(temperature=0))
        async for outputs in service.engine.generate([request]):
            stream.message_received()
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


def run(turns: int, tokens: int, folder: Path, log: Path, seed: int) -> list[Figure]:
    """`measure` of a server of its own, in an event loop of its own. Raises StartError."""
    with ready_server(log, [str(folder)]) as address:
        return asyncio.run(measure(turns, tokens, address.http, folder, seed))
