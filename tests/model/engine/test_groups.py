"""Blocks by the kind of memory that layers keep: what a window no longer sees goes back, and what is found is exact."""

from itertools import chain
from types import SimpleNamespace

import pytest

from attend.model.engine import snapshots
from attend.model.engine.blocks import Texts
from attend.model.engine.config import EngineConfig, GroupSize
from attend.model.engine.engine import Engine
from attend.model.engine.plan import StepInput
from attend.model.engine.request import Request
from attend.model.engine.scheduler import Scheduler
from attend.model.engine.snapshots import LEAST
from tests.model.engine.integrity import check_tables
from tests.model.engine.machines import Clock, ask, fake_answer, run, told
from tests.model.engine.windows import GroupsRunner

SIZE = 4
WINDOW = 10
"""Under which three blocks before a token are seen."""


def engine(*groups: GroupSize, **changes) -> Engine:
    """Over a model that computes each token from what the groups keep."""
    values = {"max_model_len": 128, "block_size": SIZE, "max_batch_tokens": 16, "chunk_size": 1, "max_batch_requests": 4}
    config = EngineConfig(num_blocks=groups[0].num_blocks, groups=groups, **(values | changes))
    clock = Clock()
    return Engine(Scheduler(config, clock), GroupsRunner(config), clock)


def with_window(num_blocks: int = 20, **changes) -> Engine:
    return engine(GroupSize(64), GroupSize(num_blocks, WINDOW), **changes)


def only_window(num_blocks: int = 20, **changes) -> Engine:
    return engine(GroupSize(num_blocks, WINDOW), **changes)


both_kinds = pytest.mark.parametrize("kind", [with_window, only_window])


def text(name: str, length: int = 100, max_tokens: int = 20, **fields):
    return ask(name, [(at * at + 7) % 16 for at in range(length)], max_tokens, **fields)


@both_kinds
def test_a_prefix_is_found_where_the_window_still_has_its_end(kind):
    machine = kind(40)
    run(machine, [text("a", 40, 1)])
    again = text("b", 40, 4)
    assert fake_answer(again)[0] == told(run(machine, [again])["b"])[0]
    assert 36 == again.num_cached


@both_kinds
def test_a_prefix_ends_where_the_windows_blocks_were_reused(kind):
    """The first 24 tokens of the text are needed for nothing: only the window before the prefix's end is."""
    machine = kind(20)
    run(machine, [text("a", 40, 1)])
    pool = machine.scheduler.tables.groups[-1].pool
    held = pool.allocate(20 - 3)  # all but the three blocks that were used last
    pool.free(held)
    again = text("b", 41, 4)
    assert fake_answer(again)[0] == told(run(machine, [again])["b"])[0]
    assert 40 == again.num_cached
    pool.free(pool.allocate(20 - 2))
    shorter = text("c", 38, 4)
    assert fake_answer(shorter)[0] == told(run(machine, [shorter])["c"])[0]
    assert 0 == shorter.num_cached


def test_texts_are_known_after_their_first_blocks_were_reused():
    texts = Texts(3)
    first = texts.remember("", [1], 7)
    second = texts.remember(first, [2], 8)
    assert (0, first) == texts.find("", [1])
    assert (0, second) == texts.find(first, [2])
    assert second == texts.remember(first, [2], 9)
    assert texts.find("", [2]) is None


def test_the_text_that_was_met_the_longest_ago_is_forgotten_and_its_number_is_never_used_again():
    texts = Texts(2)
    first, second = texts.remember("", [1], 0), texts.remember("", [2], 0)
    texts.find("", [1])
    third = texts.remember("", [3], 0)
    assert texts.find("", [2]) is None
    assert first == texts.remember("", [1], 0)
    assert 4 == len({first, second, third, texts.remember("", [2], 0)})


def test_usage_is_that_of_the_fullest_group():
    machine = with_window(20, max_batch_tokens=SIZE)
    assert 64 == machine.stats().num_free_blocks
    machine.add(text("a", 40, 40))
    while not machine.scheduler._running or not machine.scheduler._running[0].output:
        machine.step()
    assert 64 - 11 > machine.stats().num_free_blocks == int(64 * (1 - 5 / 19)), "5 blocks of 19 are claimed under the window"


# States.


def with_states(**changes) -> Engine:
    values = {"prefix_caching": False, "max_batch_requests": 3, "num_snapshots": 0} | changes
    slots = values["max_batch_requests"] + values["num_snapshots"]
    return engine(GroupSize(64), GroupSize(slots, has_state=True), **values)


def test_the_table_of_a_state_has_one_entry_in_a_step_that_keeps_none():
    machine, steps = with_states(), []
    submit = machine.runner.submit

    def kept(step: StepInput):
        steps.append([[list(table) for table in group] for group in step.tables])
        return submit(step)

    machine.runner.submit = kept
    run(machine, [text("a", 20, 3), text("b", 7, 3)])
    assert all(2 == len(groups) for groups in steps)
    assert all(1 == len(table) for groups in steps for table in groups[1])


