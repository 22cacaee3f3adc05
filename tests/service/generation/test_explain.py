"""POST /v1/attention and gRPC Explain: the same numbers on both, refusals by name, and a price for each call."""

import asyncio
import json
from contextlib import ExitStack
from dataclasses import replace

import grpc
import pytest
from pydantic import TypeAdapter

from attend.model.engine.request import EngineStats
from attend.service.access.keys import Entry, KeyRing, digest_of, write_keys
from attend.service.access.quota import Limits
from attend.service.contract.texts import Attention
from attend.service.generation.explain import MAX_CALLS
from attend.service.http_api.attention import AttentionWriter
from attend.service.http_api.json_pieces import json_pieces
from attend.service.records import MAX_NUMBERS, ExplainCommand
from attend.v1 import generation_pb2 as pb
from tests.explainer import ENTROPY, SINK
from tests.fakes import INFO, MODEL, FakeEngine, Server, build_server, until
from tests.service.bad_calls import whole_server

SECRET = "att_secret"
BEARER = {"authorization": f"Bearer {SECRET}"}


def ask(server: Server, body: dict, **headers: str):
    return server.post(body, "/v1/attention", headers=headers)


def told(server: Server, body: dict) -> dict:
    answer = ask(server, body)
    assert answer.status_code == 200, answer.text
    TypeAdapter(Attention).validate_json(answer.content)
    return answer.json()


def explain(server: Server, request: pb.ExplainRequest) -> pb.ExplainResponse:
    [response] = server.rpc("Explain", request)
    return response


def ring(folder, **limits: int) -> KeyRing:
    write_keys(folder / "keys.json", {"ci": Entry(digest_of(SECRET.encode()), Limits(**limits))})
    return KeyRing(folder / "keys.json", lambda: 1000.0)


def test_an_answer_tells_tokens_weights_and_what_was_expected():
    found = told(build_server(), {"prompt": "ab", "answer": "c", "top_logprobs": 2, "logit_lens": 1, "scores": True})
    assert (found["num_layers"], found["num_heads"], found["num_prompt_tokens"]) == (3, 2, 2)
    assert [(token["id"], token["token"], token["logprob"]) for token in found["tokens"]] == [
        (97, "a", None), (98, "b", -2.5), (99, "c", -3.5),
    ]  # fmt: skip
    assert found["tokens"][0]["top_logprobs"] is None
    assert found["tokens"][1]["top_logprobs"] == [
        {"id": 98, "token": "b", "logprob": -0.5},
        {"id": 99, "token": "c", "logprob": -1.5},
    ]
    assert found["next"] == {
        "entropy": ENTROPY,
        "top_logprobs": [{"id": 100, "token": "d", "logprob": -0.5}, {"id": 101, "token": "e", "logprob": -1.5}],
    }
    even, window, state = found["layers"]
    assert even["heads"][1]["weights"] == [[1], [0.5, 0.5], pytest.approx([1 / 3] * 3)]
    assert window["heads"][0]["weights"] == [[1 - SINK], [0.375, 0.375], [0, 0.375, 0.375]]
    assert window["heads"][0]["sinks"] == [SINK] * 3
    assert even["heads"][0]["scores"] == [[0], [0, 1], [0, 1, 2]]
    assert "sinks" not in even["heads"][0]
    assert (window["window"], even["window"], [head["key_value_head"] for head in even["heads"]]) == (2, None, [0, 0])
    assert state == {"layer": 2, "kind": "state", "window": None, "heads": []}
    assert [[place[0]["token"] for place in layer["guesses"]] for layer in found["logit_lens"]] == [
        [*"bcd"],
        [*"cde"],
        [*"def"],
    ]
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}


def test_both_transports_tell_the_same():
    body = {
        "prompt": "abc",
        "answer": [100, 226],
        "layers": [1, 0],
        "heads": [1],
        "scores": True,
        "top_logprobs": 3,
        "logit_lens": 2,
    }
    server = build_server()
    over_http = told(server, body)
    request = pb.ExplainRequest(text="abc", scores=True, top_logprobs=3, logit_lens=2)
    request.answer_token_ids.ids.extend([100, 226])
    request.layers.numbers.extend([1, 0])
    request.heads.numbers.append(1)
    over_grpc = explain(server, request)
    assert server.explaining.explainer.asked[0] == server.explaining.explainer.asked[1]
    assert over_grpc.num_prompt_tokens == over_http["num_prompt_tokens"] == 3
    for theirs, ours in zip(over_grpc.tokens, over_http["tokens"], strict=True):
        assert (theirs.token_id, theirs.token) == (ours["id"], ours["token"])
        assert theirs.HasField("logprob") == theirs.HasField("expected") == (ours["logprob"] is not None)
        if ours["logprob"] is not None:
            assert theirs.logprob == ours["logprob"]
            assert same(theirs.expected.top_logprobs, ours["top_logprobs"])
    assert same(over_grpc.next.top_logprobs, over_http["next"]["top_logprobs"])
    for theirs, ours in zip(over_grpc.layers, over_http["layers"], strict=True):
        assert theirs.layer == ours["layer"]
        assert (theirs.window if theirs.HasField("window") else None) == ours["window"]
        for head, known in zip(theirs.heads, ours["heads"], strict=True):
            assert list(head.weights) == pytest.approx([weight for row in known["weights"] for weight in row])
            assert list(head.scores) == [score for row in known["scores"] for score in row]
            assert list(head.sinks) == known.get("sinks", [])
    for theirs, ours in zip(over_grpc.logit_lens, over_http["logit_lens"], strict=True):
        assert all(same(*pair) for pair in zip(theirs.guesses, ours["guesses"], strict=True))
    assert over_grpc.system_fingerprint == over_http["system_fingerprint"]


