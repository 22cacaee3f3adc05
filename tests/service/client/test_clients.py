"""The four clients against a real application in this process, whose connections break at every place."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from attend.model.errors import QueueFull, RateLimited, Unavailable
from attend.service.client import http
from attend.service.client.errors import Answer, Broken, DeadlinePassed, GaveUp, InvalidRequest, OtherFingerprint, Refused
from attend.service.client.events import Events
from attend.service.client.fields import Chat, Completion
from attend.service.client.grpc import AsyncGrpcClient, GrpcClient
from attend.service.client.http import AsyncHttpClient, HttpClient
from attend.service.client.retry import Call, Delta, Means, Policy, TryFailed
from attend.service.contract.chat import ChatRequest
from attend.service.contract.requests import CompletionRequest
from attend.v1 import generation_pb2 as pb
from tests.fakes import END, info
from tests.service.client.cutting import Real, real

TEXT = "aäß漢🎉é!" * 3
TOKENS = (*TEXT.encode(), END)
FAST = Means(Policy(seconds=20.0, first_wait=0.001, longest_wait=0.002))
PATIENT = Means(Policy(seconds=60.0, tries=50, first_wait=0.05, longest_wait=0.1))
"""A channel of gRPC takes a tenth of a second to connect again, and refuses calls until then."""


def rule(request: Any) -> int:
    """TEXT, each character by its bytes; with the seed 5 nothing but the letter z."""
    return ord("z") if request.seed == 5 else TOKENS[min(len(request.output), len(TOKENS) - 1)]


@pytest.fixture(scope="module")
def replica() -> Iterator[Real]:
    with real(rule) as replica:
        yield replica


def whole(deltas: list[Delta]) -> tuple[str, tuple[int, ...], Any, Any]:
    last = deltas[-1]
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    return "".join(delta.text for delta in deltas), tokens, last.finish_reason, last.stop_reason


def message(prompt: str = "x", max_tokens: int = 100, stop: tuple[str, ...] = (), **sampling: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text=prompt, max_tokens=max_tokens, sampling=pb.SamplingParameters(**sampling))
    request.stopping.stop_strings.extend(stop)
    return request


def by_http(replica: Real, means: Means = FAST, **fields: Any) -> list[Delta]:
    return list(HttpClient(replica.url, means=means).stream(**{"prompt": "x", "max_tokens": 100, **fields}))


def by_http_async(replica: Real, means: Means = FAST, **fields: Any) -> list[Delta]:
    async def run() -> list[Delta]:
        async with AsyncHttpClient(replica.url, means=means) as client:
            return [delta async for delta in client.stream(**{"prompt": "x", "max_tokens": 100, **fields})]

    return asyncio.run(run())


def by_grpc(replica: Real, means: Means = FAST, **fields: Any) -> list[Delta]:
    with GrpcClient(replica.target, means=means) as client:
        return list(client.stream(message(**fields)))


def by_grpc_async(replica: Real, means: Means = FAST, **fields: Any) -> list[Delta]:
    async def run() -> list[Delta]:
        async with AsyncGrpcClient(replica.target, means=means) as client:
            return [delta async for delta in client.stream(message(**fields))]

    return asyncio.run(run())


HTTP, GRPC = (by_http, by_http_async), (by_grpc, by_grpc_async)
each = pytest.mark.parametrize("ask", [*HTTP, *GRPC])


@each
@pytest.mark.parametrize("fields", [{}, {"stop": ("é!a",)}], ids=str)
def test_an_answer_is_the_uncut_one_wherever_its_connections_break(replica, ask, fields):
    """Each case breaks the first connection, and every other one the second too."""
    proxy = replica.http if ask in HTTP else replica.grpc
    uncut = whole(ask(replica, **fields))
    text, size = TEXT.partition("é!a")[0] if fields else TEXT, proxy.passed
    assert (uncut[0], uncut[2]) == (text, "stop")
    for place, at in enumerate([*range(1, size, size // (24 if ask in HTTP else 8)), size - 1]):
        proxy.cuts = [at, at // 2] if place % 2 else [at]
        assert whole(ask(replica, PATIENT, **fields)) == uncut, f"cut after {at} of {size} bytes"
        assert len(proxy.cuts) < 1 + place % 2, "the connection was not cut"


@each
def test_a_refusal_for_now_is_tried_again_and_one_for_ever_is_not(replica, ask):
    engine = replica.server.engine
    try:
        for error in (Unavailable("draining"), QueueFull("full")):
            engine.refusal = error
            with pytest.raises(DeadlinePassed, match=str(error)):
                ask(replica, Means(Policy(seconds=0.9)))
            with pytest.raises(GaveUp, match=str(error)):
                ask(replica, Means(Policy(tries=1)))
        engine.refusal = RateLimited("the key's limit", 7, "key_tokens")
        with pytest.raises(DeadlinePassed, match="the next try would come after"):
            ask(replica, Means(Policy(seconds=6.0)))
    finally:
        engine.refusal = None
    with pytest.raises(Refused, match="max_tokens") as caught:
        ask(replica, max_tokens=-1)
    assert caught.value.code in ("invalid_value", "INVALID_ARGUMENT")


@each
def test_an_answer_does_not_go_on_with_another_fingerprint(replica, ask):
    """The weights change where the first connection breaks. Where in the bytes the first token ends differs from run to run."""
    proxy, engine = replica.http if ask in HTTP else replica.grpc, replica.server.engine
    ask(replica)
    size, before, stopped = proxy.passed, engine.info, []
    for eighths in range(3, 8):
        proxy.cuts = [size * eighths // 8]
        try:
            ask(replica, Means(Policy(seconds=20.0), draw=Changing(engine)), seed=1)
        except OtherFingerprint as error:
            stopped.append(error)
        finally:
            engine.info = before
    assert stopped
    for error in stopped:
        got = error.answer
        assert "fp_other" in str(error)
        assert got.token_ids and got.token_ids == TOKENS[: len(got.token_ids)]
        assert TEXT.startswith(got.text)


class Changing(random.Random):
    """Chance that changes the server's weights as the second try is about to begin."""

    def __init__(self, engine: Any) -> None:
        super().__init__(1)
        self.engine = engine

    def uniform(self, low: float, high: float) -> float:
        self.engine.info = info(fingerprint="fp_other")
        return low


