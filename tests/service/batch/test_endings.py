"""How batches end where the disk, or what all callers may keep together, is used up: what was answered is kept."""

import errno
import sqlite3
from contextlib import contextmanager
from pathlib import Path

import pytest

from attend.service.access.quota import Limits as KeyLimits
from attend.service.batch import answers, batches, job, lines
from tests.fakes import FakeEngine, info
from tests.service.batch.test_batches import until
from tests.service.batch.test_crashes import full, one_token
from tests.service.batch.world import Clock, World, keys_of, serving

WINDOW = 24 * 3600


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What the disk did not take is tried again at once."""
    monkeypatch.setattr(job, "STUCK_SECONDS", 0.05)


@contextmanager
def unreadable(monkeypatch):
    """A set of ids of files, which can be read while they are checked and not afterwards."""
    read, begin, named, bad = lines.Reader.some, batches.Batches.begin, set(), set()

    def next_lines(reader):
        if Path(reader._file.name).name in named & bad:
            raise OSError(errno.EIO, "Input/output error")
        return read(reader)

    def begins(self, batch, *more):
        bad.add(batch.input_file)
        return begin(self, batch, *more)

    with monkeypatch.context() as context:
        context.setattr(lines.Reader, "some", next_lines)
        context.setattr(batches.Batches, "begin", begins)
        yield named


def files_of(world: World) -> set[str]:
    return {path.name for path in world.batch_service.files.folder.files.iterdir()}


@pytest.mark.parametrize("step", ["the database", "the second file"])
async def test_an_end_that_is_tried_again_leaves_no_second_copy_of_its_answers(tmp_path, monkeypatch, step):
    seen, sync, engine = [], answers.os.fsync, FakeEngine(held=True)
    async with serving(tmp_path, engine) as world:

        def refuse(*given):
            seen.append(files_of(world))
            raise sqlite3.OperationalError("database or disk is full")

        def sync_the_first(handle):
            seen.append(files_of(world))
            if len(seen) % 2 == 0:
                full()
            sync(handle)

        bad = one_token(9) | {"body": {"prompt": "a", "max_tokens": -1}}
        batch = await world.create([*(one_token(number) for number in range(3)), bad])
        await until(lambda: len(engine.open) == 3)
        with monkeypatch.context() as full_disk:
            if step == "the database":
                full_disk.setattr(batches.Batches, "end", refuse)
            else:
                full_disk.setattr(answers.os, "fsync", sync_the_first)
            engine.release(3)
            await until(lambda: len(seen) >= 8)
        ended = await world.ended(batch)
        assert max(map(len, seen)) <= 3, "the input, and two files of answers"
        assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", 3)
        known = {ended["input_file_id"], ended["output_file_id"], ended["error_file_id"]}
        await until(lambda: files_of(world) == known)


async def test_a_batch_whose_answers_find_no_room_waits_and_keeps_them(tmp_path):
    """All callers together keep too much: no line begins until there is room, and its end has every line."""
    engine, most = FakeEngine(held=True), 100_000
    keys = keys_of(tmp_path, ann=KeyLimits(), bob=KeyLimits())
    limits = {"bytes": most, "file_bytes": most, "concurrency": 4}
    async with serving(tmp_path, engine, keys=keys, limits=limits) as world:
        batch = await world.create([one_token(number) for number in range(40)], "ann")
        await until(lambda: len(engine.open) == 4)
        room = most - await world.batch_service.db(world.batch_service.files.total_bytes)
        sent = {"files": {"file": b"x" * (room - 1200)}, "data": {"purpose": "batch"}}
        file = await world.call("POST", "/v1/files", "bob", **sent)
        assert file.status_code == 200, file.text
        engine.release(8)
        job_of_it, _ = world.server.runner.jobs[batch]
        await until(lambda: job_of_it.is_paused)
        engine.release(40)
        await until(lambda: not engine.open)
        assert len(engine.requests) < 40
        await world.call("DELETE", f"/v1/files/{file.json()['id']}", "bob")
        engine.held = False
        engine.release(40)
        ended = await world.ended(batch, "ann")
        assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", 40)
        assert len(await world.rows(ended["output_file_id"], "ann")) == 40


@pytest.mark.parametrize("end", ["expired", "cancelled"])
async def test_answers_that_wait_for_a_full_disk_are_kept_when_their_batch_ends(tmp_path, monkeypatch, end):
    clock, engine = Clock(), FakeEngine(held=True)
    async with serving(tmp_path, engine, clock=clock, limits={"concurrency": 4}) as world:
        batch = await world.create([one_token(number) for number in range(6)])
        await until(lambda: len(engine.open) == 4)
        with monkeypatch.context() as full_disk:
            full_disk.setattr(answers.os, "write", full)
            full_disk.setattr(answers.os, "fsync", full)
            engine.release(4)
            await until(lambda: world.batch_service.numbers.storage_errors >= 4)
            if end == "expired":
                clock.ahead = WINDOW + 1
            else:
                await world.call("POST", f"/v1/batches/{batch}/cancel")
            await until(lambda: not world.server.runner.jobs[batch][0].running)
            before = world.batch_service.numbers.storage_errors
            await until(lambda: world.batch_service.numbers.storage_errors >= before + 3)
        ended = await world.ended(batch)
        output, errors = await world.rows(ended["output_file_id"]), await world.rows(ended["error_file_id"])
        assert (ended["status"], ended["request_counts"]["completed"], ended["usage"]["output_tokens"]) == (end, 4, 4)
        assert [row["custom_id"] for row in output] == ["r0", "r1", "r2", "r3"]
        assert [(row["custom_id"], row["error"]["code"]) for row in errors] == [(f"r{n}", f"batch_{end}") for n in (4, 5)]


async def test_one_input_that_cannot_be_read_fails_its_own_batch_and_no_other(tmp_path, monkeypatch):
    async with serving(tmp_path, limits={"concurrency": 1}) as world:
        with unreadable(monkeypatch) as bad_files:
            bad = await world.create([one_token(number) for number in range(3)])
            bad_files.add((await world.batch(bad))["input_file_id"])
            good = await world.create([one_token(number) for number in range(3)])
            ended = await world.ended(bad)
            assert (await world.ended(good))["request_counts"]["completed"] == 3
        [error] = ended["errors"]["data"]
        assert (ended["status"], error["code"]) == ("failed", "storage_unavailable")
        assert "Input/output error" in error["message"]
        assert world.batch_service.numbers.storage_errors == 1


async def test_a_cancelled_batch_whose_input_cannot_be_read_any_more_keeps_its_answers(tmp_path, monkeypatch):
    engine = FakeEngine(held=True)
    async with serving(tmp_path, engine, limits={"concurrency": 2}) as world:
        batch = await world.create([one_token(number) for number in range(5)])
        await until(lambda: len(engine.open) == 2)
        engine.release(2)
        await until(lambda: world.batch_service.numbers.lines["completed"] == 2 and len(engine.open) == 2)
        monkeypatch.setattr(lines.Reader, "some", full)
        await world.call("POST", f"/v1/batches/{batch}/cancel")
        ended = await world.ended(batch)
        assert (ended["status"], ended["request_counts"]["completed"]) == ("cancelled", 2)
        assert len(await world.rows(ended["output_file_id"])) == 2


class Adapters:
    """A registry with one adapter, of these weights."""

    names = ("tone",)

    def __init__(self, digest: str) -> None:
        self.digest = digest

    def get(self, name: str) -> "Adapters | None":
        return self if name in self.names else None


OTHERS = {
    "other weights": ({}, {}, {"engine": FakeEngine(info=info(weights_digest="w2"))}, "'fake' (w)", "'fake' (w2)"),
    "another adapter": (
        {"model": "tone"},
        {"adapter_registry": Adapters("a" * 64)},
        {"adapter_registry": Adapters("b" * 64)},
        *("'tone' (w-aaaaaaaa", "'tone' (w-bbbbbbbb"),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
async def test_a_batch_has_the_answers_of_one_model_and_ends_where_another_is_served(tmp_path, name):
    body, one, other, before, now = OTHERS[name]
    lines = [one_token(number) for number in range(4)]
    lines = [each | {"body": each["body"] | body} for each in lines]
    async with serving(tmp_path, engine := FakeEngine(held=True), limits={"concurrency": 1}, **one) as world:
        batch = await world.create(lines)
        await until(lambda: engine.open)
        engine.release(1)
        await until(lambda: world.batch_service.numbers.lines["completed"] == 1)
    async with serving(tmp_path, **other) as world:
        ended = await world.ended(batch)
        [error] = ended["errors"]["data"]
        assert (ended["status"], error["code"]) == ("failed", "model_changed")
        assert before in error["message"] and now in error["message"]
        assert [row["custom_id"] for row in await world.rows(ended["output_file_id"])] == ["r0"]
        left = await world.rows(ended["error_file_id"])
        assert [(row["custom_id"], row["error"]["code"]) for row in left] == [(f"r{n}", "batch_failed") for n in (1, 2, 3)]
        assert (await world.ended(await world.create([one_token(1)])))["status"] == "completed"


async def test_a_batch_goes_on_with_the_same_weights_under_another_version_or_set_up(tmp_path):
    async with serving(tmp_path, engine := FakeEngine(held=True), limits={"concurrency": 1}) as world:
        batch = await world.create([one_token(number) for number in range(4)])
        await until(lambda: engine.open)
    async with serving(tmp_path, FakeEngine(info=info(fingerprint="fp_2", dtype="float32", backend="other"))) as world:
        ended = await world.ended(batch)
        assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", 4)


def test_a_line_that_is_too_long_is_no_empty_one_whatever_it_begins_with(tmp_path):
    for start in (b" ", b"\r", b"x"):
        (tmp_path / "in").write_bytes(start * 2000 + b'{"custom_id":"a"}\n{}\n')
        reader = lines.Reader(tmp_path / "in", 1000)
        assert reader.some() == [lines.Raw(1, b""), lines.Raw(2, b"{}")]
        reader.close()
