"""Callers who do nothing wrong, in a process of their own: eight streams, a short chat, probes, a key that is at its limit.

python -m loadtest.faults.neighbours reads a JSON object from its first line of standard input, the fields of
`NeighbourOptions`. After each further line it prints a JSON object of what was seen since the line before. The process does
little else, so that what it sees is the server's doing.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loadtest.faults.target import Target

STREAMS, TOKENS = 8, 600
PROMPT = "def fibonacci(n):\n    "
EVERY = 0.2
"""Seconds between two calls of one kind."""
CALL_SECONDS = 30.0
PROBE_SECONDS = 2.0
"""A probe without an answer by then has failed, as for a kubelet with the manifests in deploy/."""
Headers = dict[str, str]


@dataclass
class NeighbourOptions:
    """Whom to call, and as whom. `refused` is empty where no key is at its limit, `address` where any will do."""

    url: str
    grpc: str
    stream: Headers
    chat: Headers
    limited_headers: Headers
    address: str = ""


@dataclass
class Observation:
    """What the neighbours saw in a stretch of time; seconds."""

    took: float = 0.0
    """Length of the stretch."""
    events: int = 0
    """Of all streams."""
    gaps: list[float] = field(default_factory=list)
    """Between two messages of one stream; of a stream that is silent at the end, the silence too."""
    firsts: list[float] = field(default_factory=list)
    chats: list[float] = field(default_factory=list)
    """From a call of one word to its answer of one token."""
    refusals: list[float] = field(default_factory=list)
    """From a call with the limited key to its 429."""
    probes: list[float] = field(default_factory=list)
    """From a probe to its good answer, with the making of a connection."""
    turned_away: int = 0
    """Streams and chats that were refused with 429: the queue was full."""
    failed: list[str] = field(default_factory=list)
    """Streams that did not end as they should, and calls that had another answer."""
    lost_probes: list[str] = field(default_factory=list)
    """Probes with another answer than a good one in time."""

    def longest_gap(self) -> float:
        """The largest gap between messages; the whole stretch has none where nothing came: infinity."""
        return max(self.gaps, default=float("inf"))

    def p99_gap(self) -> float:
        """The gap that one of a hundred exceeds."""
        return sorted(self.gaps)[len(self.gaps) * 99 // 100] if self.gaps else float("inf")

    def speed(self) -> float:
        """Events of all streams a second."""
        return self.events / self.took if self.took else 0.0

    def with_end(self, after: "Observation") -> "Observation":
        """With what ended while the server settled: calls and probes, not the streams' pace."""
        return Observation(
            *(self.took, self.events, self.gaps, self.firsts, self.chats + after.chats, self.refusals, self.probes),
            self.turned_away + after.turned_away,
            self.failed + after.failed,
            self.lost_probes + after.lost_probes,
        )


