"""What every attack is made of: calls over HTTP and gRPC that are counted by how they ended, and plain connections."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import grpc
import orjson

from attend.v1.generation_pb2_grpc import GenerationServiceStub
from loadtest.faults.target import Target

CALL_SECONDS = 30.0
PAUSE = 0.01
Job = Callable[[], Awaitable[object]]


class Attacker:
    """One caller who means harm. `outcomes` counts calls by status, refused ones too."""

    def __init__(self, target: Target, session: aiohttp.ClientSession, stub: GenerationServiceStub) -> None:
        self.target, self.session, self.stub = target, session, stub
        self.outcomes: Counter[str] = Counter()
        place = urlsplit(target.address.http)
        self.host, self.port = place.hostname or "", place.port or 0

    async def post(self, path: str, body: Any, key: str = "open", **headers: str) -> None:
        """One POST, its whole answer read and thrown away. `body` is JSON, or bytes that are sent as they are."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        await self._call("POST", path, data, self.target.headers(key) | headers)

    async def get(self, path: str, **headers: str) -> None:
        """One GET."""
        await self._call("GET", path, None, headers)

    async def _call(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> None:
        try:
            url = self.target.address.http + path
            async with self.session.request(method, url, data=data, headers=headers) as answer:
                async for _ in answer.content.iter_any():
                    pass
                self.outcomes[str(answer.status)] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            self.outcomes[type(error).__name__] += 1

    async def rpc(self, method: str, request: Any, key: str = "open") -> None:
        """One unary RPC."""
        metadata = [("application", "default")]
        metadata += [("authorization", f"Bearer {self.target.keys[key]}")] if self.target.keys else []
        try:
            await getattr(self.stub, method)(request, metadata=metadata, timeout=CALL_SECONDS)
            self.outcomes["OK"] += 1
        except grpc.RpcError as error:
            self.outcomes[error.code().name] += 1

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A plain connection to the HTTP port."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def again(self, job: Job, at_once: int = 1) -> None:
        """Do `job` again and again, so many at a time, for ever."""

        async def one() -> None:
            while True:
                with contextlib.suppress(OSError):
                    await job()
                await asyncio.sleep(PAUSE)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(one())

    def head(self, path: str, length: int, key: str = "open") -> bytes:
        """The head of a POST, by hand."""
        lines = [f"POST {path} HTTP/1.1", "host: attend", f"content-length: {length}"]
        lines += [f"{name}: {value}" for name, value in self.target.headers(key).items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@contextlib.asynccontextmanager
async def attacker(target: Target) -> AsyncIterator[Attacker]:
    """An attacker with connections of his own."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=CALL_SECONDS)
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session,
        grpc.aio.insecure_channel(target.address.grpc, options=options) as channel,
    ):
        yield Attacker(target, session, GenerationServiceStub(channel))
