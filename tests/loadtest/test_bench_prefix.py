"""A cached prefix is the last one that was sent; a cold one is new."""

import asyncio
from types import SimpleNamespace

from loadtest.bench.prefix import OWN, measure


class Recorder:
    """An engine that answers every prompt with one token at once."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def generate(self, requests, at_once=None):
        self.prompts += [request.prompt for request in requests]
        yield [SimpleNamespace(token_ids=(1,))]

    async def drain(self, seconds):
        self.drained = True

    def close(self):
        self.closed = True


def test_prompts_come_in_pairs_with_one_prefix_and_two_ends():
    engine = Recorder()
    found = asyncio.run(measure(engine, num_shared=64, turns=3))
    assert {name: len(values) for name, values in found.values.items()} == {"cached": 3, "cold": 3}
    pairs = list(zip(engine.prompts[::2], engine.prompts[1::2], strict=True))
    assert len(pairs) == 4  # one to warm up
    assert all(one[:64] == other[:64] and one[64:] != other[64:] for one, other in pairs)
    assert {len(prompt) for prompt in engine.prompts} == {64 + OWN}
    assert len({tuple(one[:64]) for one, _ in pairs}) == 4
    assert engine.closed


def test_with_restarts_each_turn_asks_once_more_of_an_engine_that_was_built_again():
    engines = [Recorder()]

    def restarted():
        assert engines[-1].drained and engines[-1].closed
        engines.append(Recorder())
        return engines[-1]

    found = asyncio.run(measure(engines[0], 64, 2, restarted))
    assert {name: len(values) for name, values in found.values.items()} == {"after a restart": 2, "cached": 2, "cold": 2}
    assert [len(engine.prompts) for engine in engines] == [2, 3, 1]
    assert engines[0].prompts[1][:64] == engines[1].prompts[0][:64] != engines[1].prompts[1][:64]
