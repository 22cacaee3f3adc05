"""KV offloading: what is read back gives the tokens that computing gives, whatever is evicted, cut, late or another's."""

import asyncio
import random
import threading
import time
from array import array
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attend.model.engine import snapshots
from attend.model.engine.build import build_engine
from attend.model.engine.config import EngineConfig, GroupSize
from attend.model.engine.engine import Engine
from attend.model.engine.loop import AsyncEngine
from attend.model.engine.offload import offloader, reader, writer
from attend.model.engine.offload.offloader import KVOffload
from attend.model.engine.offload.reader import next_digest, root_digest
from attend.model.engine.offload.store import BlockStore
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import Output, Request
from attend.model.engine.scheduler import Scheduler
from attend.model.errors import SettingError
from attend.model.net.native.library import load_library
from tests.conftest import examples
from tests.model.checkpoints import KINDS, TORCH_ALONE, VOCAB, write_checkpoint
from tests.model.engine.integrity import check_integrity
from tests.model.engine.machines import Clock, ask, fake_answer, sizes, told
from tests.model.engine.test_loop import collect
from tests.model.engine.windows import GroupsRunner, with_groups

LEAST = 8


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for module in (offloader, reader):
        monkeypatch.setattr(module, "LEAST_TOKENS", LEAST)


class Cells:
    """The layout of a `GroupsRunner`: a block is a number of eight bytes, by which what its slots had is found again."""

    def __init__(self, runner: GroupsRunner, saved: dict[bytes, object]) -> None:
        self.runner, self.saved = runner, saved
        self.sizes = [8] * len(runner.groups)

    def _places(self, group: int, block: int) -> range:
        size = 1 if self.runner.groups[group].has_state else self.runner.block_size
        return range(block * size, block * size + size)

    def read(self, group: int, blocks: list[int]) -> list[memoryview]:
        found = []
        for block in blocks:
            name = len(self.saved).to_bytes(8)
            held = self.runner.states if self.runner.groups[group].has_state else self.runner.kept
            self.saved[name] = [held.get((group, place)) for place in self._places(group, block)]
            found.append(memoryview(name))
        return found

    def write(self, group: int, blocks: list[int], data: list[bytes]) -> None:
        for block, name in zip(blocks, data, strict=True):
            held = self.runner.states if self.runner.groups[group].has_state else self.runner.kept
            for place, cell in zip(self._places(group, block), self.saved[name], strict=True):
                held[group, place] = cell
                if self.runner.groups[group].has_state and cell is not None:
                    self.runner.passed[group, place] = {cell[0]: cell[1]}


def fake(config: EngineConfig, folder: Path, saved: dict[bytes, object], *, most_bytes: int = 1 << 20, **more) -> Engine:
    """An engine over a fake model, with offloading to a folder."""
    clock = Clock()
    runner = GroupsRunner(config)
    scheduler = Scheduler(config, clock)
    layout = Cells(runner, saved)
    store = BlockStore(folder, "0" * 16, layout.sizes, most_bytes)
    offload = KVOffload(scheduler, store, layout, **{"bytes_per_second": 1e9} | more)
    return Engine(scheduler, runner, clock, offload=offload)


def finished(engine: Engine, requests: Iterable[Request], seconds: float = 30.0) -> dict[str, list[Output]]:
    """Everything that came, with every invariant held after each step."""
    outputs: dict[str, list[Output]] = {}
    for request in requests:
        engine.add(request)
    deadline = time.monotonic() + seconds
    scheduler = engine.scheduler
    while scheduler.num_running + scheduler.num_waiting or engine.offload.has_results:
        assert time.monotonic() < deadline, "the engine does not come to an end"
        if not engine.has_work:
            time.sleep(0.0005)  # the thread that reads is at work
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        check_integrity(scheduler)
    return outputs


def flushed(offload: KVOffload) -> bool:
    done = threading.Event()
    offload.writer.flush(done)
    return done.wait(30)


def ended(engine: Engine) -> None:
    assert flushed(engine.offload), "what was computed is not written"
    engine.offload.close(10)
    for thread in (*engine.offload.reader._threads, engine.offload.writer._thread):
        assert not thread.is_alive()
    finished(engine, [])
    engine.scheduler.tables.check_all_free()


def config_of(dice: random.Random, *, windows: bool, states: bool, blocks: int) -> EngineConfig:
    most = {"max_model_len": 40} if windows or states else {}
    config = sizes(num_blocks=blocks, block_size=4, max_batch_requests=4, max_batch_tokens=16, prefix_caching=True, **most)
    return with_groups(config, dice, states=states) if windows or states else config


