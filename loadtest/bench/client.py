"""A client that takes little of the cores that it shares: streams over HTTP and gRPC, timed where a caller feels it."""

import asyncio
import random
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import orjson

from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from loadtest.measures import Row, Rows
from loadtest.stream import TOTAL, FailedError, RefusedError, Stream, three_digits

DEADLINE_SECONDS = 300.0
CHOICE, TAIL = b'"finish_reason"', 4096
"""What every choice of a chunk has, and no text can hold, because its quotes are escaped; bytes kept of a stream's end."""
SAMPLING = {False: {"temperature": 0.0}, True: {"temperature": 0.7, "top_p": 0.95}}
"""The fields of greedy requests, and of sampled ones."""
Ask = Callable[[list[int], int, Stream], Awaitable[None]]
"""Ask for so many tokens, and tell the stream what is heard and how many tokens it was."""
Answer = tuple[Stream, Exception | None]


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who can be asked: a server by one transport."""

    name: str
    transport: str
    """HTTP or GRPC."""
    max_model_len: int
    """Tokens of a prompt and its answer."""
    ask: Ask
    memory: Callable[[], float] | None = None
    """MiB of all that serves it, where that is known."""


class Prompts:
    """Prompts that no server has cached, unless it was asked with the same seed before."""

    def __init__(self, seed: int | str = 0) -> None:
        self._dice = random.Random(seed)

    def ids(self, length: int) -> list[int]:
        """So many tokens."""
        return self._dice.choices(range(100, 8000), k=length)


async def read_events(pieces: AsyncIterable[bytes], stream: Stream) -> bytes:
    """Hear every choice of server-sent events as it comes; returns the end of the stream. Raises FailedError of a cut one.

    An event is not parsed: what counts is how many there are, and what the last of them says.
    """
    rest = tail = b""
    async for piece in pieces:
        whole, cut, rest = (rest + piece).rpartition(b"\n\n")
        for _ in range(whole.count(CHOICE)):
            stream.message_received()
        tail = (tail + whole + cut)[-TAIL:]
    if b'data: {"error"' in tail or re.search(rb'"finish_reason": ?"(error|abort)"|"length", ?"stop_reason": ?"abort"', tail):
        raise FailedError(f"error in the stream: {tail[-300:].decode(errors='replace')}")
    if b"data: [DONE]" not in tail:
        raise FailedError("stream cut: no [DONE]")
    return tail


def http_ask(session: aiohttp.ClientSession, url: str, model: str, *, do_sample: bool) -> Ask:
    """POST /v1/completions of any server that speaks OpenAI's protocol."""
    fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}} | SAMPLING[do_sample]
    fields |= {"ignore_eos": True}
    headers = {"content-type": "application/json"}

    async def ask(prompt: list[int], tokens: int, stream: Stream) -> None:
        body = orjson.dumps(fields | {"prompt": prompt, "max_tokens": tokens})
        async with session.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
            if answer.status == 429:
                raise RefusedError("429")
            if answer.status != 200:
                raise FailedError(f"status {answer.status}: {(await answer.text())[:300]}")
            tail = await read_events(answer.content.iter_any(), stream)
        counted = re.findall(rb'"completion_tokens": ?(\d+)', tail)
        if not counted:
            raise FailedError("the stream does not say how many tokens it had")
        stream.tokens = int(counted[-1])

    return ask


def grpc_ask(stub: Any, *, do_sample: bool) -> Ask:
    """GenerateStream of Attend."""
    fields = SAMPLING[do_sample]
    temperature, sampling = fields["temperature"], pb.SamplingParameters(top_p=fields.get("top_p"))

    async def ask(prompt: list[int], tokens: int, stream: Stream) -> None:
        given = pb.TokenIds(ids=prompt)
        stopping = pb.StoppingCriteria(ignore_eos=True)
        finished = False
        async for message in stub.GenerateStream(
            pb.GenerateRequest(
                token_ids=given, max_tokens=tokens, stopping=stopping, temperature=temperature, sampling=sampling
            ),
            metadata=[("application", "default")],
        ):
            for output in message.outputs:
                stream.message_received()
                stream.tokens, finished = output.num_tokens, output.HasField("finish_info")
        if not finished:
            raise FailedError("stream cut: no finish_info")

    return ask


@asynccontextmanager
async def http_caller(url: str, name: str = "HTTP", *, do_sample: bool = False) -> AsyncIterator[Caller]:
    """A server's first model over HTTP."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        async with session.get(f"{url}/v1/models") as answer:
            model = (await answer.json())["data"][0]
        ask = http_ask(session, url, model["id"], do_sample=do_sample)
        yield Caller(name, "HTTP", model.get("max_model_len") or 2048, ask)


@asynccontextmanager
async def grpc_caller(target: str, name: str = "gRPC", *, do_sample: bool = False) -> AsyncIterator[Caller]:
    """Attend's model over gRPC."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        yield Caller(name, "GRPC", info.max_model_len, grpc_ask(stub, do_sample=do_sample))


async def answer(caller: Caller, prompt: list[int], tokens: int) -> Answer:
    """One request from its prompt to its end, and why it failed."""
    stream, error = Stream(), None
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await caller.ask(prompt, tokens, stream)
        stream.check()
    except Exception as exc:  # whatever it was, it is this request's result
        error = exc
    return stream, error


async def closed_loop(caller: Caller, at_once: int, prompts: Sequence[list[int]], tokens: int) -> tuple[Rows, float]:
    """Ask all prompts, so many at once; what came of it, and the seconds that it took."""
    waiting = iter(prompts)

    async def worker() -> list[Answer]:
        return [await answer(caller, prompt, tokens) for prompt in waiting]

    started = time.perf_counter()
    lists = await asyncio.gather(*(worker() for _ in range(at_once)))
    return rows(caller.transport, [each for answers in lists for each in answers]), time.perf_counter() - started


def rows(transport: str, answers: Sequence[Answer]) -> Rows:
    """The sums over answers; TOTAL has the failed ones and the tokens of the others. Says why the first of them failed."""
    times: dict[str, Counter[float]] = {TOTAL: Counter()}
    for stream, error in answers:
        for measure, seconds in stream.rows(error):
            times.setdefault(measure, Counter())[three_digits(seconds * 1e3)] += 1
    found = {(measure, transport): Row(count=counted.total(), times=counted) for measure, counted in times.items()}
    failures = [error for _, error in answers if error is not None and not isinstance(error, RefusedError)]
    if failures:
        print(f"{len(failures)} of {len(answers)} answers failed, the first with {failures[0]!r}", file=sys.stderr, flush=True)
    made = sum(stream.tokens for stream, error in answers if error is None)
    whole = found[TOTAL, transport]
    return found | {(TOTAL, transport): Row(whole.count, len(failures), made, whole.times)}
