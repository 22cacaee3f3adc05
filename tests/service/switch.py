"""What a Service of Kubernetes is to callers: one address, whose new connections go to a server that is ready."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from tests.service.server import Server


class Switch:
    """Two ports of its own. A connection stays with the server that it was made to."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.http, self.grpc = 0, 0
        self._tasks: set[asyncio.Task[None] | None] = set()
        """The event loop itself would not keep those whose callers have left."""

    async def pass_on(self, transport: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """All bytes of a connection, both ways."""
        writers = [writer]
        self._tasks.add(asyncio.current_task())
        try:
            there, to_there = await asyncio.open_connection("127.0.0.1", getattr(self.server, transport))
            writers.append(to_there)
            await asyncio.gather(_copy(reader, to_there), _copy(there, writer))
        except (OSError, asyncio.CancelledError):  # refused, cut, or the end of the test
            for each in writers:
                each.transport.abort()
        finally:
            for each in writers:
                each.close()

    async def serve(self, ready: threading.Event, over: threading.Event) -> None:
        """Until `over` is set."""
        async with contextlib.AsyncExitStack() as stack:
            for name in ("http", "grpc"):
                listener = await asyncio.start_server(lambda *ends, to=name: self.pass_on(to, *ends), "127.0.0.1", 0)
                setattr(self, name, listener.sockets[0].getsockname()[1])
                stack.callback(listener.close)
            ready.set()
            await asyncio.to_thread(over.wait)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0.1)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that comes, and then the end."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


@contextlib.contextmanager
def switch(server: Server) -> Iterator[Switch]:
    """A switch that leads to `server` until it is told of another."""
    one, ready, over = Switch(server), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(one.serve(ready, over)))
    thread.start()
    try:
        assert ready.wait(10)
        yield one
    finally:
        over.set()
        thread.join(10)
