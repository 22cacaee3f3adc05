"""Callers of a service that changes or loses a part: small calls, plain streams, and streams of our own client.

A plain stream that is cut is broken. Our client goes on with it, and its answer must be the uncut one, token for token.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import httpx

from attend.service.client.errors import Answer, CallFailed
from attend.service.client.grpc import GrpcClient
from attend.service.client.retry import Policy
from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from loadtest.faults.deaths import Calls
from loadtest.server import Address

PROMPT, TOKENS, SEED = "def fibonacci(n):", 600, 7
FIELDS = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.8, "seed": SEED}
POLICY = Policy(seconds=120.0)
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
PAUSE = 1.0
"""Seconds before the next stream after one that did not end well, as a client does."""


@dataclass(frozen=True)
class Application:
    """What `Calls` needs of a server."""

    address: Address

    def headers(self) -> dict[str, str]:
        """Of a call."""
        return {"content-type": "application/json"}


def request() -> pb.GenerateRequest:
    """The same over gRPC as FIELDS."""
    asked = pb.GenerateRequest(text=PROMPT, max_tokens=TOKENS, temperature=0.8)
    asked.stopping.ignore_eos, asked.sampling.seed = True, SEED
    return asked


def plain_http(address: Address) -> str:
    """How a stream ended: `[DONE]` is the last event of a whole one."""
    last = ""
    with httpx.stream("POST", f"{address.http}/v1/completions", json=FIELDS | {"stream": True}, timeout=120) as answer:
        for line in filter(None, answer.iter_lines()):
            last = line
    return "ok" if last == "data: [DONE]" else f"HTTP: {answer.status_code}, {last[:80]}"


def plain_grpc(address: Address) -> str:
    """How a stream ended: the last message of a whole one says why."""
    reason = pb.FINISH_REASON_UNSPECIFIED
    with grpc.insecure_channel(address.grpc, options=OWN_CONNECTION) as channel:
        for message in GenerationServiceStub(channel).GenerateStream(request(), timeout=120):
            reason = message.outputs[-1].finish_info.finish_reason
    return "ok" if reason == pb.FINISH_REASON_LENGTH else f"gRPC: ended with {reason}"


def client_grpc(address: Address) -> Answer:
    """The whole answer by our client over gRPC."""
    with GrpcClient(address.grpc, policy=POLICY) as client:
        return client.generate(request())


PLAIN: tuple[Callable[[Address], str], ...] = (plain_http, plain_grpc)


@dataclass
class Callers:
    """All of them, each doing the same again and again."""

    address: Address
    calls: Calls = field(init=False)
    plain: list[str] = field(default_factory=list)
    """How plain streams ended: `ok`, or what came."""
    answers: list[Answer] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Calls of our client that failed."""

    def __post_init__(self) -> None:
        self.calls, self.over = Calls(Application(self.address)), threading.Event()

    def stream(self, one: Callable[[Address], str]) -> None:
        """Plain stream after plain stream."""
        while not self.over.is_set():
            try:
                self.plain.append(one(self.address))
            except httpx.HTTPError as error:
                self.plain.append(f"{one.__name__}: {type(error).__name__}: {error}"[:160])
            except grpc.RpcError as error:
                self.plain.append(f"{one.__name__}: {error.code().name}")
            if self.plain[-1] != "ok":
                time.sleep(PAUSE)

    def ask(self) -> None:
        """Answer after answer of our client."""
        while not self.over.is_set():
            try:
                self.answers.append(client_grpc(self.address))
            except CallFailed as error:
                self.failed.append(f"{type(error).__name__}: {error}"[:160])
                time.sleep(PAUSE)

    @contextmanager
    def going_on(self) -> Iterator["Callers"]:
        """For the length of the block; then what is under way ends."""
        with ThreadPoolExecutor(len(PLAIN) + 1) as pool, self.calls.going_on():
            workers = [pool.submit(self.stream, one) for one in PLAIN] + [pool.submit(self.ask)]
            try:
                yield self
            finally:
                self.over.set()
                for worker in workers:
                    worker.result()

    def under_way(self) -> bool:
        """True if calls were answered and each kind of stream has ended well before."""
        return self.calls.ok_since(0) and len(self.plain) >= len(PLAIN) and bool(self.answers)


@dataclass(frozen=True)
class Seen:
    """What the callers saw of one change; seconds are those after it began."""

    calls: int
    failed: tuple[str, ...]
    """Small calls that were not answered: transport and end."""
    last_failure: float
    """When the last of those was begun."""
    slowest: float
    """The longest wait for an answer, an error too."""
    again: float
    """When both transports had answered calls that began after the change."""
    streams: int
    broken: tuple[str, ...]
    """Plain streams."""
    answers: int
    resumed: int
    """Answers of our client that took several tries."""
    wrong: int
    """Answers of our client that lost, repeated or changed a token."""
    given_up: tuple[str, ...]
    """Calls of our client that failed."""


def seen(callers: Callers, began: float, uncut: Collection[tuple[str, tuple[int, ...]]]) -> Seen:
    """Judge the callers of a change at `began`; `uncut` are the right answers: before and after it."""
    done = callers.calls.completed
    bad = [call for call in done if call.result != "ok"]
    since = [call for call in done if call.ended_at > began]
    first = {call.transport: call.ended_at - began for call in reversed(done) if call.result == "ok" and call.began > began}
    return Seen(
        calls=len(done),
        failed=tuple(f"{call.transport}: {call.result}" for call in bad),
        last_failure=max((call.began - began for call in bad), default=0.0),
        slowest=max((call.seconds for call in since), default=0.0),
        again=max(first.values()) if len(first) == len(PLAIN) else float("inf"),
        streams=len(callers.plain),
        broken=tuple(end for end in callers.plain if end != "ok"),
        answers=len(callers.answers),
        resumed=sum(answer.tries > 1 for answer in callers.answers),
        wrong=sum((answer.text, answer.token_ids) not in uncut for answer in callers.answers),
        given_up=tuple(callers.failed),
    )