DENSE = config_of(random.Random(), windows=False, states=False, blocks=24)


def restarted(folder: Path, prompt: list[int], **more) -> Engine:
    """An engine over a folder in which the one before it has left the blocks of a prompt."""
    saved: dict[bytes, object] = {}
    engine = fake(DENSE, folder, saved)
    finished(engine, [ask("a", prompt, 2)])
    ended(engine)
    return fake(DENSE, folder, saved, **more)


KIND = {
    "full attention": (False, False),
    "windows": (True, False),
    "windows and states": (True, True),
}


def with_windows(groups: tuple[int | None, ...]) -> EngineConfig:
    config = sizes(num_blocks=24, max_batch_tokens=16, prefix_caching=True, max_model_len=64)
    return replace(config, groups=tuple(GroupSize(24, window) for window in groups))


@pytest.mark.parametrize("kind", KIND)
@pytest.mark.parametrize("seed", range(examples(40)))
def test_a_random_life_over_restarts_gets_the_tokens_that_are_computed_by_hand(kind, seed, tmp_path):
    """Shared beginnings, salts, answers that go on, few blocks, a small folder, requests that are aborted."""
    dice = random.Random(f"{kind} {seed}")
    windows, states = KIND[kind]
    config, saved = config_of(dice, windows=windows, states=states, blocks=dice.choice((24, 40))), {}
    stems = [dice.choices(range(8), k=dice.randint(8, 30)) for _ in range(3)]
    most = config.max_model_len - 12
    hits = 0
    for _ in range(3):
        engine = fake(config, tmp_path, saved, most_bytes=dice.choice((1 << 20, 2000)))
        for turn in range(3):
            requests = [
                ask(
                    f"{turn} {at}",
                    [*dice.choice(stems), *dice.choices(range(8), k=dice.randint(1, 12))][:most],
                    dice.randint(1, 10),
                    cache_salt=dice.choice(("", "", "a")),
                    seed=dice.randint(0, 2),
                )
                for at in range(dice.randint(1, 6))
            ]
            found = finished(engine, requests)
            for request in requests:
                assert told(found[request.request_id]) == fake_answer(replace_output(request))
            stems.append([*requests[0].prompt, *requests[0].output])
        hits += engine.offload.stats().read_tokens
        ended(engine)
    assert engine.offload.store.num_errors == 0


def replace_output(request: Request) -> Request:
    return ask("again", request.prompt, request.max_tokens, seed=request.seed)


def test_blocks_that_the_step_under_way_fills_are_not_copied(tmp_path):
    """They are known from its planning on, to the thread that writes too: it may just walk along the same text."""
    engine = fake(DENSE, tmp_path, {})
    offload, submit, seen = engine.offload, engine.runner.submit, []

    def submitted(step):
        offload.writer._jobs.put(writer.Text("\0", array("I", [1] * 16), 4, []))
        assert flushed(offload)
        seen.append(len(offload.store))
        return submit(step)

    engine.runner.submit = submitted
    finished(engine, [ask("a", [1] * 40, 2)])
    assert seen[:2] == [0, 4], "the first step fills four blocks of four"
    ended(engine)


def test_after_a_restart_a_known_prefix_is_read_and_not_computed(tmp_path):
    config, saved, prompt = DENSE, {}, list(range(8)) * 5
    for turn in range(3):
        engine = fake(config, tmp_path, saved)
        for salt in ("", "another") if turn == 1 else ("",):
            found = finished(engine, [ask("a", prompt, 4, cache_salt=salt)])
            cached = found["a"][-1].times.cached_tokens
            assert cached == (36 if turn and not salt else 0)
        assert engine.offload.stats().read_tokens == (36 if turn else 0)
        ended(engine)


def test_what_is_evicted_while_it_is_copied_is_not_written(tmp_path):
    """A block's slots have another text by then: the copy would be of that."""
    engine = fake(DENSE, tmp_path, {})
    begins, goes_on, real = threading.Event(), threading.Event(), engine.offload.writer._layout.read

    def read(group, blocks):
        begins.set()
        assert goes_on.wait(10)
        return real(group, blocks)

    engine.offload.writer._layout.read = read
    finished(engine, [ask("a", [1] * 60, 2)])
    assert begins.wait(10)
    finished(engine, [ask("b", [2] * 80, 2)])
    goes_on.set()
    assert flushed(engine.offload)
    assert engine.offload.stats().dropped_texts == 1
    engine.offload.writer._layout.read = real
    again = finished(engine, [ask("c", [1] * 60, 2)])
    assert told(again["c"]) == fake_answer(ask("c", [1] * 60, 2))
    ended(engine)


