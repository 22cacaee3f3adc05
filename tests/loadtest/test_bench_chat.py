"""Each turn sends the whole chat so far, the same for all engines but for their own answers."""

import asyncio
from itertools import pairwise
from types import SimpleNamespace

from loadtest.bench.chat import QUARTERS, measure


class Recorder:
    """An engine that answers with sevens, and finds half of each prompt."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def generate(self, requests, at_once=None):
        [request] = requests
        self.prompts.append(list(request.prompt))
        request.num_cached = len(request.prompt) // 2
        for _ in range(request.max_tokens):
            yield [SimpleNamespace(token_ids=(7,))]


def test_a_turn_goes_on_after_the_last_answer():
    engines = {"one": Recorder(), "other": Recorder()}
    found = asyncio.run(measure(engines, turns=8, tokens=80, answer=3, chats=2))
    assert engines["one"].prompts == engines["other"].prompts
    prompts = engines["one"].prompts[8:16]  # after the chat to warm up
    assert [len(prompt) for prompt in prompts] == [7 + 10 * at for at in range(8)]
    for before, after in pairwise(prompts):
        assert after[: len(before) + 3] == [*before, 7, 7, 7]
    assert len(found) == QUARTERS + 2
    assert all(len(each) == 2 * 2 for part in found[:QUARTERS] for each in part.values.values())
    assert found[-1].values[:2] == (4.0, 9.0)
