"""The engine's steps while the service tokenizes a large text and compiles a large schema, beside its steps without.

Eight streams decode with the default model, on the step thread; the service's event loop reads them. With the load,
one caller has 1 MiB of text tokenized and another has a schema of 64 KB compiled, again and again, as the routes do it.
Phases with and without take turns.
"""

import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from attend.model.config import DEFAULT_MODEL
from attend.model.engine.build import build_engine
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import StepReport
from attend.model.params import SamplingParams, StopRules
from attend.model.text.grammar import GrammarSpec
from attend.model.text.tokenizer import Tokenizer
from attend.service.generation.generation import GenerationService
from attend.service.observe.metrics import Metrics
from attend.service.records import Command
from loadtest.bench.figures import Comparison, Figure, percentile, take_turns
from loadtest.bench.parsing import source_text

STREAMS, TOKENS, TEXT, SCHEMA = 8, 512, 1 << 20, 64 << 10
MOST_RATIO = 1.3
Job = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Phase:
    """What one phase saw."""

    steps: list[float]
    """Seconds of each step in which all streams decoded."""
    gaps: list[float]
    """Seconds between two tokens, as the readers of the streams saw them."""
    jobs: int
    """How often the load was carried out."""


@asynccontextmanager
async def served_model(folder: Path = DEFAULT_MODEL) -> AsyncIterator[GenerationService]:
    """The service round a checkpoint, with the engine's settings of `attend serve`, without Ray."""
    threads = len(os.sched_getaffinity(0))
    engine = build_engine(folder, EngineOptions(num_threads=threads, kv_cache_memory=1 << 28))
    service = GenerationService(engine, Tokenizer.load(folder), model_name="attend-default")
    engine.start()
    try:
        yield service
    finally:
        engine.close()


def schema_text(number: int, size: int = SCHEMA) -> str:
    """A JSON schema of nearly `size` bytes, another one for each number, so that no cache knows it."""
    one = {"type": "object", "properties": {"id": {"type": "integer"}, "name": {"type": "string", "maxLength": 40}}}
    names = [f"field_{index:04}" for index in range(size // (len(json.dumps(one)) + 30))]
    properties = dict.fromkeys(names, one)
    return json.dumps({"title": f"schema {number}", "type": "object", "properties": properties, "required": names})


def load_of(service: GenerationService) -> tuple[Job, Job]:
    """Tokenize, and compile."""
    text, numbers = source_text(TEXT), itertools.count()

    async def compile_schema() -> None:
        spec = GrammarSpec("json_schema", schema_text(next(numbers)))
        await service.preparation.compiled(spec)

    return (lambda: service.tokenize(text)), compile_schema


async def phase(service: GenerationService, metrics: Metrics, over: Job, load: Sequence[Job]) -> Phase:
    """Run the streams again and again, with the load beside them, until `over` is done."""
    reports: list[StepReport] = []
    service.engine.on_step(reports.append)
    done = asyncio.Event()
    workers = [asyncio.create_task(_again(job, done)) for job in load]
    readers = [asyncio.create_task(_read(service, metrics, index, done)) for index in range(STREAMS)]
    await over()
    done.set()
    gaps = [gap for each in await asyncio.gather(*readers) for gap in each]
    steps = [report.seconds for report in reports if report.num_requests == report.num_tokens == STREAMS]
    return Phase(steps, gaps, sum(await asyncio.gather(*workers)))


async def _again(job: Job, done: asyncio.Event) -> int:
    """How often the job was carried out until `done`."""
    count = 0
    while not done.is_set():
        await job()
        count += 1
    return count


async def _read(service: GenerationService, metrics: Metrics, index: int, done: asyncio.Event) -> list[float]:
    """Seconds between the tokens of greedy streams, one after the other until `done`."""
    stops = StopRules(max_tokens=TOKENS, ignore_eos=True)
    prompt = source_text(400 + index)[-24:]
    command = Command(prompts=(prompt,), sampling=SamplingParams(temperature=0), stops=stops, request_id="bench")
    gaps: list[float] = []
    while not done.is_set():
        last = 0.0
        async with aclosing(service.generate(command, metrics.open("http", "/v1/completions"), adapter=None)) as batches:
            async for _ in batches:
                now = time.perf_counter()
                gaps += [now - last] if last else []
                last = now
                if done.is_set():
                    break
    return gaps


async def measure(turns: int, seconds: float) -> list[Figure]:
    """p99 of steps and gaps without and with the load, and their ratios in each turn."""
    async with served_model() as service:
        metrics = Metrics(service.engine, service.model_name)
        load = load_of(service)
        for job in load:
            await job()  # the vocabulary is loaded at the first
        over = partial(asyncio.sleep, seconds)
        phases = {name: partial(phase, service, metrics, over, jobs) for name, jobs in (("busy", load), ("quiet", ()))}
        found = await take_turns(phases, turns)
    return [
        *_compared("step", found, lambda p: p.steps, MOST_RATIO),
        *_compared("gap", found, lambda p: p.gaps, None),
    ]


def _compared(
    name: str, found: Mapping[str, list[Phase]], of: Callable[[Phase], list[float]], most: float | None
) -> list[Figure]:
    """Milliseconds, median and p99, of each kind of phase; the ratio of the p99."""

    def at(percent: int) -> Comparison:
        values = {kind: [percentile(of(each), percent) * 1e3 for each in phases] for kind, phases in found.items()}
        return Comparison(f"{name} p{percent}", "ms", values)

    middle, tail = at(50), at(99)
    return [*map(middle.figure, found), *map(tail.figure, found), replace(tail.ratio("quiet"), most=most)]


def run(turns: int, seconds: float) -> list[Figure]:
    """`measure` in an event loop of its own."""
    return asyncio.run(measure(turns, seconds))
