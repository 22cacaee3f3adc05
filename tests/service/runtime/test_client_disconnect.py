"""A caller who leaves ends his call, over uvicorn itself."""

import asyncio
import contextlib
from typing import Any

import pytest

from attend.service.runtime import http_server
from tests.fakes import until

CALL = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"


class Waits:
    """Reads the body, and answers when `gate` opens, in pieces where `streams`; `ends` tells how its calls ended."""

    def __init__(self, *, streams: bool = False) -> None:
        self.gate, self.ends, self.streams, self.begun, self.reading = asyncio.Event(), [], streams, 0, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reading += 1
        try:
            while (await receive()).get("more_body"):
                pass
            self.begun += 1
            if self.streams:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await self.gate.wait()
            if not self.streams:
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})
            await asyncio.sleep(0.02)  # what an application does behind its answer
            self.ends.append("answered")
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise


@contextlib.asynccontextmanager
async def serving(app):
    server = http_server.http_server(app, 8)
    with http_server.bind_socket("127.0.0.1", 0) as sock:
        task = asyncio.create_task(server.serve([sock]))
        try:
            await until(lambda: server.started)
            yield sock.getsockname()[1]
        finally:
            server.end()
            await task


@pytest.mark.parametrize("streams", [False, True])
async def test_a_caller_who_leaves_before_the_end_of_the_answer_ends_his_call(streams, caplog):
    app = Waits(streams=streams)
    async with serving(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CALL)
        await until(lambda: app.begun)
        writer.close()
        await until(lambda: app.ends)
    found = app.ends
    assert found == ["cancelled"]
    assert caplog.records == []


@pytest.mark.parametrize("size", [70_000, 200_000, 400_000])
async def test_a_caller_who_leaves_behind_a_long_body_ends_his_call(size):
    app = Waits()
    async with serving(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size
        writer.write(head)
        writer.write(bytes(size))
        await writer.drain()
        await until(lambda: app.begun)
        writer.transport.abort()
        await until(lambda: app.ends)
    found = app.ends
    assert found == ["cancelled"]


async def test_a_caller_who_leaves_with_half_a_body_ends_his_call():
    app = Waits()
    async with serving(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CALL[:-1])
        await until(lambda: app.reading)
        writer.close()
        await until(lambda: app.ends)
    found = app.ends
    assert found == ["cancelled"]


async def test_a_call_that_is_answered_goes_on_to_its_own_end():
    app = Waits()
    app.gate.set()
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):  # the second one on the same connection
            writer.write(CALL)
            await reader.readuntil(b"ok")
        writer.close()
        await until(lambda: len(app.ends) == 2)
    found = app.ends
    assert found == ["answered", "answered"]


async def test_a_caller_who_leaves_gives_his_place_back():
    app = Waits()
    async with serving(app) as port:
        for _ in range(3):
            writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(8)]
            for writer in writers:
                writer.write(CALL)
            await until(lambda wanted=app.begun + 8: app.begun == wanted)
            for writer in writers:
                writer.close()
            await until(lambda wanted=app.begun: len(app.ends) == wanted)
    found = app.ends
    assert found == ["cancelled"] * 24
