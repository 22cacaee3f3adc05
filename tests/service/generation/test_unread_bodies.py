"""Calls whose bodies have not come: bounded by bytes, and one that comes at once is never the one that ends."""

import asyncio

import pytest

from attend.model.errors import Overloaded
from attend.service.errors import SlowBody
from attend.service.generation.unread_bodies import CALL_BYTES, MAX_BYTES, UnreadBodies
from tests.virtual_time import run_at_once

MOST = 64
"""Calls that may wait, if nothing has come of their bodies."""


async def silent(unread_bodies: UnreadBodies, address: str, ends: list[str]) -> None:
    try:
        with unread_bodies.call(address) as call:
            async with call.waiting():
                await asyncio.Event().wait()
    except Overloaded:
        ends.append(address)


def law(given) -> None:
    async def run() -> None:
        ends, tasks = [], []
        unread_bodies = UnreadBodies(MOST * CALL_BYTES)

        async def begin(address: str, count: int) -> None:
            tasks.extend(asyncio.create_task(silent(unread_bodies, address, ends)) for _ in range(count))
            await asyncio.sleep(1)

        await given(unread_bodies, begin, ends)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert unread_bodies._total == 0 and not unread_bodies._calls and not unread_bodies._bytes

    run_at_once(run())


def test_of_too_many_the_oldest_of_the_address_that_holds_most_ends():
    async def given(unread_bodies, begin, ends):
        await begin("few", 3)
        await begin("many", MOST - 3)
        assert ends == []
        await begin("new", 2)
        assert ends == ["many"] * 2
        await begin("many", 5)
        assert ends == ["many"] * 7

    law(given)


def test_bytes_that_have_come_count():
    async def given(unread_bodies, begin, ends):
        await begin("many", MOST - 2)
        with unread_bodies.call("one") as call:
            call.came(10 * CALL_BYTES)
            await asyncio.sleep(1)
            assert ends == ["many"] * 9
            unread_bodies.leave(call)
            await begin("many", 10)
            assert ends == ["many"] * 9

    law(given)


def test_where_calls_are_few_each_counts_for_its_share():
    """Behind Ray Serve a call takes a place of the replica's while its body comes."""

    async def run() -> None:
        unread_bodies, ends = UnreadBodies(MAX_BYTES, 4), []
        tasks = [asyncio.create_task(silent(unread_bodies, "many", ends)) for _ in range(4)]
        await asyncio.sleep(1)
        assert ends == []
        tasks.append(asyncio.create_task(silent(unread_bodies, "one", ends)))
        await asyncio.sleep(1)
        assert ends == ["many"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_at_once(run())


def test_a_call_that_ends_before_it_waits_ends_when_it_does():
    async def given(unread_bodies, begin, ends):
        with unread_bodies.call("many") as call:
            await begin("many", MOST)
            call.came(1)
            with pytest.raises(Overloaded, match="still being received"):
                async with call.waiting():
                    await asyncio.sleep(1)

    law(given)


def test_a_message_that_does_not_come_in_time_is_a_slow_one():
    async def given(unread_bodies, begin, ends):
        with unread_bodies.call("one") as call, pytest.raises(SlowBody, match="within 30 seconds"):
            async with call.waiting(30.0):
                await asyncio.sleep(31)

    law(given)
