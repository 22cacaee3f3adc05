"""The bridge between event loops and the step thread: every stream ends once, and whoever leaves frees its blocks."""

import asyncio
import threading
from contextlib import aclosing
from dataclasses import replace

import pytest

import attend.model.engine.loop
from attend.model.engine.engine import Engine
from attend.model.engine.loop import AsyncEngine
from attend.model.engine.request import EngineStats, FinishReason, Output
from attend.model.engine.scheduler import Scheduler
from attend.model.errors import ContextTooLong, InvalidRequest, QueueFull, Unavailable
from tests.model.engine.machines import Clock, FakeRunner, Gate, ask, fake_answer, info, sizes, threaded, told, until

IDLE = EngineStats(0, 0, 64, 0)
"""Of an engine of the usual size with nothing to do."""


def is_idle(engine) -> bool:
    """Nothing runs, waits or holds a block."""
    return engine.stats() == IDLE


async def collect(engine: AsyncEngine, requests, at_once: int | None = None) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    async with aclosing(engine.generate(requests, at_once)) as stream:
        async for batch in stream:
            assert batch, "an empty list"
            for output in batch:
                outputs.setdefault(output.request_id, []).append(output)
    return outputs


async def answers(engine: AsyncEngine, requests, at_once: int | None = None) -> dict:
    return {name: told(outputs) for name, outputs in (await collect(engine, requests, at_once)).items()}


def expected(requests) -> dict:
    return {request.request_id: fake_answer(request) for request in requests}


def gate(engine: AsyncEngine) -> Gate:
    return engine._engine.runner.gate


async def begun(engine: AsyncEngine, *requests):
    """A stream whose requests have had one step and its outputs; the engine is held before the next."""
    gate(engine).shut()
    stream = engine.generate(requests)
    gate(engine).allow(1)
    return stream, await anext(stream)


async def in_flight(engine: AsyncEngine, *names: str, **fields) -> asyncio.Task:
    """A task that waits for the answers of requests, none of which has had a step: shut the gate before."""
    task = asyncio.create_task(answers(engine, [ask(name, **fields) for name in names]))
    await until(lambda: set(names) <= engine._streams.keys())
    return task


def test_a_full_queue_refuses_without_a_trace():
    """One too many is refused whole, also when a part of it would have found a place."""

    async def crowd(engine):
        gate(engine).shut()
        running = [await in_flight(engine, name) for name in "abc"]
        before = set(engine._streams)
        with pytest.raises(QueueFull, match="4 is the limit") as caught:
            await collect(engine, [ask("d"), ask("e")])
        assert 1 == caught.value.retry_after
        assert before == set(engine._streams)
        with pytest.raises(InvalidRequest, match="at most 4 on this server; got 5"):
            await collect(engine, [ask(name) for name in "defgh"])
        running.append(await in_flight(engine, "d"))
        with pytest.raises(QueueFull):
            await collect(engine, [ask("e")])
        gate(engine).open()
        return [await task for task in running]

    with threaded(max_queued_requests=2, max_batch_requests=2) as engine:
        assert [expected([ask(name)]) for name in "abcd"] == asyncio.run(crowd(engine))
        assert {"a", "b", "c", "d"} == {name for plan in engine._engine.runner.plans for name, _, _ in plan}


def test_an_owner_leaves_room_in_the_queue_for_the_next():
    """Of places and of tokens; who is alone may have three quarters."""

    async def crowd(engine):
        gate(engine).shut()
        running = [await in_flight(engine, f"a{at}", owner="alice") for at in range(12)]
        with pytest.raises(QueueFull, match="the queue is full for 'alice', who has 12 of 12 requests"):
            engine.check_room(1, "alice")
        running.append(await in_flight(engine, "b", owner="bob"))
        with pytest.raises(QueueFull, match="'bob'"):
            engine.check_room(3, "bob")
        running += [await in_flight(engine, name) for name in "cde"]
        gate(engine).open()
        for task in running:
            await task
        assert not engine._owned and not engine._owned_tokens
        await answers(engine, [ask(f"z{at}", owner="alice") for at in range(16)])  # one call, and nothing of hers in flight

    with threaded(max_queued_requests=8, max_batch_requests=8) as engine:
        asyncio.run(crowd(engine))


def test_prompts_that_wait_have_at_most_so_many_tokens_and_leave_the_queue_with_their_first_output():
    async def crowd(engine):
        gate(engine).shut()
        running = [await in_flight(engine, "a"), await in_flight(engine, "b")]
        with pytest.raises(QueueFull, match=f"its prompts have {2 * size} of {2 * size + 1} tokens"):
            await collect(engine, [ask("c")])
        running.pop().cancel()
        await asyncio.sleep(0)
        running.append(await in_flight(engine, "c"))
        gate(engine).open()
        found = [await task for task in running]
        assert engine._queued_tokens == 0 and not engine._prompts
        return [*found, await answers(engine, [ask("d")])]

    size = len(ask("a").prompt)
    with threaded(max_queued_tokens=2 * size + 1) as engine:
        assert [expected([ask(name)]) for name in "acd"] == asyncio.run(crowd(engine))


