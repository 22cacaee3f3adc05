"""A real server whose model two ranks share: it answers as one process does, and is replaced when a rank dies."""

import json
import os
import signal
import urllib.error
import urllib.request
from typing import Any

import grpc
import pytest

from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from tests.service.server import Server, running, wait_for
from tests.service.sse import events, joined, same

pytestmark = pytest.mark.ray

PROMPT = "def fibonacci(n):"
WAYS = ("--backend", "torch", "--dtype", "float32", "--kv-cache-memory", "67108864", "--num-threads", "1")
SAMPLED = {"temperature": 0.8, "seed": 7}


def complete(server: Server, **more) -> str:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 32, "temperature": 0} | more).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]


def answers(server: Server) -> list[str]:
    """Over both transports, greedy and drawn."""
    with grpc.insecure_channel(server.target) as channel:
        ask = pb.GenerateRequest(text=PROMPT, max_tokens=32, temperature=0)
        over_grpc = GenerationServiceStub(channel).Generate(ask, timeout=60).outputs[0].text
    return [complete(server), over_grpc, complete(server, **SAMPLED), complete(server, **SAMPLED, top_p=0.9)]


def streamed(server: Server, **more) -> list[Any]:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 32, "stream": True, "logprobs": 0} | SAMPLED | more).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/completions", body, headers), timeout=60) as answer:
        return events(answer.read())


def check_cuts(server: Server) -> None:
    """A stream that is cut goes on as the uncut one, by its tokens."""
    documents = streamed(server, return_token_ids=True)
    for place in (1, len(documents) // 2, len(documents) - 1):
        before = documents[:place]
        tokens = [token for document in before for token in document["choices"][0]["token_ids"]]
        if before[-1]["choices"][0]["finish_reason"] is None:
            rest = streamed(server, return_token_ids=True, resume_token_ids=tokens)
            rest[0]["choices"][0].pop("prompt_token_ids")
            assert same(joined([*before, *rest]), joined(documents), bits=False), place


def unexplained(server: Server) -> list[str]:
    """What is said over both transports to who wants a text explained."""
    request = urllib.request.Request(f"{server.url}/v1/attention", b'{"prompt": "a"}', {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as over_http:
        urllib.request.urlopen(request, timeout=60)
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as over_grpc:
        GenerationServiceStub(channel).Explain(pb.ExplainRequest(text="a"), timeout=60)
    return [over_http.value.read().decode(), over_grpc.value.details()]


@pytest.mark.long
def test_ranks_answer_as_one_process_and_a_dead_one_is_replaced(tmp_path):
    with running(tmp_path / "one", "--single", *WAYS) as server:
        wanted = answers(server)
    with running(tmp_path / "two", "--tensor-parallel", "2", *WAYS) as server:
        assert "2 ranks" in server.output()
        assert answers(server) == wanted
        check_cuts(server)
        assert all("tensor_parallel" in refusal for refusal in unexplained(server))

        rank = server.pid_of("ray::Rank")
        os.kill(rank, signal.SIGKILL)

        def answers_again() -> bool:
            try:
                return server.pid_of("ray::Rank") != rank and complete(server) == wanted[0]
            except (AssertionError, OSError):
                return False

        assert wait_for(answers_again, 120)
    assert server.processes() == []


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        pytest.param(["--tensor-parallel", "4"], "6 heads are not divisible by it", marks=pytest.mark.long),
        pytest.param(["--tensor-parallel", "2", "--quantize", "int8"], "quantize is set", marks=pytest.mark.long),
        (["--tensor-parallel", "2", "--single"], "tensor_parallel = 2 needs Ray"),
    ],
)
def test_what_ranks_cannot_share_is_one_sentence_and_the_status_2(flags, why, tmp_path):
    server = Server(tmp_path / "log", *flags)
    assert server.process.wait(150) == 2
    assert why in server.output() and "Traceback" not in server.output()
    assert server.processes() == []
