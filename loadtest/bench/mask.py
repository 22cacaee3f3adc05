"""What structured output costs the engine: 16 streams under a grammar beside 16 without, the same number of tokens each."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from attend.model.config import DEFAULT_MODEL
from attend.model.engine.request import Request
from attend.model.params import SamplingParams
from attend.model.text.grammar import GrammarSpec
from attend.model.text.mask import CompiledGrammar
from attend.service.chat.forms import CALLS, AnswerFormat
from attend.service.chat.grammars import CallGrammar
from attend.service.chat.parts import Tool
from attend.service.generation.generation import GenerationService
from loadtest.bench.figures import Comparison, Figure, take_turns
from loadtest.bench.over_http import served_model

STREAMS = 16
MAX_RATIO = 1.1
MAX_RATIO_DRAWN = 1.15
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=0.7, top_p=0.95)
"""Its masks are worked out before a step: the scores of other tokens decide which are kept."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["reader", "writer", "owner"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 500}
WRITE = Tool("write", {"type": "object", "properties": {"people": PEOPLE}, "required": ["people"]})
SPECS = {
    "a JSON schema": GrammarSpec("json_schema", json.dumps(PEOPLE)),
    "a regex": GrammarSpec("regex", "([a-z_]{2,12} ){600,}"),
    "a call of a tool": CallGrammar(AnswerFormat(CALLS["hermes"]), [WRITE], {}, reasoning_open=False).required_calls(
        parallel=False
    ),
}
"""None is complete before the last token that is asked for, so that every stream has the same length."""


async def at_once(service: GenerationService, grammar: CompiledGrammar | None, sampling: SamplingParams, tokens: int) -> float:
    """Tokens/s of all streams."""
    numbers = itertools.count()
    prompt = service.tokenizer.encode("def read(self, path):\n    ")

    def request() -> Request:
        started = None if grammar is None else grammar.start()
        at = next(numbers)
        return Request(f"mask-{at}", prompt, tokens, sampling, seed=at, grammar=started)

    requests = [request() for _ in range(STREAMS)]
    begun, made = time.perf_counter(), 0
    async for outputs in service.engine.generate(requests):
        made += sum(len(each.token_ids) for each in outputs)
    assert made == STREAMS * tokens, f"{made} tokens, not {STREAMS * tokens}"
    return made / (time.perf_counter() - begun)


async def measure(turns: int, tokens: int, folder: Path) -> list[Figure]:
    """Tokens/s without and with each grammar, and how many times longer it takes; the contestants take turns."""
    async with served_model(folder) as service:
        compile_spec: Callable[[GrammarSpec], CompiledGrammar] = service.preparation.grammars.compile
        grammars = {name: compile_spec(spec) for name, spec in SPECS.items()}
        contestants = {"no grammar": partial(at_once, service, None, GREEDY, tokens)}
        contestants |= {name: partial(at_once, service, grammar, GREEDY, tokens) for name, grammar in grammars.items()}
        drawn = {
            f"{name}, top_p {DRAWN.top_p}": partial(at_once, service, grammar, DRAWN, tokens)
            for name, grammar in grammars.items()
        }
        contestants |= drawn
        found = await take_turns(contestants, turns)
    speeds = Comparison(f"{STREAMS} streams", "tokens/s", found)
    most = dict.fromkeys(SPECS, MAX_RATIO) | dict.fromkeys(drawn, MAX_RATIO_DRAWN)
    longer = [replace(speeds.ratio(name), what=f"time, {name} / no grammar", most=limit) for name, limit in most.items()]
    return [*map(speeds.figure, found), *longer]


def run(turns: int, tokens: int, folder: Path = DEFAULT_MODEL) -> list[Figure]:
    """`measure` in an event loop of its own."""
    return asyncio.run(measure(turns, tokens, folder))
