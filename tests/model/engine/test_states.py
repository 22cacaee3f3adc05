"""Models that keep a state for each request: through scheduler, runner and decoder, nobody meets the state of another."""

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from attend.model.backends.torch import Torch
from attend.model.backends.triton import Triton
from attend.model.config import ModelConfig
from attend.model.engine import snapshots
from attend.model.engine.build import build_engine, size_engine
from attend.model.engine.config import GroupSize
from attend.model.engine.engine import Engine
from attend.model.engine.lookup import Lookup
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import FinishReason, Request
from attend.model.errors import SettingError
from attend.model.net.native.library import load_library
from attend.model.params import SamplingParams
from attend.model.sublayers import DeltaSpec
from tests.model.checkpoints import VOCAB, their_logits, their_model, tiny_config, write_checkpoint
from tests.model.engine.machines import ask, run, told
from tests.model.net.laws.test_engine_laws import Answer, answer, assert_near, engine, repeating
from tests.model.net.laws.ways import Way

needs_library = pytest.mark.skipif(
    load_library() is None, reason="the native decoder is not built here: python -m attend.model.net.native"
)
CONFIG = tiny_config(
    num_layers=3,
    max_positions=512,
    attention_gate=True,
    delta=DeltaSpec(key_heads=2, value_heads=4, key_size=8, value_size=6, kernel=4),
    delta_layers=(0, 2),
)
CONVOLVING = tiny_config(num_layers=3, max_positions=256, conv_kernel=4, conv_bias=True, conv_layers=(0, 2), head_gate=True)
each_kind = pytest.mark.parametrize("config", [CONFIG, CONVOLVING], ids=["delta rule", "short convolutions"])
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


def stateful(
    backend: str = "torch", *, config: ModelConfig = CONFIG, num_blocks: int = 64, dtype: torch.dtype = torch.float32, **changes
) -> Engine:
    """An engine with NaN in every state."""
    settings = {"max_batch_requests": 4, "max_model_len": 160, "num_snapshots": 0} | changes
    slots = settings["max_batch_requests"] + settings["num_snapshots"]
    groups = GroupSize(num_blocks), GroupSize(slots, has_state=True)
    machine = engine(Way(backend, dtype), config, num_blocks=num_blocks, groups=groups, **settings)
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
def alone(config: ModelConfig = CONFIG) -> dict[str, Answer]:
    """What each of the crowd gets from an engine of its own, its whole prompt at once."""
    return {name: answer(outputs) for each in crowd() for name, outputs in run(stateful(config=config), [each]).items()}


@each_kind
@pytest.mark.parametrize("coming", COMINGS)
def test_a_request_gets_the_tokens_that_it_gets_alone(coming, config):
    """And their scores are those of a dense pass. A state's place is taken over by several requests."""
    backend = "reference" if "reference" in coming else "torch"
    machine = stateful(backend, config=config, **COMINGS[coming])
    found = {name: answer(outputs) for name, outputs in run(machine, crowd()).items()}
    assert_near(Way(backend, torch.float32), config, crowd(), found)
    assert {name: tokens for name, (tokens, _) in alone(config).items()} == {
        name: tokens for name, (tokens, _) in found.items()
    }
    assert ("preempted" in coming) == (machine.stats().num_preemptions > 0)


NATIVE = {"backend": "native", "dtype": torch.bfloat16}


@cache
def bits_alone(config: ModelConfig) -> dict[str, Answer]:
    """The same on the native backend."""
    one_by_one = (run(stateful(**NATIVE, config=config), [each]) for each in crowd())
    return {name: answer(outputs) for found in one_by_one for name, outputs in found.items()}


@needs_library
@each_kind
@pytest.mark.parametrize("coming", COMINGS)
def test_on_the_native_backend_its_scores_have_the_same_bits_however_it_comes(coming, config):
    machine = stateful(**NATIVE, config=config, **COMINGS[coming])
    assert {name: answer(outputs) for name, outputs in run(machine, crowd()).items()} == bits_alone(config)
    assert ("preempted" in coming) == (machine.stats().num_preemptions > 0)


# Prefixes that are reused.

