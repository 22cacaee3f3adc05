"""Long work stands back behind everything else; short work does not."""

import asyncio
import os
import threading
import time
import weakref
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attend.model.errors import EngineFailed, Overloaded
from attend.service.access.caller import Address
from attend.service.generation.thread_pools import LARGE, MAX_LARGE, SHORT, FairSemaphore, TurnPool, run_exclusive, run_in_pool
from attend.service.records import Arrival
from tests.conftest import examples


def policy() -> int:
    return os.sched_getscheduler(threading.get_native_id())


async def test_large_work_runs_when_nothing_else_wants_to_and_small_work_at_once():
    found = [await run_in_pool(policy, size) for size in (1, LARGE, LARGE + 1)]
    assert [os.SCHED_OTHER, os.SCHED_OTHER, os.SCHED_IDLE] == found
    assert os.SCHED_OTHER == policy(), "the caller's own thread is as it was"


async def test_small_work_does_not_wait_for_large_work():
    gate = threading.Event()
    large = asyncio.ensure_future(run_in_pool(lambda: gate.wait(20), LARGE + 1))
    told = await asyncio.wait_for(run_in_pool(lambda: "small", 1), 20)
    gate.set()
    assert await large
    found = told
    assert "small" == found


async def test_no_more_than_so_many_large_ones_wait(monkeypatch):
    gate = threading.Event()

    waiting = [asyncio.ensure_future(run_in_pool(lambda: gate.wait(20), LARGE + 1)) for _ in range(MAX_LARGE)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="long texts are waiting"):
        await run_in_pool(lambda: "one more", LARGE + 1)
    assert await run_in_pool(lambda: "small", LARGE) == "small"
    gate.set()
    found = [*(await asyncio.gather(*waiting)), await run_in_pool(lambda: True, LARGE + 1)]
    assert all(found)


