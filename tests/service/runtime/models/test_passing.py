"""Calls that are passed to the process of a model, which is played here by a small server on a socket of its own."""

import asyncio
import functools
import gzip
import json
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import httpx
import pytest
from aiohttp import web

from attend.service.access.caller import Callers
from attend.service.generation import slow_reader
from attend.service.http_api.request_ids import ABORT
from attend.service.runtime.models import http
from attend.service.runtime.models.admission import Admission
from attend.service.runtime.models.app import build_models_app
from attend.service.runtime.models.entries import Entry, ModelsFile, Plan, ServedModel
from attend.service.runtime.models.pool import Pool
from attend.service.runtime.models.process import LoadFailed
from attend.service.settings import Settings


def in_a_loop(test):
    """A test that is a coroutine, in an event loop of its own."""

    @functools.wraps(test)
    def run(*given, **named):
        asyncio.run(test(*given, **named))

    return run


ASK = {"prompt": "a", "stream": True}


class Played:
    """The process of a model that answers by `answer`, and takes `seconds` to load."""

    def __init__(self, answer, seconds: float = 0.0, broken: bool = False) -> None:
        self.answer, self.seconds, self.broken = answer, seconds, broken
        self.facts, self.memory, self.name = {"max_model_len": 1024}, 0, "m"
        self.asked: list[web.Request] = []
        self.bodies: list[bytes] = []

    async def start(self, model: ServedModel) -> "Played":
        await asyncio.sleep(self.seconds)
        if self.broken:
            raise LoadFailed("it is broken")
        return self

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        self.bodies.append(await request.read())
        return await self.answer(request)

    async def wait_for_exit(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def stop(self, seconds: float = 0.0) -> None: ...

    async def close(self) -> None: ...

    def check(self) -> None: ...


@asynccontextmanager
async def served(played: Played, **settings):
    """A client of a server whose one model, `m`, is played."""
    with tempfile.TemporaryDirectory() as folder:
        runner = web.AppRunner(web.Application())
        runner.app.router.add_route("*", "/{path:.*}", played.handle)
        await runner.setup()
        await web.UnixSite(runner, str(Path(folder, "http"))).start()
        file = ModelsFile(models=[Entry(name="m", memory=1)])
        pool = Pool(Plan({"m": ServedModel(file.models[0], Settings())}, file, 10), played.start)
        made = Settings(**settings)
        app = build_models_app(made, Admission(None, Callers(), pool, made.request_timeout_seconds), None, "0")
        connector = aiohttp.UnixConnector(str(Path(folder, "http")))
        transport = httpx.ASGITransport(app, client=("10.0.0.9", 1))
        try:
            async with (
                aiohttp.ClientSession("http://localhost", connector=connector, auto_decompress=False) as played.http,
                httpx.AsyncClient(transport=transport, base_url="http://server") as client,
            ):
                client.pool = pool
                yield client
        finally:
            await runner.cleanup()


async def whole(request: web.Request) -> web.StreamResponse:
    return web.json_response({"it": "is"}, headers={"x-attend-ignored": "store", "x-request-id": "child"})


async def streamed(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for piece in (b"data: 1\n\n", b": keep-alive\n", b"data: [DONE]\n\n"):
        await response.write(piece)
    return response


async def refused(request: web.Request) -> web.StreamResponse:
    error = {"message": "too hot", "type": "invalid_request_error", "param": "temperature", "code": "invalid_value"}
    body = {"type": "error", "error": error} if "messages" in request.path else {"error": error}
    return web.json_response(body, status=400)


def cut(*pieces: bytes):
    """A stream that breaks after these pieces."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.05)
        request.transport.abort()
        await asyncio.sleep(1)
        return response

    return answer


@in_a_loop
async def test_bytes_and_headers_pass_in_both_directions_and_the_address_is_added():
    async with served(played := Played(whole)) as client:
        body = f'{{"prompt" :"é", "model":"m","unknown": [1.00,2,1e300,-0,{10**300}]}}'.encode()
        sent = {
            "content-type": "application/json",
            "x-forwarded-for": "1.2.3.4",
            "authorization": "Bearer k",
            "x-request-id": "mine",
        }
        answer = await client.post("/v1/completions", content=body, headers=sent)
        assert (answer.status_code, answer.json()) == (200, {"it": "is"})
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert answer.headers["x-attend-ignored"] == "store"
        [got] = played.asked
        assert played.bodies == [body]
        assert got.headers.getall("x-forwarded-for") == ["1.2.3.4", "10.0.0.9"]
        assert (got.headers["authorization"], got.headers["x-request-id"]) == ("Bearer k", "mine")
        packed = gzip.compress(body)
        answer = await client.post("/v1/completions", content=packed, headers=sent | {"content-encoding": "gzip"})
        assert (answer.status_code, played.bodies[1]) == (200, body)
        assert played.asked[1].headers["content-length"] == str(len(packed))  # aiohttp's server has unpacked it
        ids = b'{"prompt":[%s]}' % b",".join([b"1"] * 500_000)  # a space more for each would be too much
        answer = await client.post("/v1/completions", content=ids, headers=sent)
        assert (answer.status_code, played.bodies[2] == ids) == (200, True)


@in_a_loop
async def test_a_stream_whose_model_loads_gets_comments_and_one_whose_model_is_there_gets_none(monkeypatch):
    monkeypatch.setattr(http, "COMMENT_SECONDS", 0.1)
    async with served(Played(streamed, 0.35)) as client:
        answer = await client.post("/v1/completions", json=ASK)
        assert answer.text == ": loading m\n" * 3 + "data: 1\n\n: keep-alive\ndata: [DONE]\n\n"
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert (await client.post("/v1/completions", json=ASK)).text == "data: 1\n\n: keep-alive\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    ("path", "event"),
    [
        ("/v1/chat/completions", 'data: {"error":{"message":"too hot",'),
        ("/v1/responses", 'event: error\ndata: {"message":"too hot","type":"error",'),
        ("/v1/messages", 'event: error\ndata: {"type":"error","error":{"message":"too hot",'),
    ],
)
@in_a_loop
async def test_an_error_after_the_comments_is_an_event_of_the_calls_own_api(path, event, monkeypatch):
    monkeypatch.setattr(http, "COMMENT_SECONDS", 0.1)
    async with served(Played(refused, 0.15)) as client:
        text = (await client.post(path, json={"stream": True})).text
        assert text.startswith(f": loading m\n\n{event}"), text
        assert text.endswith("data: [DONE]\n\n") == ("completions" in path)
        assert (await client.post(path, json={"stream": True})).status_code == 400  # once it is loaded
    async with served(Played(refused, 0.15, broken=True)) as client:
        text = (await client.post(path, json={"stream": True})).text
        assert "'m' cannot be loaded" in text and event.partition("{")[0] in text
        answer = await client.post(path, json={"stream": True})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")


@pytest.mark.parametrize(
    ("path", "event"),
    [
        ("/v1/completions", 'data: {"error":{"message":"the process'),
        (
            "/v1/responses",
            'event: error\ndata: {"message":"the process of the model \'m\' ended during the call","type":"error",',
        ),
        ("/v1/messages", 'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"the process'),
    ],
)
@pytest.mark.parametrize("pieces", [(b"data: 1\n\n",), (b"data: 1\n\n: keep-alive\n",)])
@in_a_loop
async def test_a_stream_that_breaks_between_two_events_ends_with_an_error(pieces, path, event):
    async with served(Played(cut(*pieces))) as client:
        text = (await client.post(path, json=ASK)).text
        assert text.startswith(f"{b''.join(pieces).decode()}\n{event}"), text
        assert text.endswith("data: [DONE]\n\n") == ("completions" in path)


@in_a_loop
async def test_a_stream_that_breaks_inside_an_event_is_cut_there():
    async with served(Played(cut(b"data: 1\n\ndata: 2"))) as client:
        with pytest.raises(AssertionError):  # of the transport: the answer has no end
            await client.post("/v1/completions", json=ASK)


@in_a_loop
async def test_what_a_call_waited_for_its_model_is_taken_from_its_deadline():
    async with served(played := Played(whole, 0.3)) as client:
        assert (await client.post("/v1/completions", json={"prompt": "é", "deadline_ms": 2000})).status_code == 200
        [body] = played.bodies
        assert json.loads(body)["prompt"] == "é"
        assert 1000 < json.loads(body)["deadline_ms"] <= 1700
        assert played.asked[0].headers["content-length"] == str(len(body))
    async with served(Played(whole, 0.3)) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "deadline_ms": 50})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert answer.headers["x-should-retry"] == "false"


@in_a_loop
async def test_a_call_waits_no_longer_than_a_request_may_take():
    async with served(Played(whole, 0.5), request_timeout_seconds=0.1) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
        assert answer.headers["retry-after"] == "5"
        await asyncio.sleep(0.6)
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize("holds_up", [True, False])
@in_a_loop
async def test_a_slow_reader_that_holds_up_another_model_is_cut_and_no_other_is(monkeypatch, caplog, holds_up):
    caplog.set_level("INFO", "attend.requests")
    monkeypatch.setattr(slow_reader, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(slow_reader, "HOLD_UP_SECONDS", 0.2)
    async with served(Played(whole)) as client:
        app, read, ends = client._transport.app, asyncio.Event(), []

        async def writes(message):
            await read.wait()

        async def receive():
            return {"type": "http.request", "body": b"{}", "more_body": False}

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1"}
        scope |= {"headers": [(b"content-type", b"application/json")], "client": ("10.0.0.9", 1), "asgi": {"version": "3.0"}}
        scope |= {"scheme": "http", "server": None, "extensions": {ABORT: lambda: ends.append("cut")}}
        call = asyncio.create_task(app(scope, receive, writes))
        slot = client.pool.slots["m"]
        await asyncio.sleep(0.3)
        assert slot.calls == 1
        slot.yields = holds_up
        await asyncio.sleep(0.6)
        assert (slot.calls, ends) == ((0, ["cut"]) if holds_up else (1, []))
        assert ("cut, since its caller reads too slowly from the model m" in caplog.text) == holds_up
        slot.yields = False
        read.set()
        await call


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not valid JSON"),
        (b'{"model": 5}', 400, "model must be a string; got 5 (integer)"),
        (b'{"model": null, "prompt": "a"}', 200, ""),
        (b'{"model": "M"}', 404, "'M' (string) does not exist; this server has 'm'"),
        (b'{"prompt": "%s"}' % (b"a" * (1 << 20)), 413, "the body must be at most"),
    ],
)
@in_a_loop
async def test_bad_bodies_are_refused_as_by_a_replica(body, status, words):
    async with served(Played(whole)) as client:
        answer = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status, answer.text
        assert words in answer.text
        assert (await client.get("/v1/completions")).status_code == 405
