"""The gRPC methods over a real channel: codes, deltas, the end of a call that nobody waits for, and health."""

import asyncio
import contextlib
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attend.model.engine.request import FinishReason
from attend.model.errors import EngineFailed, Overloaded, Unavailable
from attend.service.grpc_api import health, reading, servicer
from attend.service.grpc_api.convert import Responses
from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fakes import FakeEngine, Server, build_server, byte_tokenizer, grpc_channel, until

PATH = "/attend.v1.GenerationService/"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def stub(server: Server):
    async with grpc_channel(server) as channel:
        yield GenerationServiceStub(channel)


def generate(server: Server, request: pb.GenerateRequest) -> pb.GenerateResponse:
    [response] = server.rpc("Generate", request)
    return response


def stream(server: Server, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return server.rpc("GenerateStream", request)


def refused(call, server: Server, request: pb.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        call(server, request)
    return caught.value.code(), caught.value.details()


BOTH = pytest.mark.parametrize(("call", "route"), [(generate, "Generate"), (stream, "GenerateStream")])
BIG = 2**62


@BOTH
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "input is required"),
        ({"text": "a", "temperature": float("nan")}, "temperature must be a number from 0 to 2; got nan"),
        ({"text": "a", "decoding": pb.DecodingParameters(logit_bias={BIG: 1})}, f"from 0 to 256; got {BIG}"),
    ],
)
def test_a_mistake_is_invalid_argument_and_names_the_field(call, route, fields, words):
    server = build_server()
    code, details = refused(call, server, pb.GenerateRequest(**fields))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in details
    assert server.outcomes() == {("grpc", route, "invalid"): 1}


@BOTH
@pytest.mark.parametrize(
    ("error", "code", "outcome"),
    [
        (Overloaded("the queue is full"), grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected"),
        (Unavailable("draining"), grpc.StatusCode.UNAVAILABLE, "rejected"),
        (EngineFailed("SecretError"), grpc.StatusCode.INTERNAL, "error"),
        (ZeroDivisionError("SecretError"), grpc.StatusCode.INTERNAL, "error"),
    ],
)
def test_each_refusal_has_its_code_and_bugs_say_nothing(call, route, error, code, outcome):
    engine = FakeEngine()
    engine.refusal = error
    server = build_server(engine)
    found, details = refused(call, server, pb.GenerateRequest(text="a", request_id="id-1"))
    assert found is code
    assert details == ("internal error; request id id-1" if outcome == "error" else str(error))
    assert server.outcomes() == {("grpc", route, outcome): 1}


@BOTH
def test_a_refusal_that_says_when_to_try_again_says_its_request_id_too(call, route):
    engine = FakeEngine()
    engine.refusal = Overloaded("the queue is full")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        call(build_server(engine), pb.GenerateRequest(text="a", request_id="id-1"))
    assert dict(caught.value.trailing_metadata()) == {"retry-after": "1", "x-request-id": "id-1"}


def test_a_failure_in_the_stream_keeps_what_was_sent_and_has_its_code():
    engine = FakeEngine()
    engine.broken_after = 2
    server = build_server(engine)

    async def run() -> None:
        async with stub(server) as service:
            async for response in service.GenerateStream(pb.GenerateRequest(text="a", request_id="id-2")):
                texts.append(response.outputs[0].text)

    texts: list[str] = []
    with pytest.raises(grpc.aio.AioRpcError, match="internal error; request id id-2") as caught:
        asyncio.run(run())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert texts == ["b", "c"]
    assert server.outcomes() == {("grpc", "GenerateStream", "error"): 1}


GARBAGE = [b"\xff", b"\x0a\xff", b"\x1a\x02\xff\xfe", b"\x0a\x01\x80", b"\x00", b"\x3a\x02\x08"]


@pytest.mark.parametrize("data", GARBAGE)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_bytes_that_are_no_message_are_invalid_argument(method, data):
    """Cut fields, bad tags, and text that is not UTF-8; never UNKNOWN with a Python exception."""
    server = build_server()

    async def run() -> None:
        async with grpc_channel(server) as channel:
            if method == "Generate":
                await channel.unary_unary(PATH + method)(data)
            else:
                [answer async for answer in channel.unary_stream(PATH + method)(data)]

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(run())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the bytes sent are not a valid GenerateRequest"
    assert server.outcomes() == {("grpc", method, "invalid"): 1}


LARGE = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 2 * reading.INLINE_BYTES), max_tokens=1, request_id="large")


