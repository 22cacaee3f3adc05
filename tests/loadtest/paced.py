"""A server that answers at a known pace, over real sockets: the whole service around an engine that sleeps."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvicorn

from attend.model.engine.request import Request
from attend.model.text.chat import ChatTemplate
from attend.service.grpc_api.register import add_generation_service
from tests.fakes import FakeEngine, RayLike, build_server, info

TEMPLATE = ChatTemplate("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
FIRST, PAUSE = 0.1, 0.04
"""Seconds to the first token of an answer, and from one token to the next."""


class PacedEngine(FakeEngine):
    """The first token of each answer after FIRST seconds, each other one PAUSE seconds after the one before."""

    def __init__(self):
        super().__init__(rule=lambda request: ord("x"), info=info(max_model_len=4096, num_blocks=1 << 16))

    async def _turn(self, mine: dict[str, Request]) -> int:
        begun = any(request.output for request in mine.values())
        await asyncio.sleep(PAUSE if begun else FIRST)
        return 1


class Methods(RayLike):
    """Streams over gRPC, which lose their end while the server cuts."""

    def __init__(self, server: "PacedServer", methods):
        super().__init__(methods)
        self._server = server

    def __getattr__(self, name):
        method = super().__getattr__(name)
        return self.stream(method) if name == "GenerateStream" else method

    def stream(self, method):
        async def answers(request, context):
            async for answer in method(request, context):
                for output in answer.outputs if self._server.cut else ():
                    output.ClearField("finish_info")
                yield answer

        return answers


@dataclass(frozen=True)
class Locked:
    """A service behind TLS that asks for a key, as one in production is."""

    key: str
    certificate: Path
    """PEM, of its own signing, for 127.0.0.1."""
    private: Path


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the key."""

    def __init__(self, key: str):
        self._key = key

    async def intercept_service(self, continuation, details):
        if ("authorization", f"Bearer {self._key}") in details.invocation_metadata:
            return await continuation(details)

        async def refuse(request, context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "an API key is needed")
            yield

        return grpc.unary_stream_rpc_method_handler(refuse)


class PacedServer:
    """Where it listens, and what it may be told to do wrong."""

    def __init__(self, locked: Locked | None = None):
        self.locked = locked
        self.engine = PacedEngine()
        self.cut = False
        """True if streams end without [DONE], or without their finish_info."""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.http = f"{'https' if locked else 'http'}://127.0.0.1:{self.listener.getsockname()[1]}"
        self.grpc = ""

    async def app(self, scope, receive, send):
        async def sending(message):
            if self.cut and b"[DONE]" in message.get("body", b""):
                message = message | {"body": message["body"].replace(b"data: [DONE]\n\n", b"")}
            await send(message)

        if self.locked and (b"authorization", f"Bearer {self.locked.key}".encode()) not in scope["headers"]:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.inner(scope, receive, sending)

    async def run(self, ready: threading.Event) -> None:
        server = build_server(self.engine, template=TEMPLATE)
        self.inner = server.app
        locked, more = self.locked, {}
        rpc = grpc.aio.server(interceptors=[KeyInterceptor(locked.key)] if locked else [])
        add_generation_service(Methods(self, server.methods), rpc)
        if locked:
            pair = (locked.private.read_bytes(), locked.certificate.read_bytes())
            port = rpc.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
            more = {"ssl_keyfile": locked.private, "ssl_certfile": locked.certificate}
        else:
            port = rpc.add_insecure_port("127.0.0.1:0")
        self.grpc = f"127.0.0.1:{port}"
        await rpc.start()
        given = {"log_level": "error", "lifespan": "off", "interface": "asgi3", "timeout_graceful_shutdown": 1}
        config = uvicorn.Config(self.app, **given, **more)
        self.web, self.loop = uvicorn.Server(config), asyncio.get_running_loop()
        self.web.install_signal_handlers = lambda: None
        ready.set()
        await self.web.serve(sockets=[self.listener])
        await rpc.stop(None)


@contextmanager
def paced(locked: Locked | None = None) -> Iterator[PacedServer]:
    """A paced server in a thread, for as long as the block lasts."""
    server, ready = PacedServer(locked), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(server.run(ready)))
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        server.web.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
