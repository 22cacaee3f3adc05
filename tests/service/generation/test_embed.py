"""POST /v1/embeddings and gRPC Embed: the same vectors on both, of length 1, in the order of the texts."""

import base64
import struct
import time
from array import array
from dataclasses import replace
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import torch

from attend.model.engine.build import build_engine
from attend.model.engine.engine import Engine
from attend.model.engine.loop import AsyncEngine
from attend.model.engine.options import EngineOptions
from attend.model.engine.scheduler import Scheduler
from attend.model.pooling import NO_EMBEDDINGS, EmbeddingRules, Pooling, read_rules
from attend.service.access.quota import Limits
from attend.service.records import MAX_INPUTS
from attend.v1 import generation_pb2 as pb
from tests.fakes import FakeEngine, Server, build_server, info
from tests.model.checkpoints import their_model, write_checkpoint
from tests.model.engine.machines import Done, FakeRunner, sizes
from tests.model.engine.machines import info as machine_info
from tests.model.test_pooling import modes, written
from tests.wire.exchange import SECRET, serve


def unit(*numbers: float) -> list[float]:
    return [number / sum(each * each for each in numbers) ** 0.5 for number in numbers]


def post(server: Server, **body: Any) -> httpx.Response:
    return server.post(body, "/v1/embeddings")


def embed(server: Server, *inputs: pb.EmbedInput, **fields: Any) -> pb.EmbedResponse:
    [response] = server.rpc("Embed", pb.EmbedRequest(inputs=inputs, **fields))
    return response


A, B = unit(97, -98, 2, 3), unit(99, -99, 1, 3)
SHAPES = {
    "a text": ("ab", [A]),
    "texts": (["ab", "c", "ab"], [A, B, A]),
    "token ids": ([97, 98], [A]),
    "lists of token ids": ([[99], [97, 98]], [B, A]),
    "an empty text": ("", [unit(256, -256, 1, 3)]),
}


@pytest.mark.parametrize(("given", "wanted"), SHAPES.values(), ids=SHAPES)
def test_the_vectors_come_in_the_order_of_the_texts(given, wanted):
    answer = post(build_server(), input=given).json()
    count = sum(2 if vector == A else 1 for vector in wanted)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (answer["object"], answer["model"]) == ("list", "fake")
    assert [(each["object"], each["index"]) for each in answer["data"]] == [("embedding", at) for at in range(len(wanted))]
    assert [each["embedding"] for each in answer["data"]] == [pytest.approx(each) for each in wanted]


def test_both_transports_give_the_same_vectors():
    over_http = post(build_server(), input=["ab", "c"], dimensions=3).json()
    response = embed(build_server(), pb.EmbedInput(text="ab"), pb.EmbedInput(token_ids={"ids": [99]}), dimensions=3)
    assert [list(each.values) for each in response.embeddings] == [pytest.approx(e["embedding"]) for e in over_http["data"]]
    assert (response.num_prompt_tokens, response.system_fingerprint) == (over_http["usage"]["prompt_tokens"], "fp_fake")


@pytest.mark.parametrize("dimensions", [1, 2, 4])
def test_dimensions_are_the_first_numbers_with_length_one(dimensions):
    [one] = post(build_server(), input="ab", dimensions=dimensions).json()["data"]
    assert one["embedding"] == pytest.approx(unit(*[97, -98, 2, 3][:dimensions]))


def test_base64_is_the_same_numbers_as_little_endian_float32():
    [one] = post(build_server(), input="ab", encoding_format="base64").json()["data"]
    [same] = post(build_server(), input="ab").json()["data"]
    assert struct.unpack("<4f", base64.b64decode(one["embedding"])) == tuple(np.float32(same["embedding"]))


def test_the_pooling_is_the_checkpoints():
    server = build_server(embedding=EmbeddingRules(Pooling.MEAN, None, ""))
    assert post(server, input="ab").json()["data"][0]["embedding"] == pytest.approx(unit(97, -98, 2, 4))
    [request] = server.engine.requests
    assert (request.pooling, request.max_tokens) == (Pooling.MEAN, 0)


REFUSED = {
    "no input": ({}, "input", "required"),
    "no texts": ({"input": []}, "input", "1 to 2048"),
    "too many texts": ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "2048"),
    "no tokens": ({"input": [[]]}, "input", "at least one token id"),
    "an unknown token": ({"input": [257]}, "input", "257"),
    "a text that is too long": ({"input": ["a", "a" * 101]}, "input", "at most 100 tokens; got 101"),
    "token ids beyond the context": ({"input": [97] * 129}, "input", "128 tokens"),
    "too many characters": ({"input": "a" * 20_000}, "input", "20000 characters"),
    "no dimensions": ({"input": "a", "dimensions": 0}, "dimensions", "1 to 4"),
    "too many dimensions": ({"input": "a", "dimensions": 5}, "dimensions", "1 to 4"),
    "another format": ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
    "a mixed list": ({"input": ["a", 3]}, "input", "list"),
    "an unknown model": ({"input": "a", "model": "no"}, "model", "does not exist"),
}


