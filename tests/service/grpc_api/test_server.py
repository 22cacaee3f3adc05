"""gRPC without Ray: a call's message is read after its key is judged, in time, and stops no check of health until it comes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from attend.service.access.keys import Entry, KeyRing, Limits, digest_of, write_keys
from attend.service.generation.unread_bodies import CALL_BYTES, UnreadBodies
from attend.service.grpc_api import reading
from attend.service.grpc_api import server as grpc_server
from attend.service.grpc_api.limits import MAX_MESSAGE
from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fakes import FakeEngine, Server, build_server, info, until

GENERATE = "/attend.v1.GenerationService/Generate"
REQUEST = pb.GenerateRequest(text="ab", max_tokens=3)
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
MOST = 924
SILENT = MOST + 76


@asynccontextmanager
async def serving(server: Server, most_calls: int = 8, **limits: int) -> AsyncIterator[Callable[[], grpc.aio.Channel]]:
    """What makes a channel to the server, a connection of its own each."""
    real = grpc_server.grpc_server(server.methods, "127.0.0.1", 0, most_calls, **limits)
    port = real.add_insecure_port("127.0.0.1:0")
    await real.start()
    channels: list[grpc.aio.Channel] = []

    def channel() -> grpc.aio.Channel:
        channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS))
        return channels[-1]

    try:
        yield channel
    finally:
        for each in channels:
            await each.close()
        await real.stop(None)


def run(law: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(law())


async def ended(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details()


async def silent(channel: Callable[[], grpc.aio.Channel], count: int, method: str = GENERATE, **more: Any) -> list[Any]:
    """Calls whose message never comes, a hundred on a connection."""
    calls = []
    for _ in range(0, count, 100):
        begin = channel().stream_unary(method)
        calls += [begin(**more) for _ in range(min(100, count - len(calls)))]
        for call in calls[-100:]:
            await call.wait_for_connection()
    return calls


def test_calls_whose_message_never_comes_stop_neither_health_nor_a_call(monkeypatch):
    monkeypatch.setattr(reading, "GRACE_SECONDS", 60)
    server = build_server(unread_bodies=UnreadBodies(MOST * CALL_BYTES))

    async def law() -> None:
        async with serving(server) as channel:
            calls = [*await silent(channel, SILENT // 2), *await silent(channel, SILENT // 2, "/grpc.health.v1.Health/Check")]
            health, service = HealthStub(channel()), GenerationServiceStub(channel())
            for _ in range(5):
                assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
                assert (await service.Generate(REQUEST)).outputs[0].text == "cde"
            assert [message.outputs[0].text async for message in service.GenerateStream(REQUEST)] == ["c", "d", "e"]
            await until(lambda: sum(call.done() for call in calls) >= 76)
            over = [await ended(call) for call in calls if call.done()]
            assert (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many request bodies are still being received") in over
            assert len(over) < 100, "those that fit wait on"
            for call in calls:
                call.cancel()

    run(law)


def test_a_message_that_does_not_come_soon_counts_as_the_longest(monkeypatch):
    """What has come of it nobody can know."""
    monkeypatch.setattr(reading, "GRACE_SECONDS", 0.3)
    server = build_server(unread_bodies=UnreadBodies(4 * MAX_MESSAGE))

    async def law() -> None:
        async with serving(server) as channel:
            calls, service = await silent(channel, 6), GenerationServiceStub(channel())
            await until(lambda: sum(call.done() for call in calls) == 3)
            assert (await service.Generate(REQUEST)).outputs[0].text == "cde"
            for call in calls:
                call.cancel()

    run(law)


@pytest.mark.parametrize("method", [GENERATE, "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"])
def test_a_message_that_does_not_come_in_time_ends_its_call(monkeypatch, method):
    monkeypatch.setattr(reading, "MESSAGE_SECONDS", 0.2)

    async def law() -> None:
        async with serving(build_server()) as channel:
            (call,) = await silent(channel, 1, method)
            assert await ended(call) == (grpc.StatusCode.DEADLINE_EXCEEDED, "the message must arrive within 0.2 seconds")

    run(law)


@pytest.mark.parametrize(("messages", "words"), [([], "got none"), ([REQUEST, REQUEST], "got a second one")])
@pytest.mark.parametrize("method", [GENERATE, "/grpc.health.v1.Health/Check"])
def test_a_call_has_one_message(method, messages, words):
    async def law() -> None:
        async with serving(build_server()) as channel:
            call = channel().stream_unary(method)(iter([message.SerializeToString() for message in messages]))
            assert await ended(call) == (grpc.StatusCode.INVALID_ARGUMENT, f"a call has one message; {words}")

    run(law)


def test_a_key_is_judged_and_charged_before_the_message_comes(tmp_path):
    path = tmp_path / "keys.json"
    write_keys(path, {"one": Entry(digest_of(b"good"), Limits(requests_per_minute=1))})

    async def law() -> None:
        async with serving(build_server(keys=KeyRing(str(path)))) as channel:
            (call,) = await silent(channel, 1)
            assert (await ended(call))[0] is grpc.StatusCode.UNAUTHENTICATED
            first, second = await silent(channel, 2, metadata=(("authorization", "Bearer good"),))
            done, _ = await asyncio.wait(
                [asyncio.create_task(call.code()) for call in (first, second)], return_when="FIRST_COMPLETED"
            )
            assert [task.result() for task in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
            first.cancel(), second.cancel()

    run(law)


def test_calls_over_the_bound_are_told_to_come_again_and_health_is_none_of_them():
    engine = FakeEngine(held=True)

    async def law() -> None:
        async with serving(build_server(engine), most_calls=2) as channel:
            service, health = GenerationServiceStub(channel()), HealthStub(channel())
            running = [service.Generate(REQUEST) for _ in range(2)]
            await until(lambda: len(engine.open) == 2)
            third = service.Generate(REQUEST)
            assert await ended(third) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "2 calls are running already")
            assert dict(await third.trailing_metadata())["retry-after"] == "1"
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            engine.release(20)
            for call in running:
                await call
            assert (await service.Generate(REQUEST)).outputs[0].text == "cde"
            watch.cancel()

    run(law)


def test_a_message_may_be_as_long_as_the_context_needs_and_an_answer_as_long_as_it_is():
    context = 1 << 19
    server = build_server(FakeEngine(info=info(max_model_len=context, num_blocks=context)))

    async def law() -> None:
        async with serving(server, max_model_len=context) as channel:
            service = GenerationServiceStub(channel())
            long = pb.DetokenizeRequest(token_ids=[97] * (8 * context))
            assert MAX_MESSAGE < long.ByteSize() < 16 * context
            assert (await service.Detokenize(long)).text == "a" * (8 * context)
            code, words = await ended(service.Tokenize(pb.TokenizeRequest(text="a" * (16 * context))))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in words

    run(law)


def test_a_connection_ends_by_its_age_without_the_streams_on_it(monkeypatch):
    """Behind an address of several servers a caller would stay with the first one for ever. grpc varies the age by a tenth."""
    quick = {**dict(grpc_server.OPTIONS), "grpc.max_connection_age_ms": 300}
    assert quick.keys() == dict(grpc_server.OPTIONS).keys()
    monkeypatch.setattr(grpc_server, "OPTIONS", tuple(quick.items()))
    engine, peers = FakeEngine(held=True), []
    server = build_server(engine)
    judge = server.methods.Check

    async def check(request, grpc_context):
        peers.append(grpc_context.peer())
        return await judge(request, grpc_context)

    monkeypatch.setattr(server.methods, "Check", check)

    async def law():
        async with serving(server) as channel:
            one = channel()
            stream = GenerationServiceStub(one).GenerateStream(REQUEST)
            await until(lambda: engine.requests)
            for _ in range(2):
                await HealthStub(one).Check(health_pb2.HealthCheckRequest())
                await asyncio.sleep(0.6)
            assert len(set(peers)) == 2, "the connection was not ended"
            engine.release(8)
            messages = [message async for message in stream]
            assert messages[-1].outputs[0].HasField("finish_info") and await stream.code() == grpc.StatusCode.OK

    run(law)
