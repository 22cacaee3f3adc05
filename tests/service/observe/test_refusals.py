"""Why calls are refused, as an operator sees it: each reason alone, on both transports."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import pytest
from grpc import StatusCode

from attend.model.engine.request import EngineStats, StepReport
from attend.model.errors import QueueFull, Unavailable
from attend.service.access.keys import Entry, KeyRing, digest_of, write_keys
from attend.service.access.quota import Limits
from attend.service.observe.capacity import retry_seconds
from attend.service.observe.metrics import REASONS
from attend.v1 import generation_pb2 as pb
from tests.fakes import CallContext, Server, build_server

WHO = ("authorization", "Bearer att_ci")
ASK = {"prompt": "a", "max_tokens": 4}
Stage = Callable[[Server], AbstractContextManager]


def keyed(tmp_path, **limits: int) -> Server:
    """A server with the key `ci`, whose minute never passes."""
    write_keys(tmp_path / "keys", {"ci": Entry(digest_of(b"att_ci"), Limits(**limits))})
    return build_server(keys=KeyRing(tmp_path / "keys", lambda: 0.0))


def refusing(error: Exception) -> Stage:
    """The engine refuses the next call."""

    def stage(server: Server) -> AbstractContextManager:
        server.engine.refusal = error
        return nullcontext()

    return stage


def crowded(server: Server) -> AbstractContextManager:
    """Every place of preparation is held."""
    info = server.engine.info
    return server.service._preparing.hold("other", info.max_batch_requests + info.max_queued_requests)


def spent(server: Server) -> AbstractContextManager:
    """The key has used its first call of two, with the tokens that a call may take."""
    key = server.methods.keys.authenticate(WHO[1])
    key.arrive()
    with key.admit(1) as lease:
        lease.reserve(5)
        lease.use(5)
    return nullcontext()


def running(server: Server) -> AbstractContextManager:
    """An answer of the key is being made."""
    return server.methods.keys.authenticate(WHO[1]).admit(1)


CASES = {
    "queue": ({}, refusing(QueueFull("full"))),
    "draining": ({}, refusing(Unavailable("drains"))),
    "preparation": ({}, crowded),
    "key_requests": ({"requests_per_minute": 1}, spent),
    "key_tokens": ({"tokens_per_minute": 6}, spent),
    "key_concurrent": ({"concurrent": 1}, running),
}


async def over_http(server: Server) -> int:
    async with server.http() as client:
        return (await client.post("/v1/completions", json=ASK, headers=[WHO])).status_code


async def over_grpc(server: Server) -> StatusCode | None:
    context = CallContext()
    context.metadata = [WHO]
    await server.methods.Generate(pb.GenerateRequest(text="a", max_tokens=4).SerializeToString(), context)
    return context.code


def counted(server: Server) -> dict[str, float]:
    """The refusals so far, without the zeros."""
    counts = {reason: server.value("attend_requests_rejected_total", reason=reason) for reason in REASONS}
    return {reason: number for reason, number in counts.items() if number}


@pytest.mark.parametrize("reason", CASES)
@pytest.mark.parametrize("call", [over_http, over_grpc])
async def test_a_refused_call_counts_once_under_what_refused_it(tmp_path, call, reason):
    limits, stage = CASES[reason]
    server = keyed(tmp_path, **limits)

    with ExitStack() as held:
        held.enter_context(stage(server))
        code = await call(server)
    drains = reason == "draining"
    assert code in ((503, StatusCode.UNAVAILABLE) if drains else (429, StatusCode.RESOURCE_EXHAUSTED))
    assert counted(server) == {reason: 1}
    assert sum(number for (*_, outcome), number in server.outcomes().items() if outcome == "rejected") == 1


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_an_explanation_that_finds_no_core_is_refused_as_busy(monkeypatch, transport):
    server, context = build_server(), CallContext()
    monkeypatch.setattr(server.engine, "stats", lambda: EngineStats(3, 1, 10, 0))
    if transport == "http":
        assert server.post({"prompt": "a"}, "/v1/attention").status_code == 429
    else:
        asyncio.run(server.methods.Explain(pb.ExplainRequest(text="a").SerializeToString(), context))
        assert context.code is StatusCode.RESOURCE_EXHAUSTED
    assert counted(server) == {"busy": 1}


async def test_a_full_queue_tells_when_to_come_back(monkeypatch):
    """As long as a call waits now, as the steps so far tell."""
    server, told = build_server(), []
    server.engine.refusal = QueueFull("full")
    busy = EngineStats(server.engine.info.max_batch_requests, 0, 10, 0)
    monkeypatch.setattr(server.engine, "stats", lambda: busy)
    server.metrics.meter.observe_step(
        StepReport(seconds=7.5, num_requests=busy.num_running, num_tokens=1, num_drawn=1, num_ended=1)
    )
    wait = retry_seconds(server.metrics.load())
    assert wait == 8

    async with server.http() as client:
        told.append((await client.post("/v1/completions", json=ASK)).headers["retry-after"])
    context = CallContext()
    await server.methods.Generate(pb.GenerateRequest(text="a").SerializeToString(), context)
    told.append(dict(context.trailing)["retry-after"])
    assert told == [str(wait)] * 2
