"""Long work stands back behind everything else; short work does not."""

import asyncio
import os
import threading

import pytest

from model.errors import Overloaded
from service.aside import LARGE, MOST_LARGE, aside


def policy() -> int:
    return os.sched_getscheduler(threading.get_native_id())


def test_large_work_runs_when_nothing_else_wants_to_and_small_work_at_once():
    async def run() -> list[int]:
        return [await aside(policy, size) for size in (1, LARGE, LARGE + 1)]

    assert [os.SCHED_OTHER, os.SCHED_OTHER, os.SCHED_IDLE] == asyncio.run(run())
    assert os.SCHED_OTHER == policy(), "the caller's own thread is as it was"


def test_small_work_does_not_wait_for_large_work():
    async def run() -> str:
        gate = threading.Event()
        large = asyncio.ensure_future(aside(lambda: gate.wait(20), LARGE + 1))
        told = await asyncio.wait_for(aside(lambda: "small", 1), 20)
        gate.set()
        assert await large
        return told

    assert "small" == asyncio.run(run())


def test_no_more_than_so_many_large_ones_wait(monkeypatch):
    gate = threading.Event()

    async def run() -> list[bool]:
        waiting = [asyncio.ensure_future(aside(lambda: gate.wait(20), LARGE + 1)) for _ in range(MOST_LARGE)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="long texts are waiting"):
            await aside(lambda: "one more", LARGE + 1)
        assert await aside(lambda: "small", LARGE) == "small"
        gate.set()
        return [*(await asyncio.gather(*waiting)), await aside(lambda: True, LARGE + 1)]

    assert all(asyncio.run(run()))


@pytest.mark.parametrize("size", [1, LARGE + 1])
def test_an_error_comes_back_to_the_caller(size):
    with pytest.raises(ZeroDivisionError):
        asyncio.run(aside(lambda: 1 // 0, size))
