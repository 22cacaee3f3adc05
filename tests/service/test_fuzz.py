"""Whatever is sent, to either transport, is answered or refused in the one shape, in time, and leaves the server as it was.

The inputs are the same in every run on one machine: Hypothesis draws some of its words from the modules that are loaded.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from tests.conftest import examples
from tests.service import fuzz_inputs as inputs
from tests.service.bad_calls import COMPLETIONS, Answer, Prey, asgi, check_answer
from tests.service.fuzz_grammars import grammars


def law(count: int) -> settings:
    return settings(max_examples=examples(count), derandomize=True, deadline=None, database=None)


@pytest.fixture(scope="module")
def prey() -> Iterator[Prey]:
    prey = Prey()
    with prey.runner:
        yield prey


@pytest.fixture(autouse=True)
def well_afterwards(prey: Prey) -> Iterator[None]:
    yield
    prey.check_well()


@law(2400)
@given(sent=inputs.byte_bodies())
def test_a_body_of_damaged_bytes_is_answered_or_refused(prey, sent):
    prey.post(*sent)


@law(2200)
@given(sent=inputs.byte_messages())
def test_a_message_of_damaged_bytes_is_answered_or_refused(prey, sent):
    prey.call(*sent)


def test_any_grammar_is_followed_or_refused(prey):
    """Each goes through a child process, so these are few."""
    count = examples(100)

    async def all_of_them() -> list[Answer]:
        two = asyncio.Semaphore(2)

        async def one(name: str, value: Any) -> Answer:
            body = json.dumps({"prompt": "a", "structured_outputs": {name: value}}).encode()
            async with two:
                return await asgi(prey.server, COMPLETIONS, body)

        return await asyncio.gather(*(one(*each) for each in grammars(count, seed=1)))

    answers = prey.runner.run(all_of_them())
    for answer in answers:
        check_answer(answer)
    assert 0 < sum(answer.status == 200 for answer in answers) < 0.9 * count
    assert not prey.engine.open