@pytest.mark.parametrize(("body", "param", "words"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_the_field(body, param, words):
    server = build_server()
    answer = post(server, **body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert (error["param"], words in error["message"]) == (param, True), error
    assert not server.engine.requests
    assert server.outcomes() == {("http", "/v1/embeddings", "invalid"): 1}


@pytest.mark.parametrize(
    ("inputs", "fields", "words"),
    [
        ([], {}, "1 to 2048"),
        ([pb.EmbedInput(text="a")] * 2049, {}, "2048"),
        ([pb.EmbedInput()], {}, "text or token_ids"),
        ([pb.EmbedInput(token_ids={})], {}, "at least one token id"),
        ([pb.EmbedInput(token_ids={"ids": [97] * 129})], {}, "128 tokens"),
        ([pb.EmbedInput(text="a")], {"dimensions": 5}, "1 to 4"),
    ],
)
def test_a_refusal_over_grpc_is_an_invalid_argument(inputs, fields, words):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        embed(build_server(), *inputs, **fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in caught.value.details()


def test_a_checkpoint_without_pooling_says_why_and_serves_text():
    server = build_server(embedding=NO_EMBEDDINGS)
    answer = post(server, input="a")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "no modules.json" in answer.json()["error"]["message"]
    with pytest.raises(grpc.aio.AioRpcError, match=r"no modules\.json"):
        embed(server, pb.EmbedInput(text="a"))
    assert server.post({"prompt": "a"}).status_code == 200


def test_a_call_is_counted_with_its_tokens_and_has_no_answer():
    server = build_server()
    post(server, input=["ab", "c"])
    embed(server, pb.EmbedInput(text="ab"))
    assert server.outcomes() == {("http", "/v1/embeddings", "stop"): 1, ("grpc", "Embed", "stop"): 1}
    assert server.value("attend_prompt_tokens_total") == 5
    assert server.value("attend_generation_tokens_total") == 0


def test_a_key_pays_for_the_tokens_of_its_texts(tmp_path):
    server = serve(FakeEngine(), Limits(tokens_per_minute=4), None, tmp_path)
    asked = {"path": "/v1/embeddings", "headers": {"authorization": f"Bearer {SECRET}"}}
    assert [server.post({"input": ["ab", "c"]}, **asked).status_code for _ in range(2)] == [200, 429]


MANY = ["ab", "c"] * (MAX_INPUTS // 2)


class Watched(FakeEngine):
    """Keeps how many requests each call has, and may have in the engine at a time."""

    def generate(self, requests, at_once=None):
        self.shares = [*getattr(self, "shares", []), (len(requests), at_once)]
        return super().generate(requests, at_once)


def test_a_call_of_thousands_of_texts_is_answered_over_both_transports():
    server = build_server(Watched())
    over_http = post(server, input=MANY).json()
    assert over_http["usage"]["prompt_tokens"] == len(MANY) // 2 * 3
    assert [each["embedding"] for each in over_http["data"][-2:]] == [pytest.approx(A), pytest.approx(B)]
    response = embed(server, *(pb.EmbedInput(text=text) for text in MANY))
    assert [list(each.values) for each in response.embeddings[-2:]] == [pytest.approx(A), pytest.approx(B)]
    assert server.engine.shares == [(len(MANY), 32)] * 2
    assert server.outcomes() == {("http", "/v1/embeddings", "stop"): 1, ("grpc", "Embed", "stop"): 1}


def test_texts_of_300000_tokens_are_taken_and_one_more_is_refused():
    server = build_server(FakeEngine(info=info(max_model_len=1000)), embedding=EmbeddingRules(Pooling.LAST, None, ""))
    whole = post(server, input=[[97] * 500] * 600)
    assert (whole.status_code, whole.json()["usage"]["prompt_tokens"]) == (200, 300_000)
    refused = post(server, input=[*[[97] * 500] * 600, [97]]).json()["error"]
    assert (refused["param"], "at most 300000 tokens in all; got 300001" in refused["message"]) == ("input", True)
    over_grpc = [pb.EmbedInput(token_ids={"ids": [97] * 500})] * 601
    with pytest.raises(grpc.aio.AioRpcError, match="at most 300000 tokens in all; got 300500"):
        embed(server, *over_grpc)


def test_300000_token_ids_of_six_digits_fit_into_a_body():
    facts = {"max_model_len": 1000, "vocab_size": 10**6}
    server = build_server(FakeEngine(info=info(**facts)), embedding=EmbeddingRules(Pooling.LAST, None, ""))
    sent = b'{"input": [%s]}' % b", ".join([b"[%s]" % b", ".join([b"123456"] * 500)] * 600)
    assert len(sent) > 2 << 20
    assert server.post(sent, "/v1/embeddings").status_code == 200


def test_a_server_whose_vectors_are_long_takes_as_many_texts_as_it_may_hold_vectors(monkeypatch):
    monkeypatch.setattr("attend.service.generation.embed.MAX_VECTORS", 3 * 4)
    error = post(build_server(), input=["a"] * 4).json()["error"]
    assert (error["param"], "1 to 3 texts" in error["message"]) == ("input", True)


def test_a_key_has_as_many_texts_in_the_engine_as_it_may_have_answers(tmp_path):
    engine = Watched()
    server = serve(engine, Limits(concurrent=3), None, tmp_path)
    found = server.post({"input": MANY}, "/v1/embeddings", headers={"authorization": f"Bearer {SECRET}"}).status_code
    assert (found, engine.shares) == (200, [(len(MANY), 3)])


class Partly(FakeEngine):
    """An engine that makes one vector, and no more in time."""

    def _advance(self, request, steps):
        return super()._advance(request, 1 if request.request_id.endswith("-0") else 0)


def test_a_deadline_that_passes_before_the_last_vector_is_an_error():
    server = build_server(Partly())
    answer = post(server, input=["a", "b"], deadline_ms=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert server.outcomes() == {("http", "/v1/embeddings", "deadline"): 1}
    assert not server.engine.open


class Slow(FakeRunner):
    """A step takes 20 ms."""

    def submit(self, step):
        time.sleep(0.02)
        done = super().submit(step)
        sums = {asked.request_id: array("d", [1.0] * 4) for asked in step.hidden_sums}
        return Done(replace(done.outcome, hidden_sums=sums))


def test_a_deadline_passes_between_the_parts_of_a_call():
    """Those that are not in the engine yet count too."""
    config = sizes(max_batch_requests=8)
    inner = Engine(Scheduler(config, time.monotonic), Slow(config.block_size), time.monotonic)
    engine = AsyncEngine(inner, replace(machine_info(config), vocab_size=257, max_queued_requests=64), clock=time.monotonic)
    engine.start()
    try:
        began = time.monotonic()
        answer = post(build_server(engine), input=[[1, 2, 3]] * 400, deadline_ms=150)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert time.monotonic() - began < 1.5, "400 texts, 4 a step, take 2 s"
    finally:
        engine.close()


def test_vectors_hold_their_places_until_they_are_written(monkeypatch):
    """More than there are places for is refused, and the places come back."""
    monkeypatch.setattr("attend.service.generation.generation.MAX_VECTORS", 8)
    server = build_server()
    assert [post(server, input=["a"] * count).status_code for count in (2, 3, 2)] == [200, 429, 200]
    assert server.service._vectors.num_held == 0


@pytest.mark.parametrize(("pooling", "mode"), [("last", "lasttoken"), ("mean", "mean_tokens")])
def test_a_served_checkpoint_gives_the_vectors_of_transformers(tmp_path, pooling, mode):
    """From its files to the answer, in chunks, through the step thread; every block is free afterwards."""
    folder = write_checkpoint("qwen3", tmp_path)
    written(folder, pooling=modes(mode))
    texts = [[5, 17, 80, 3], [*range(8, 60)], [44]]
    theirs = [their_model(folder).model(torch.tensor([text])).last_hidden_state[0].detach() for text in texts]
    wanted = [hidden_TE[-1] if pooling == "last" else hidden_TE.mean(dim=0) for hidden_TE in theirs]
    options = EngineOptions(device="cpu", dtype="float32", backend="torch", max_batch_tokens=16, kv_cache_memory=1 << 22)
    engine = build_engine(folder, options)
    engine.start()
    try:
        server = build_server(engine, embedding=read_rules(folder))
        answer = post(server, input=texts).json()
        assert server.post({"prompt": texts[0]}).status_code == 200
        assert engine.stats().num_free_blocks == engine.info.num_blocks
    finally:
        engine.close()
    assert answer["usage"]["prompt_tokens"] == 57
    for found, hidden_E in zip(answer["data"], wanted, strict=True):
        assert np.abs(np.array(found["embedding"]) - (hidden_E / hidden_E.norm()).numpy()).max() < 1e-5
