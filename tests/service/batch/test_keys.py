"""Whose files and batches they are, and what they cost whom."""

import asyncio
from collections import Counter

import pytest

from attend.service.access.keys import Entry, digest_of, write_keys
from attend.service.access.quota import Limits as KeyLimits
from attend.service.batch import runner
from tests.fakes import FakeEngine
from tests.service.batch.test_batches import until
from tests.service.batch.world import COMPLETIONS, jsonl, keys_of, line, serving

NO_LIMIT = KeyLimits()
ONE = {"prompt": "a", "max_tokens": 1}


async def test_a_key_sees_its_own_alone_and_nobody_else_learns_that_they_are_there(tmp_path):
    async with serving(tmp_path, keys=keys_of(tmp_path, ann=NO_LIMIT, bob=NO_LIMIT)) as world:
        batch = await world.ended(await world.create([line(1)], "ann"), "ann")
        file_id = batch["output_file_id"]
        unknown = await world.call("GET", f"/v1/files/file-{'0' * 32}", "ann")
        calls = [
            ("GET", f"/v1/files/{file_id}"),
            ("GET", f"/v1/files/{file_id}/content"),
            ("DELETE", f"/v1/files/{file_id}"),
        ]
        calls += [("GET", f"/v1/batches/{batch['id']}"), ("POST", f"/v1/batches/{batch['id']}/cancel")]
        calls += [("GET", f"/v1/files?after={file_id}"), ("GET", f"/v1/batches?after={batch['id']}")]
        for method, path in calls:
            answer = await world.call(method, path, "bob")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), path
        body = {"input_file_id": batch["input_file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        assert (await world.call("POST", "/v1/batches", "bob", json=body)).status_code == 404
        assert (await world.call("GET", "/v1/files", "bob")).json()["data"] == []
        assert (await world.call("GET", "/v1/batches", "bob")).json()["data"] == []
        assert (await world.call("GET", "/v1/files")).status_code == 401
        mine = (await world.call("GET", f"/v1/files/{file_id}", "bob")).json()["error"]["message"]
        assert mine.replace(file_id, "") == unknown.json()["error"]["message"].replace(f"file-{'0' * 32}", "")


@pytest.mark.parametrize(
    "path", ["..", "../state.sqlite3", "%2e%2e%2fstate.sqlite3", "file-../../x", "file-" + "g" * 32, "a\0b"]
)
@pytest.mark.parametrize("route", ["/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}"])
async def test_an_id_never_becomes_a_path(tmp_path, path, route):
    async with serving(tmp_path, starts=False) as world:
        answer = await world.call("GET", route.format(path.replace("\0", "%00")))
        assert answer.status_code in (404, 405)


async def test_the_name_of_a_file_is_text_in_json_and_in_no_header(tmp_path):
    async with serving(tmp_path, starts=False) as world:
        head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a\\"; \x01\xc3\xa9../../b"\r\n\r\nhi\r\n'
        body = head + b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--'
        sent = {"content-type": "multipart/form-data; boundary=x"}
        file = (await world.call("POST", "/v1/files", content=body, headers=sent)).json()
        assert file["filename"] == 'a"; é../../b'
        answer = await world.call("GET", f"/v1/files/{file['id']}/content")
        assert answer.headers["content-disposition"] == f'attachment; filename="{file["id"]}.jsonl"'
        assert (answer.headers["x-content-type-options"], answer.content) == ("nosniff", b"hi")


UPLOADS = {
    "another purpose": ({"purpose": "fine-tune"}, b"x", 400, "purpose", "'batch'"),
    "no purpose": ({}, b"x", 400, "purpose", "required"),
    "a mistyped field": ({"purpose": "batch", "purposes": "x"}, b"x", 400, "purposes", "did you mean purpose"),
    "empty": ({"purpose": "batch"}, b"", 400, "file", "at least one byte"),
    "no file": ({"purpose": "batch", "other": "1"}, None, 400, "file", "required"),
    "too large": ({"purpose": "batch"}, b"x" * 200_000, 413, None, "at most 1000 bytes"),
    "a little too large": ({"purpose": "batch"}, b"x" * 1001, 413, None, "at most 1000 bytes"),
    "a bad anchor": ({"purpose": "batch", "expires_after[anchor]": "x"}, b"x", 400, "expires_after", "created_at"),
    "seconds": (
        {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
        *(b"x", 400, "expires_after", "3600 to 2592000"),
    ),
}


@pytest.mark.parametrize("name", UPLOADS)
async def test_an_upload_that_cannot_be_is_refused_by_field_and_leaves_nothing(tmp_path, name):
    fields, content, status, param, word = UPLOADS[name]

    async with serving(tmp_path, starts=False, limits={"file_bytes": 1000}) as world:
        files = {"file": ("l", content)} if content is not None else {"another": ("l", b"x")}
        answer = await world.call("POST", "/v1/files", files=files, data=fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), error
        assert word in error["message"]
        await until(lambda: not [*world.batch_service.files.folder.files.iterdir()])
        assert await world.batch_service.db(world.batch_service.files.total_bytes) == 0


async def test_unknown_fields_of_a_form_are_said_and_a_file_may_live_shorter(tmp_path):
    async with serving(tmp_path, starts=False) as world:
        fields = {
            "purpose": "batch",
            "colour": "red",
            "expires_after[anchor]": "created_at",
            "expires_after[seconds]": "3600",
        }
        answer = await world.call("POST", "/v1/files", files={"file": b"x"}, data=fields)
        file = answer.json()
        assert (answer.headers["x-attend-ignored"], file["expires_at"] - file["created_at"]) == ("colour", 3600)
        world.clock.ahead = 3700
        await world.batch_service.db(world.batch_service.files.sweep)
        assert (await world.call("GET", f"/v1/files/{file['id']}")).status_code == 404
        assert not [*world.batch_service.files.folder.files.iterdir()]


async def test_an_input_whose_time_is_over_stays_until_its_batch_has_ended(tmp_path):
    async with serving(tmp_path, starts=False) as world:
        fields = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        answer = await world.call("POST", "/v1/files", files={"file": jsonl([line(1)])}, data=fields)
        body = {"input_file_id": answer.json()["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        batch = (await world.call("POST", "/v1/batches", json=body)).json()["id"]
        world.clock.ahead = 3700
        await world.batch_service.db(world.batch_service.files.sweep)
        world.server.runner.start()
        assert (await world.ended(batch))["status"] == "completed"
        await world.batch_service.db(world.batch_service.files.sweep)
        assert (await world.call("GET", f"/v1/files/{body['input_file_id']}")).status_code == 404


async def test_bytes_are_charged_before_they_are_read_and_given_back(tmp_path):
    """To the key, and to all of them together."""

    limits = {"file_bytes": 1000, "key_bytes": 1850, "bytes": 2500}
    async with serving(tmp_path, keys=keys_of(tmp_path, ann=NO_LIMIT, bob=NO_LIMIT), starts=False, limits=limits) as world:

        async def send(size, key, **more):
            return await world.call("POST", "/v1/files", key, files={"file": b"x" * size}, data={"purpose": "batch"}, **more)

        first = await send(900, "ann")
        second = await send(900, "ann")
        assert (second.status_code, second.json()["error"]["code"]) == (403, "storage_limit_reached")
        assert "1850" in second.json()["error"]["message"]
        assert (await send(900, "bob")).status_code == 200
        assert (await send(500, "bob")).status_code == 507, "all of them together"
        await world.call("DELETE", f"/v1/files/{first.json()['id']}", "ann")
        assert (await send(900, "ann")).status_code == 200


async def test_uploads_that_are_under_way_count_with_all_that_they_may_bring(tmp_path):
    async with serving(tmp_path, starts=False, limits={"file_bytes": 1000, "key_bytes": 1500}) as world:
        comes = asyncio.Event()

        async def slowly():
            yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            await comes.wait()
            yield b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nhi\r\n--x--\r\n'

        sent = {"content-type": "multipart/form-data; boundary=x"}
        slow = asyncio.create_task(world.call("POST", "/v1/files", content=slowly(), headers=sent))
        await until(lambda: world.batch_service.uploads.num_held == 1)
        await asyncio.sleep(0.1)
        other = await world.call("POST", "/v1/files", files={"file": b"x" * 600}, data={"purpose": "batch"})
        assert other.status_code == 403
        comes.set()
        assert (await slow).json()["bytes"] == 2
        assert await world.batch_service.db(world.batch_service.files.total_bytes) == 2


async def test_a_key_has_so_many_files_and_batches(tmp_path):
    async with serving(tmp_path, starts=False, limits={"key_files": 3}) as world:
        file_ids = [await world.upload([line(1)]) for _ in range(3)]
        answer = await world.call("POST", "/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "storage_limit_reached")
        body = {"input_file_id": file_ids[0], "endpoint": COMPLETIONS, "completion_window": "24h"}
        made = [await world.call("POST", "/v1/batches", json=body) for _ in range(4)]
        assert [each.status_code for each in made] == [200, 200, 200, 403]
        answer = await world.call("DELETE", f"/v1/files/{file_ids[0]}")
        assert answer.status_code == 400 and "cancel that first" in answer.json()["error"]["message"]
        assert (await world.call("DELETE", f"/v1/files/{file_ids[1]}")).json()["deleted"] is True
        await world.upload([line(1)])


async def test_a_batch_whose_answers_are_more_than_its_key_may_keep_fails_by_name(tmp_path):
    async with serving(tmp_path, limits={"file_bytes": 100_000, "key_bytes": 1_500_000}) as world:
        body = ONE | {"prompt": "a" * 100, "max_tokens": 20, "logprobs": 5, "echo": True}
        lines = [line(number, body=body) for number in range(400)]
        batch = await world.ended(await world.create(lines))
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "storage_limit_reached")
        assert await world.batch_service.db(world.batch_service.files.total_bytes) < 100_000


async def test_each_line_is_charged_to_its_key_as_a_call_and_waits_for_its_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SPARED", 1.0)

    ring = keys_of(tmp_path, ann=KeyLimits(requests_per_minute=100, tokens_per_minute=10, concurrent=4))
    async with serving(tmp_path, FakeEngine(), keys=ring) as world:
        batch = await world.create([line(number, body=ONE) for number in range(8)], "ann")
        await until(lambda: world.batch_service.numbers.lines["completed"] == 5)  # of 2 tokens each
        found = await world.until(lambda found: found["request_counts"]["completed"], batch, "ann")
        assert (found["status"], found["request_counts"]) == ("in_progress", {"total": 8, "completed": 5, "failed": 0})
        key = ring.find_by_name("ann")
        assert key.usage.tokens.spent == 10


async def test_a_batch_leaves_half_of_each_limit_of_its_key_to_its_other_calls(tmp_path):
    ring = keys_of(tmp_path, ann=KeyLimits(concurrent=4), bob=NO_LIMIT)
    engine = FakeEngine(held=True)
    async with serving(tmp_path, engine, keys=ring, limits={"concurrency": 16}) as world:
        await world.create([line(number, body=ONE) for number in range(8)], "ann")
        await until(lambda: len(engine.open) == 2)
        await asyncio.sleep(0.3)
        assert len(engine.open) == 2


async def test_batches_of_several_keys_take_turns(tmp_path):
    """However many lines and batches one of them has."""

    engine = FakeEngine(held=True)
    ring = keys_of(tmp_path, ann=NO_LIMIT, bob=NO_LIMIT, cleo=NO_LIMIT)
    async with serving(tmp_path, engine, keys=ring, limits={"concurrency": 6}) as world:
        for _ in range(3):
            await world.create([line(number, body=ONE) for number in range(50)], "ann")
        for key in ("bob", "cleo"):
            await world.create([line(number, body=ONE) for number in range(50)], key)
        await until(lambda: len(world.server.runner.jobs) >= 4)
        for _ in range(15):
            engine.release(6)
            await asyncio.sleep(0.1)
        counts = Counter(request.cache_salt.partition("\0")[0] for request in engine.requests[12:])
        assert min(counts.values()) > 0.6 * max(counts.values()), counts
        engine.release(10**6)


async def row_of(world, batch, condition):
    """The row of a batch whose owner cannot ask for it, once it is so."""
    select = "SELECT * FROM batches WHERE id = ?"
    found = {}
    await until(
        lambda: condition(found.update(world.batch_service.files.connection.execute(select, (batch,)).fetchone()) or found)
    )
    return found


async def test_a_key_that_is_away_pauses_its_batches(tmp_path):
    engine, both = FakeEngine(held=True), {"ann": NO_LIMIT, "bob": NO_LIMIT}
    async with serving(tmp_path, engine, keys=(ring := keys_of(tmp_path, **both)), limits={"concurrency": 2}) as world:
        batch = await world.create([line(number, body=ONE) for number in range(5)], "ann")
        await until(lambda: len(engine.open) == 2)
        write_keys(tmp_path / "keys", {"bob": Entry(digest_of(b"bob"))})
        ring._next_look = 0.0
        engine.release(2)
        await until(lambda: world.batch_service.numbers.lines["completed"] == 2)
        await asyncio.sleep(1.5)
        assert len(engine.requests) == 2, "no line begins meanwhile"
        keys_of(tmp_path, **both)
        ring._next_look = 0.0
        engine.held = False
        assert (await world.ended(batch, "ann"))["status"] == "completed"


@pytest.mark.parametrize("made_by", ["another key", "nobody", "a key, and now without keys"])
async def test_a_server_that_does_not_know_an_owner_leaves_its_batch_until_its_window_is_over(tmp_path, made_by):
    before = None if made_by == "nobody" else keys_of(tmp_path, ann=NO_LIMIT)
    async with serving(tmp_path, engine := FakeEngine(held=True), keys=before, limits={"concurrency": 1}) as world:
        batch = await world.create([line(number, body=ONE) for number in range(3)], "ann" if before else None)
        await until(lambda: engine.open)
        engine.release(1)
        await until(lambda: world.batch_service.numbers.lines["completed"] == 1)
    now = None if made_by == "a key, and now without keys" else keys_of(tmp_path, bob=NO_LIMIT)
    async with serving(tmp_path, engine := FakeEngine(), keys=now) as world:
        await asyncio.sleep(1.5)
        assert (await row_of(world, batch, bool))["status"] == "in_progress"
        world.clock.ahead = 24 * 3600 + 5
        row = await row_of(world, batch, lambda row: row["status"] == "expired")
        assert (row["completed"], engine.requests) == (1, [])
        assert world.batch_service.files.folder.file(row["output_file"]).exists()


async def test_a_line_says_nothing_of_who_it_is(tmp_path):
    """Headers that a call from outside brings lead nowhere: who calls, the scope of the server says alone."""

    async with serving(tmp_path, keys=keys_of(tmp_path, ann=NO_LIMIT), starts=False) as world:
        headers = {"attend.batch_line": "ann", "x-attend-batch-line": "ann"}
        assert (await world.call("POST", COMPLETIONS, json=ONE, headers=headers)).status_code == 401