KEPT = {"prefix_caching": True, "num_snapshots": 24, "max_model_len": 384}
WARM = {
    "batched": {},
    "chunked": {"max_batch_tokens": 13},
    "two at a time": {"max_batch_requests": 2},
    "with few snapshots": {"num_snapshots": 3},
    "with one slot more than requests": {"num_snapshots": 1, "max_batch_requests": 2},
    "in a small cache": {"num_blocks": 20},
    "preempted": {"num_blocks": 12, "num_snapshots": 8},
    "async scheduling": {"async_scheduling": True},
    "async scheduling, preempted": {"async_scheduling": True, "num_blocks": 12, "max_batch_tokens": 100},
}
TURNS, TALKS = 4, 5


@cache
def cold(backend: str, dtype: torch.dtype, prompt: tuple[int, ...], seed: int) -> Answer:
    """What a turn of a talk gets alone, its whole prompt at once."""
    return answer(run(stateful(backend, dtype=dtype, max_model_len=384), [turn("a", prompt, seed)])["a"])


def turn(name: str, prompt: tuple[int, ...], seed: int, **fields) -> Request:
    return ask(name, prompt, 20, sampling=SamplingParams(temperature=seed % 2), seed=seed, logprobs=0, **fields)


def talks(backend: str, dtype: torch.dtype) -> list[list[tuple[tuple[int, ...], int]]]:
    """Prompt and seed of each turn of talks that begin alike. A turn goes on after the answer; the last talk asks again."""
    dice, found = random.Random(11), []
    stem = dice.choices(range(VOCAB), k=75)
    for seed in range(TALKS):
        prompt, turns = (*stem, *dice.choices(range(VOCAB), k=dice.randint(1, 70))), []
        for _ in range(TURNS):
            turns.append((prompt, seed))
            if seed < TALKS - 1:
                prompt = (*prompt, *cold(backend, dtype, prompt, seed)[0], *dice.choices(range(VOCAB), k=dice.randint(1, 40)))
        found.append(turns)
    return found


def warm(machine: Engine, backend: str, dtype: torch.dtype) -> Iterator[tuple[Answer, Answer]]:
    """Each turn's answer where all talks are held at once, and alone. One is left, and one has a salt of its own."""
    for at, turns in enumerate(zip(*talks(backend, dtype), strict=True)):
        requests = [turn(f"r{at}-{seed}", prompt, seed, cache_salt="x" * (seed == 1)) for prompt, seed in turns]
        machine.add(turn(f"left {at}", turns[0][0], 7))
        for _ in range(at):
            machine.step()
        machine.abort(f"left {at}", FinishReason.ABORT)
        found = run(machine, requests)
        for request, (prompt, seed) in zip(requests, turns, strict=True):
            yield answer(found[request.request_id]), cold(backend, dtype, prompt, seed)


@needs_library
@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("coming", WARM)
def test_an_answer_that_goes_on_from_a_snapshot_has_the_same_bits(coming, least, monkeypatch):
    monkeypatch.setattr(snapshots, "LEAST", least)
    machine = stateful(**NATIVE, **KEPT | WARM[coming])
    for found, alone in warm(machine, "native", torch.bfloat16):
        assert found == alone
    assert machine.stats().num_prefix_hits > (0 if "one slot" in coming or "preempted" in coming else 500)
    assert "preempted" not in coming or machine.stats().num_preemptions > 0


@pytest.mark.parametrize("coming", WARM)
def test_an_answer_that_goes_on_from_a_snapshot_is_the_same(coming, monkeypatch):
    """On the torch backend sums depend on how a prompt is cut."""
    monkeypatch.setattr(snapshots, "LEAST", 1)
    machine = stateful(**KEPT | WARM[coming])
    for (tokens, scores), (wanted, expected) in warm(machine, "torch", torch.float32):
        assert tokens == wanted
        torch.testing.assert_close(torch.tensor(scores), torch.tensor(expected), atol=1e-4, rtol=1e-4)
    assert machine.stats().num_prefix_hits > 0


# Drafts.

DRAFTED = {
    "batched": {},
    "one at a time": {"max_batch_requests": 1},
    "preempted": {"num_blocks": 6},
    "in small steps": {"max_batch_tokens": 9},
    "with snapshots": {"prefix_caching": True, "num_snapshots": 8},
}


