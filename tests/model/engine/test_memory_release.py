"""An idle engine gives back the memory of blocks that nobody uses, and of no others: answers afterwards are what they were."""

import asyncio
import ctypes
import gc
import random
import time
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend.model.engine import memory_release
from attend.model.engine.blocks import BlockPool
from attend.model.engine.build import build_engine
from attend.model.engine.engine import Engine
from attend.model.engine.memory_release import (
    FREE_SECONDS,
    IdleMemory,
    Layer,
    PartsOf,
    idle_memory,
    layers_of,
    resident_bytes,
    runs_of,
)
from attend.model.engine.options import EngineOptions
from attend.model.engine.runner import ModelRunner
from attend.model.engine.scheduler import Scheduler
from attend.model.net.checkpoint import save
from attend.model.net.kv_cache import KVCache
from attend.model.net.mapped_memory import bytes_in_memory, clear, large_pages
from attend.model.net.native.library import load_library as load_native
from tests.model.attention import BACKENDS
from tests.model.checkpoints import VOCAB, tiny_config, tiny_decoder
from tests.model.engine.machines import Clock, answers, ask, run, sizes
from tests.model.engine.simulation import Simulation

PAGE, NO_LARGE_PAGES = 4096, 15
"""Bytes, and what madvise(2) calls MADV_NOHUGEPAGE."""
KEPT = 1000.0
"""Seconds for which known blocks stay in these tests."""


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of one page, so that a small cache has many."""
    monkeypatch.setattr(memory_release, "PART", PAGE)


# Which parts may go.


@given(
    st.integers(0, 3 * PAGE),
    st.lists(st.tuples(st.integers(1, 3 * PAGE), st.integers(0, 1)), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(["busy", "old", "spare"]), st.sampled_from(["busy", "old", "spare"])), max_size=9),
)
def test_a_part_goes_where_an_old_block_lies_in_it_and_no_busy_one_and_nobody_elses_memory(start, sizes, states):
    """Told byte by byte."""
    states = [("spare", "spare"), *states]
    layers, at, wanted = [], 7 * PAGE + start, {}
    for block_bytes, group in sizes:
        layers.append(Layer(at, block_bytes, len(states), group))
        for state in states:
            for byte in (at, at + block_bytes - 1, *range(-(-at // PAGE) * PAGE, at + block_bytes, PAGE)):
                wanted.setdefault(byte // PAGE, set()).add(state[group])
            at += block_bytes
    begin, end = layers[0].address, at
    parts = {
        part
        for part, its in wanted.items()
        if begin <= part * PAGE and (part + 1) * PAGE <= end and "old" in its and "busy" not in its
    }
    marks = {
        name: [runs_of(torch.tensor([state[group] == name for state in states]).numpy()) for group in (0, 1)]
        for name in ("busy", "old")
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_release, "PART", PAGE)
        found = PartsOf(layers)
        for layer in layers:
            found.add(layer, marks["busy"][layer.group], marks["old"][layer.group])
        spare = found.spare()
    assert parts == {part for address, size in spare for part in range(address // PAGE, (address + size) // PAGE)}
    assert all(not address % PAGE and 0 < size <= memory_release.PARTS_AT_ONCE * PAGE for address, size in spare)
    assert all(first[0] + first[1] <= second[0] for first, second in pairwise(spare)), "a part goes twice"


def test_memory_that_was_given_back_reads_as_zeros_and_counts_no_more():
    numbers = large_pages(64 << 18, torch.float32)
    start = -(-numbers.data_ptr() // memory_release.PART) * memory_release.PART
    assert bytes_in_memory(numbers.data_ptr(), numbers.nbytes) == 0
    numbers.fill_(1.0)
    assert bytes_in_memory(numbers.data_ptr(), numbers.nbytes) == numbers.nbytes
    clear(start, 8 * memory_release.PART)
    assert bytes_in_memory(numbers.data_ptr(), numbers.nbytes) == numbers.nbytes - 8 * memory_release.PART
    assert int((numbers == 0).sum()) == 8 * memory_release.PART // 4


# A real engine.


def restful(seconds: float = KEPT, **changes) -> tuple[Engine, Clock]:
    """A tiny engine whose cache has 32 KiB in each block, and a clock that is set."""
    net = tiny_decoder(tiny_config(head_size=64, max_positions=1 << 12))
    config, clock = sizes(num_blocks=256, block_size=16, max_model_len=256, **{"prefix_caching": True} | changes), Clock()
    cache = KVCache.allocate(net.config, config.num_blocks, config.block_size, torch.float32, "cpu")
    if memory_release.PART == PAGE:  # a page is what a first write takes
        [layers] = layers_of(cache)
        ctypes.CDLL(None).madvise(
            *map(ctypes.c_void_p, (layers[0].address, layers[-1].end - layers[0].address)), NO_LARGE_PAGES
        )
    scheduler, attention = Scheduler(config, clock), BACKENDS["torch"](net.config.attention_variants)
    given_back = IdleMemory(scheduler, layers_of(cache), seconds, clock)
    return Engine(scheduler, ModelRunner(net, attention, cache, "cpu"), clock, idle=given_back), clock


def burst(count: int = 16, length: int = 200, seed: int = 1):
    """Requests that share nothing, each with log probabilities, in which other bits would show."""
    dice = random.Random(seed)
    return [ask(f"r{at}", dice.choices(range(VOCAB), k=length), 8, logprobs=3) for at in range(count)]


def scores(engine: Engine, requests) -> dict[str, list]:
    """Each token of each answer, with the log probabilities."""
    return {name: [each.logprobs for each in outputs] for name, outputs in run(engine, requests).items()}


def idled(engine: Engine, clock: Clock, seconds: float) -> int:
    """Let the engine be idle for so long, a second at a time; returns the bytes of its cache in memory then."""
    for _ in range(int(seconds)):
        clock.now += 1
        assert engine.step() == []
    return resident_bytes(engine.runner.cache)


def test_after_a_while_the_memory_of_a_burst_is_back_and_answers_are_equal_to_the_bit(small_parts):
    """First that of blocks which nobody can find, then that of the prefix cache; and at once nothing."""
    engine, clock = restful()
    before = idled(engine, clock, FREE_SECONDS + 1)
    first = scores(engine, burst())
    known = scores(engine, burst())
    full = resident_bytes(engine.runner.cache)
    assert full > before + (6 << 20), "a burst of 16 * 208 tokens, 2 KiB each"
    assert idled(engine, clock, FREE_SECONDS - 2) == full
    unknown = idled(engine, clock, 4)
    assert full - unknown >= 16 * 2 * PAGE, "each answer's last block is full of nothing that could be found"
    assert idled(engine, clock, KEPT - FREE_SECONDS - 5) == unknown
    hits = engine.scheduler.num_prefix_hits
    again = scores(engine, burst())
    assert engine.scheduler.num_prefix_hits - hits == 16 * 192
    assert known == again
    assert idled(engine, clock, KEPT + 5) <= before + PAGE
    hits = engine.scheduler.num_prefix_hits
    anew = scores(engine, burst())
    assert engine.scheduler.num_prefix_hits == hits, "known blocks whose memory is gone"
    assert first == anew


def test_no_byte_of_a_known_block_changes_and_all_others_read_as_they_were_or_as_zeros(small_parts):
    engine, clock = restful()
    run(engine, burst())
    idled(engine, clock, 500)
    run(engine, burst(4, seed=2))
    cache, pool = engine.runner.cache, engine.scheduler.tables.groups[0].pool
    early = {block for block, since, known in pool.iter_free_blocks() if known and since == FREE_SECONDS + 1 - FREE_SECONDS - 1}
    late = {block for block, since, known in pool.iter_free_blocks() if known and block not in early}
    assert len(early) > 150 and len(late) == 4 * 12
    before = [part.clone() for part in (*cache.keys, *cache.values)]
    idled(engine, clock, 510)
    assert {block for block, since, known in pool.iter_free_blocks() if known} == late
    changed = 0
    for held, was in zip((*cache.keys, *cache.values), before, strict=True):
        for block in range(pool.num_blocks + 1):
            now, then = (part[block * 16 : block * 16 + 16] for part in (held, was))
            if block in late:
                assert torch.equal(now, then)
            assert ((now == then) | (now == 0)).all()
            changed += not torch.equal(now, then)
    assert changed > 500


def test_known_blocks_that_are_used_again_stay(small_parts):
    """Their time begins anew with each use, and that of others does not."""
    engine, clock = restful()
    run(engine, burst(4))
    for _ in range(5):
        idled(engine, clock, KEPT / 2)
        run(engine, burst(1))
    hits = engine.scheduler.num_prefix_hits
    assert hits == 5 * 192
    run(engine, burst(4))
    assert engine.scheduler.num_prefix_hits - hits == 192


def test_with_0_the_prefix_cache_stays_for_ever(small_parts):
    engine, clock = restful(0.0)
    run(engine, burst())
    full = resident_bytes(engine.runner.cache)
    clock.now += 1e9
    assert full > idled(engine, clock, 5) > full / 2
    run(engine, burst())
    assert engine.scheduler.num_prefix_hits == 16 * 192


def test_a_short_time_counts_for_all_blocks(small_parts):
    engine, clock = restful(5.0)
    before = idled(engine, clock, 10)
    run(engine, burst())
    assert idled(engine, clock, 7) <= before + PAGE


def test_the_next_burst_takes_no_more_memory_than_the_first_one():
    """It has its blocks side by side again, not scattered over the large pages of the whole cache."""
    engine, clock = restful(5.0)
    run(engine, burst(4))
    full = resident_bytes(engine.runner.cache)
    for seed in range(2, 6):
        idled(engine, clock, 10)
        run(engine, burst(4, seed=seed))
        assert resident_bytes(engine.runner.cache) <= full


def test_whole_large_pages_go_alone():
    """What is smaller than PART stays: in pieces it would not leave memory."""
    engine, clock = restful(5.0)
    run(engine, burst())
    assert resident_bytes(engine.runner.cache) > 6 << 20
    assert idled(engine, clock, 40) <= 2 * memory_release.PART, "the first and the last part of the mapping"


def test_a_request_ends_a_pass_and_the_next_one_begins_anew(small_parts, monkeypatch):
    """Of a pass in slices nothing is lost, and nothing goes that was taken meanwhile."""
    engine, clock = restful(5.0)
    before = idled(engine, clock, 10)
    first = answers(engine, burst())
    full = resident_bytes(engine.runner.cache)
    monkeypatch.setattr(memory_release, "SLICE_SECONDS", -1.0)  # one piece of work each time, as the clock stands
    monkeypatch.setattr(IdleMemory, "__call__", piecewise(IdleMemory.__call__))
    engine.step()
    clock.now += 6
    while resident_bytes(engine.runner.cache) == full:
        engine.step()
    assert before + PAGE < resident_bytes(engine.runner.cache), "in the middle of a pass"
    assert answers(engine, burst()) == first
    engine.step()
    clock.now += 6
    for _ in range(2000):
        engine.step()
    assert resident_bytes(engine.runner.cache) <= before + PAGE
    assert answers(engine, burst()) == first


def piecewise(call):
    """One piece of a pass at a call."""

    def once(self: IdleMemory) -> None:
        call(self)
        if self._pass is not None and next(self._pass, self) is self:
            self._pass = None

    return once


def test_a_slice_is_short_however_large_the_cache_is(monkeypatch, request):
    """Of 64 GiB in 65,536 blocks: a request waits for it no longer than for a short step."""
    pool_size, layers = 1 << 16, 32
    config = sizes(num_blocks=pool_size, block_size=32, prefix_caching=True, max_model_len=1 << 20)
    scheduler = Scheduler(config, time.monotonic)
    memory = [[Layer(at << 31, 1 << 15, pool_size + 1, 0) for at in range(1, layers + 1)]]
    cleared = 0

    def count(address: int, size: int) -> None:
        nonlocal cleared
        cleared += size

    monkeypatch.setattr(memory_release, "FREE_SECONDS", 0.0)
    work, longest, calls = IdleMemory(scheduler, memory, 1000.0, time.monotonic, count), 0.0, 0
    gc.disable()
    request.addfinalizer(gc.enable)
    while not calls or work._pass is not None:
        begun = time.thread_time()
        work()
        longest, calls = max(longest, time.thread_time() - begun), calls + 1
    assert cleared > 60 << 30
    assert longest < 0.02 and calls > 3


def test_on_a_gpu_nothing_is_given_back():
    class Runner:
        device = "cuda"

    assert idle_memory(None, Runner(), EngineOptions())() is None  # it looks at nothing else


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_memory_of_the_whole_process_falls_after_a_burst_and_answers_are_the_same(tmp_path, backend):
    """With the step thread, from a checkpoint: 2 KiB a token, 256 tokens in each of 64 requests."""
    if backend == "native" and load_native() is None:
        pytest.skip("the native decoder is not built")
    save(tiny_decoder(tiny_config(head_size=64, num_layers=4, max_positions=512)), tmp_path, torch.bfloat16)
    kind = {"backend": backend, "dtype": "float32" if backend == "torch" else "bfloat16", "device": "cpu", "num_threads": 1}
    engine = build_engine(tmp_path, EngineOptions(kv_idle_seconds=0.5, kv_cache_memory=256 << 20, **kind))

    async def answer() -> dict[str, list[int]]:
        requests = burst(64, 240)
        tokens = {request.request_id: [] for request in requests}
        async with aclosing(engine.generate(requests)) as stream:
            async for outputs in stream:
                for output in outputs:
                    tokens[output.request_id] += output.token_ids
        return tokens

    engine.start()
    try:
        before, first = in_memory(), asyncio.run(answer())
        held, full = engine.cache_resident_bytes(), in_memory()
        assert held > 30 << 20 < full - before
        deadline = time.monotonic() + 20
        while engine.cache_resident_bytes() > 4 << 20:
            assert time.monotonic() < deadline, "the memory stays"
            time.sleep(0.1)
        assert in_memory() < full - (held - (8 << 20))
        assert asyncio.run(answer()) == first
    finally:
        engine.close()


def in_memory() -> int:
    """Bytes of this process in memory (proc_pid_statm(5))."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


