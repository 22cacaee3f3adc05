"""Which models are loaded, in virtual time: once for all callers, the one that is idle longest goes, never a busy one."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from attend.model.errors import Overloaded, Unavailable
from attend.service.errors import ModelUnavailable
from attend.service.runtime.models import pool as module
from attend.service.runtime.models.entries import Entry, ServedModel
from attend.service.runtime.models.pool import State
from attend.service.settings import Settings
from tests.service.runtime.models.fakes import LOAD_SECONDS, Machine, background
from tests.virtual_time import run_at_once


def now() -> float:
    return asyncio.get_running_loop().time()


def test_twenty_calls_at_once_load_a_model_once():
    async def law():
        machine = Machine({"a": 1})
        await asyncio.gather(*(machine.call("a") for _ in range(20)))
        assert machine.starts == ["a"]
        assert now() == LOAD_SECONDS + 1
        assert machine.pool.slots["a"].calls == machine.pool.slots["a"].waiting == 0

    run_at_once(law())


def test_the_idle_model_goes_that_was_used_longest_ago():
    async def law():
        machine = Machine({"a": 5, "b": 5, "c": 5})
        for name in ("a", "b", "a", "c"):
            await machine.call(name)
        assert machine.states() == "a c"

    run_at_once(law())


def test_a_model_that_is_never_idle_gives_way_after_its_turn_and_comes_back_for_its_own_callers():
    async def law():
        machine, done = Machine({"a": 10, "b": 10}), []

        async def keep(name):
            while now() < 100:
                await machine.call(name)
                done.append((name, now()))

        await asyncio.gather(keep("a"), keep("a"), keep("b"))
        first = next(at for name, at in done if name == "b")
        assert first <= LOAD_SECONDS + module.TURN_SECONDS + 1 + 0.5 + LOAD_SECONDS + 2
        assert [name for name, at in done if at > first].count("a") > 10
        assert len(machine.starts) < 12, "they must not push each other out at each call"

    run_at_once(law())


def test_a_pinned_model_is_loaded_at_the_start_and_never_goes():
    async def law():
        machine = Machine({"a": 5, "b": 5, "c": 5}, pins=["a"], idle_seconds=10.0)
        async with AsyncExitStack() as stack:
            await machine.pool.load_pinned()
            assert machine.states() == "a"
            await background(stack, machine.watch())
            for name in ("b", "c", "b"):
                await machine.call(name)
            assert machine.states() == "a b"
            await asyncio.sleep(1000)
            assert machine.states() == "a"
            machine.pool.slots["a"].process.die()
            await asyncio.sleep(LOAD_SECONDS + 2)
            assert machine.states() == "a", "it comes back by itself"

    run_at_once(law())


@pytest.mark.parametrize("idle_seconds", [10.0, 0.0])
def test_an_idle_model_goes_after_its_time_or_stays_for_good(idle_seconds):
    async def law():
        machine = Machine({"a": 1}, idle_seconds=idle_seconds)
        async with AsyncExitStack() as stack:
            await background(stack, machine.watch())
            await machine.call("a", 30)  # longer than it may be idle
            await asyncio.sleep(idle_seconds - 2 if idle_seconds else 9)
            assert machine.states() == "a"
            await asyncio.sleep(4)
            assert machine.states() == ("" if idle_seconds else "a")

    run_at_once(law())


def test_a_model_that_does_not_load_is_told_by_name_and_tried_again_after_a_pause():
    async def law():
        machine = Machine({"a": 1, "b": 1})
        machine.broken.add("a")
        for _ in range(3):  # the second time at once, without a try
            with pytest.raises(ModelUnavailable, match="'a' cannot be loaded") as caught:
                await machine.call("a")
            assert caught.value.retry_after == module.PAUSE_SECONDS
            assert (machine.pool.slots["a"].state, len(machine.starts)) == (State.FAILED, 1)
        await machine.call("b")
        machine.broken.clear()
        await asyncio.sleep(module.PAUSE_SECONDS)
        await machine.call("a")
        assert machine.states() == "a b"

    run_at_once(law())


def test_a_load_that_does_not_end_is_given_up():
    async def law():
        machine = Machine({"a": 1}, load_seconds=2.0)
        with pytest.raises(ModelUnavailable):
            await machine.call("a")
        assert now() == 2.0
        assert machine.alive == set()

    run_at_once(law())


@pytest.mark.parametrize(("lived", "pause"), [(5, module.PAUSE_SECONDS), (module.STABLE_SECONDS, 0)])
def test_a_process_that_dies_is_started_anew_by_a_call_and_one_that_died_soon_after_a_pause(lived, pause):
    async def law():
        machine = Machine({"a": 1})
        slot = machine.pool.slots["a"]
        dying = asyncio.create_task(machine.call("a", 1000))
        await asyncio.sleep(LOAD_SECONDS + lived)
        assert slot.calls == 1 and slot.process is not None
        slot.process.die()
        await dying  # it ends
        await asyncio.sleep(0)
        assert (slot.state, slot.counts["deaths"]) == (State.UNLOADED, 1)
        if pause:
            with pytest.raises(ModelUnavailable):
                await machine.call("a")
        await asyncio.sleep(pause)
        await machine.call("a")

    run_at_once(law())


def test_a_model_that_never_fits_stops_the_start_and_one_that_outgrew_the_budget_is_refused():
    async def law():
        machine = Machine({"a": 8, "pinned": 4, "b": 1}, pins=["pinned"])
        with pytest.raises(ModelUnavailable, match=r"'a' takes .*, and other pinned ones .*: memory_budget is "):
            await machine.pool.load_pinned()
        machine = Machine({"a": 6, "pinned": 4, "b": 1}, pins=["pinned"])
        await machine.pool.load_pinned()
        machine.pool.slots["pinned"].memory = 5  # as it was measured
        with pytest.raises(ModelUnavailable, match="'a' takes"):
            await machine.call("a")
        await machine.call("b")
        assert machine.states() == "pinned b"

    run_at_once(law())


@pytest.mark.parametrize("configured", [4, None])
def test_a_model_counts_for_its_configured_memory_or_else_for_what_it_takes(configured):
    async def law():
        machine = Machine({"a": 4})
        machine.measured = 7
        slot = machine.pool.slots["a"]
        slot.model = ServedModel(Entry(name="a", memory=configured), Settings())
        await machine.call("a")
        assert (slot.memory, machine.pool.memory_held()) == (configured or 7,) * 2

    run_at_once(law())


def test_callers_who_leave_end_nothing_and_hold_nothing():
    async def law():
        machine = Machine({"a": 10, "b": 10})
        leaving = asyncio.create_task(machine.call("a"))
        await asyncio.sleep(1)
        leaving.cancel()
        await asyncio.sleep(LOAD_SECONDS)
        assert machine.states() == "a"  # it was nearly there
        busy = asyncio.create_task(machine.call("a", 100))
        waiting = asyncio.create_task(machine.call("b"))
        await asyncio.sleep(5)
        waiting.cancel()
        await asyncio.sleep(50)
        assert machine.pool.slots["b"].state is State.UNLOADED
        await machine.call("a")  # it has kept its place
        await busy
        assert machine.starts == ["a"]

    run_at_once(law())


def test_one_key_whose_calls_wait_leaves_places_for_others():
    async def law():
        machine = Machine({"a": 1})
        slot = machine.pool.slots["a"]
        refused = 0

        async def call(owner):
            nonlocal refused
            try:
                async with machine.pool.use(slot, owner):
                    pass
            except Overloaded:
                refused += 1

        await asyncio.gather(*(call("greedy") for _ in range(1000)), call("other"))
        assert 1000 - module.MAX_WAITING // 4 <= refused < 1000

    run_at_once(law())


def test_a_drain_refuses_new_calls_and_those_that_wait_and_lets_running_ones_end():
    async def law():
        machine = Machine({"a": 1, "b": 1})
        running = asyncio.create_task(machine.call("a", 10))
        await asyncio.sleep(LOAD_SECONDS + 1)
        waiting = asyncio.create_task(machine.call("b"))
        await asyncio.sleep(1)
        await machine.pool.close(30.0)
        for call in (waiting, machine.call("a"), machine.call("b")):
            with pytest.raises(Unavailable, match="shutting down"):
                await call
        await running
        assert machine.alive == set()

    run_at_once(law())


@pytest.mark.parametrize("seed", range(8))
def test_any_life_keeps_the_budget_and_answers_every_call(seed):
    """The machine asserts that the budget holds, and that no process is told to end amid its calls."""
    dice = random.Random(seed)

    async def law():
        sizes = {name: dice.randint(1, 5) for name in "abcdef"}
        machine = Machine(sizes, pins=["a"], idle_seconds=dice.choice([0.0, 5.0, 30.0]))
        async with AsyncExitStack() as stack:
            await machine.pool.load_pinned()
            await background(stack, machine.watch())

            async def caller():
                for _ in range(12):
                    await asyncio.sleep(dice.choice([0, 1, 20]))
                    name = dice.choice("abcdef")
                    try:
                        async with asyncio.timeout(dice.choice([2, 500, 500])):
                            await machine.call(name, dice.choice([0.1, 3, 15]))
                    except (TimeoutError, ModelUnavailable):
                        pass
                    process = machine.pool.slots[dice.choice("abcdef")].process
                    if dice.random() < 0.05 and process is not None:
                        process.die()

            async with asyncio.timeout(20_000):
                await asyncio.gather(*(caller() for _ in range(10)))
        await asyncio.sleep(100)
        assert all(slot.calls == slot.waiting == 0 and slot.task is None for slot in machine.pool.slots.values())
        assert machine.alive == set(machine.states().split())

    run_at_once(law())