class Neighbours:
    """The streams, the chat, the probes and the limited key's calls."""

    def __init__(self, session: aiohttp.ClientSession | None, options: NeighbourOptions) -> None:
        self.session, self.options = session, options
        self.seen, self.since = Observation(), time.monotonic()
        self.waiting: dict[object, tuple[str, float]] = {}
        """By stream or chat: the list that its next message's time belongs to, and when the wait began."""

    def take(self) -> Observation:
        """What was seen since the last time, open waits included; they go on from now."""
        now = time.monotonic()
        for who, (kind, since) in self.waiting.items():
            getattr(self.seen, kind).append(now - since)
            if kind == "gaps":
                self.waiting[who] = kind, now
        seen, self.seen = self.seen, Observation()
        seen.took, self.since = now - self.since, now
        return seen

    def message_received(self, stream: object, events: int = 1) -> None:
        """A message of a stream has come."""
        now = time.monotonic()
        kind, since = self.waiting[stream]
        getattr(self.seen, kind).append(now - since)
        self.seen.events += events
        self.waiting[stream] = "gaps", now

    async def stream(self, number: int) -> None:
        """One stream after the other, for ever."""
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "temperature": 0.7}
        while True:
            self.waiting[number] = "firsts", time.monotonic()
            try:
                await self._read(number, body)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                self.seen.failed.append(f"{type(error).__name__}: {str(error)[:200]}")
                await asyncio.sleep(EVERY)
            finally:
                kind, since = self.waiting.pop(number)
                getattr(self.seen, kind).append(time.monotonic() - since)  # the silence before a cut is a gap too

    async def _read(self, number: int, body: dict[str, Any]) -> None:
        assert self.session is not None
        url = f"{self.options.url}/v1/completions"
        async with self.session.post(url, json=body, headers=self.options.stream) as answer:
            if answer.status == 429:
                self.seen.turned_away += 1
                await asyncio.sleep(EVERY)
                return
            if answer.status != 200:
                raise ValueError(f"{answer.status} {(await answer.text())[:200]}")
            last = b""
            async for piece in answer.content.iter_any():
                self.message_received(number, piece.count(b"data: "))
                last = (last + piece)[-100:]
            if b"data: [DONE]" not in last:
                raise ValueError("a stream was cut")

    async def ask_again(self, kind: str, path: str, body: dict[str, Any], headers: Headers) -> None:
        """A short call, again and again: one of `chats` is answered, one of `refusals` is not, but for once a minute."""
        assert self.session is not None
        while True:
            began = time.monotonic()
            self.waiting[kind] = kind, began
            try:
                async with self.session.post(self.options.url + path, json=body, headers=headers) as answer:
                    text = await answer.text()
                if answer.status == (200 if kind == "chats" else 429):
                    getattr(self.seen, kind).append(time.monotonic() - began)
                elif answer.status == 429:
                    self.seen.turned_away += 1
                elif answer.status != 200:
                    self.seen.failed.append(f"one of {kind}: {answer.status} {text[:200]}")
            except (aiohttp.ClientError, TimeoutError) as error:
                self.seen.failed.append(f"one of {kind}: {type(error).__name__}")
            del self.waiting[kind]
            await asyncio.sleep(EVERY)

    async def probe(self, what: str) -> None:
        """Ask one thing again and again, on a new connection each time as a kubelet does."""
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    answer = await (
                        grpc_state(self.options.grpc) if what == "grpc.health" else http_state(self.options.url + what)
                    )
            except (aiohttp.ClientError, TimeoutError, OSError, grpc.RpcError) as error:
                code = getattr(error, "code", None)
                answer = code().name if callable(code) else type(error).__name__
            if answer == "good":
                self.seen.probes.append(time.monotonic() - began)
            else:
                self.seen.lost_probes.append(f"{what}: {answer}")
            await asyncio.sleep(EVERY)

    def jobs(self) -> list[Coroutine[Any, Any, None]]:
        """All that goes on at once."""
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        short = [self.ask_again("chats", "/v1/chat/completions", chat, self.options.chat)]
        if limited := self.options.limited_headers:
            short.append(self.ask_again("refusals", "/v1/completions", {"prompt": PROMPT, "max_tokens": 1}, limited))
        return [*map(self.stream, range(STREAMS)), *short, *map(self.probe, ("/healthz", "/readyz", "grpc.health"))]


async def http_state(url: str) -> str:
    """`good`, or the status of a GET."""
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        await answer.read()
        return "good" if answer.status == 200 else str(answer.status)


async def grpc_state(address: str) -> str:
    """`good`, or the state that grpc.health tells."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        metadata = [("application", "default")]
        answer = await stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=PROBE_SECONDS)
    return "good" if answer.status == answer.SERVING else str(answer.status)


async def main() -> None:
    """Call until standard input ends."""
    loop = asyncio.get_running_loop()
    wanted = NeighbourOptions(**json.loads(await loop.run_in_executor(None, sys.stdin.readline)))
    place = (wanted.address, 0) if wanted.address else None
    connector, timeout = aiohttp.TCPConnector(limit=0, local_addr=place), aiohttp.ClientTimeout(sock_read=CALL_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
        neighbours = Neighbours(session, wanted)
        tasks = [group.create_task(job) for job in neighbours.jobs()]
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(asdict(neighbours.take())), flush=True)
        for task in tasks:
            task.cancel()


class NeighbourProcess:
    """The neighbours' process, asked from here."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def take(self) -> Observation:
        """What the neighbours saw since the last time."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return Observation(**json.loads(self.process.stdout.readline()))


@contextlib.contextmanager
def run_neighbours(target: Target, address: str = "") -> Iterator[NeighbourProcess]:
    """Neighbours of a server for the length of the block. `address`: the one that they call from."""
    command = [sys.executable, "-m", "loadtest.faults.neighbours"]
    limited = target.headers("limited") if "limited" in target.keys else {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        headers = target.headers("neighbour"), target.headers("quiet"), limited
        wanted = NeighbourOptions(target.address.http, target.address.grpc, *headers, address)
        process.stdin.write(json.dumps(asdict(wanted)) + "\n")
        process.stdin.flush()
        try:
            yield NeighbourProcess(process)
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(main())
