"""The wider contract on a real server: chat, token routes, structured output, log probabilities, resuming, API keys."""

import concurrent.futures
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import openai
import pytest

from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc
from tests.service.server import Server, running, wait_for

pytestmark = pytest.mark.ray

PROMPT = "def fibonacci(n):"


def call(server: Server, path: str, key: str = "", **body: object) -> tuple[int, dict]:
    """(status, document) of a POST."""
    status, _, document = server.post(path, key, **body)
    return status, document


def complete(server: Server, **body: object) -> dict:
    status, document = call(server, "/v1/completions", **{"prompt": PROMPT, "temperature": 0, **body})
    assert status == 200, document
    return document["choices"][0]


def stub(server: Server) -> rpc.GenerationServiceStub:
    return rpc.GenerationServiceStub(grpc.insecure_channel(server.target))


def test_the_openai_client_chats_and_streams_the_same_text(server: Server) -> None:
    ask = {"model": "attend-default", "messages": [{"role": "user", "content": "def add(a, b):"}], "max_tokens": 12}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(**ask, temperature=0, logprobs=True, top_logprobs=2)
        chunks = list(client.chat.completions.create(**ask, temperature=0, stream=True))
    assert whole.choices[0].message.content == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens


def test_tokens_travel_both_ways_on_both_transports(server: Server) -> None:
    tokens = call(server, "/tokenize", prompt=PROMPT)[1]["tokens"]
    assert tokens == list(stub(server).Tokenize(pb.TokenizeRequest(text=PROMPT), timeout=30).token_ids)
    assert call(server, "/detokenize", tokens=tokens)[1] == {"prompt": PROMPT}
    assert stub(server).Detokenize(pb.DetokenizeRequest(token_ids=tokens), timeout=30).text == PROMPT
    assert json.loads(server.get("/tokenizer_info")[1])["eos_token"] == "<|endoftext|>"
    assert stub(server).GetServerInfo(pb.GetServerInfoRequest(), timeout=30).max_model_len == 1024


@pytest.mark.parametrize("seed", range(4))
def test_constrained_answers_obey_on_both_transports(server: Server, seed: int) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    drawn = {"temperature": 1, "seed": seed, "max_tokens": 400}
    choice = complete(server, structured_outputs={"json": schema}, **drawn)
    request = pb.GenerateRequest(text=PROMPT, max_tokens=400, temperature=1, sampling=pb.SamplingParameters(seed=seed))
    request.decoding.json_schema = json.dumps(schema)
    output = stub(server).Generate(request, timeout=60).outputs[0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["text"])["ok"], bool)
    assert choice["text"] == output.text


def test_a_constrained_neighbour_changes_nothing(server: Server) -> None:
    alone = complete(server, max_tokens=32)["text"]
    asks = [{"max_tokens": 32}, {"max_tokens": 32, "structured_outputs": {"regex": "[a-c]{5}"}}]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        free, bound = pool.map(lambda ask: complete(server, **ask)["text"], asks)
    assert free == alone
    assert len(bound) == 5


def test_a_grammar_that_is_wrong_is_a_400_that_says_where(server: Server) -> None:
    status, document = call(server, "/v1/completions", prompt="x", structured_outputs={"regex": "(a"})
    assert (status, document["error"]["param"]) == (400, "structured_outputs.regex")
    assert "character 1" in document["error"]["message"]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 7, "ignore_eos": True}])
def test_an_answer_goes_on_after_the_tokens_received(server: Server, sampling: dict) -> None:
    whole = complete(server, max_tokens=12, return_token_ids=True, **sampling)
    for kept in (1, 5, 11):
        rest = complete(server, max_tokens=12, return_token_ids=True, resume_token_ids=whole["token_ids"][:kept], **sampling)
        assert whole["token_ids"][kept:] == rest["token_ids"]
        assert whole["text"].endswith(rest["text"])