def test_a_call_finds_room_where_nobody_waits_however_long_its_prompt():
    with threaded(max_queued_tokens=1) as engine:
        assert expected([ask("a")]) == asyncio.run(answers(engine, [ask("a")]))


def test_a_request_that_can_never_fit_refuses_its_call_without_a_trace():
    async def refuse(engine):
        with pytest.raises(ContextTooLong):
            await collect(engine, [ask("fits"), ask("giant", range(300))])
        assert {} == engine._streams
        assert is_idle(engine)
        return await answers(engine, [ask("fits")])

    with threaded() as engine:
        assert expected([ask("fits")]) == asyncio.run(refuse(engine))
        assert {"fits"} == {name for plan in engine._engine.runner.plans for name, _, _ in plan}


def prepared(prepare) -> AsyncEngine:
    def whole():
        prepare()
        return replace(info(sizes()), recorded_sizes=(3, 1))

    return AsyncEngine(Engine(Scheduler(sizes(), Clock()), FakeRunner(4), Clock()), info(sizes()), prepare=whole)


def test_an_engine_is_prepared_on_its_step_thread_before_it_has_started():
    """What a library keeps for each thread is then the step thread's."""
    threads = []
    engine = prepared(lambda: threads.append(threading.current_thread()))
    engine.start()
    assert [engine._thread] == threads
    assert engine.info.recorded_sizes == (3, 1), "what it learns meanwhile is told"
    engine.close()


def test_a_stream_opened_while_the_thread_dies_fails_too():
    """The thread has told its streams, but has not ended yet: nobody would tell the one that comes now."""
    dying, release = threading.Event(), threading.Event()

    async def arrive(engine):
        hand_over = engine._hand_over

        def slowly(outputs, failure):
            hand_over(outputs, failure)
            dying.set()
            release.wait(10)

        engine._hand_over = slowly
        engine._engine.step = lambda: 1 / 0
        await until(dying.is_set)
        try:
            async with asyncio.timeout(2):
                await collect(engine, [ask("late")])
        finally:
            release.set()

    with threaded(dies=True) as engine, pytest.raises(Unavailable):
        asyncio.run(arrive(engine))


def test_an_engine_not_started_refuses_and_shows_no_life():
    engine = AsyncEngine(Engine(Scheduler(sizes(), Clock()), FakeRunner(4), Clock()), info(sizes()))
    assert float("inf") == engine.heartbeat_age()
    with pytest.raises(Unavailable):
        asyncio.run(collect(engine, [ask("a")]))
    engine.close()


def test_the_heart_beats_while_idle(monkeypatch):
    monkeypatch.setattr(attend.model.engine.loop, "IDLE_BEAT_SECONDS", 0.002)

    async def live(engine, clock):
        for _ in range(3):
            clock.now += 5
            await until(lambda: engine.heartbeat_age() == 0)

    clock = Clock()
    with threaded(clock=clock) as engine:
        asyncio.run(live(engine, clock))


def test_a_step_that_advances_is_alive_however_long_it_takes_and_one_that_stands_still_is_not():
    """Each layer is a sign of life. Somebody looks every second, as Serve does."""

    async def hang(engine, clock):
        gate(engine).shut()
        task = await in_flight(engine, "a")
        await until(lambda: engine._commands == [])
        ages, stands = [], []
        for _ in range(500):  # 1000 s, a layer each 2 s
            for _ in range(2):
                clock.now += 1
                ages.append(engine.heartbeat_age())
            engine._progress.beat()
        for _ in range(15):
            clock.now += 1
            stands.append(engine.heartbeat_age())
        gate(engine).open()
        await task
        await until(lambda: engine.heartbeat_age() == 0)
        return ages, stands

    clock = Clock()
    with threaded(clock=clock) as engine:
        ages, stands = asyncio.run(hang(engine, clock))
    assert max(ages) <= 2
    assert list(range(15)) == stands, "stuck for ten seconds is seen within fifteen"