def keeping(num_snapshots: int = 8, **changes) -> Engine:
    """With a snapshot wherever there may be one."""
    return with_states(prefix_caching=True, num_snapshots=num_snapshots, **{"max_batch_tokens": 256} | changes)


def cached(machine: Engine, request: Request) -> int:
    """Tokens that it finds, once its answer was right."""
    assert fake_answer(request)[0] == told(run(machine, [request])[request.request_id])[0]
    check_tables(machine.scheduler.tables, [])
    return request.num_cached


def told_before(request: Request) -> list[int]:
    return [*request.prompt, *request.output]


def test_the_next_turn_goes_on_from_the_last_block_of_the_answer():
    machine, first = keeping(), text("a", 34, 9)
    assert 0 == cached(machine, first)
    assert 40 == cached(machine, second := ask("b", [*told_before(first), 1, 2, 3], 9)), "its last token was not computed"
    assert 52 == cached(machine, ask("c", [*told_before(second), 4], 2))


def test_of_an_answer_only_the_last_snapshot_stays():
    machine = keeping()
    run(machine, [text("a", 34, 60)])
    pool = machine.scheduler.tables.groups[1].pool
    assert 2 == len(pool._keys), "that of the prompt, and that of the answer"


def test_where_two_prompts_part_the_third_goes_on():
    machine, stem = keeping(), text("", 40).prompt
    asks = [ask(name, [*stem[:38], *[at] * 20], 2) for at, name in enumerate("abc")]
    assert [0, 0, 36] == [cached(machine, request) for request in asks]


def test_less_than_a_few_blocks_are_not_worth_a_snapshot():
    machine = keeping()
    short = [text(name, SIZE * LEAST, 1) for name in "ab"]
    assert [0, 0] == [cached(machine, request) for request in short]
    enough = [text(name, SIZE * LEAST + 1, 1, cache_salt="b") for name in "cd"]
    assert [0, SIZE * LEAST] == [cached(machine, request) for request in enough]
    assert [(0, 16), (16, 1)] == [(start, count) for name, start, count in chain(*machine.runner.plans) if name == "c"]


def test_a_long_prompt_has_snapshots_on_its_way(monkeypatch):
    monkeypatch.setattr(snapshots, "SPACING", 5)
    machine = keeping(32)
    run(machine, [text("a", 64, 1)])
    assert 40 == cached(machine, ask("b", [*text("", 64).prompt[:50], *[7] * 9], 1))


def test_a_snapshot_belongs_to_its_adapter():
    machine, (one, other) = keeping(), (SimpleNamespace(digest=name) for name in ("one", "other"))
    asks = [text(name, 34, 2, adapter=adapter) for name, adapter in [("a", None), ("b", one), ("c", other), ("d", one)]]
    assert [0, 0, 0, 32] == [cached(machine, request) for request in asks]


def test_the_snapshot_that_was_used_longest_ago_makes_room():
    """Two fit beside the state of one request, and each answer of one token keeps one."""
    machine = keeping(2, max_batch_requests=1)

    def found(salt: str) -> int:
        return cached(machine, text(salt, 34, 1, cache_salt=salt))

    assert [0, 0, 32, 0] == [found(salt) for salt in "abac"]
    assert [32, 0] == [found(salt) for salt in "ab"]


def test_with_a_block_of_its_text_a_snapshot_goes_too():
    machine = keeping()
    run(machine, [text("a", 34, 1)])
    full, states = (group.pool for group in machine.scheduler.tables.groups)
    full.free(full.allocate(64))
    assert not states._keys
    assert 0 == cached(machine, text("b", 34, 1))


def test_answers_to_one_prompt_compute_it_once():
    """The others wait for the snapshot at its last block, and go on from there."""
    machine = keeping(max_batch_requests=8, num_snapshots=8)
    requests = [text(f"r{at}", 34, 3, seed=at) for at in range(5)]
    assert [fake_answer(request)[0] for request in requests] == [told(one)[0] for one in run(machine, requests).values()]
    assert [0] + [32] * 4 == [request.num_cached for request in requests]
    assert [[("r0", 0, 32)], [(f"r{at}", 32, 2) for at in range(5)]] == machine.runner.plans[:2]


def test_beside_snapshots_drafts_stop_before_the_end_of_a_block():
    """A state is kept at each: the next turn goes on from the last one, whatever was drafted."""
    machine = keeping(draft_tokens=15)
    first = ask("a", fake_answer(text("b", 1, 30, seed=2))[0], 40, seed=2)
    assert 0 == cached(machine, first)
    assert machine.stats().num_accepted > 0
    assert 68 == cached(machine, ask("c", [*told_before(first), 1, 2], 2))
