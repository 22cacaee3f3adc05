"""Values of an option take turns on the same prompts; what is read again begins as it began."""

import asyncio
from types import SimpleNamespace

import pytest

from attend.model.config import DEFAULT_MODEL
from attend.model.text.tokenizer import Tokenizer
from loadtest.bench.lookup import BEGINNING, KINDS, TOKENS, in_turn, one_owner_each, texts
from loadtest.bench.option import AT_ONCE, OUTPUT, PROMPTS, measure


class Recorder:
    """An engine that answers at once."""

    def __init__(self) -> None:
        self.asked = []

    async def generate(self, requests, at_once=None):
        self.asked.append([(request.prompt, request.max_tokens, request.sampling.temperature) for request in requests])
        yield [SimpleNamespace()]


def test_every_value_answers_the_same_requests():
    engines = {"block_size 32": Recorder(), "block_size 64": Recorder()}

    async def run():
        return [each async for each in measure(engines, turns=2)]

    found = asyncio.run(run())
    assert [list(engines)] * 2 == [list(each.values) for each in found]
    one, other = (engine.asked for engine in engines.values())
    assert one == other
    assert [[(prompt, OUTPUT, temperature) for prompt in PROMPTS] for temperature in (0, 0, 0, 1, 1, 1)] == one
    assert AT_ONCE == len(PROMPTS)


def test_a_text_that_is_read_again_begins_as_it_began():
    found = texts(Tokenizer.load(DEFAULT_MODEL))
    (again, _), (anew, _) = found["again"], found["anew"]
    assert again[:TOKENS] == anew
    assert again[TOKENS:] == anew[:BEGINNING]


class Drafting:
    """An engine that answers at once, and accepts every second draft token."""

    def __init__(self) -> None:
        self.asked = []

    async def generate(self, requests, at_once=None):
        self.asked += [(request.owner, request.seed) for request in requests]
        yield [SimpleNamespace()]

    def stats(self):
        return SimpleNamespace(num_drafted=4 * len(self.asked), num_accepted=2 * len(self.asked))


@pytest.mark.parametrize("shared", [False, True])
def test_requests_that_are_alike_are_of_one_owner_or_of_an_owner_each_in_every_turn(shared):
    engine, rates = Drafting(), []
    for _ in range(2):
        asyncio.run(in_turn(engine, [[1]] * len(KINDS), 0.0, rates, same_owner=shared))
    owners, seeds = zip(*engine.asked, strict=True)
    assert (2 if shared else 2 * len(KINDS)) == len(set(owners))
    assert [*range(len(KINDS))] * 2 == [*seeds]
    assert [0.5, 0.5] == rates


def test_what_is_read_again_is_no_other_requests_text():
    engine = Drafting()
    asyncio.run(one_owner_each(engine, [1], 4, 0.0))
    asyncio.run(one_owner_each(engine, [1], 4, 0.0))
    assert 8 == len({owner for owner, _ in engine.asked})