def test_what_waits_goes_out_before_the_step_of_a_new_request():
    async def join(engine):
        requests = [ask(name, max_tokens=9) for name in "abcd"]
        stream, first = await begun(engine, *requests)
        more = asyncio.ensure_future(anext(stream))
        gate(engine).allow(1)
        await until(lambda: len(engine._coalescer._held) == 4)
        task = await in_flight(engine, "e")
        assert not more.done(), "the clock stands still, so nothing is due"
        gate(engine).allow(1)
        assert "abcdabcd" == "".join(output.request_id for output in await more)
        gate(engine).open()
        outputs = [*first, *more.result(), *[output async for batch in stream for output in batch]]
        await task
        return {name: told([each for each in outputs if each.request_id == name]) for name in "abcd"}, expected(requests)

    with threaded(clock=Clock()) as engine:
        found, wanted = asyncio.run(join(engine))
        assert wanted == found


def test_requests_that_nobody_has_picked_up_count_as_waiting():
    async def count(engine):
        stream, _ = await begun(engine, ask("a", max_tokens=200))
        await until(lambda: engine.stats().num_running == 1)
        task = await in_flight(engine, "b", "c")
        assert (1, 2) == (engine.stats().num_running, engine.stats().num_waiting)
        gate(engine).open()
        await stream.aclose()
        await task

    with threaded() as engine:
        asyncio.run(count(engine))


def test_event_loops_in_two_threads_do_not_mix():
    found, problems = {}, []

    def serve(engine, side):
        requests = [ask(f"{side}{at}", [at], 20, seed=side) for at in range(6)]

        async def read():
            async with aclosing(engine.generate(requests)) as stream:
                outputs = []
                async for batch in stream:
                    outputs += batch
                    problems.extend(o for o in batch if not o.request_id.startswith(str(side)))
            return {r.request_id: told([o for o in outputs if o.request_id == r.request_id]) for r in requests}

        found[side] = (expected(requests), asyncio.run(read()))

    with threaded(max_batch_requests=5) as engine:
        gate(engine).shut()
        threads = [threading.Thread(target=serve, args=(engine, side)) for side in (1, 2)]
        for thread in threads:
            thread.start()
        asyncio.run(until(lambda: len(engine._streams) == 12))
        gate(engine).open()
        for thread in threads:
            thread.join(20)
    assert [] == problems
    assert {1, 2} == found.keys()
    for wanted, got in found.values():
        assert wanted == got


def test_close_ends_the_thread_and_may_be_called_twice():
    with threaded() as engine:
        engine.close()
        assert not engine._thread.is_alive()
        assert float("inf") == engine.heartbeat_age()
        engine.close()
        with pytest.raises(Unavailable):
            asyncio.run(collect(engine, [ask("a")]))


def crowded(engine: AsyncEngine) -> tuple[int, int]:
    """Requests in the engine or its queue, and their prompts' tokens, now."""
    return len(engine._streams), engine._queued_tokens


@pytest.mark.parametrize(("at_once", "tokens", "most"), [(3, 1 << 14, 3), (8, 9, 4), (8, 1, 1)])
def test_a_call_in_parts_has_no_more_requests_and_tokens_in_the_engine_than_its_share(monkeypatch, at_once, tokens, most):
    """20 requests pass a queue of 4, and each makes room for the next."""
    monkeypatch.setattr(attend.model.engine.loop, "PART_TOKENS", tokens)
    requests, seen = [ask(f"r{at}", [at, 2], 1 + at % 3, seed=at) for at in range(20)], []

    async def watched(engine):
        outputs: dict[str, list[Output]] = {}
        async with aclosing(engine.generate(requests, at_once)) as stream:
            async for batch in stream:
                seen.append(crowded(engine))
                for output in batch:
                    outputs.setdefault(output.request_id, []).append(output)
        return {name: told(found) for name, found in outputs.items()}

    with threaded(max_batch_requests=2, max_queued_requests=2) as engine:
        assert expected(requests) == asyncio.run(watched(engine))
        assert max(count for count, _ in seen) == most
        assert max(queued for _, queued in seen) <= max(2, tokens)
        assert is_idle(engine) and crowded(engine) == (0, 0)


def test_a_drain_whose_time_is_up_gives_up_the_parts_that_come_later():
    async def drain(engine, clock):
        gate(engine).shut()
        many = asyncio.create_task(collect(engine, [ask(f"m{at}") for at in range(40)], 2))
        await until(lambda: len(engine._streams) == 2 and not engine._commands)
        draining = asyncio.create_task(engine.drain(30))
        await until(lambda: engine.draining)
        clock.now += 31
        await until(lambda: engine._commands)
        gate(engine).open()
        await draining
        return await many

    clock = Clock()
    with threaded(clock=clock, max_batch_requests=2, max_queued_requests=2) as engine:
        found = asyncio.run(drain(engine, clock))
        assert len(found) == 40
        assert {FinishReason.ABORT} == {found[f"m{at}"][-1].finish_reason for at in range(2, 40)}
