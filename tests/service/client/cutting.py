"""A real server of gRPC in this process, behind a proxy that cuts connections after so many bytes."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from attend.model.text.chat import ChatTemplate
from attend.service.grpc_api.server import grpc_server
from tests.fakes import FakeEngine, Rule, Server, build_server

ALL = 1 << 40


@dataclass
class Proxy:
    """Passes bytes on to a port. Each connection takes the next of `cuts`, and is reset after so many bytes of answer."""

    target: int
    cuts: list[int] = field(default_factory=list)
    port: int = 0
    passed: int = 0
    """Bytes of the last connection's answer."""
    connections: set[asyncio.Task] = field(default_factory=set)

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def stop(self) -> None:
        """End the connections that are left, before their event loop ends."""
        for task in self.connections:
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)
        await asyncio.sleep(0.01)  # an aborted transport closes in the next rounds of the loop

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cut = self.cuts.pop(0) if self.cuts else ALL
        task = asyncio.current_task()
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)
        there, back = await asyncio.open_connection("127.0.0.1", self.target)
        ways = [asyncio.create_task(way) for way in (self._forth(reader, back), self._back(there, writer, cut))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, back):
                end.transport.abort()

    async def _forth(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int) -> None:
        self.passed = 0
        with contextlib.suppress(OSError):
            while left and (data := await reader.read(min(left, 1 << 16))):
                left, self.passed = left - len(data), self.passed + len(data)
                writer.write(data)


@dataclass
class Real:
    """A replica without Ray on a port of its own, behind a proxy."""

    server: Server
    grpc: Proxy

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc.port}"


@contextlib.contextmanager
def real(rule: Rule) -> Iterator[Real]:
    """Such a replica, in a thread with an event loop of its own."""
    ready, made = threading.Event(), []

    async def serve() -> None:
        server = build_server(FakeEngine(rule), template=ChatTemplate("{{ messages[0].content }}"))
        grpc = grpc_server(server.methods, "127.0.0.1", 0, 64)
        port = grpc.add_insecure_port("127.0.0.1:0")
        await grpc.start()
        proxy, stop = Proxy(port), asyncio.Event()
        front = await proxy.start()
        made.extend((Real(server, proxy), asyncio.get_running_loop(), stop))
        ready.set()
        await stop.wait()
        front.close()
        await proxy.stop()
        await grpc.stop(None)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    replica, loop, stop = made
    try:
        yield replica
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