def same(theirs: pb.TopLogprobs, ours: list[dict]) -> bool:
    return (list(theirs.token_ids), list(theirs.logprobs)) == ([one["id"] for one in ours], [one["logprob"] for one in ours])


def test_what_is_left_out_is_all_layers_and_heads_five_alternatives_and_no_guesses():
    server = build_server()
    for call in (lambda: told(server, {"prompt": "ab"}), lambda: explain(server, pb.ExplainRequest(text="ab"))):
        call()
    for asked in server.explaining.explainer.asked:
        assert (asked.layers, asked.heads, asked.top, asked.lens, asked.scores) == ((0, 1, 2), (0, 1), 5, 0, False)


BAD = {
    "no prompt": ({}, "prompt", "is required"),
    "two prompts": ({"prompt": ["a", "b"]}, "prompt", "must be"),
    "no tokens": ({"prompt": []}, "prompt", "at least one token id"),
    "an unknown token": ({"prompt": [5, 300]}, "prompt", "integers from 0 to 256; got 300"),
    "an unknown token behind it": ({"prompt": "a", "answer": [-1]}, "answer", "got -1"),
    "a long text": ({"prompt": "a" * 129}, "prompt", "at most 128 tokens; prompt and answer have 129"),
    "a text that cannot be short": ({"prompt": "a" * 20_000}, "prompt", "have more, with 20000 characters"),
    "many ids": ({"prompt": "a", "answer": [1] * 200}, "prompt", "at most 128 tokens"),
    "a layer too high": ({"prompt": "a", "layers": [3]}, "layers", "integers from 0 to 2; got 3"),
    "a layer below": ({"prompt": "a", "layers": [-1]}, "layers", "integers from 0 to 2; got -1"),
    "a layer twice": ({"prompt": "a", "layers": [1, 1]}, "layers", "no number twice"),
    "too many heads": ({"prompt": "a", "heads": [0, 1, 0]}, "heads", "at most 2 numbers; got 3"),
    "a head that is none": ({"prompt": "a", "heads": [0.5]}, "heads", "integer"),
    "scores that are a number": ({"prompt": "a", "scores": 1}, "scores", "boolean"),
    "too many alternatives": ({"prompt": "a", "top_logprobs": 21}, "top_logprobs", "from 0 to 20; got 21"),
    "too many guesses": ({"prompt": "a", "logit_lens": 6}, "logit_lens", "from 0 to 5; got 6"),
    "a deadline of nothing": ({"prompt": "a", "deadline_ms": 0}, "deadline_ms", "from 1 to"),
    "a mistyped field": ({"prompt": "a", "top_logprob": 1}, "top_logprob", "mean top_logprobs"),
    "another model": ({"prompt": "a", "model": "other"}, "model", "does not exist"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_refused_with_the_field_named_and_computes_nothing(name):
    body, field, sentence = BAD[name]
    server = build_server()
    answer = ask(server, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if name == "another model" else 400, field)
    assert sentence in error["message"]
    assert server.explaining.explainer.asked == []
    assert server.outcomes() == {("http", "/v1/attention", "invalid"): 1}


def test_an_answer_of_too_many_numbers_is_refused_before_it_is_computed():
    server = build_server(FakeEngine(info=replace(INFO, max_model_len=4096)))
    length = 512
    each = length * (length + 1) // 2
    assert 6 * each > MAX_NUMBERS > 3 * each
    error = ask(server, {"prompt": [1] * length}).json()["error"]
    assert f"at most {MAX_NUMBERS} numbers" in error["message"]
    assert f"3 layers x 2 heads x {each} numbers of a head are {6 * each}" in error["message"]
    assert server.explaining.explainer.asked == []
    told(server, {"prompt": [1] * length, "layers": [0], "heads": [1]})
    assert ask(server, {"prompt": [1] * (length + 1), "layers": []}).status_code == 400  # 512 tokens, whatever the context


@pytest.mark.parametrize("stats", [EngineStats(3, 1, 10, 0), EngineStats(INFO.max_batch_requests, 0, 10, 0)])
def test_while_the_engine_is_busy_it_is_refused_and_may_be_tried_again(stats, monkeypatch):
    server = build_server()
    monkeypatch.setattr(server.engine, "stats", lambda: stats)
    answer = ask(server, {"prompt": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert server.explaining.explainer.asked == []
    assert server.outcomes() == {("http", "/v1/attention", "rejected"): 1}


def test_a_server_that_drains_refuses_it():
    engine = FakeEngine()
    engine.drain()
    assert ask(build_server(engine), {"prompt": "a"}).status_code == 503


def until_left(between) -> None:
    """Work without an end, but for what is raised between its slices."""
    while True:
        between()


def test_at_its_deadline_a_call_ends_and_so_does_its_work():
    server, ended = build_server(), []

    def work(between) -> None:
        try:
            until_left(between)
        finally:
            ended.append(True)

    server.explaining.explainer.during = work
    answer = ask(server, {"prompt": "a", "deadline_ms": 500})  # long enough that the work has begun, also on a busy machine
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    server.explaining.explainer.during = lambda between: None
    told(server, {"prompt": "a"})  # one thread does the work of all: it is free again
    assert ended == [True]
    assert server.outcomes() == {("http", "/v1/attention", "deadline"): 1, ("http", "/v1/attention", "stop"): 1}


def test_the_served_model_may_be_named_and_an_adapter_not(monkeypatch):
    server = build_server()
    told(server, {"prompt": "ab", "model": MODEL})
    monkeypatch.setattr(server.explaining.service, "find", lambda name: object())
    refused = ask(server, {"prompt": "ab", "model": "polite"})
    assert refused.status_code == 400 and "'polite' is an adapter" in refused.json()["error"]["message"]


async def test_when_its_caller_leaves_its_work_ends():
    server, state = build_server(), []

    def work(between) -> None:
        state.append("begun")
        try:
            until_left(between)
        finally:
            state.append("ended")

    server.explaining.explainer.during = work

    async with server.http() as client:
        call = asyncio.create_task(client.post("/v1/attention", json={"prompt": "a"}))
        await until(lambda: state)
        call.cancel()
        await until(lambda: state == ["begun", "ended"])


async def test_so_many_calls_wait_for_each_other_and_no_more():
    server, begun, go = build_server(), [], []

    def work(between) -> None:
        begun.append(1)
        while not go:
            between()

    server.explaining.explainer.during = work

    async with server.http() as client:
        calls = [asyncio.create_task(client.post("/v1/attention", json={"prompt": "a"})) for _ in range(MAX_CALLS)]
        await until(lambda: begun)
        await until(lambda: server.explaining._places.num_held == MAX_CALLS)
        refused = await client.post("/v1/attention", json={"prompt": "a"})
        assert len(begun) == 1  # one at a time
        go.append(1)
        found = [refused.status_code] + [(await call).status_code for call in calls]
    assert found == [429] + [200] * MAX_CALLS


def test_an_answer_holds_its_place_until_it_is_written():
    server = build_server(FakeEngine(info=replace(INFO, max_model_len=4096)))
    command = ExplainCommand(prompt=(1,) * 400, layers=(0,), request_id="mine")

    async def run() -> None:
        with ExitStack() as held:
            await server.explaining.explain(command, server.metrics.open("http", "/v1/attention"), held)
            assert server.explaining._places.num_held == 1
        assert server.explaining._places.num_held == 0

    asyncio.run(run())
    told(server, {"prompt": [1] * 400, "layers": [0]})
    assert server.explaining._places.num_held == 0


def test_a_key_is_asked_for_and_pays_for_the_text(tmp_path):
    server = whole_server(keys=ring(tmp_path, tokens_per_minute=10))
    assert ask(server, {"prompt": "abcdef"}).status_code == 401
    assert ask(server, {"prompt": "abcd", "answer": "ef"}, **BEARER).status_code == 200
    answer = ask(server, {"prompt": "abcdef"}, **BEARER)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert ask(server, {"prompt": "abcd"}, **BEARER).status_code == 200


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (pb.ExplainRequest(), "input is required"),
        (pb.ExplainRequest(token_ids={"ids": [1] * 600}), "at most 512 tokens; token_ids has 600"),
        (pb.ExplainRequest(text="a", layers={"numbers": [7]}), "from 0 to 2; got 7"),
        (pb.ExplainRequest(text="a", heads={"numbers": [0] * 5000}), "at most 4096 numbers"),
        (pb.ExplainRequest(text="a", logit_lens=9), "from 0 to 5; got 9"),
        (pb.ExplainRequest(text="a", request_id="a b"), "request_id must be"),
    ],
)
def test_a_bad_message_is_an_invalid_argument_with_a_sentence(request_, sentence):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        explain(build_server(), request_)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in refused.value.details()


def test_a_long_answer_is_made_in_pieces_which_together_are_the_answer():
    server = build_server(FakeEngine(info=replace(INFO, max_model_len=4096)))
    command = ExplainCommand(prompt=(1,) * 400, layers=(0,), request_id="mine")
    record = server.metrics.open("http", "/v1/attention")
    explained = asyncio.run(server.explaining.explain(command, record, ExitStack()))
    parts = list(json_pieces(AttentionWriter(server.explaining, explained).full_response()))
    assert len(parts) > 10
    assert max(map(len, parts)) < 256 << 10
    TypeAdapter(Attention).validate_json(b"".join(parts))


def test_the_id_of_a_call_is_in_its_answer():
    assert json.loads(ask(build_server(), {"prompt": "a", "request_id": "mine"}).content)["id"] == "attn-mine"
