"""Prefix-aware routing with real replicas: what their prefix caches have, how even their load is, and one that dies."""

import json
import os
import random
import re
import signal
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from tests.service.server import Server, running, wait_for

pytestmark = pytest.mark.ray

NUM_CONVERSATIONS, NUM_TURNS, AT_ONCE = 50, 4, 5
SYSTEM = "You answer questions about programs. " * 10


def texts_of(kind: str, number: int, turns: int) -> list[str]:
    """What is said before the answer of a conversation's turn, beginning with what its user asks."""
    first = f"Conversation {number} by {kind}. " + " ".join(f"def f{number}_{line}(x): return x" for line in range(60))
    return [first, *(f"Part {part} of conversation {number} says this and that." for part in range(2 * turns))]


def said(texts: list[str]) -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    return [{"role": "system", "content": SYSTEM}, *turns]


def post(server: Server, path: str, **fields: object) -> None:
    body = json.dumps({"max_tokens": 4, "temperature": 0} | fields).encode()
    request = urllib.request.Request(server.url + path, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["choices"]


def by_chat(server: Server, texts: list[str]) -> None:
    post(server, "/v1/chat/completions", messages=said(texts))


def by_completions(server: Server, texts: list[str]) -> None:
    post(server, "/v1/completions", prompt="\n".join(texts))


def by_grpc(server: Server, texts: list[str]) -> None:
    with grpc.insecure_channel(server.target) as channel:
        messages = [pb.ChatMessage(**turn) for turn in said(texts)]
        GenerationServiceStub(channel).Chat(pb.ChatRequest(messages=messages, max_tokens=4, temperature=0), timeout=60)


KINDS: dict[str, Callable[[Server, list[str]], None]] = {"chat": by_chat, "completions": by_completions, "grpc": by_grpc}


def converse(server: Server, kind: str, turns: range = range(NUM_TURNS)) -> None:
    """All conversations, turn by turn; of each turn the conversations in another order."""
    order = list(range(NUM_CONVERSATIONS))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for turn in turns:
            random.Random(turn).shuffle(order)
            for done in [pool.submit(KINDS[kind], server, texts_of(kind, number, turn)) for number in order]:
                done.result()


def counted(server: Server) -> dict[str, tuple[float, float, float]]:
    """(queries, hits, calls) of each replica: of its prefix cache in tokens."""
    page = server.metrics()
    names = ("attend_prefix_cache_queries_total", "attend_prefix_cache_hits_total", "attend_requests_total")
    found: dict[str, list[float]] = {}
    for place, name in enumerate(names):
        for labels, value in re.findall(rf"^{name}\{{(.*?)\}} (\S+)$", page, re.MULTILINE):
            replica = (re.findall(r'replica="(\w+)"', labels) or ["one"])[0]
            found.setdefault(replica, [0.0, 0.0, 0.0])[place] += float(value)
    return {replica: (values[0], values[1], values[2]) for replica, values in found.items()}


def measured(server: Server, kind: str) -> tuple[float, dict[str, float]]:
    """(hit rate, calls of each replica) of all conversations."""
    before = counted(server)
    converse(server, kind)
    after = counted(server)
    spans = {name: [new - old for new, old in zip(after[name], before.get(name, (0, 0, 0)), strict=True)] for name in after}
    queries, hits, calls = (sum(column) for column in zip(*spans.values(), strict=True))
    assert calls == NUM_CONVERSATIONS * NUM_TURNS
    return hits / queries, {name: span[2] for name, span in spans.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One replica, which has every prefix."""
    with running(
        tmp_path_factory.mktemp("alone") / "log", "--single", "--num-threads", "1", "--kv-cache-memory", "256MiB"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(
        tmp_path_factory.mktemp("replicated") / "log", "--replicas", "2", "--num-threads", "1", "--kv-cache-memory", "256MiB"
    ) as server:
        yield server


def test_two_replicas_find_what_one_finds_and_share_the_load(alone, replicated):
    calls: Counter[str] = Counter()
    for kind in KINDS:
        of_one, _ = measured(alone, kind)
        of_two, shares = measured(replicated, kind)
        assert of_two >= 0.9 * of_one
        calls.update(shares)
    assert len(calls) == 2 and max(calls.values()) <= 1.3 * calls.total() / 2


def test_conversations_of_a_replica_that_is_killed_go_on(replicated):
    converse(replicated, "chat", range(2))
    before = replicated.replicas()
    os.kill(replicated.pid_of("ray::ServeReplica"), signal.SIGKILL)
    converse(replicated, "chat", range(2, NUM_TURNS))
    assert wait_for(lambda: len(replicated.replicas() - before) == 1, 120)
    converse(replicated, "chat", range(2, NUM_TURNS))
