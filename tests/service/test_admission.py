"""One caller against the others: a key pays before anything is worked out for it, and for what it was given in the end; and no
more than its share of the server is prepared for it at a time."""

import asyncio
import json
import threading
from contextlib import aclosing

import pytest

from attend.model.errors import InvalidRequest, Overloaded, RateLimited
from attend.model.params import SamplingParams, StopRules
from attend.model.text.caller_marks import ChatText
from attend.model.text.chat import ChatTemplate
from attend.model.text.grammar import GrammarCompiler, GrammarSpec
from attend.model.text.tokenizer import Tokenizer
from attend.service.access.caller import Caller
from attend.service.access.keys import Entry, KeyRing, digest_of, write_keys
from attend.service.access.quota import Limits
from attend.service.generation.thread_pools import FairSemaphore
from attend.service.http_api import body
from attend.service.records import Arrival, Command
from attend.v1 import generation_pb2 as pb
from tests.fakes import CallContext, FakeEngine, Server, build_server, until
from tests.service.bad_calls import asgi, grpc_bytes, whole_server
from tests.service.http_api.described import LEAST

HEADER = {"authorization": "Bearer att_ci"}
METADATA = (("authorization", "Bearer att_ci"),)


@pytest.fixture
def ring(tmp_path):
    """Makes a ring of the keys `ci` and `other` whose minute never passes; the limits are those of `ci`."""

    def make(**limits: int) -> KeyRing:
        path = tmp_path / "keys"
        write_keys(path, {"ci": Entry(digest_of(b"att_ci"), Limits(**limits)), "other": Entry(digest_of(b"att_other"))})
        return KeyRing(path, lambda: 0.0)

    return make


def ci(keys: KeyRing, name: str = "ci"):
    return keys.authenticate(f"Bearer att_{name}")


def command(key, *prompts, n: int = 1, grammar=None, **rules) -> Command:
    more = {name: rules.pop(name) for name in {"prompt_logprobs", "echo"} & rules.keys()}
    stops = StopRules(**{"max_tokens": 4} | rules)
    given = {"sampling": SamplingParams(seed=1), "request_id": "test", "n": n, "grammar": grammar}
    given["arrival"] = Arrival(Caller(key).turn)
    return Command(prompts=prompts or ("a",), stops=stops, caller=Caller(key), **given, **more)


async def answered(server: Server, asked: Command, most: int = 1000) -> int:
    """Take so many deliveries of a call and leave; how many there were."""
    taken, record = 0, server.metrics.open("http", "/v1/completions")
    async with asyncio.timeout(20), aclosing(server.service.generate(asked, record, adapter=None)) as batches:
        async for _ in batches:
            taken += 1
            if taken == most:
                break
    return taken


# Before anything is worked out

ROUTES = LEAST | {
    "Generate": pb.GenerateRequest(text="a"),
    "GenerateStream": pb.GenerateRequest(text="a"),
    "Chat": pb.ChatRequest(messages=[{"role": "user", "content": "a"}]),
    "ChatStream": pb.ChatRequest(messages=[{"role": "user", "content": "a"}]),
    "Embed": pb.EmbedRequest(inputs=[{"text": "a"}]),
    "Tokenize": pb.TokenizeRequest(text="a"),
    "Detokenize": pb.DetokenizeRequest(token_ids=[97]),
}


def ask(server: Server, route: str) -> str:
    """One call, and how it went: an HTTP status, or the name of a gRPC code."""
    sent = ROUTES[route]
    if isinstance(sent, dict):
        return str(asyncio.run(asgi(server, route, json.dumps(sent).encode(), HEADER)).status)
    return code_of(asyncio.run(grpc_bytes(server, route, sent.SerializeToString(), METADATA)))


def code_of(context: CallContext) -> str:
    return "OK" if context.code is None else context.code.name


@pytest.mark.parametrize("route", ROUTES)
def test_a_key_that_has_reached_its_limit_is_refused_before_its_call_is_read(ring, monkeypatch, route):
    server, worked = whole_server(keys=ring(requests_per_minute=1)), []
    assert ask(server, route) in ("200", "OK")
    for place, name in ((body, "parse_json"), (Tokenizer, "encode"), (Tokenizer, "decode"), (ChatTemplate, "render")):
        monkeypatch.setattr(place, name, lambda *_, name=name, **__: worked.append(name))
    monkeypatch.setattr("attend.service.grpc_api.servicer.to_command", lambda *_: worked.append("to_command"))
    assert ask(server, route) in ("429", "RESOURCE_EXHAUSTED")
    assert worked == []