@cache
def without_drafts(backend: str, dtype: torch.dtype) -> dict[str, Answer]:
    found = run(stateful(backend, dtype=dtype), [replace(request, logprobs=0) for request in repeating()])
    return {name: answer(outputs) for name, outputs in found.items()}


def draft_from(truth: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are the tokens to come, of which one is wrong as often as not."""
    dice = random.Random(3)

    def draft(lookup: Lookup, request: Request, most: int, streams: int) -> list[int]:
        begin = len(request.output)
        tokens = truth[request.request_id][begin : begin + dice.randint(0, most)]
        if tokens and dice.random() < 0.5:
            at = dice.randrange(len(tokens))
            tokens[at] = (tokens[at] + 1) % VOCAB
        return tokens

    monkeypatch.setattr(Lookup, "draft", draft)


@pytest.mark.parametrize("draft_tokens", [7, 15, 60])
@pytest.mark.parametrize("coming", DRAFTED)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("reference", torch.float32),
        ("torch", torch.float32),
        pytest.param("native", torch.bfloat16, marks=needs_library),
    ],
)
def test_drafts_change_no_token(backend, dtype, coming, draft_tokens, monkeypatch):
    """Also where an earlier answer's states are gone on from: a wrong draft leaves nothing in them."""
    wanted = {name: tokens for name, (tokens, _) in without_drafts(backend, dtype).items()}
    draft_from(wanted, monkeypatch)
    machine = stateful(backend, dtype=dtype, draft_tokens=draft_tokens, **DRAFTED[coming])
    for _ in range(2):
        assert wanted == {name: told(outputs)[0] for name, outputs in run(machine, repeating()).items()}
    assert 0 < machine.stats().num_accepted < machine.stats().num_drafted
    assert ("preempted" in coming) <= (machine.stats().num_preemptions > 0)


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


def test_a_built_engine_answers_as_transformers_and_says_how_many_states_it_keeps(folder, caplog):
    async def read(request):
        async with aclosing(served.generate([request])) as stream:
            return told([output async for batch in stream for output in batch])

    with caplog.at_level(logging.INFO, "attend"):
        served = build_engine(folder, OPTIONS)
    assert any("prefix caching keeps" in record.getMessage() for record in caplog.records)
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


def test_drafts_are_refused_where_a_wrong_one_would_stay_in_the_state():
    options = replace(OPTIONS, draft_tokens=4)
    with pytest.raises(SettingError, match="the triton backend would leave a rejected draft token in a recurrent state"):
        Triton(CONFIG).check_drafts(options, torch.float32)
    Torch(CONFIG).check_drafts(options, torch.float32)


STATE = 2 * CONFIG.layers[0].state_bytes
BLOCK = 32 * CONFIG.kv_bytes_per_token(4)


def test_snapshots_take_their_share_of_the_memory_where_keys_and_values_have_room():
    memory = 64 * STATE + 64 * BLOCK
    for share in (0.02, 0.05, 0.25):
        options = replace(OPTIONS, kv_cache_memory=memory, state_cache_share=share)
        config = size_engine(CONFIG, torch.float32, "cpu", options)
        assert config.num_snapshots == int(share * memory) // STATE == config.groups[1].num_blocks - 4
        assert config.prefix_caching


@pytest.mark.parametrize(("changes", "cause"), [({"state_cache_share": 0.0}, "state_cache_share is 0")])
def test_where_no_state_is_kept_prefix_caching_is_off_and_the_log_says_so(folder, caplog, changes, cause):
    with caplog.at_level(logging.INFO, "attend"):
        served = build_engine(folder, replace(OPTIONS, **changes))
    assert not served.engine.scheduler.config.prefix_caching
    assert [record.name for record in caplog.records if cause in record.getMessage()] == ["attend.engine"]


def test_fewer_requests_run_at_a_time_where_their_states_would_take_more_than_half_of_the_memory():
    for memory, most in ((8 * STATE, 3), (64 * STATE, 4), (4 * STATE, 1), (5 * STATE, 1)):
        options = replace(OPTIONS, kv_cache_memory=memory, max_model_len=16, block_size=16, state_cache_share=0.0)
        config = size_engine(CONFIG, torch.float32, "cpu", options)
        assert config.max_batch_requests == config.groups[1].num_blocks == most
