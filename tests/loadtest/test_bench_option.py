"""Values of an option take turns on the same prompts; what is read again begins as it began; a server is all its processes."""

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from loadtest.bench.lookup import BEGINNING, TOKENS, texts
from loadtest.bench.memory import resident
from loadtest.bench.option import AT_ONCE, OUTPUT, PROMPTS, measure, parse
from loadtest.bench.start import MARK


class Recorder:
    """An engine that answers at once."""

    def __init__(self) -> None:
        self.asked = []

    async def generate(self, requests, at_once=None):
        self.asked.append([(request.prompt, request.max_tokens, request.sampling.temperature) for request in requests])
        yield [SimpleNamespace()]


def test_every_value_answers_the_same_requests():
    engines = {"block_size 32": Recorder(), "block_size 64": Recorder()}
    found = asyncio.run(measure(engines, turns=2))
    assert [list(engines)] * 2 == [list(each.values) for each in found]
    one, other = (engine.asked for engine in engines.values())
    assert one == other
    assert [[(prompt, OUTPUT, temperature) for prompt in PROMPTS] for temperature in (0, 0, 0, 1, 1, 1)] == one
    assert AT_ONCE == len(PROMPTS)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("64", 64), ("0.5", 0.5), ("native", "native"), ("null", None)])
def test_a_value_is_json_or_a_word(text, value):
    assert value == parse(text)


def test_a_text_that_is_read_again_begins_as_it_began():
    again, _ = texts()["again"]
    anew, _ = texts()["anew"]
    assert again[:TOKENS] == anew
    assert again[TOKENS:] == anew[:BEGINNING]


def test_the_memory_of_a_server_is_that_of_all_its_processes():
    hold = "import sys; held = bytearray(50 << 20); print(1, flush=True); sys.stdin.read()"
    environment = os.environ | {MARK: "test-memory"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    held = [subprocess.Popen([sys.executable, "-c", hold], env=environment, **pipes) for _ in range(2)]
    try:
        for process in held:
            process.stdout.readline()
        largest, total = resident("test-memory")
    finally:
        for process in held:
            process.communicate()
    assert 50 < largest < 100 < total < 200