def test_echoed_log_probabilities_lie_at_their_offsets(server: Server) -> None:
    choice = complete(server, max_tokens=4, echo=True, logprobs=2)
    lists = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert lists["token_logprobs"][0] is None
    edges = [*lists["text_offset"], len(choice["text"])]
    assert lists["tokens"] == [choice["text"][start:end] for start, end in itertools.pairwise(edges)]


class Guarded(NamedTuple):
    """A server with two API keys."""

    server: Server
    key: str
    """May make three requests a minute."""
    free: str
    """Has no limit."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server that asks for a key. Its last tests kill a replica, then all of it."""
    file = tmp_path_factory.mktemp("keys") / "keys.json"

    def add(name: str, *limits: str) -> str:
        command = [sys.executable, "-m", "attend.service.commands.cli", "keys", "add", name, "--file", str(file), *limits]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    key, free = add("tester", "--requests-per-minute", "3"), add("free")
    with running(Path(tmp_path_factory.mktemp("guarded") / "log"), "--api-keys-file", str(file)) as server:
        yield Guarded(server, key, free)


def test_without_its_key_nothing_but_health_is_open(guarded: Guarded) -> None:
    server, key, _ = guarded
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        status, document = call(server, path, key=key[:-1], prompt="x")
        assert (status, document["error"]["code"]) == (401, "invalid_api_key")
        assert key[:-1] not in document["error"]["message"]
    assert server.get("/v1/models")[0] == 401
    assert server.get("/openapi.json")[0] == 401
    assert [server.get(path)[0] for path in ("/healthz", "/readyz", "/metrics", "/version", "/", "/docs")] == [200] * 6
    with pytest.raises(grpc.RpcError) as caught:
        stub(server).Generate(pb.GenerateRequest(text="x"), timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_one_keys_limit_counts_over_both_transports(guarded: Guarded) -> None:
    server, key, _ = guarded
    request = pb.GenerateRequest(text="x", max_tokens=1)
    metadata = [("authorization", f"Bearer {key}")]
    assert call(server, "/v1/completions", key=key, prompt="x", max_tokens=1)[0] == 200
    for _ in range(2):
        stub(server).Generate(request, metadata=metadata, timeout=30)
    status, document = call(server, "/v1/completions", key=key, prompt="x", max_tokens=1)
    with pytest.raises(grpc.RpcError) as caught:
        stub(server).Generate(request, metadata=metadata, timeout=30)
    assert (status, document["error"]["code"]) == (429, "rate_limit_exceeded")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_replica_that_dies_under_a_call_gives_an_error_to_try_again_on_both_transports(guarded: Guarded) -> None:
    server, _, key = guarded
    long = pb.GenerateRequest(text=PROMPT, max_tokens=900, stopping=pb.StoppingCriteria(ignore_eos=True))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        refused = pool.submit(server.post, "/v1/completions", key, prompt=PROMPT, max_tokens=900, ignore_eos=True)
        call = stub(server).Generate.future(long, metadata=[("authorization", f"Bearer {key}")], timeout=60)
        assert wait_for(lambda: server.metric("attend_requests_running") == 2)
        os.kill(server.pid_of("ray::ServeReplica"), signal.SIGKILL)
        status, headers, document = refused.result()
        assert (status, headers["retry-after"]) == (503, "1")
        assert set(document["error"]) == {"message", "type", "param", "code"}
        assert document["error"]["type"] == "unavailable_error"
        assert call.exception(30).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def test_a_server_whose_first_process_is_killed_leaves_no_process(guarded: Guarded) -> None:
    """The last test of this server. Without the supervisor, HAProxy would keep the ports and answer 500 for ever."""
    server = guarded.server
    assert wait_for(lambda: ready(server), 60), "the replica that was killed is not replaced"
    os.kill(server.pid_of("attend.service.commands.cli"), signal.SIGKILL)
    assert wait_for(lambda: server.processes() == [], 60), server.processes()


def ready(server: Server) -> bool:
    """True if a replica takes calls; while one is replaced, a connection may end without an answer."""
    with contextlib.suppress(OSError):
        return server.get("/readyz")[0] == 200
    return False