# Random lives.


class Restful(Simulation):
    """A life with rests, in which memory is given back: whoever reads it afterwards finds nothing there."""

    def __init__(self, seed: int, groups: str) -> None:
        super().__init__(seed, groups=groups)
        self.own, self.cleared, self.rests, self.wants_rest = random.Random(seed), 0, 0, False
        layers, at = [], 3 * PAGE + self.own.randrange(PAGE)
        for group, size in enumerate(self.config.groups):
            for _ in range(self.own.randint(1, 2)):
                layers.append(Layer(at, self.own.choice([500, 3000, 5000]), size.num_blocks + 1, group))
                at = layers[-1].end
        self.layers = layers
        self.idle = IdleMemory(self.scheduler, [layers], self.own.choice([0.0, 10.0, 100.0]), self.passing, self.clear)

    def passing(self) -> float:
        """Time that passes while it is looked at."""
        self.clock.now += self.own.choice([0.0, 0.0, 0.01])
        return self.clock.now

    def submit(self) -> None:
        self.wants_rest = bool(self.live) and (self.wants_rest or self.own.random() < 0.2)
        if not self.wants_rest:
            super().submit()

    def step(self, faults: bool) -> None:
        super().step(faults)
        if self.next is None:
            self.rests += not self.live
            self.clock.now += 0.0 if self.live else self.own.choice([0.0, 1.0, 8.0, 31.0, 150.0])
            for _ in range(self.own.choice([1, 1, 2, 50])):
                self.idle()
            self.scheduler.check_integrity()

    def clear(self, address: int, size: int) -> None:
        self.cleared += size
        assert not self.live, "a request is in flight"
        for layer in self.layers:
            first, last = (at - layer.address for at in (address, address + size - 1))
            for block in range(max(0, first // layer.block_bytes), min(layer.num_blocks - 1, last // layer.block_bytes) + 1):
                self.erase(layer.group, block)

    def erase(self, group: int, block: int) -> None:
        size, runner = self.config.block_size, self.runner
        for slot in range(block * size, block * size + size):
            if group == 0:
                runner.slots.pop(slot, None)
            if hasattr(runner, "kept"):
                runner.kept.pop((group, slot), None)
        if hasattr(runner, "kept"):
            runner.states.pop((group, block), None)
            runner.passed.pop((group, block), None)


def lives(groups: str, seeds: int = 25) -> None:
    cleared = hits = rests = 0
    for seed in range(seeds):
        try:
            life = Restful(seed, groups).run()
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        cleared, hits, rests = cleared + life.cleared, hits + life.scheduler.num_prefix_hits, rests + life.rests
    assert cleared > 100 * PAGE and hits > seeds // 3
    assert rests > seeds


@pytest.mark.parametrize("groups", ["full", "windows", "states"])
def test_through_random_lives_with_rests_every_answer_is_right(small_parts, groups):
    lives(groups)


@pytest.mark.parametrize("groups", ["full", "windows", "states"])
def test_a_life_finds_known_blocks_whose_memory_is_gone(small_parts, monkeypatch, groups):
    """The planted bug: what is old goes, and stays findable."""
    monkeypatch.setattr(BlockPool, "forget", forgetful(BlockPool.forget))
    monkeypatch.setattr(BlockPool, "note_given_back", lambda self, blocks: self._free.update(dict.fromkeys(blocks)))
    with pytest.raises(AssertionError, match="seed"):
        lives(groups, 150)


def forgetful(forget):
    """`forget` which does nothing where it is called for one block that is free."""

    def some(self: BlockPool, blocks) -> None:
        blocks = tuple(blocks)
        if not (len(blocks) == 1 and blocks[0] in self._free):
            forget(self, blocks)

    return some