@pytest.mark.parametrize("size", [1, LARGE + 1])
def test_an_error_comes_back_to_the_caller(size):
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_in_pool(lambda: 1 // 0, size))
    with pytest.raises(EngineFailed, match="a library panicked: unwrap"):
        asyncio.run(run_in_pool(panic, size))


def panic():
    """As of a library in Rust: no Exception."""
    raise type("PanicException", (BaseException,), {})("unwrap")


async def test_work_that_holds_the_interpreter_is_done_alone_and_rests_as_long_as_it_works():
    began, ended = [], []

    def work(seconds: float) -> None:
        began.append(time.perf_counter())
        start = time.thread_time()
        while time.thread_time() < start + seconds:
            pass
        ended.append(time.perf_counter())

    await asyncio.gather(*(run_exclusive(partial(work, 0.05), Arrival(owner)) for owner in "abcd"))
    rests = [after - before for before, after in zip(ended, began[1:], strict=False)]
    assert len(rests) == 3 and min(rests) >= 0.05


# Turns and places


def test_owners_take_turns_so_that_the_first_work_of_one_does_not_wait_for_all_work_of_another():
    pool, gate, order = TurnPool(1, "test"), threading.Event(), []
    busy = pool.submit("greedy", lambda: gate.wait(20))
    later = [pool.submit("greedy", lambda each=each: order.append(("greedy", each))) for each in range(5)]
    later += [pool.submit(owner, lambda owner=owner: order.append((owner, 0))) for owner in ("b", "c", "b", None)]
    gate.set()
    wait([busy, *later], 20)
    assert [("greedy", 0), ("b", 0), ("c", 0), (None, 0), ("greedy", 1), ("b", 0), *(("greedy", n) for n in (2, 3, 4))] == order


def test_work_that_is_given_up_before_its_turn_is_never_begun_and_holds_up_nobody():
    pool, gate, begun = TurnPool(1, "test"), threading.Event(), []
    busy = pool.submit("a", lambda: gate.wait(20))
    dropped = pool.submit("a", lambda: begun.append("dropped"))
    kept = pool.submit("a", lambda: begun.append("kept"))
    assert dropped.cancel()
    gate.set()
    wait([busy, kept], 20)
    assert begun == ["kept"]


def test_work_that_is_given_up_before_its_turn_lets_go_of_its_text_at_once():
    class Text:
        pass

    def asked(owner: str) -> tuple[Future, weakref.ref]:
        text = Text()
        return pool.submit(owner, lambda: text), weakref.ref(text)

    pool, gate = TurnPool(1, "test"), threading.Event()
    busy = pool.submit("a", lambda: gate.wait(20))
    dropped = [asked(owner) for owner in ("a", "a", "b")]
    kept, _ = asked("b")
    try:
        assert all(future.cancel() for future, _ in dropped)
        assert [None] * 3 == [text() for _, text in dropped]
    finally:
        gate.set()
    wait([busy, kept], 20)
    assert not pool._waiting


async def test_short_work_does_not_wait_for_long_work_that_holds_the_interpreter():
    gate = threading.Event()
    long = [asyncio.ensure_future(run_exclusive(lambda: gate.wait(20), Arrival("a", size=SHORT + 1))) for _ in range(8)]
    told = await asyncio.wait_for(run_exclusive(lambda: "short", Arrival("a", size=SHORT)), 20)
    gate.set()
    assert all(await asyncio.gather(*long))
    found = told
    assert "short" == found


async def test_no_more_than_so_many_long_bodies_wait_and_short_ones_are_none_of_them():
    gate = threading.Event()

    long = [asyncio.ensure_future(run_exclusive(lambda: gate.wait(20), Arrival(size=LARGE + 1))) for _ in range(MAX_LARGE)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="long request bodies are waiting"):
        await run_exclusive(lambda: "one more", Arrival(size=LARGE + 1))
    waits = asyncio.ensure_future(run_exclusive(lambda: True, Arrival(size=LARGE)))
    assert await run_exclusive(lambda: True, Arrival(size=SHORT))
    gate.set()
    found = all(await asyncio.gather(*long, waits))
    assert found


def test_one_address_leaves_places_for_others_but_may_have_most_of_them():
    places = FairSemaphore(64, "are held")
    with ExitStack() as stack:
        count = 0
        with suppress(Overloaded):
            while True:
                stack.enter_context(places.hold(Address("10.0.0.1")))
                count += 1
        assert count == 48
        stack.enter_context(places.hold(Address("10.0.0.2")))
        with pytest.raises(Overloaded, match="already for your address"):
            places.hold(Address("10.0.0.1")).__enter__()


law = settings(max_examples=examples(100), derandomize=True, deadline=None)
moves = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 6), st.booleans()), max_size=60)


@law
@given(st.integers(1, 40), moves)
def test_no_owner_holds_more_than_a_quarter_beyond_his_first_and_whoever_holds_nothing_finds_a_place_while_one_is_free(
    most, moves
):
    places, held = FairSemaphore(most, "are held"), []
    for owner, amount, stays in moves:
        mine, free = sum(n for who, n, _ in held if who == owner), most - sum(n for _, n, _ in held)
        with ExitStack() as stack:
            try:
                stack.enter_context(places.hold(owner, amount))
            except Overloaded:
                assert amount > free or (mine and mine + amount > (free - amount) / 3)
            else:
                assert amount <= free and (not mine or mine + amount <= most / 4)
                held.append((owner, amount, stack.pop_all()))
        if held and not stays:
            held.pop(0)[2].close()
    assert places._taken == sum(places._held.values()) == sum(n for _, n, _ in held)
    assert all(places._held.values())


def test_callers_without_keys_share_all_places():
    places = FairSemaphore(3, "are held")
    with places.hold(None), places.hold(None), places.hold(None), pytest.raises(Overloaded, match="3 are held already"):
        places.hold(None).__enter__()