def test_large_messages_are_read_beside_the_event_loop_and_small_ones_on_it(monkeypatch):
    alone, sizes = reading.run_exclusive, []

    def watched(work, arrival):
        sizes.append(arrival.size)
        return alone(work, arrival)

    monkeypatch.setattr(reading, "run_exclusive", watched)
    server = build_server()
    assert refused(generate, server, LARGE)[0] is refused(stream, server, LARGE)[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert sizes == [LARGE.ByteSize()] * 4, "each is read, and each makes a command"
    generate(server, pb.GenerateRequest(text="a", max_tokens=1))
    assert len(sizes) == 4


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_a_caller_who_goes_frees_its_requests_and_is_an_abort(method, how):
    engine = FakeEngine(held=True)
    server = build_server(engine)

    async with stub(server) as service:
        request = pb.GenerateRequest(text="a", sampling=pb.SamplingParameters(n=2))
        call = getattr(service, method)(request, timeout=0.3 if how == "timeout" else None)
        waiting = asyncio.ensure_future(call.read() if method == "GenerateStream" else call)
        await until(lambda: engine.requests)
        if how == "cancel":
            call.cancel()
        await asyncio.wait([waiting])
        await until(lambda: server.outcomes())
        assert waiting.cancelled() or waiting.exception() is not None
    assert [reason for _, reason in engine.aborted] == [FinishReason.ABORT] * 2
    assert not engine.open
    assert server.outcomes() == {("grpc", method, "abort"): 1}


async def test_a_drain_ends_a_stream_with_its_reason():
    engine = FakeEngine(held=True)
    server = build_server(engine)

    reasons = []
    async with stub(server) as service:
        engine.release()
        async for response in service.GenerateStream(pb.GenerateRequest(text="a", max_tokens=50)):
            reasons.append(response.outputs[0].finish_info.finish_reason)
            engine.drain()
    found = reasons
    assert found == [pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_ABORT]
    assert server.outcomes() == {("grpc", "GenerateStream", "abort"): 1}


def ask(server: Server, method: str, request):
    async def run():
        async with stub(server) as service:
            return await getattr(service, method)(request)

    return asyncio.run(run())


@pytest.mark.parametrize("text", ["", "abc", "naïve café 日本語 😀", "a<|endoftext|>b", "\0\n "])
@pytest.mark.parametrize("special", [None, True, False])
def test_tokens_of_a_text_are_the_text_again(text, special):
    server = build_server()
    told = ask(server, "Tokenize", pb.TokenizeRequest(text=text, add_special_tokens=special, model="fake"))
    assert list(told.token_ids) == byte_tokenizer().encode(text)
    assert told.max_model_len == 128
    assert ask(server, "Detokenize", pb.DetokenizeRequest(token_ids=told.token_ids, model="fake")).text == text


@pytest.mark.parametrize(
    ("method", "fields", "code"),
    [
        ("Tokenize", {"model": "gpt-4"}, grpc.StatusCode.NOT_FOUND),
        ("Tokenize", {"text": "a" * (servicer.MAX_CHARACTERS + 1)}, grpc.StatusCode.INVALID_ARGUMENT),
        ("Detokenize", {"model": "gpt-4"}, grpc.StatusCode.NOT_FOUND),
        ("Detokenize", {"token_ids": [97] * (servicer.MAX_CHARACTERS // 2 + 1)}, grpc.StatusCode.INVALID_ARGUMENT),
        ("Detokenize", {"token_ids": [257]}, grpc.StatusCode.INVALID_ARGUMENT),
        ("Detokenize", {"token_ids": [-1]}, grpc.StatusCode.INVALID_ARGUMENT),
        ("Detokenize", {"token_ids": [BIG]}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_tokens_are_made_by_the_served_model_alone(method, fields, code):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        ask(build_server(), method, getattr(pb, f"{method}Request")(**fields))
    assert caught.value.code() is code


def test_log_probabilities_of_a_prompt_hold_their_places_until_they_are_written(monkeypatch):
    server, taken, write = build_server(), [], Responses.full_response

    async def watched(*given):
        taken.append(server.service._scores.num_held)
        return await write(*given)

    monkeypatch.setattr(Responses, "full_response", watched)
    asked = pb.GenerateRequest(text="abc", max_tokens=1, response=pb.ResponseOptions(prompt_logprobs=1))
    assert len(ask(server, "Generate", asked).prompt_info.logprobs) == 3
    assert taken == [6]
    assert server.service._scores.num_held == 0


def test_the_tokens_of_a_long_text_are_written_in_turns(monkeypatch):
    turns = []

    async def turn(caller=None) -> None:
        turns.append(1)

    monkeypatch.setattr(servicer, "yield_to_loop", turn)
    told = ask(build_server(), "Tokenize", pb.TokenizeRequest(text="a" * (3 * servicer.IDS)))
    assert [97] * (3 * servicer.IDS) == told.token_ids
    assert len(turns) == 3, "one before the call begins, and one between each two parts"


def test_health_follows_the_drain_and_a_watch_ends_with_it(monkeypatch):
    monkeypatch.setattr(health, "WATCH_SECONDS", 0.001)
    server = build_server()

    async def run() -> list[int]:
        async with grpc_channel(server) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            assert (await health.Check(request)).status == SERVING
            told = []
            async for answer in health.Watch(request):
                told.append(answer.status)
                server.engine.drain()
            assert (await health.Check(request)).status == NOT_SERVING
            return told

    assert asyncio.run(run()) == [SERVING, NOT_SERVING]


def test_health_is_told_of_each_service_and_of_no_other():
    server = build_server()

    async def run() -> tuple[dict[str, int], int]:
        async with grpc_channel(server) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            listed = (await health.List(health_pb2.HealthListRequest())).statuses
            named = await health.Check(health_pb2.HealthCheckRequest(service="attend.v1.GenerationService"))
            other = health_pb2.HealthCheckRequest(service="other")
            with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
                await health.Check(other)
            return {name: answer.status for name, answer in listed.items()}, named.status

    listed, named = asyncio.run(run())
    assert listed == {"": SERVING, "attend.v1.GenerationService": SERVING}
    assert named == SERVING


def test_a_watch_of_an_unknown_service_says_so_and_stays_open_until_the_drain(monkeypatch):
    monkeypatch.setattr(health, "WATCH_SECONDS", 0.001)
    server, request = build_server(), health_pb2.HealthCheckRequest(service="other")

    async def run() -> None:
        async with grpc_channel(server) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(request)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            assert not watch.done()
            server.engine.drain()
            assert await watch.read() is grpc.aio.EOF
            assert await watch.code() is grpc.StatusCode.OK

    asyncio.run(run())


def test_watches_are_bounded_for_each_holds_a_place_that_probes_need(monkeypatch):
    monkeypatch.setattr(health, "MAX_WATCHES", 2)
    server, request = build_server(), health_pb2.HealthCheckRequest()

    async def run() -> None:
        async with grpc_channel(server) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            open_ones = [health.Watch(request) for _ in range(2)]
            assert [(await anext(aiter(watch))).status for watch in open_ones] == [SERVING] * 2
            with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
                await anext(aiter(health.Watch(request)))
            open_ones[0].cancel()
            async with asyncio.timeout(20):
                while True:  # the server hears of it a moment later
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        assert (await anext(aiter(health.Watch(request)))).status == SERVING
                        break

    asyncio.run(run())