@each
def test_a_silent_server_holds_no_caller_beyond_the_deadline(replica, ask):
    engine = replica.server.engine
    engine.held = True
    try:
        with pytest.raises(DeadlinePassed):
            ask(replica, Means(Policy(seconds=0.3)))
    finally:
        engine.held = False


@pytest.mark.parametrize("ask", HTTP)
def test_a_stream_that_falls_silent_is_taken_up_by_another_try(replica, ask, monkeypatch):
    uncut, proxy = whole(ask(replica)), replica.http
    monkeypatch.setattr(http, "SILENT_SECONDS", 0.5)
    proxy.cuts, proxy.stalls = [proxy.passed * 2 // 3], True
    try:
        assert whole(ask(replica, PATIENT)) == uncut
    finally:
        proxy.stalls = False
    assert not proxy.cuts


@each
def test_nobody_there_is_tried_again(replica, ask):
    replica.http.port, replica.grpc.port, ports = 9, 9, (replica.http.port, replica.grpc.port)
    try:
        with pytest.raises(GaveUp):
            ask(replica, Means(Policy(tries=2, first_wait=0.001)))
    finally:
        replica.http.port, replica.grpc.port = ports


@each
def test_the_same_seed_is_asked_for_with_every_try(replica, ask):
    proxy, requests = replica.http if ask in HTTP else replica.grpc, replica.server.engine.requests
    requests.clear()
    ask(replica)
    proxy.cuts = [proxy.passed * 2 // 3]
    assert whole(ask(replica))[0] == TEXT
    first, second, third = requests
    assert first.seed != second.seed == third.seed
    assert second.prompt == third.prompt
    requests.clear()
    assert whole(ask(replica, seed=5, max_tokens=3))[0] == "zzz"


async def test_whole_answers_are_the_streams_put_together(replica):
    http = HttpClient(replica.url, means=FAST).generate(prompt="x", max_tokens=100, seed=1)
    with GrpcClient(replica.target, means=FAST) as client:
        assert http == client.generate(message(seed=1))
    assert http == Answer(TEXT, TOKENS, 1, "fp_fake", "stop", None, 1)

    async with AsyncHttpClient(replica.url, means=FAST) as over_http, AsyncGrpcClient(replica.target) as over_grpc:
        assert http == await over_http.generate(prompt="x", max_tokens=100, seed=1)
        assert http == await over_grpc.generate(message(seed=1))


def test_a_chat_is_answered_and_breaks_with_what_has_come(replica):
    """It has no field for the tokens that have come."""
    proxy = replica.http
    asked: Any = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100, "seed": 1}
    client = HttpClient(replica.url, means=FAST)
    assert client.chat(**asked) == Answer(TEXT, TOKENS, 1, "fp_fake", "stop", None, 1)
    size = proxy.passed
    proxy.cuts = [60]
    assert client.chat(**asked).tries == 2
    proxy.cuts = [size * 2 // 3]
    with pytest.raises(Broken) as caught:
        client.chat(**asked)
    assert TEXT.startswith(caught.value.answer.text) and len(caught.value.answer.text) > 3

    async def law() -> None:
        async with AsyncHttpClient(replica.url, means=FAST) as client:
            assert (await client.chat(**asked)).text == TEXT
            proxy.cuts = [size * 2 // 3]
            with pytest.raises(Broken):
                [delta async for delta in client.stream_chat(**asked)]

    asyncio.run(law())


def test_a_field_whose_stream_could_not_go_on_is_refused_by_name(replica):
    for name, value in {"n": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 1, "stream": False}.items():
        with pytest.raises(InvalidRequest, match=name) as caught:
            HttpClient(replica.url).stream(prompt="x", **{name: value})
        assert caught.value.field == name
    with pytest.raises(InvalidRequest, match="prompt must be one string"):
        HttpClient(replica.url).stream(prompt=["x", "y"])
    for request in (
        message(n=2),
        pb.GenerateRequest(text="x", response=pb.ResponseOptions(echo=True)),
        pb.GenerateRequest(text="x", response=pb.ResponseOptions(prompt_logprobs=0)),
    ):
        with GrpcClient(replica.target) as client, pytest.raises(InvalidRequest, match="one answer, which can be resumed"):
            client.stream(request)


def test_the_clients_fields_are_those_of_the_bodies():
    """Less those of which the client is the owner, and those whose stream could not go on."""
    own = {"stream", "stream_options", "return_token_ids"}
    cannot = {"n", "best_of", "echo", "logprobs", "prompt_logprobs", "timing"}
    taken = CompletionRequest.model_fields.keys() - own - cannot
    assert taken == Completion.__annotations__.keys(), "a field has client=True and `make docs` was run, or stands in `cannot`"
    parts = {"tools", "tool_choice", "parallel_tool_calls", "top_logprobs"}
    assert ChatRequest.model_fields.keys() - own - cannot - parts >= Chat.__annotations__.keys()


@pytest.mark.parametrize("room", ["http", "grpc"])
def test_the_client_imports_nothing_of_the_server(room):
    code = f"""
import sys, attend.service.client.{room}
heavy = {{"torch", "ray", "fastapi", "uvicorn", "pydantic", "numpy", "tokenizers", "orjson", "prometheus_client"}}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
ours = {{name for name in sys.modules if name.startswith(("attend.model", "attend.service."))}}
assert all(name.startswith("attend.service.client") for name in ours), ours
assert {room == "grpc"} == ("grpc" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("data", [b"half a", b'{"choices": [{}]}', b'{"choices": 3}', b'{"error": "words"}', b"[]"])
def test_an_event_of_another_shape_breaks_the_try_and_not_the_caller(data):
    with pytest.raises(TryFailed) as caught:
        list(Events().feed(b"data: " + data + b"\n\n"))
    assert caught.value.again


@pytest.mark.parametrize(
    ("url", "port", "secure"),
    [("http://localhost:8000", 8000, False), ("https://localhost", 443, True), ("HTTPS://10.0.0.1:1/prefix", 1, True)],
)
def test_a_server_is_called_at_the_port_of_its_url_and_with_tls_where_it_says_so(url, port, secure):
    connection = HttpClient(url)._connection(Call(FAST, None))
    assert (connection.host, connection.port) == (urlsplit(url).hostname, port)
    assert isinstance(connection, HTTPSConnection) == secure


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "https://", "/v1", ""])
def test_what_is_no_url_of_a_server_is_refused(url):
    with pytest.raises(InvalidRequest, match="url must be"):
        HttpClient(url)
