"""Callers who do nothing wrong, in a process of their own: eight streams, and a key that is at its limit.

python -m loadtest.faults.neighbours reads a JSON object {"url", "stream", "refused"} from its first line of standard input:
the server, the headers of the streams, and those of the limited key. After each further line it prints a JSON object of what
was seen since the line before. The process does little else, so that what it sees is the server's doing.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import aiohttp

from loadtest.faults.target import Target

STREAMS, TOKENS = 8, 600
PROMPT = "def fibonacci(n):\n    "
PROBE_SECONDS = 0.2
CALL_SECONDS = 30.0


@dataclass
class Seen:
    """What the neighbours saw in a stretch of time; seconds."""

    gaps: list[float] = field(default_factory=list)
    """Between two messages of one stream; of a stream that is silent at the end, the silence too."""
    firsts: list[float] = field(default_factory=list)
    """From a call to its first message."""
    refusals: list[float] = field(default_factory=list)
    """From a call with the limited key to its 429."""
    turned_away: int = 0
    """Calls for a stream that were refused with 429: the queue was full."""
    failed: list[str] = field(default_factory=list)
    """Streams that did not end as they should, and calls with the limited key that had another answer."""

    def longest_gap(self) -> float:
        """The largest gap between messages; the whole stretch has none where nothing came: infinity."""
        return max(self.gaps, default=float("inf"))


class Neighbours:
    """The streams and the limited key's calls."""

    def __init__(self, session: aiohttp.ClientSession, url: str, stream: dict[str, str], refused: dict[str, str]) -> None:
        self.session, self.url = session, f"{url}/v1/completions"
        self.stream_headers, self.refused_headers = stream, refused
        self.seen = Seen()
        self.waiting: dict[int, tuple[str, float]] = {}
        """By stream: the list that its next message's time belongs to, and when the wait began."""

    def take(self) -> Seen:
        """What was seen since the last time, open waits included; they go on from now."""
        now = time.monotonic()
        for stream, (kind, since) in self.waiting.items():
            getattr(self.seen, kind).append(now - since)
            self.waiting[stream] = kind, now
        seen, self.seen = self.seen, Seen()
        return seen

    def heard(self, stream: int) -> None:
        """A message of a stream has come."""
        now = time.monotonic()
        kind, since = self.waiting[stream]
        getattr(self.seen, kind).append(now - since)
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
                await asyncio.sleep(PROBE_SECONDS)
            finally:
                kind, since = self.waiting.pop(number)
                getattr(self.seen, kind).append(time.monotonic() - since)  # the silence before a cut is a gap too

    async def _read(self, number: int, body: dict) -> None:
        async with self.session.post(self.url, json=body, headers=self.stream_headers) as answer:
            if answer.status == 429:
                self.seen.turned_away += 1
                await asyncio.sleep(PROBE_SECONDS)
                return
            if answer.status != 200:
                raise ValueError(f"{answer.status} {(await answer.text())[:200]}")
            last = b""
            async for piece in answer.content.iter_any():
                self.heard(number)
                last = (last + piece)[-100:]
            if b"data: [DONE]" not in last:
                raise ValueError("a stream was cut")

    async def be_refused(self) -> None:
        """Call with the key that is at its limit, again and again."""
        body = {"prompt": PROMPT, "max_tokens": 1}
        while True:
            started = time.monotonic()
            try:
                async with self.session.post(self.url, json=body, headers=self.refused_headers) as answer:
                    await answer.read()
                    if answer.status == 429:
                        self.seen.refusals.append(time.monotonic() - started)
                    elif answer.status != 200:  # once a minute it is let in
                        self.seen.failed.append(f"the limited key: {answer.status}")
            except (aiohttp.ClientError, TimeoutError) as error:
                self.seen.failed.append(f"the limited key: {type(error).__name__}")
            await asyncio.sleep(PROBE_SECONDS)


async def main() -> None:
    """Stream until standard input ends."""
    loop = asyncio.get_running_loop()
    wanted = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None, sock_read=CALL_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
        neighbours = Neighbours(session, wanted["url"], wanted["stream"], wanted["refused"])
        tasks = [group.create_task(neighbours.stream(number)) for number in range(STREAMS)]
        tasks.append(group.create_task(neighbours.be_refused()))
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(asdict(neighbours.take())), flush=True)
        for task in tasks:
            task.cancel()


class Watched:
    """The neighbours' process, asked from here."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process

    def take(self) -> Seen:
        """What the neighbours saw since the last time."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return Seen(**json.loads(self.process.stdout.readline()))


@contextlib.contextmanager
def beside(target: Target) -> Iterator[Watched]:
    """Neighbours of a server for the length of the block."""
    command = [sys.executable, "-m", "loadtest.faults.neighbours"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        headers = {"stream": target.headers("neighbour"), "refused": target.headers("limited")}
        process.stdin.write(json.dumps({"url": target.address.http} | headers) + "\n")
        process.stdin.flush()
        try:
            yield Watched(process)
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(main())
