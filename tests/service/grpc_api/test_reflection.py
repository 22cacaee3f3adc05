"""gRPC without Ray: reflection and pings."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from attend.service.grpc_api import server
from tests.fakes import build_server, until
from tests.service.server import free_port

UNKNOWN = health_pb2.HealthCheckRequest(service="other")
"""A watch of it is silent after its first answer."""


@asynccontextmanager
async def channel(**options):
    """A channel to a server of made-up answers; `options` are gRPC's, after their prefix."""
    port = free_port()
    one = server.grpc_server(build_server().methods, "127.0.0.1", port, 16)
    await one.start()
    given = [(f"grpc.{name}", value) for name, value in options.items()]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=given) as made:
            yield made
    finally:
        await one.stop(None)


def asked(**fields):
    return reflection_pb2.ServerReflectionRequest(**fields)


async def answers(made, *requests):
    return [answer async for answer in reflection_pb2_grpc.ServerReflectionStub(made).ServerReflectionInfo(iter(requests))]


async def test_a_client_without_the_proto_finds_services_methods_and_fields():
    async with channel() as made:
        listed, method, message, file, missing = await answers(
            made,
            asked(list_services=""),
            asked(file_containing_symbol="attend.v1.GenerationService"),
            asked(file_containing_symbol="grpc.health.v1.Health"),
            asked(file_by_filename="attend/v1/generation.proto"),
            asked(file_containing_symbol="attend.v1.Nothing"),
        )
    names = {service.name for service in listed.list_services_response.service}
    assert names == {"attend.v1.GenerationService", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    proto = descriptor_pb2.FileDescriptorProto.FromString(method.file_descriptor_response.file_descriptor_proto[0])
    assert "GenerateStream" in {each.name for each in proto.service[0].method}
    assert "max_tokens" in {field.name for kind in proto.message_type for field in kind.field}
    assert message.file_descriptor_response.file_descriptor_proto
    assert file.file_descriptor_response == method.file_descriptor_response
    assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_reflection_holds_few_places_and_none_for_long(monkeypatch):
    monkeypatch.setattr(server, "MAX_REFLECTIONS", 2)
    monkeypatch.setattr(server, "REFLECTION_SECONDS", 1.0)

    async def law() -> None:
        async with channel() as made:
            stub = reflection_pb2_grpc.ServerReflectionStub(made)
            silent = [stub.ServerReflectionInfo() for _ in range(2)]
            for one in silent:
                await one.write(asked(list_services=""))
                assert (await one.read()).HasField("list_services_response")
            with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
                await answers(made, asked(list_services=""))
            assert [await one.code() for one in silent] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 2
            assert await answers(made, asked(list_services=""))

    asyncio.run(law())


async def silent_watch(made):
    watch = health_pb2_grpc.HealthStub(made).Watch(UNKNOWN)
    await watch.read()
    return watch


async def test_pings_at_the_pace_that_is_allowed_end_neither_a_silent_call_nor_an_idle_connection(monkeypatch):
    name = "grpc.http2.min_ping_interval_without_data_ms"
    assert dict(server.OPTIONS)[name] < 10_000, "clients ping every 10 s, some a little sooner"
    monkeypatch.setattr(server, "OPTIONS", (*(one for one in server.OPTIONS if one[0] != name), (name, 1)))
    eager = {"keepalive_time_ms": 1000, "keepalive_permit_without_calls": 1, "http2.max_pings_without_data": 0}

    async with channel(**eager) as calling, channel(**eager) as idle:
        watch = await silent_watch(calling)
        await health_pb2_grpc.HealthStub(idle).Check(health_pb2.HealthCheckRequest())
        await asyncio.sleep(4.5)  # four pings: two that come too soon are let pass, and the third ends the connection
        assert not watch.done()
        assert idle.get_state() is grpc.ChannelConnectivity.READY


async def test_a_flood_of_pings_ends_the_connection():
    async with channel(keepalive_time_ms=1000, **{"http2.max_pings_without_data": 0}) as made:
        watch = await silent_watch(made)
        await until(watch.done)
        assert await watch.code() is grpc.StatusCode.UNAVAILABLE
        assert "Too many pings" in await watch.details()
