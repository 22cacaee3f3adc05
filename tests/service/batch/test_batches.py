"""A batch from its lines to its files: each line has the answer of its route, once, or an error by name."""

import asyncio
import json
import time

import pytest

from attend.model.errors import Overloaded, Unavailable
from attend.service.access.caller import BATCH_WEIGHT, BATCHES
from attend.service.http_api import internal_calls
from attend.service.records import TokenCounts, TokenUsage
from tests.fakes import FakeEngine, build_server, info
from tests.service.batch.world import COMPLETIONS, line, serving, usage_of

NEW = ("id", "created", "created_at", "completed_at", "seed")
CHAT = [{"role": "user", "content": "hello"}]
BODIES = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 4, "seed": 3, "n": 2, "logprobs": 1},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4, "seed": 3},
    "/v1/embeddings": {"input": ["one", "two"], "encoding_format": "base64"},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
}


def without_new(document):
    """An answer without what differs from call to call."""
    if isinstance(document, dict):
        return {name: without_new(value) for name, value in document.items() if name not in NEW}
    return [without_new(each) for each in document] if isinstance(document, list) else document


@pytest.mark.parametrize("endpoint", BODIES)
async def test_the_answer_of_a_line_is_that_of_its_route(tmp_path, endpoint, chat_template):
    async with serving(tmp_path, template=chat_template) as world:
        direct = await world.call("POST", endpoint, json=BODIES[endpoint])
        lines = [
            line(1, url=endpoint, body=BODIES[endpoint]),
            line(2, url=endpoint, body={"nonsense": 1, "max_tokens": -1}),
        ]
        wrong = await world.call("POST", endpoint, json=lines[1]["body"])
        batch, output, errors = await world.run(lines, endpoint=endpoint)
        assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 2, "completed": 1, "failed": 1})
        [row], [bad] = output, errors
        assert batch["usage"] == usage_of(output) and batch["usage"]["total_tokens"] > 0
        assert (row["custom_id"], row["response"]["status_code"], row["error"]) == ("r1", 200, None)
        assert without_new(row["response"]["body"]) == without_new(direct.json())
        assert row["response"]["request_id"] in str(row["response"]["body"].get("id", row["response"]["request_id"]))
        assert (bad["custom_id"], bad["response"]["status_code"], bad["error"]) == ("r2", wrong.status_code, None)
        assert bad["response"]["body"] == wrong.json()


async def test_cached_and_reasoning_tokens_are_summed_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(TokenCounts, "total", TokenUsage(10, 4, 7, 2))

    async with serving(tmp_path) as world:
        batch, rows, _ = await world.run([line(1), line(2)])
        usage = batch["usage"]
        assert usage == usage_of(rows)
        assert (usage["input_tokens_details"], usage["output_tokens_details"]) == (
            {"cached_tokens": 8},
            {"reasoning_tokens": 4},
        )


def test_answers_stand_in_the_order_of_the_lines_and_empty_lines_are_none(tmp_path):
    lines = [line(1), b"", line(2), b"  ", *(line(number) for number in range(3, 40)), b""]

    async def law():
        async with serving(tmp_path) as world:
            batch, output, errors = await world.run(lines)
            assert [row["custom_id"] for row in output] == [f"r{number}" for number in range(1, 40)]
            assert len({row["id"] for row in output}) == 39 and errors == []
            assert batch["error_file_id"] is None and batch["request_counts"]["total"] == 39
            assert world.server.value("attend_batch_lines_total", outcome="completed") == 39
            assert batch["completed_at"] >= batch["finalizing_at"] >= batch["in_progress_at"] >= batch["created_at"]

    asyncio.run(law())


