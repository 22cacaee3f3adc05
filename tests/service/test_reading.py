"""Reading before placing, and first tokens: what a call waits for before it has a place, in whose turn, and until when."""

import asyncio
import json
import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest

from attend.service.access.keys import Entry, KeyRing, digest_of, write_keys
from attend.service.access.quota import Limits
from attend.service.generation import thread_pools
from attend.service.generation.unread_bodies import CALL_BYTES, UnreadBodies
from attend.service.grpc_api import reading, register
from attend.service.http_api import body
from attend.v1 import generation_pb2 as pb
from tests.fakes import Server, build_server
from tests.service.bad_calls import grpc_bytes, whole_server

with warnings.catch_warnings():
    # Ray 2.60 declares its own fields in pydantic's old way; nothing of ours does.
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field` is deprecated")
    from ray import serve  # noqa: F401  # it must be imported before parts of it
    from ray.serve._private.grpc_util import gRPCGenericServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHORT = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).encode()
LONG = {"prompt": "a " * 10_000, "temperature": "hot"}


def held_pool(monkeypatch) -> threading.Event:
    """Long calls wait in the pool until the event is set."""
    gate, parse = threading.Event(), body.parse_json
    monkeypatch.setattr(body, "parse_json", lambda data: (len(data) <= thread_pools.SHORT or gate.wait(20)) and parse(data))
    return gate


def test_a_default_deadline_counts_from_the_arrival(monkeypatch):
    gate, server = held_pool(monkeypatch), build_server(deadline_default_ms=50)
    try:
        assert server.post(json.dumps(LONG).encode()).status_code == 504
    finally:
        gate.set()


def test_a_deadline_passes_while_a_long_message_waits_to_be_made_a_command(monkeypatch):
    gate, server = threading.Event(), build_server()
    monkeypatch.setattr(server.methods, "_command", lambda *_, **origin: gate.wait(20))
    request = pb.GenerateRequest(text="a" * 2 * reading.INLINE_BYTES, deadline_ms=50)
    try:
        assert (
            asyncio.run(grpc_bytes(server, "Generate", request.SerializeToString(), ())).code
            is grpc.StatusCode.DEADLINE_EXCEEDED
        )
    finally:
        gate.set()


async def test_bodies_of_both_transports_share_one_budget():
    """A call over HTTP whose body does not come loses to calls over gRPC of the same address, the oldest first."""
    server = build_server(unread_bodies=UnreadBodies(3 * CALL_BYTES))

    never, http = asyncio.Event(), server.http()
    first = asyncio.create_task(http.post(COMPLETIONS, content=silent(never), headers={"content-type": "application/json"}))
    await asyncio.sleep(0.2)
    calls = []
    for _ in range(3):
        context = SimpleNamespace(invocation_metadata=tuple, peer=lambda: "ipv4:127.0.0.1:1")
        turn = server.methods.turn_of(context)
        calls.append(asyncio.create_task(reading.receive_message(silent(never), server.methods.unread_bodies, turn, 1)))
        await asyncio.sleep(0.05)
    done = [call.done() for call in calls]
    for call in calls:
        call.cancel()
    found = (await asyncio.wait_for(first, 10)).status_code, done
    assert found == (429, [False] * 3)


async def silent(never: asyncio.Event):
    await never.wait()
    yield b""


@pytest.mark.parametrize("behind_edge", [False, True])
def test_the_turn_of_a_call_is_that_of_its_key_else_of_the_address_that_the_edge_saw(tmp_path, behind_edge):
    write_keys(tmp_path / "keys", {"ci": Entry(digest_of(b"att_ci"), Limits())})
    metadata = (("x-forwarded-for", "6.6.6.6, 10.0.0.7"), ("authorization", "Bearer att_ci"))
    context = SimpleNamespace(invocation_metadata=lambda: metadata, peer=lambda: "ipv4:127.0.0.1:1")
    server = build_server(behind_edge=behind_edge)
    assert server.methods.turn_of(context) == ("10.0.0.7" if behind_edge else "127.0.0.1")
    server.methods.keys = KeyRing(tmp_path / "keys")
    assert server.methods.turn_of(context) == "ci"


# Behind Ray Serve


def serve_like(monkeypatch, server: Server | None) -> tuple[Any, list[tuple[bytes, str]]]:
    """Registers with a server as Serve's is: its handlers by name, and what they were given."""
    given: list[tuple[bytes, str]] = []

    def factory(service_method: str, streaming_type: Any) -> Any:
        async def whole(request: bytes, context: Any) -> bytes:
            given.append((request, streaming_type.name))
            return b"answer"

        async def stream(request: bytes, context: Any):
            given.append((request, streaming_type.name))
            yield b"answer"

        return stream if streaming_type.name.endswith("STREAM") else whole

    monkeypatch.setattr(register, "_own", None if server is None else server.methods)
    return lambda: gRPCGenericServer(factory), given


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_behind_serve_the_key_is_judged_before_the_message_and_the_place_comes_after_it(monkeypatch, tmp_path, method):
    write_keys(tmp_path / "keys", {"ci": Entry(digest_of(b"att_ci"), Limits())})
    server = build_server(keys=KeyRing(tmp_path / "keys"))
    make, given = serve_like(monkeypatch, server)
    monkeypatch.setattr(reading, "MESSAGE_SECONDS", 0.5)
    good, path = (("authorization", "Bearer att_ci"),), f"/attend.v1.GenerationService/{method}"

    real = make()
    register.add_generation_service(server.methods, real)
    port = real.add_insecure_port("127.0.0.1:0")
    await real.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        begin = channel.stream_stream(path)
        assert [answer async for answer in begin(iter([b"message"]), metadata=good)] == [b"answer"]
        kind = "UNARY_STREAM" if method == "GenerateStream" else "UNARY_UNARY"
        assert given.pop() == (b"message", kind)
        wrong = begin(metadata=(("authorization", "Bearer other"),))  # its message never comes
        assert [answer async for answer in wrong] == [b"answer"], "the method, which refuses it"
        assert given.pop() == (b"", kind)
        with pytest.raises(grpc.aio.AioRpcError) as slow:
            [answer async for answer in begin(metadata=good, timeout=10)]
        assert slow.value.details() == "the message must arrive within 0.5 seconds"
        assert given == [], "it had no place"
    await real.stop(None)


async def test_serves_own_proxy_reads_messages_as_serve_does(monkeypatch):
    make, given = serve_like(monkeypatch, None)

    real = make()
    register.add_generation_service(build_server().methods, real)
    port = real.add_insecure_port("127.0.0.1:0")
    await real.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await channel.unary_unary("/attend.v1.GenerationService/Generate")(b"message") == b"answer"
    await real.stop(None)
    assert given == [(b"message", "UNARY_UNARY")]


# First tokens


def test_a_short_chat_does_not_wait_for_long_bodies_that_are_refused_anyway():
    """Without the short calls' own thread it waited for all of them: 21 s of 250, 0.7 s of these 30."""
    server = whole_server()
    messages = [{"role": "user", "content": [{"type": "text", "text": "x" * 8}]}] * 5000
    bad = json.dumps({"messages": messages, "temperature": "hot"}).encode()

    async def run() -> tuple[float, list[int], float]:
        async with server.http() as client:

            async def post(data: bytes) -> httpx.Response:
                return await client.post(CHAT, content=data, headers={"content-type": "application/json"})

            for data in (SHORT, bad):
                await post(data)
            began = time.perf_counter()
            flood = [asyncio.create_task(post(bad)) for _ in range(30)]
            await asyncio.sleep(0.05)
            chat = await post(SHORT)
            seconds = time.perf_counter() - began
            codes = [answer.status_code for answer in await asyncio.gather(*flood)]
            assert chat.status_code == 200
            return seconds, codes, time.perf_counter() - began

    seconds, codes, whole = asyncio.run(run())
    assert {*codes} <= {400, 429} and codes.count(400) >= 10
    assert seconds < whole / 2