@pytest.mark.parametrize("route", ROUTES)
def test_a_key_whose_places_are_taken_is_refused_before_its_call_is_read(ring, monkeypatch, route):
    keys = ring(concurrent=2)
    server = whole_server(keys=keys)
    monkeypatch.setattr(body, "parse_json", None)
    with ci(keys).admit(2):
        assert ask(server, route) in ("429", "RESOURCE_EXHAUSTED")


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"max_tokens": 60}, RateLimited),
        ({"max_tokens": 101}, InvalidRequest),
        ({"max_tokens": None}, InvalidRequest),
        ({"max_tokens": 11, "n": 8}, RateLimited),
    ],
)
def test_a_call_that_cannot_have_its_tokens_is_refused_before_it_is_tokenized_or_compiled(ring, monkeypatch, asked, error):
    caller = ci(ring(tokens_per_minute=100))
    caller.charge(50)
    worked = []
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: worked.append("encode"))
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *_: worked.append("compile"))
    with pytest.raises(error, match="tokens_per_minute"):
        asyncio.run(answered(build_server(), command(caller, grammar=GrammarSpec("regex", "a*"), **asked)))
    assert worked == []
    assert (caller.usage.running, caller.usage.tokens.spent) == (0, 50)


async def test_concurrent_counts_answers_and_frees_them_when_their_call_ends(ring):
    caller, engine = ci(ring(concurrent=8)), FakeEngine(held=True)

    server = build_server(engine)
    running = asyncio.create_task(answered(server, command(caller, "a", "b", n=3)))
    await until(lambda: len(engine.open) == 6)
    assert caller.usage.running == 6
    with pytest.raises(RateLimited, match="concurrent = 8"):
        await answered(server, command(caller, n=3))
    with pytest.raises(InvalidRequest, match="at most 8, the limit concurrent of API key 'ci'; got 9"):
        await answered(server, command(caller, "a", "b", "c", n=3))
    engine.release(4)
    await running
    assert caller.usage.running == 0


async def test_one_key_cannot_take_all_places_of_preparation_and_callers_without_keys_share_them(ring, monkeypatch):
    keys = ring()

    server, never = build_server(), asyncio.Event()
    monkeypatch.setattr(server.service.preparation, "answers", lambda command: never.wait())
    counts = []
    for caller in (ci(keys), ci(keys, "other"), None):
        calls = [asyncio.create_task(answered(server, command(caller))) for _ in range(400)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        refused = [call for call in calls if call.done()]
        assert {type(call.exception()) for call in refused} == {Overloaded}
        counts.append(len(calls) - len(refused))
    found = counts
    assert found == [80, 60, 180]


def test_the_first_grammar_of_a_key_does_not_wait_for_all_grammars_of_another(ring, monkeypatch):
    keys, gate, compiled = ring(), threading.Event(), []

    def compile_slowly(_, spec):
        gate.wait(20)
        compiled.append(spec.text)
        raise InvalidRequest("no grammar", "regex")

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)

    async def run():
        server, slow = build_server(), [GrammarSpec("regex", f"greedy{n}") for n in range(8)]
        calls = [asyncio.create_task(answered(server, command(ci(keys), grammar=spec))) for spec in slow]
        await asyncio.sleep(0)
        calls.append(asyncio.create_task(answered(server, command(ci(keys, "other"), grammar=GrammarSpec("regex", "other")))))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(run())
    assert len(compiled) == 9
    assert compiled.index("other") <= 4, (
        "two that had begun, one turn of the other key, and what a second thread does meanwhile"
    )


async def test_a_conversation_is_rendered_within_the_bounds_of_preparation(ring, monkeypatch):
    """Where a template takes its time, a deadline passes, and a place is held."""
    server, gate = whole_server(), threading.Event()
    server.service._preparing = FairSemaphore(1, "requests are being prepared")
    monkeypatch.setattr(ChatTemplate, "write", lambda *_, **__: gate.wait(20) and ChatText("a"))
    sent = json.dumps(ROUTES["/v1/chat/completions"] | {"deadline_ms": 1500}).encode()

    first = asyncio.create_task(asgi(server, "/v1/chat/completions", sent))
    await until(lambda: server.service._preparing._held)
    second = await asgi(server, "/v1/chat/completions", sent)
    found = (await first).status, second.status
    assert found == (504, 429)
    gate.set()


async def test_log_probabilities_of_prompts_are_bounded_over_all_calls_together(ring):
    engine, keys = FakeEngine(held=True), ring()

    server = build_server(engine)
    server.service._scores = FairSemaphore(24, "log probabilities are being computed")
    asked = {"prompt_logprobs": 1, "max_tokens": 1}
    running = asyncio.create_task(answered(server, command(None, "abcde", n=2, **asked)))  # 20 of them
    await until(lambda: engine.open)
    with pytest.raises(Overloaded, match="20 log probabilities are being computed already"):
        await answered(server, command(ci(keys), "abc", **asked))
    engine.release(3)
    await running
    engine.release(3)
    assert await answered(server, command(ci(keys), "abc", **asked)) == 1
