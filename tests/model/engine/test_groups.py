"""Blocks by the kind of memory that layers keep: what a window no longer sees goes back, and what is found is exact."""

import pytest

from attend.model.engine.blocks import Texts
from attend.model.engine.config import EngineConfig, GroupSize
from attend.model.engine.engine import Engine
from attend.model.engine.plan import StepInput
from attend.model.engine.scheduler import Scheduler
from attend.model.errors import SettingError
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
def test_a_prompt_longer_than_its_window_holds_at_once_runs_part_by_part(kind):
    """100 tokens are 25 blocks, and there are 20."""
    machine, request = kind(), text("a")
    assert fake_answer(text("a"))[0] == told(run(machine, [request])["a"])[0]


@both_kinds
def test_an_entry_of_a_block_that_went_back_is_0(kind):
    machine, request = kind(), text("a", 30)
    machine.add(request)
    while not request.output:
        machine.step()
    seen = (30 - WINDOW + 1) // SIZE
    assert [False] * seen + [True] * (8 - seen) == [bool(block) for block in request.tables[-1]]


@both_kinds
def test_what_a_window_needs_no_more_is_there_for_others(kind):
    """Four requests of 29 blocks each run side by side in 24 blocks of the window."""
    machine = kind(24)
    requests = [text(f"r{at}", 90, 26, seed=at) for at in range(2 if kind is with_window else 4)]
    for request in requests:
        machine.add(request)
    most = 0
    while machine.has_work:
        machine.step()
        machine.scheduler.check_integrity()
        most = max(most, machine.stats().num_running)
    assert len(requests) == most
    assert [fake_answer(request)[0] for request in requests] == [request.output for request in requests]


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


@both_kinds
def test_a_hit_takes_no_block_of_a_window_that_the_next_token_does_not_see(kind):
    machine = kind(40)
    run(machine, [text("a", 60, 1)])
    machine.add(again := text("b", 60, 4))
    machine.scheduler.schedule()
    assert 56 == again.num_computed
    assert [0] * 11 == list(again.tables[-1][:11])
    assert all(again.tables[-1][11:])


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
    values = {"prefix_caching": False, "max_batch_requests": 3} | changes
    return engine(GroupSize(64), GroupSize(values["max_batch_requests"], has_state=True), **values)


def test_a_state_is_one_requests_alone_and_comes_back():
    machine = with_states()
    requests = [text(f"r{at}", 20 + at, 3 + at, seed=at) for at in range(8)]
    for request in requests:
        machine.add(request)
    seen = set()
    while machine.has_work:
        running = [request.tables[1] for request in machine.scheduler._running]
        assert all(len(table) == 1 for table in running)
        places = [table[0] for table in running]
        assert len(places) == len(set(places))
        seen |= set(places)
        machine.step()
        machine.scheduler.check_integrity()
    assert {1, 2, 3} == seen
    assert 3 == machine.scheduler.tables.groups[1].pool.num_free
    assert [fake_answer(request)[0] for request in requests] == [request.output for request in requests]


def test_a_state_stays_in_its_place_from_the_admission_to_the_end():
    machine, request = with_states(), text("a", 50, 9)
    machine.add(request)
    places = set()
    while machine.has_work:
        machine.step()
        places |= set(request.tables[1])
    assert 1 == len(places)


def test_the_table_of_a_state_has_one_entry_in_a_step():
    machine, steps = with_states(), []
    submit = machine.runner.submit

    def kept(step: StepInput):
        steps.append([[list(table) for table in group] for group in step.tables])
        return submit(step)

    machine.runner.submit = kept
    run(machine, [text("a", 20, 3), text("b", 7, 3)])
    assert all(2 == len(groups) for groups in steps)
    assert all(1 == len(table) for groups in steps for table in groups[1])


def test_guesses_are_refused_where_layers_keep_a_state():
    with pytest.raises(SettingError, match=r"^draft_tokens is set, but this model has a recurrent state"):
        with_states(draft_tokens=3)
