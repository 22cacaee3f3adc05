"""What every attack is made of: calls over HTTP and gRPC that are counted by how they ended, and plain connections."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import grpc
import orjson

from attend.v1.generation_pb2_grpc import GenerationServiceStub
from loadtest.faults.judge import Measure
from loadtest.faults.target import Target

CALL_SECONDS = 30.0
PAUSE = 0.01
Job = Callable[[], Awaitable[object]]


class Attacker:
    """One caller who means harm. `outcomes` counts calls by status, refused ones too; `checks` are what must hold beside."""

    def __init__(self, target: Target, session: aiohttp.ClientSession, channel: grpc.aio.Channel) -> None:
        self.target, self.session, self.channel = target, session, channel
        self.stub: Any = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
        self.outcomes: Counter[str] = Counter()
        self.checks: list[Measure] = []
        place = urlsplit(target.address.http)
        self.host, self.port = place.hostname or "", place.port or 0
        self.grpc_port = int(target.address.grpc.rpartition(":")[2])

    def check(self, what: str, value: float, most: float | None = 0, note: str = "") -> None:
        """Something that must be at most `most`, beside what the neighbours see."""
        self.checks.append(Measure(what, value, "", most, note[:300]))

    async def post(self, path: str, body: Any, key: str = "open", **headers: str) -> None:
        """One POST, its whole answer read and thrown away. `body` is JSON, or bytes that are sent as they are."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        await self._call("POST", path, data, self.target.headers(key) | headers)

    async def get(self, path: str, key: str = "", **headers: str) -> None:
        """One GET, with a key where one is named."""
        await self._call("GET", path, None, (self.target.headers(key) if key else {}) | headers)

    async def _call(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> None:
        try:
            url = self.target.address.http + path
            async with self.session.request(method, url, data=data, headers=headers) as answer:
                async for _ in answer.content.iter_any():
                    pass
                self.outcomes[str(answer.status)] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            self.outcomes[type(error).__name__] += 1

    def metadata(self, key: str = "open") -> list[tuple[str, str]]:
        """The metadata of an RPC with a key."""
        known = [("authorization", f"Bearer {self.target.keys[key]}")] if self.target.keys else []
        return [("application", "default"), *known]

    async def rpc(self, method: str, request: Any, key: str = "open", seconds: float = CALL_SECONDS, **more: Any) -> None:
        """One unary RPC."""
        try:
            await getattr(self.stub, method)(request, metadata=self.metadata(key), timeout=seconds, **more)
            self.outcomes["OK"] += 1
        except grpc.RpcError as error:
            self.outcomes[error.code().name] += 1

    @contextlib.asynccontextmanager
    async def connection(
        self, port: int = 0, receive: int = 0
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A plain connection to the HTTP port, or to another one; with a buffer of `receive` bytes for what comes."""
        made = socket.socket()
        if receive:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        made.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(made, (self.host, port or self.port))
        except BaseException:
            made.close()
            raise
        reader, writer = await asyncio.open_connection(sock=made, limit=receive or 1 << 16)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def repeat(self, job: Job, at_once: int = 1) -> None:
        """Do `job` again and again, so many at a time, for ever."""

        async def one() -> None:
            while True:
                with contextlib.suppress(OSError):
                    await job()
                await asyncio.sleep(PAUSE)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(one())

    def head(self, path: str, length: int | None, key: str = "open", **headers: str) -> bytes:
        """The head of a POST, by hand; without a length its body comes in chunks."""
        size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        lines = [f"POST {path} HTTP/1.1", "host: localhost", size]
        lines += [f"{name}: {value}" for name, value in (self.target.headers(key) | headers).items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def raw(self, data: bytes, *, seconds: float = 5.0, port: int = 0) -> bytes:
        """What comes back for these bytes until the connection ends, or for so long."""
        answer = b""
        async with self.connection(port) as (reader, writer):
            writer.write(data)
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(seconds):
                    while piece := await reader.read(1 << 16):
                        answer += piece
        return answer


@contextlib.asynccontextmanager
async def attacker(target: Target) -> AsyncIterator[Attacker]:
    """An attacker with connections of his own."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=CALL_SECONDS)
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session,
        grpc.aio.insecure_channel(target.address.grpc, options=options) as channel,
    ):
        yield Attacker(target, session, channel)