@pytest.mark.parametrize("groups", [(None,), (None, 5), (12,)], ids=str)
@pytest.mark.parametrize("place", range(0, 24, 3))
def test_a_record_that_is_bad_is_computed_again(groups, place, tmp_path):
    """Whichever it is: of full attention, or of a window."""
    config, saved, prompt = with_windows(groups), {}, list(range(8)) * 5
    engine = fake(config, tmp_path, saved)
    finished(engine, [ask("a", prompt, 2)])
    ended(engine)
    paths = sorted(tmp_path.iterdir())
    path = paths[place % len(paths)]
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(data)
    engine = fake(config, tmp_path, saved)
    found = finished(engine, [ask("a", prompt, 2)])
    assert told(found["a"]) == fake_answer(ask("a", prompt, 2))
    stats = engine.offload.stats()
    seen = sum(9 if window is None else -(-(window - 1) // 4) for window in groups)
    assert stats.num_errors == 1 or stats.read_bytes == 8 * seen, "more is read than the next token sees"
    ended(engine)


def test_a_request_that_ends_while_its_blocks_are_read_leaves_nothing(tmp_path):
    prompt = list(range(8)) * 5
    engine = restarted(tmp_path, prompt)
    begins, goes_on, real = threading.Event(), threading.Event(), engine.offload.store.read

    def read(keys):
        begins.set()
        assert goes_on.wait(10)
        return real(keys)

    engine.offload.store.read = read
    engine.add(ask("a", prompt, 2))
    while not begins.is_set():
        engine.step()
    assert engine.scheduler.num_waiting == 1 and not engine.has_work
    engine.scheduler.tables.check_all_free()
    others = ask("b", [3] * 10, 3)
    engine.add(others)
    while others.finish_reason is None:  # nobody waits for a disk but who needs it
        engine.step()
    engine.abort("a", "abort")
    goes_on.set()
    finished(engine, [])
    ended(engine)


def test_a_disk_that_hangs_is_waited_for_only_so_long(tmp_path):
    """Though the prompt needs nearly all blocks, and others come: a read holds none."""
    prompt, clock = list(range(8)) * 11, Clock()
    engine = restarted(tmp_path, prompt, clock=clock)
    goes_on, real = threading.Event(), engine.offload.store.read
    engine.offload.store.read = lambda keys: goes_on.wait(20) and real(keys)
    request = ask("a", prompt, 2)
    engine.add(request)
    for _ in range(20):
        engine.step()
        time.sleep(0.001)
    assert engine.scheduler.num_waiting == 1
    clock.now = reader.MAX_WAIT_SECONDS + 1
    while request.finish_reason is None:
        engine.step()
    later = ask("b", [*prompt[:60], 1, 1], 2)
    engine.add(later)
    assert "b" not in engine.scheduler.awaiting_kv, "nobody else waits for it"
    while later.finish_reason is None:
        engine.step()
    assert request.output == fake_answer(ask("a", prompt, 2))[0] and request.num_cached == 0
    assert engine.offload.stats().num_slower == 1
    goes_on.set()
    ended(engine)


def test_what_is_queued_is_bounded_at_a_time_and_not_since_the_start(tmp_path, monkeypatch):
    """Nor does an error of the disk, a text that goes, or one that was too much, end it for ever."""
    monkeypatch.setattr(writer, "MAX_QUEUED_TOKENS", 80)
    clock = Clock()
    engine = fake(DENSE, tmp_path, {}, clock=clock)
    queue, offload, real = engine.offload.writer, engine.offload, engine.offload.store.write
    begins, goes_on = threading.Event(), threading.Event()

    def write(key, data):
        begins.set()
        assert goes_on.wait(20)
        raise OSError(28, "No space left on device")

    def told_to(name: str) -> int:
        finished(engine, [ask(name, [ord(name) % 8] * 39, 2)])
        return offload.stats().dropped_texts

    offload.store.write = write
    assert told_to("a") == 0 and begins.wait(10)
    assert [told_to(name) for name in "bcd"] == [0, 0, 1], "40 tokens each, beside the one that is written"
    goes_on.set()
    assert flushed(offload) and offload.stats().dropped_texts == 4 and not len(offload.store)
    offload.store.write = real
    for turn, at in enumerate((29.0, 31.0, 1000.0)):
        clock.now = at
        told_to("efg"[turn])
        assert flushed(offload)
        assert (offload.stats().dropped_texts, len(offload.store)) == (5, 10 * turn)
    engine.runner.broken.add("g")
    told_to("g")
    assert flushed(offload) and queue._queued_tokens == 0
    ended(engine)


def test_what_the_last_step_filled_is_written_however_late_that_step_ends(tmp_path):
    engine = fake(DENSE, tmp_path, {})
    offer = engine.scheduler.on_finish

    def offer_early(request):
        offer(request)
        time.sleep(0.05)

    engine.scheduler.on_finish = offer_early
    finished(engine, [ask("a", [1] * 39, 2)])
    assert flushed(engine.offload) and len(engine.offload.store) == 10
    ended(engine)


def test_a_read_ends_a_wait_and_what_was_queued_and_the_next_is_read_too(tmp_path):
    """However long after: a read that has ended does not hang, and what was read waits no longer."""
    prompt, clock = list(range(8)) * 5, Clock()
    engine = restarted(tmp_path, prompt, clock=clock)
    engine.scheduler.cost.token_seconds = 1.0
    for turn in range(3):
        engine.scheduler.tables.groups[0].pool.forget(range(1, 25))
        assert finished(engine, [ask(f"{turn}", prompt, 1)])[f"{turn}"][-1].times.cached_tokens == 36
        assert engine.offload.reader._queued_bytes == 0 and not engine.scheduler.awaiting_kv
        clock.now += 10 * reader.MAX_WAIT_SECONDS
    stats = engine.offload.stats()
    assert (stats.read_tokens, stats.read_bytes, stats.num_slower) == (3 * 36, 3 * 9 * 8, 0)
    ended(engine)


@pytest.mark.parametrize("groups", [(None,), (None, 5), (None, 9), (12,)], ids=str)
def test_blocks_are_read_up_to_the_last_token_that_must_be_computed(groups, tmp_path, monkeypatch):
    """And of a window no more than the next token sees, wherever the prompt ends in a block; in pieces."""
    config, saved, text = with_windows(groups), {}, list(range(8)) * 5
    for module in (reader, writer):
        monkeypatch.setattr(module, "PIECE_BYTES", 24)
    engine = fake(config, tmp_path, saved)
    finished(engine, [ask("a", text, 2)])
    ended(engine)
    for length in range(LEAST, 40):
        engine = fake(config, tmp_path, saved)
        cached = finished(engine, [ask("a", text[:length], 1)])["a"][-1].times.cached_tokens
        blocks = (length - 1) // 4
        assert cached == (4 * blocks if 4 * blocks >= LEAST and length > LEAST else 0)
        seen = sum(blocks if window is None else min(blocks, -(-(window - 1) // 4)) for window in groups)
        assert engine.offload.stats().read_bytes == (8 * seen if cached else 0)
        ended(engine)


def test_who_needs_nothing_from_disk_does_not_wait_for_those_who_do_and_owners_take_turns(tmp_path):
    config, saved = config_of(random.Random(), windows=False, states=False, blocks=60), {}
    texts = {name: [number] * 40 for number, name in enumerate(["a0", "a1", "a2", "b0", "known"], 1)}
    engine = fake(config, tmp_path, saved)
    for name, text in texts.items():
        finished(engine, [ask(name, text, 2)])
    ended(engine)
    engine = fake(config, tmp_path, saved)
    finished(engine, [ask("before", texts["known"], 2)])
    order, begins, goes_on, real = [], threading.Event(), threading.Event(), engine.offload.store.read

    def read(keys):
        begins.set()
        assert goes_on.wait(20)
        order.append(keys[0])
        return real(keys)

    engine.offload.store.read = read
    for name, owner in (("a0", "a"), ("a1", "a"), ("a2", "a"), ("b0", "b")):
        engine.add(ask(name, texts[name], 2, owner=owner))
    assert begins.wait(10)
    last = ask("known", texts["known"], 2, owner="c")
    engine.add(last)
    deadline = time.monotonic() + 20
    while last.finish_reason is None and time.monotonic() < deadline:
        engine.step()
        time.sleep(0.0005)
    assert last.finish_reason is not None and last.num_cached == 36
    goes_on.set()
    finished(engine, [])
    firsts = {next_digest(root_digest("\0"), texts[name][:4]): name for name in texts}
    assert [firsts[key[0]] for key in order] == ["a0", "b0", "a1", "a2"], "b comes after a's first, not after all of a's"
    ended(engine)


def test_a_text_whose_scores_are_not_finite_does_not_come_back(tmp_path):
    """What was kept of it may be at fault: the next request computes it."""
    config, saved, prompt = DENSE, {}, [5] * 40
    engine = fake(config, tmp_path, saved)
    finished(engine, [ask("a", prompt, 2)])
    assert flushed(engine.offload) and len(engine.offload.store)
    engine.runner.broken.add("b")
    assert told(finished(engine, [ask("b", prompt, 2)])["b"])[1] == "error"
    assert flushed(engine.offload) and not len(engine.offload.store)
    assert finished(engine, [ask("c", prompt, 2)])["c"][-1].times.cached_tokens == 0
    ended(engine)


def test_one_slow_read_does_not_end_all_of_them(tmp_path):
    prompt = list(range(8)) * 5
    engine = restarted(tmp_path, prompt)
    engine.scheduler.cost.token_seconds = 1e-3
    engine.offload.reader._rate = 1.0
    found = []
    for turn in range(60):
        engine.scheduler.tables.groups[0].pool.forget(range(1, 25))
        found.append(finished(engine, [ask(f"{turn}", prompt, 1)])[f"{turn}"][-1].times.cached_tokens)
        engine.scheduler.cost.token_seconds = 1e-3
    assert found[0] == 0 and 36 in found
    ended(engine)


# Real models.


def prompts() -> list[list[int]]:
    dice = random.Random(3)
    stem = dice.choices(range(VOCAB), k=64)
    return [[*stem, *dice.choices(range(VOCAB), k=extra)] for extra in (9, 20, 33)]


def answered(folder: Path, options: EngineOptions) -> list[tuple[tuple, int]]:
    """Tokens and scores of each prompt, one after the other, and the tokens that were cached, by a process of its own."""
    engine = build_engine(folder, options)
    engine.start()
    try:
        requests = [ask(f"{at}", prompt, 6, logprobs=0) for at, prompt in enumerate(prompts())]
        found = asyncio.run(one_by_one(engine, requests))
        return [
            (
                tuple((score.token_id, score.logprob) for one in outputs for score in one.logprobs),
                outputs[-1].times.cached_tokens,
            )
            for outputs in found.values()
        ]
    finally:
        engine.close()


async def one_by_one(engine: AsyncEngine, requests: list[Request]) -> dict[str, list[Output]]:
    found: dict[str, list[Output]] = {}
    for request in requests:
        found |= await collect(engine, [request])
    await engine.drain(5)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_answers_the_same_to_the_bit_after_a_restart(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "LEAST", 1)
    folder = write_checkpoint(kind, tmp_path / "model")
    native = kind not in TORCH_ALONE and load_library() is not None
    dtype = "bfloat16" if native else "float32"
    disk = tmp_path / "kv"
    options = EngineOptions(dtype=dtype, num_threads=1, kv_cache_memory=1 << 22, max_batch_requests=4)
    kept = replace(options, kv_disk_folder=str(disk))
    torch.manual_seed(0)
    first = answered(folder, kept)
    assert list(disk.iterdir())
    second = answered(folder, kept)
    if native:
        assert [scores for scores, _ in second] == [scores for scores, _ in first]
    else:  # torch's sums depend on how many tokens a step has
        pairs = zip(*([one for scores, _ in some for one in scores] for some in (second, first)), strict=True)
        assert all(new == old and found == pytest.approx(before, abs=1e-4) for (new, found), (old, before) in pairs)
    assert first[0][1] == 0 and second[0][1] == 64, "it is found on disk"
    other = answered(folder, replace(kept, kv_dtype="int8")) if native else []
    assert not other or other[0][1] == 0, "bits of another kind are not used"


def test_what_runs_while_draining_is_written_too(tmp_path):
    folder = write_checkpoint("llama", tmp_path / "model")
    disk = tmp_path / "kv"
    engine = build_engine(
        folder, EngineOptions(dtype="float32", num_threads=1, block_size=16, kv_cache_memory=1 << 22, kv_disk_folder=str(disk))
    )
    engine.start()

    async def left() -> None:
        request = ask("a", prompts()[0], 40)
        async with aclosing(engine.generate([request])) as batches:
            await anext(batches)
            await engine.drain(0)

    asyncio.run(left())
    assert list(disk.rglob("kv-*.bin"))
    engine.close()


def test_what_it_cannot_work_with_is_named(tmp_path):
    folder = write_checkpoint("llama", tmp_path / "model")
    for changes, sentence in (
        ({"prefix_caching": False}, "^kv_disk_folder is set, but prefix caching is off: turn it on, or leave the folder out$"),
        ({"kv_disk_folder": "/proc/kv"}, "^kv_disk_folder: '/proc/kv/attend-kv' cannot be written to: "),
        ({"kv_disk_bytes": 100}, "^kv_disk_bytes is 100, but one block takes "),
    ):
        options = replace(EngineOptions(dtype="float32", kv_disk_folder=str(tmp_path / "kv")), **changes)
        with pytest.raises(SettingError, match=sentence):
            build_engine(folder, options)