BAD = {
    "not JSON": ([line(1), b"{not json"], "invalid_json_line", 2, None, "not valid JSON"),
    "no object": ([b"[1]"], "invalid_json_line", 1, None, "must be a JSON object"),
    "NaN": ([b'{"custom_id": NaN}'], "invalid_json_line", 1, None, "NaN"),
    "bad UTF-8": ([b"\xff\xfe"], "invalid_json_line", 1, None, "UTF-8"),
    "no custom_id": ([line(1, custom_id=None)], "invalid_custom_id", 1, "custom_id", "required"),
    "long custom_id": ([line(1, custom_id="x" * 513)], "invalid_custom_id", 1, "custom_id", "1 to 512 characters"),
    "custom_id of a number": ([line(1, custom_id=3)], "invalid_custom_id", 1, "custom_id", "3"),
    "twice": ([line(1), line(2), line(1)], "duplicate_custom_id", 3, "custom_id", "r1"),
    "GET": ([line(1, method="GET")], "invalid_method", 1, "method", "'GET'"),
    "another url": ([line(1, url="/v1/embeddings")], "invalid_url", 1, "url", "/v1/completions"),
    "a foreign url": ([line(1, url="http://elsewhere/v1/completions")], "invalid_url", 1, "url", "elsewhere"),
    "no body": ([line(1, body="a")], "invalid_value", 1, "body", "an object"),
    "a stream": ([line(1, body={"prompt": "a", "stream": True})], "unsupported_value", 1, "body.stream", "stream"),
    "two models": (
        [line(1, body={"model": "fake"}), line(2, body={"prompt": "b"})],
        "mismatched_model",
        2,
        "body.model",
        "fake",
    ),
    "no such model": ([line(1, body={"model": "gpt-9"})], "model_not_found", 1, "body.model", "gpt-9"),
    "model of a number": ([line(1, body={"model": 3})], "invalid_value", 1, "body.model", "3"),
    "nothing": ([b"", b"  "], "empty_file", None, "input_file_id", "no line"),
    "too many": ([line(number) for number in range(6)], "too_many_lines", 6, None, "at most 5 lines"),
    "too many, most of them empty": ([line(1), *[b""] * 9], "too_many_lines", 6, None, "empty ones included"),
    "too long": ([line(1), line(2, body={"prompt": "x" * (1 << 21)})], "line_too_long", 2, None, "bytes"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_line_fails_its_batch_before_any_line_is_computed_and_is_named(tmp_path, name):
    lines, code, number, param, word = BAD[name]

    engine = FakeEngine()
    async with serving(tmp_path, engine, limits={"lines": 5}) as world:
        batch, output, errors = await world.run(lines)
        assert (batch["status"], output, errors, engine.requests) == ("failed", [], [], [])
        first = batch["errors"]["data"][0]
        assert (first["code"], first["line"], first["param"]) == (code, number, param)
        assert word in first["message"]
        assert batch["failed_at"] and batch["output_file_id"] is None


async def test_the_work_of_one_owner_with_files_delays_no_other(tmp_path):
    async with serving(tmp_path, starts=False) as world:
        mine = [asyncio.create_task(world.batch_service.disk("ann", time.sleep, 0.1)) for _ in range(60)]
        whole = world.batch_service.submit("ann", time.sleep, 3.0)
        began = time.monotonic()
        await asyncio.gather(*(world.upload([line(1)]) for _ in range(3)))
        assert time.monotonic() - began < 2.5 and not whole.done()
        for task in mine:
            task.cancel()


async def test_a_body_that_its_route_takes_fits_in_a_line(tmp_path):
    async with serving(tmp_path) as world:
        lines = [line(1, custom_id="x" * 512), line(2, body={"prompt": "x" * ((1 << 20) - 14)})]
        assert len(json.dumps(lines[1]["body"])) == 1 << 20
        direct = await world.call("POST", COMPLETIONS, json=lines[1]["body"])
        batch, _, [row] = await world.run(lines)
        assert (batch["status"], row["response"]["status_code"]) == ("completed", direct.status_code)
        assert row["response"]["body"]["error"] == direct.json()["error"]


async def test_lines_are_in_the_background_of_one_owner_whatever_they_ask(tmp_path):
    engine = FakeEngine()
    async with serving(tmp_path, engine) as world:
        await world.run([line(1, body={"prompt": "a", "max_tokens": 1, "priority": 9})])
        [request] = engine.requests
        assert (request.is_background, request.priority, request.owner, request.weight) == (True, 0, BATCHES, BATCH_WEIGHT)
        await world.call("POST", COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
        assert (engine.requests[1].is_background, engine.requests[1].owner) == (False, None)


async def test_beside_another_call_few_lines_are_computed(tmp_path):
    engine = FakeEngine(held=True)
    async with serving(tmp_path, engine, limits={"concurrency": 16}) as world:
        batch = await world.create([line(number) for number in range(100)])
        await until(lambda: len(engine.open) == 16)
        call = asyncio.create_task(world.call("POST", COMPLETIONS, json={"prompt": "z", "max_tokens": 100}))
        await until(lambda: len(engine.open) == 17)
        engine.release(16 * 3 + 16)
        await asyncio.sleep(0.5)
        engine.release(30)
        await until(lambda: len(engine.open) == 3, 30)
        await asyncio.sleep(0.3)
        assert len(engine.open) == 3, "two lines beside one call"
        call.cancel()
        await until(lambda: len(engine.open) == 16, 30)
        await world.call("POST", f"/v1/batches/{batch}/cancel")
        await until(lambda: not engine.open)


async def until(condition, seconds=10.0):
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it does not come true")


@pytest.mark.parametrize("refusal", [Overloaded("full"), Unavailable("draining")])
async def test_a_line_that_finds_no_room_is_computed_later(tmp_path, refusal):
    engine = FakeEngine()
    engine.refusal = refusal
    async with serving(tmp_path, engine) as world:
        batch = await world.create([line(1), line(2)])
        await until(lambda: world.batch_service.numbers.lines["retried"] > 1)
        assert (await world.batch(batch))["status"] == "in_progress"
        engine.refusal = None
        batch = await world.ended(batch)
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


async def test_a_line_with_which_the_server_fails_is_computed_three_times(tmp_path):
    engine = FakeEngine()
    engine.broken_after = 1
    async with serving(tmp_path, engine) as world:
        batch, output, [row] = await world.run([line(1)])
        assert (len(engine.requests), output, row["response"]["status_code"]) == (3, [], 500)
        assert batch["status"] == "completed"


async def test_a_cancelled_batch_keeps_what_is_answered_and_names_the_rest(tmp_path):
    engine = FakeEngine(held=True)
    async with serving(tmp_path, engine, limits={"concurrency": 2}) as world:
        batch = await world.create([line(number, body={"prompt": "a", "max_tokens": 1}) for number in range(5)])
        await until(lambda: len(engine.open) == 2)
        engine.release(2)
        await until(lambda: len(engine.requests) == 4)
        answer = (await world.call("POST", f"/v1/batches/{batch}/cancel")).json()
        assert answer["status"] == "cancelling" and answer["cancelling_at"]
        ended = await world.ended(batch)
        assert ended["status"] == "cancelled" and ended["cancelled_at"] and not engine.open
        output, errors = await world.rows(ended["output_file_id"]), await world.rows(ended["error_file_id"])
        assert {row["custom_id"] for row in output} == {"r0", "r1"}
        assert [row["custom_id"] for row in errors] == ["r2", "r3", "r4"]
        assert {row["error"]["code"] for row in errors} == {"batch_cancelled"}
        again = await world.call("POST", f"/v1/batches/{batch}/cancel")
        assert again.json()["status"] == "cancelled"


async def test_a_batch_whose_window_is_over_expires_with_what_it_has(tmp_path):
    engine = FakeEngine(held=True)
    async with serving(tmp_path, engine, limits={"concurrency": 1}) as world:
        batch = await world.create([line(number, body={"prompt": "a", "max_tokens": 1}) for number in range(3)])
        await until(lambda: len(engine.open) == 1)
        engine.release(1)
        await until(lambda: len(engine.requests) == 2)
        world.clock.ahead = 24 * 3600 + 5
        ended = await world.ended(batch)
        assert (ended["status"], ended["request_counts"]["completed"]) == ("expired", 1)
        errors = await world.rows(ended["error_file_id"])
        assert [(row["custom_id"], row["error"]["code"]) for row in errors] == [
            ("r1", "batch_expired"),
            ("r2", "batch_expired"),
        ]


async def test_without_a_folder_the_routes_name_the_setting():
    async with build_server(FakeEngine(info=info())).http() as client:
        calls = [("GET", "/v1/files"), ("GET", "/v1/batches"), ("POST", "/v1/files"), ("DELETE", "/v1/files/x")]
        for method, path in (
            *calls,
            ("POST", "/v1/batches"),
            ("GET", "/v1/files/x/content"),
            ("POST", "/v1/batches/x/cancel"),
        ):
            answer = await client.request(method, path)
            assert answer.status_code == 404, (method, path)
            assert "batch_folder" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "param", "word"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint", "/v1/chat/completions"),
        ({"endpoint": None}, "endpoint", "required"),
        ({"completion_window": "1h"}, "completion_window", "'24h'"),
        ({"completion_window": None}, "completion_window", "required"),
        ({"input_file_id": None}, "input_file_id", "required"),
        ({"input_file_id": 3}, "input_file_id", "string"),
        ({"metadata": {"a": 1}}, "metadata", "512"),
        ({"metadata": {"a" * 65: "1"}}, "metadata", "64"),
        ({"metadata": {f"{n}": "1" for n in range(17)}}, "metadata", "16"),
        ({"completion_windows": "24h"}, "completion_windows", "did you mean completion_window"),
    ],
)
async def test_a_batch_that_cannot_be_is_refused_by_field(tmp_path, changes, param, word):
    async with serving(tmp_path, starts=False) as world:
        body = {"input_file_id": await world.upload([line(1)]), "endpoint": COMPLETIONS, "completion_window": "24h"}
        answer = await world.call("POST", "/v1/batches", json=body | changes)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert word in error["message"]


async def test_batches_are_listed_in_pages_the_newest_first(tmp_path):
    async with serving(tmp_path, starts=False) as world:
        ids = [await world.create([line(1)]) for _ in range(5)][::-1]
        first = (await world.call("GET", "/v1/batches?limit=2")).json()
        assert ([each["id"] for each in first["data"]], first["has_more"]) == (ids[:2], True)
        rest = (await world.call("GET", f"/v1/batches?limit=3&after={first['last_id']}")).json()
        assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (ids[2:], False)
        for query in ("limit=0", "limit=101", "limit=x", "befor=1", "limit=1&limit=2"):
            assert (await world.call("GET", f"/v1/batches?{query}")).status_code == 400
        assert (await world.call("GET", "/v1/batches?after=batch_x")).status_code == 404


async def test_a_large_answer_is_written_whole_and_one_that_is_too_large_is_an_error_of_its_line(tmp_path, monkeypatch):
    body = {"prompt": "a" * 60, "max_tokens": 60, "logprobs": 5, "echo": True, "n": 8}
    async with serving(tmp_path, FakeEngine(info=info(max_model_len=128))) as world:
        _, [row], _ = await world.run([line(1, body=body)])
        direct = (await world.call("POST", COMPLETIONS, json=body)).content
        assert len(direct) > 50_000
        assert len(row["response"]["body"]["choices"]) == 8
        monkeypatch.setattr(internal_calls, "MAX_BYTES", 20_000)
        batch, output, [bad] = await world.run([line(1, body=body), line(2)])
        assert (bad["response"]["status_code"], bad["response"]["body"]["error"]["code"]) == (400, "answer_too_large")
        assert (batch["status"], [row["custom_id"] for row in output]) == ("completed", ["r2"])


async def test_a_line_has_no_time_limit_but_its_own(tmp_path):
    """Others go before it: it may wait for hours."""

    engine = FakeEngine(held=True)
    async with serving(tmp_path, engine, request_timeout=0.2) as world:
        batch = await world.create([line(1), line(2, body={"prompt": "a", "max_tokens": 3, "deadline_ms": 300})])
        await until(lambda: len(engine.requests) == 2)
        await asyncio.sleep(0.6)
        assert "r1" not in engine.aborted and len(engine.open) >= 1
        engine.held = False
        engine.release(100)
        ended = await world.ended(batch)
        assert ended["request_counts"]["completed"] >= 1
