"""What a process that dies, freezes, drains or finds a full disk leaves: each line is answered once, and the server goes on."""

import asyncio
import errno
import os
import sqlite3
import time

import pytest

from attend.service.batch import answers, batches, job, upload
from attend.service.batch.answers import DONE, FAILED, AnswerLog, Entry, spans, tally, write_sorted
from attend.service.batch.folder import Folder
from attend.service.batch.rows import Counts
from attend.service.records import TokenUsage
from tests.fakes import FakeEngine
from tests.service.batch.test_batches import until
from tests.service.batch.world import Clock, World, line, serving, usage_of

ONE = {"prompt": "a", "max_tokens": 1}


def one_token(number):
    return line(number, body=ONE | {"seed": number})


async def dies(world: World) -> None:
    """Nothing of the runner goes on, and nothing is said of it to the database; its lock is free, as the kernel has it."""
    runner = world.server.runner
    tasks = [*runner._tasks, *(task for _, task in runner.jobs.values())]
    tasks += [task for each, _ in runner.jobs.values() for task in each.running]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    runner.jobs.clear()
    if runner.lock is not None:
        os.close(runner.lock)
    runner.lock = None


@pytest.mark.parametrize("answered", [0, 1, 5, 19])
async def test_after_a_death_each_line_is_answered_once(tmp_path, answered):
    engine = FakeEngine(held=True)
    async with serving(tmp_path, engine, limits={"concurrency": 4}) as world:
        batch = await world.create([one_token(number) for number in range(20)])
        await until(lambda: len(engine.open) == 4)
        for count in range(answered):
            engine.release(1)
            await until(lambda count=count: world.batch_service.numbers.lines["completed"] == count + 1)
        await dies(world)
        with world.batch_service.files.folder.part(batch).open("ab") as file:
            file.write(b'7 1 {"id": "torn}')  # as a write that was cut
    clock = Clock()
    clock.ahead = -3600
    async with serving(tmp_path, second := FakeEngine(held=True), clock=clock) as world:
        await until(lambda: second.open)
        second.release(1)
        await world.until(lambda found: found["usage"]["output_tokens"] == answered + 1, batch)
        second.release(20)
        ended = await world.ended(batch)
        rows = await world.rows(ended["output_file_id"])
        assert [row["custom_id"] for row in rows] == [f"r{number}" for number in range(20)]
        assert ended["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        assert ended["usage"] == usage_of(rows)
        assert len(second.requests) == 20 - answered, "what was answered is not computed again"
        assert [*world.batch_service.files.folder.parts.iterdir()] == []


@pytest.mark.parametrize("end", ["drains", "dies"])
async def test_one_replica_of_a_folder_computes_and_where_it_ends_another_goes_on(tmp_path, end):
    engine, other = FakeEngine(held=True), FakeEngine()
    async with serving(tmp_path, engine) as world, serving(tmp_path, other) as second:
        await until(lambda: world.server.runner.lock is not None or second.server.runner.lock is not None)
        if world.server.runner.lock is None:
            world, second, engine, other = second, world, other, engine
        batch = await second.create([one_token(number) for number in range(3)])
        await asyncio.sleep(1.5)
        engine.held = True
        assert not other.requests
        await (dies(world) if end == "dies" else world.server.runner.close())
        other.held = False
        assert (await second.ended(batch))["request_counts"]["completed"] == 3


async def test_a_server_that_drains_leaves_a_batch_as_it_is_and_the_next_goes_on_at_once(tmp_path):
    engine = FakeEngine(held=True)
    async with serving(tmp_path, engine, limits={"concurrency": 2}) as world:
        batch = await world.create([one_token(number) for number in range(4)])
        await until(lambda: len(engine.open) == 2)
        engine.release(1)
        await until(lambda: world.batch_service.numbers.lines["completed"] == 1)
        await world.until(lambda found: found["usage"]["output_tokens"], batch)
        await world.server.runner.close()
        assert not engine.open
        before = await world.batch(batch)
        assert before["status"] == "in_progress"
    async with serving(tmp_path, starts=False) as world:
        after = await world.batch(batch)
        assert (after["usage"], after["request_counts"]) == (before["usage"], before["request_counts"]), "in the database"
    began = time.monotonic()
    async with serving(tmp_path, FakeEngine()) as world:
        ended = await world.ended(batch)
        assert time.monotonic() - began < 5
        assert ended["request_counts"] == {"total": 4, "completed": 4, "failed": 0}


@pytest.mark.parametrize("point", ["validating", "finalizing", "cancelling"])
async def test_a_death_at_any_point_is_gone_on_from(tmp_path, point, monkeypatch):
    async with serving(tmp_path, FakeEngine(), starts=point != "validating") as world:
        if point == "finalizing":
            monkeypatch.setattr(answers, "write_sorted", lambda *given: time.sleep(0.2) or _raise(asyncio.CancelledError()))
        batch = await world.create([one_token(number) for number in range(4)])
        if point == "finalizing":
            await world.until(lambda found: found["status"] == "finalizing", batch)
        if point == "cancelling":
            world.batch_service.files.connection.execute("UPDATE batches SET status = 'cancelling'")
        await dies(world)
    monkeypatch.undo()
    async with serving(tmp_path, FakeEngine()) as world:
        ended = await world.ended(batch)
        assert ended["status"] == ("cancelled" if point == "cancelling" else "completed")
        if point != "cancelling":
            assert len(await world.rows(ended["output_file_id"])) == 4


def _raise(error: BaseException) -> None:
    raise error


def full(*given: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_full_disk_pauses_a_batch_and_costs_no_answer(tmp_path, monkeypatch):
    """No line begins meanwhile: what is answered and cannot be written is held in memory."""
    monkeypatch.setattr(job, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(job, "MAX_UNWRITTEN", 4)
    engine = FakeEngine(held=True)
    async with serving(tmp_path, engine, limits={"concurrency": 4}) as world:
        batch = await world.create([one_token(number) for number in range(20)])
        await until(lambda: len(engine.open) == 4)
        engine.release(1)
        await until(lambda: world.batch_service.numbers.lines["completed"] == 1)
        with monkeypatch.context() as full_disk:
            full_disk.setattr(answers.os, "write", full)
            engine.release(20)
            await until(lambda: world.server.value("attend_batch_storage_errors_total") >= 8)
            begun = len(engine.requests)
            assert begun <= 1 + 4 + 4
            await asyncio.sleep(0.3)
            assert len(engine.requests) == begun
            assert (await world.batch(batch))["status"] == "in_progress"
            assert world.batch_service.numbers.lines["completed"] == 1
            answer = await world.call("POST", "/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
            assert answer.status_code == 507
        engine.release(20)
        ended = await world.ended(batch)
        assert ended["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        rows = await world.rows(ended["output_file_id"])
        assert [row["custom_id"] for row in rows] == [f"r{number}" for number in range(20)]
        assert ended["usage"] == usage_of(rows)


async def test_an_upload_on_a_full_disk_is_507_and_leaves_nothing(tmp_path, monkeypatch):
    async with serving(tmp_path, starts=False) as world:
        monkeypatch.setattr(upload.os, "write", full)
        answer = await world.call("POST", "/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
        monkeypatch.undo()
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_unavailable")
        await until(lambda: not [*world.batch_service.files.folder.files.iterdir()])
        assert (await world.call("GET", "/v1/files")).json()["data"] == []
        assert await world.batch_service.db(world.batch_service.files.total_bytes) == 0


async def test_a_database_that_cannot_be_written_is_507_and_delays_a_batch(tmp_path, monkeypatch):
    """As on a full disk: SQLite writes no page more."""
    monkeypatch.setattr(job, "STUCK_SECONDS", 0.1)
    engine = FakeEngine(held=True)
    async with serving(tmp_path, engine) as world:
        batch = await world.create([one_token(number) for number in range(3)])
        await until(lambda: len(engine.open) == 3)
        broken = sqlite3.OperationalError("database or disk is full")
        with monkeypatch.context() as full_disk:
            for place, name in ((batches.Batches, "save"), (batches.Batches, "end"), (batches.Batches, "finalize")):
                full_disk.setattr(place, name, lambda *given: _raise(broken))
            full_disk.setattr(world.batch_service.files, "reserve", lambda *given: _raise(broken))
            engine.release(3)
            await asyncio.sleep(0.5)
            answer = await world.call("POST", "/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_unavailable")
            assert (await world.batch(batch))["status"] == "in_progress"
        ended = await world.ended(batch)
        assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", 3)


def test_an_answer_that_could_not_be_written_whole_is_cut_back(tmp_path, monkeypatch):
    log, real = AnswerLog(tmp_path / "p", 3), os.write
    log.append(Entry(1, DONE, b'{"a":1}', TokenUsage(5, 1, 2)))
    monkeypatch.setattr(answers.os, "write", lambda handle, data: real(handle, data[:4]) if len(data) > 8 else full())
    with pytest.raises(OSError, match="No space"):
        log.append(Entry(2, DONE, b'{"b":2}'))
    assert spans(tmp_path / "p")[0].keys() == {1}
    monkeypatch.undo()
    assert log.append(Entry(3, DONE, b'{"c":3}')) and not log.append(Entry(1, DONE, b'{"a":9}'))
    assert (tmp_path / "p").read_bytes() == b'1 1 5,1,2,0 {"a":1}\n3 1 0,0,0,0 {"c":3}\n'
    assert log.counts == Counts(3, 2, 0, TokenUsage(5, 1, 2))
    log.close()
    with pytest.raises(OSError, match="is closed"):
        log.append(Entry(4, DONE, b'{"d":4}'))


def test_of_two_answers_to_a_line_the_first_counts_and_torn_ones_are_none(tmp_path):
    whole = b'3 1 {"a":3}\n1 0 {"a":1}\nnonsense\n\n3 1 9,9,9,9 {"b":3}\n2 1 5,4,3,2 {"b":2}\n4 9 {}\n'
    (part := tmp_path / "a").write_bytes(whole + b'5 1 0,0,0,0 {"a":{}')
    found, size = spans(part)
    assert size == len(whole)
    assert write_sorted(part, found, {DONE}, tmp_path / "out") == 16
    assert tally(found, 5) == Counts(5, 2, 1, TokenUsage(5, 4, 3, 2))
    assert (tmp_path / "out").read_bytes() == b'{"b":2}\n{"a":3}\n'
    assert write_sorted(part, found, {FAILED}, tmp_path / "errors") == 8
    assert write_sorted(part, {}, {FAILED}, tmp_path / "none") is None


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("/etc/hostname")])
async def test_what_is_no_file_in_the_place_of_answers_stops_its_batch_alone(plant, tmp_path):
    async with serving(tmp_path, starts=False) as world:
        stuck, other = [await world.create([one_token(number)]) for number in (1, 2)]
        plant(path := world.batch_service.files.folder.part(stuck))
    async with serving(tmp_path) as world:
        assert (await world.ended(other))["status"] == "completed"
        assert world.batch_service.numbers.storage_errors > 0
        path.unlink()
        assert (await world.ended(stuck))["status"] == "completed"


async def test_what_nobody_knows_is_swept_and_nothing_else(tmp_path):
    async with serving(tmp_path, starts=False) as world:
        file_id = await world.upload([line(1)])
        batch = await world.create([line(1)])
        folder: Folder = world.batch_service.files.folder
        strays = {folder.file("file-" + "0" * 32), folder.part("batch_" + "0" * 32)}
        others = {folder.file("file-" + "1" * 32), folder.part(batch), folder.files / "thesis.tex", folder.parts / "notes"}
        for path in strays | others:
            path.write_bytes(b"x")
            os.utime(path, (1, 1))
        folder.file("file-" + "1" * 32).touch()
        others.add(folder.file(file_id))
        await world.batch_service.db(world.batch_service.files.sweep)
        assert {path for path in strays | others if path.exists()} == others
