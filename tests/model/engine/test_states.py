"""Models that keep a state for each request: through scheduler, runner and decoder, nobody meets the state of another."""

import asyncio
import logging
import random
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from attend.model.engine.build import build_engine, size_engine
from attend.model.engine.config import GroupSize
from attend.model.engine.engine import Engine
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import FinishReason, Request
from attend.model.errors import SettingError
from attend.model.net.native.library import load
from attend.model.params import SamplingParams
from attend.model.sublayers import DeltaSpec
from tests.model.checkpoints import VOCAB, their_logits, their_model, tiny_config, write_checkpoint
from tests.model.engine.machines import ask, run, told
from tests.model.net.laws.test_engine_laws import Answer, answer, assert_near, engine
from tests.model.net.laws.ways import Way

needs_library = pytest.mark.skipif(
    load() is None, reason="the native decoder is not built here: python -m attend.model.net.native"
)
CONFIG = tiny_config(
    num_layers=3,
    max_positions=256,
    attention_gate=True,
    delta=DeltaSpec(key_heads=2, value_heads=4, key_size=8, value_size=6, kernel=4),
    delta_layers=(0, 2),
)
LENGTHS = [31, 97, 1, 130, 2, 33]
COMINGS = {
    "on the reference backend": {},
    "chunked": {"max_batch_tokens": 13},
    "batched": {},
    "two at a time": {"max_batch_requests": 2},
    "async scheduling": {"async_scheduling": True, "max_batch_tokens": 100},
    "async scheduling, preempted": {"num_blocks": 6, "async_scheduling": True},
    "preempted": {"num_blocks": 6},
    "preempted, in chunks": {"num_blocks": 6, "max_batch_tokens": 40},
}


def stateful(backend: str = "torch", *, num_blocks: int = 64, dtype: torch.dtype = torch.float32, **changes) -> Engine:
    """An engine of CONFIG with NaN in every state."""
    settings = {"max_batch_requests": 4, "max_model_len": 160} | changes
    groups = GroupSize(num_blocks), GroupSize(settings["max_batch_requests"], has_state=True)
    machine = engine(Way(backend, dtype), CONFIG, num_blocks=num_blocks, groups=groups, **settings)
    for state in machine.runner.cache.states.values():
        for part in state:
            part.fill_(torch.nan)
    return machine


def crowd() -> list[Request]:
    """Greedy and drawn."""
    dice = random.Random(5)
    return [
        ask(
            f"r{at}", dice.choices(range(VOCAB), k=length), 20, sampling=SamplingParams(temperature=at % 2), seed=at, logprobs=0
        )
        for at, length in enumerate(LENGTHS)
    ]


@cache
def alone() -> dict[str, Answer]:
    """What each of the crowd gets from an engine of its own, its whole prompt at once."""
    return {name: answer(outputs) for each in crowd() for name, outputs in run(stateful(), [each]).items()}


@pytest.mark.parametrize("coming", COMINGS)
def test_a_request_gets_the_tokens_that_it_gets_alone(coming):
    """And their scores are those of a dense pass. A state's place is taken over by several requests."""
    backend = "reference" if "reference" in coming else "torch"
    machine = stateful(backend, **COMINGS[coming])
    found = {name: answer(outputs) for name, outputs in run(machine, crowd()).items()}
    assert_near(Way(backend, torch.float32), CONFIG, crowd(), found)
    assert {name: tokens for name, (tokens, _) in alone().items()} == {name: tokens for name, (tokens, _) in found.items()}
    assert ("preempted" in coming) == (machine.stats().num_preemptions > 0)


NATIVE = {"backend": "native", "dtype": torch.bfloat16}


@cache
def bits_alone() -> dict[str, Answer]:
    """The same on the native backend."""
    return {name: answer(outputs) for each in crowd() for name, outputs in run(stateful(**NATIVE), [each]).items()}


@needs_library
@pytest.mark.parametrize("coming", COMINGS)
def test_on_the_native_backend_its_scores_have_the_same_bits_however_it_comes(coming):
    machine = stateful(**NATIVE, **COMINGS[coming])
    assert {name: answer(outputs) for name, outputs in run(machine, crowd()).items()} == bits_alone()
    assert ("preempted" in coming) == (machine.stats().num_preemptions > 0)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_state_that_is_not_a_number_ends_its_request_alone(async_scheduling):
    """And who takes its place next is not harmed."""
    machine = stateful(max_batch_requests=2, async_scheduling=async_scheduling)
    first, second, *others = crowd()
    outputs = {request.request_id: [] for request in (first, second, *others)}
    for request in (first, second):
        machine.add(request)
    while len(first.output) < 5:
        for output in machine.step():
            outputs[output.request_id].append(output)
    [lost] = first.tables[1]
    for state in machine.runner.cache.states.values():
        for part in state:
            part[lost] = torch.nan
    for name, more in run(machine, others).items():
        outputs[name] += more
    assert outputs["r0"][-1].finish_reason is FinishReason.ERROR
    assert {name: answer(outputs[name])[0] for name in outputs if name != "r0"} == {
        name: tokens for name, (tokens, _) in alone().items() if name != "r0"
    }


OPTIONS = EngineOptions(device="cpu", dtype="float32", num_threads=1, kv_cache_memory=1 << 22, max_batch_requests=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))


def test_a_built_engine_answers_as_transformers_and_says_that_prefixes_are_not_cached(folder, caplog):
    async def read(request):
        async with aclosing(served.generate([request])) as stream:
            return told([output async for batch in stream for output in batch])

    with caplog.at_level(logging.INFO, "attend"):
        served = build_engine(folder, OPTIONS)
    assert [record.name for record in caplog.records if "prefix caching is off" in record.getMessage()] == ["attend.engine"]
    assert served.info.backend == "torch"
    prompt = [5, 17, 80, 3, 44, 61, 9, 2, 33, 70, 12]
    served.start()
    try:
        tokens, *_ = asyncio.run(read(ask("a", prompt, 64)))
    finally:
        served.close()
    theirs = their_logits(their_model(folder), prompt + tokens)
    assert theirs.argmax(-1).tolist()[len(prompt) - 1 : -1] == tokens


@needs_library
def test_in_bfloat16_the_native_backend_serves_it_and_may_be_deterministic(folder):
    served = build_engine(folder, replace(OPTIONS, dtype="bfloat16", deterministic=True, block_size=32))
    assert served.info.backend.startswith("native-")


def test_guesses_are_refused(folder):
    with pytest.raises(SettingError, match="draft_tokens is set, but this model has a recurrent state"):
        build_engine(folder, replace(OPTIONS, draft_tokens=4))


STATE = 2 * CONFIG.layers[0].state_bytes
BLOCK = 32 * CONFIG.kv_bytes_per_token(4)


def test_states_are_counted_in_the_memory_of_the_cache():
    memory = 5 * STATE + 11 * BLOCK
    config = size_engine(CONFIG, torch.float32, "cpu", replace(OPTIONS, kv_cache_memory=memory))
    assert config.groups == (GroupSize(10), GroupSize(4, has_state=True))


def test_fewer_requests_run_at_a_time_where_their_states_would_take_more_than_half_of_the_memory():
    for memory, most in ((8 * STATE, 3), (64 * STATE, 4), (4 * STATE, 1), (5 * STATE, 1)):
        config = size_engine(
            CONFIG, torch.float32, "cpu", replace(OPTIONS, kv_cache_memory=memory, max_model_len=16, block_size=16)
        )
        assert config.max_batch_requests == config.groups[1].num_blocks == most
