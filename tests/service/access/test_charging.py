"""What an API key may take, from the header to the engine: every limit refuses something, and every token is charged once."""

import asyncio
from contextlib import aclosing

import pytest
from grpc import StatusCode

from attend.model.engine.request import FinishReason
from attend.model.errors import AttendError, RateLimited
from attend.model.params import SamplingParams, StopRules
from attend.model.text.chat import ChatTemplate
from attend.service.access.caller import Caller
from attend.service.access.keys import Entry, KeyRing, Limits, digest_of, write_keys
from attend.service.records import Command
from attend.v1 import generation_pb2 as pb
from tests.fakes import INFO, CallContext, FakeEngine, Server, build_server, says, until
from tests.service.bad_calls import whole_server

SECRET = "att_secret"
BEARER = f"Bearer {SECRET}"
LIMIT = 100
"""Tokens a minute."""


def ring(folder, **limits: int) -> KeyRing:
    """A file with one key, in a minute that does not pass."""
    write_keys(folder / "keys.json", {"ci": Entry(digest_of(SECRET.encode()), Limits(**limits))})
    return KeyRing(folder / "keys.json", lambda: 1000.0)


# Every limit, over HTTP


CALLS = {
    "requests_per_minute": (2, {"max_tokens": 1}, 2),
    "tokens_per_minute": (20, {"max_tokens": 8}, 2),
    "concurrent": (1, {"max_tokens": 1}, 1),
}
"""A limit, a call with a prompt of two tokens, and how many such calls it admits."""


@pytest.mark.parametrize("limit", CALLS)
def test_a_limit_refuses_the_first_call_too_many_and_no_caller_without_a_limit(tmp_path, limit):
    most, body, admitted = CALLS[limit]
    engine = FakeEngine(held=limit == "concurrent")
    server = whole_server(engine, ring(tmp_path, **{limit: most}))

    async def run() -> list:
        async with server.http() as client:
            ask = {"json": {"prompt": "ab"} | body, "headers": {"authorization": BEARER}}
            calls = []
            for place in range(admitted):
                calls.append(asyncio.create_task(client.post("/v1/completions", **ask)))
                await until(lambda: len(engine.requests) > place)  # noqa: B023 - the loop waits for it
                if not engine.held:
                    await calls[-1]
            refused = await client.post("/v1/completions", **ask)
            engine.held = False
            engine.release()
            return [refused, *[await call for call in calls]]

    refused, *served = asyncio.run(run())
    assert [each.status_code for each in served] == [200] * admitted
    assert refused.status_code == 429
    assert f"'ci' has reached its limit {limit} = {most}" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert len(engine.requests) == admitted, "who is refused costs the engine nothing"
    free = whole_server(FakeEngine(), ring(tmp_path))
    for _ in range(admitted + 1):
        assert free.post({"prompt": "ab"} | body, headers={"authorization": BEARER}).status_code == 200


def test_while_the_server_ends_that_is_what_a_key_over_its_limit_is_told(tmp_path):
    """A client that is told to wait would try again at a server that ends."""
    server = build_server(FakeEngine(), keys=ring(tmp_path, requests_per_minute=1))
    ask = {"headers": {"authorization": BEARER}}
    assert server.post({"prompt": "a", "max_tokens": 1}, **ask).status_code == 200
    assert server.post({"prompt": "a", "max_tokens": 1}, **ask).status_code == 429
    server.engine.draining = True
    refused = server.post({"prompt": "a", "max_tokens": 1}, **ask)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert server.post({"prompt": "a"}, headers={"authorization": "Bearer none"}).status_code == 401
    context = CallContext()
    context.metadata = [("authorization", BEARER)]
    asyncio.run(server.methods.Generate(pb.GenerateRequest(text="a").SerializeToString(), context))
    assert context.code is StatusCode.UNAVAILABLE


# Tokens, whatever becomes of the answer


def command(keys: KeyRing, prompt: str = "a", n: int = 1, resume: tuple[int, ...] = (), **rules) -> Command:
    stops = StopRules(**{"max_tokens": 4} | rules)
    sampling = SamplingParams(seed=1)
    return Command(
        prompts=(prompt,),
        n=n,
        stops=stops,
        sampling=sampling,
        request_id="x",
        resume_token_ids=resume,
        caller=Caller(keys.authenticate(BEARER)),
    )


async def take(server: Server, asked: Command, lists: int | None = None) -> FinishReason | None:
    """The answers of a call, or the first so many lists of it; why the last answer ended."""
    last = None
    record = server.metrics.open("http", "/v1/completions")
    async with aclosing(server.service.generate(asked, record, adapter=None)) as stream:
        async for chunks in stream:
            last = chunks[-1].finish_reason
            lists = None if lists is None else lists - 1
            if lists == 0:
                break
    return last


