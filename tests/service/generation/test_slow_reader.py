"""A caller who stops reading is ended after a while; one who reads slowly is not."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from attend.service.generation import slow_reader
from attend.service.generation.unread_bodies import UnreadBodies
from attend.service.grpc_api.server import grpc_server
from attend.service.grpc_api.servicer import GrpcMethods
from attend.service.http_api.request_ids import RequestIds
from attend.service.records import Chunk
from attend.service.remarks import Remarks
from attend.service.runtime import http_server
from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fakes import until

PIECE = 48 << 10


class Endless(GrpcMethods):
    """An answer without an end before the test's, on either transport; `ends` has how it was ended."""

    def __init__(self) -> None:
        self.num_pieces, self.ends, self.over = 0, [], False
        self.unread_bodies = UnreadBodies()
        self.service = SimpleNamespace(generate=self.pieces, adapter_of=lambda command: None, fingerprint=lambda adapter: "")
        self.connections: set[Any] = set()
        """That the server has open; over HTTP alone."""

    def is_draining(self) -> bool:
        return False

    async def pieces(self, *given: Any, **named: Any) -> AsyncIterator[list[Chunk]]:
        try:
            while not self.over:
                self.num_pieces += 1
                yield [Chunk(0, "x" * PIECE, (), 1, 1, seed=1)]
                await asyncio.sleep(0)
        except BaseException as error:
            self.ends.append(type(error))
            raise

    @asynccontextmanager
    async def _call_record(self, route: str, context: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(request_id="r")

    async def _read_request(self, *given: Any) -> tuple[pb.GenerateRequest, Any]:
        return pb.GenerateRequest(), SimpleNamespace(remarks=Remarks())

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for _ in self.pieces():
            await send({"type": "http.response.body", "body": b"x" * PIECE, "more_body": True})


Read = Callable[[], Awaitable[int]]


@asynccontextmanager
async def over_http(endless: Endless) -> AsyncIterator[Read]:
    server = http_server.http_server(RequestIds(endless.app, behind_serve=False), 8)
    with http_server.bind_socket("127.0.0.1", 0) as sock, socket.socket() as caller:
        task = asyncio.create_task(server.serve([sock]))
        await until(lambda: server.started)
        endless.connections = server.server_state.connections
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        caller.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(caller, sock.getsockname())
        await loop.sock_sendall(caller, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")

        async def read() -> int:
            got = len(await loop.sock_recv(caller, PIECE))
            assert got
            return got

        try:
            yield read
        finally:
            endless.over = True
            caller.close()
            server.end()
            await task


@asynccontextmanager
async def over_grpc(endless: Endless) -> AsyncIterator[Read]:
    with http_server.bind_socket("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    server = grpc_server(endless, "127.0.0.1", port, 8)
    await server.start()
    # The client holds as little unread as the protocol asks: else it grows to some MB, and the server waits for 1.4 s.
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.http2.bdp_probe", 0)]) as channel:
        call = GenerationServiceStub(channel).GenerateStream(pb.GenerateRequest(text="a"))

        async def read() -> int:
            return len((await call.read()).outputs[0].text)

        yield read
        endless.over = True
        call.cancel()
    await server.stop(0)


@pytest.mark.parametrize("transport", [over_http, over_grpc])
async def test_a_call_ends_whose_caller_stops_reading(transport, monkeypatch):
    monkeypatch.setattr(slow_reader, "STALL_SECONDS", 0.4)

    endless = Endless()
    async with transport(endless) as read:
        assert await read() > 0
        await until(lambda: endless.ends)
        assert endless.ends[0] in (asyncio.CancelledError, GeneratorExit)
        assert 1 < endless.num_pieces < 2000
        await until(lambda: not endless.connections)  # with all that was not sent: nobody waits for who does not read


@pytest.mark.parametrize("transport", [over_http, over_grpc])
async def test_a_caller_who_reads_slowly_keeps_its_call(transport, monkeypatch):
    """For longer than a caller may read nothing. A kernel asks for more when a third of what it holds is gone: some MB."""
    monkeypatch.setattr(slow_reader, "STALL_SECONDS", 2.0)

    endless = Endless()
    async with transport(endless) as read:
        for _ in range(25):
            taken = 0
            while taken < 6 * PIECE:
                taken += await read()
            await asyncio.sleep(0.1)
        assert endless.ends == []


async def test_a_write_that_ends_does_not_hide_another_that_waits(monkeypatch):
    """Two tasks write to one caller: the answer, and what keeps an idle stream alive."""
    monkeypatch.setattr(slow_reader, "STALL_SECONDS", 0.2)

    async def call() -> None:
        with slow_reader.SlowReaderGuard() as watched:
            watched.writing()
            watched.writing()
            watched.write_ended()
            await asyncio.sleep(5)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(call())