def assert_charged(keys: KeyRing, tokens: int) -> None:
    """Exactly the rest of the minute's tokens can be had, and not one more."""
    server, rest = build_server(), LIMIT - tokens
    with pytest.raises(RateLimited) if tokens else pytest.raises(AttendError, match="tokens_per_minute"):
        asyncio.run(take(server, command(keys, max_tokens=rest)))
    assert asyncio.run(take(server, command(keys, max_tokens=rest - 1))) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("engine", "asked", "reason", "tokens"),
    [
        (FakeEngine, {"prompt": "abc", "max_tokens": 4}, FinishReason.LENGTH, 3 + 4),
        (FakeEngine, {"prompt": "abc", "max_tokens": 4, "n": 3}, FinishReason.LENGTH, 3 * (3 + 4)),
        (lambda: FakeEngine(burst=3), {"prompt": "abc", "max_tokens": 7}, FinishReason.LENGTH, 3 + 7),
        (FakeEngine, {"prompt": "abc", "max_tokens": 4, "resume": (100, 101)}, FinishReason.LENGTH, 3 + 2 + 2),
        (lambda: FakeEngine(says("hi")), {"max_tokens": 50}, FinishReason.STOP, 1 + 3),
        (lambda: FakeEngine(says("one STOP two"), burst=9), {"max_tokens": 50, "stop": ("STOP",)}, FinishReason.STOP, 1 + 8),
        (FakeEngine, {"max_tokens": 50, "stop_token_ids": (ord("d"),)}, FinishReason.STOP, 1 + 3),
    ],
    ids=["whole", "three answers", "in bursts", "resumed", "end of text", "stop string", "stop token"],
)
def test_a_call_is_charged_for_its_prompt_and_for_what_it_was_given(tmp_path, engine, asked, reason, tokens):
    """What was reserved and not used is given back. Each answer pays for its prompt."""
    keys = ring(tmp_path, tokens_per_minute=LIMIT)
    assert asyncio.run(take(build_server(engine()), command(keys, **asked))) is reason
    assert_charged(keys, tokens)


@pytest.mark.parametrize("lists", [1, 2, 5])
def test_a_stream_that_its_caller_leaves_is_charged_up_to_its_last_list(tmp_path, lists):
    keys = ring(tmp_path, tokens_per_minute=LIMIT)
    asyncio.run(take(build_server(), command(keys, max_tokens=50), lists))
    assert_charged(keys, 1 + lists)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.DEADLINE])
def test_an_answer_that_is_cut_off_is_charged_for_what_there_is(tmp_path, reason):
    keys, engine = ring(tmp_path, tokens_per_minute=LIMIT), FakeEngine(held=True)

    async def run() -> FinishReason | None:
        server = build_server(engine)
        task = asyncio.create_task(take(server, command(keys, max_tokens=50)))
        await until(lambda: engine.open)
        engine.release(3)
        await until(lambda: len(engine.requests[0].output) == 3)
        engine.abort(engine.requests[0].request_id, reason)
        return await task

    assert asyncio.run(run()) is reason
    assert_charged(keys, 1 + 3)


@pytest.mark.parametrize("refused", [True, False])
def test_a_call_that_was_given_nothing_is_charged_nothing(tmp_path, refused):
    keys, engine = ring(tmp_path, tokens_per_minute=LIMIT), FakeEngine()
    engine.draining, engine.broken_after = refused, 0
    with pytest.raises(AttendError):
        asyncio.run(take(build_server(engine), command(keys, max_tokens=50)))
    assert_charged(keys, 0)


async def test_what_is_clamped_to_the_context_is_charged_as_that(tmp_path):
    """Of a limit that a context fits into."""
    keys = ring(tmp_path, tokens_per_minute=2 * INFO.max_model_len)
    server = build_server(keys=keys, template=ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}"))
    sent = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 32_000}
    async with server.http() as client:
        answer = await client.post("/v1/messages", json=sent, headers={"authorization": BEARER})
    assert (answer.status_code, answer.headers["x-attend-clamped"]) == (200, "max_tokens")
    assert answer.json()["usage"]["output_tokens"] < INFO.max_model_len


@pytest.mark.parametrize(
    ("bearer", "plain", "status", "unknown"),
    [
        ("a", "x", 200, "x-api-key"),
        ("x", "a", 200, "authorization"),
        ("a", "a", 200, None),
        ("a", "b", 401, None),
        ("x", "y", 401, None),
    ],
)
async def test_of_two_keys_the_known_one_counts_and_the_other_is_said(tmp_path, bearer, plain, status, unknown):
    path = tmp_path / "keys"
    write_keys(path, {name: Entry(digest_of(name.encode()), Limits(requests_per_minute=2)) for name in "ab"})
    server, context = build_server(keys=(keys := KeyRing(path))), CallContext()
    context.metadata = [("authorization", f"Bearer {bearer}"), ("x-api-key", plain)]
    async with server.http() as client:
        answer = await client.post("/v1/completions", json={"prompt": "ab"}, headers=context.metadata)
    assert (answer.status_code, answer.headers.get("x-attend-unknown-key")) == (status, unknown)
    await server.methods.Generate(pb.GenerateRequest(text="ab").SerializeToString(), context)
    assert context.code == (StatusCode.UNAUTHENTICATED if status == 401 else None)
    spent = {"a": 2, "b": 0} if status == 200 else {"a": 0, "b": 0}
    assert {name: keys.find_by_name(name).usage.requests.spent for name in "ab"} == spent
    for transport in ("http", "grpc"):
        refused = (
            f'attend_auth_failures_total{{model="fake",transport="{transport}"}} {float(status == 401 or unknown is not None)}'
        )
        assert refused in server.metrics.text()
