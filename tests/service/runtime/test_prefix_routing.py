"""Prefix-aware routing at the edge, before two fake replicas: which one a call reaches."""

import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from attend.v1 import generation_pb2 as pb
from tests.service.runtime.edges import Edge, in_front
from tests.service.server import wait_for

NUM_CONVERSATIONS, NUM_TURNS = 24, 4
SYSTEM = "You are a helpful assistant. " * 200
CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with in_front(tmp_path_factory.mktemp("edge")) as edge:
        yield edge


@pytest.fixture
def edge(started: Edge) -> Edge:
    """The same, with replicas that answer at once."""
    for replica in started.replicas:
        replica.judge = lambda *_: 200
    return started


def said(*texts: str) -> list[dict[str, Any]]:
    """A user's and an assistant's messages in turn."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def in_parts(*texts: str) -> list[dict[str, Any]]:
    """The same, in parts that begin alike."""
    return [turn | {"content": [{"type": "text", "text": "A reminder."}, {"text": turn["content"]}]} for turn in said(*texts)]


def chat(messages: list[dict[str, Any]], **others: Any) -> tuple[str, bytes]:
    return CHAT, json.dumps({"messages": messages, "model": "m"} | others).encode()


def grpc_chat(messages: list[dict[str, Any]]) -> tuple[str, bytes]:
    call = pb.ChatRequest(request_id=f"r{len(messages)}", model="m", messages=[pb.ChatMessage(**turn) for turn in messages])
    return "Chat", call.SerializeToString()


def generate(text: str) -> tuple[str, bytes]:
    return "Generate", pb.GenerateRequest(request_id=f"r{len(text)}", text=text, max_tokens=5).SerializeToString()


def generate_ids(text: str) -> tuple[str, bytes]:
    ids = pb.TokenIds(ids=list(text.encode()))
    return "GenerateStream", pb.GenerateRequest(token_ids=ids, max_tokens=len(text)).SerializeToString()


LEADING: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
DEVELOPER: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": SYSTEM}]}
]
TOOLS = [{"type": "function", "function": {"name": f"f{number}", "description": "x" * 300}} for number in range(100)]
KINDS: dict[str, Callable[..., tuple[str, bytes]]] = {
    "chat": lambda *texts: chat(said(*texts)),
    "chat with a system prompt": lambda *texts: chat(LEADING + said(*texts)),
    "chat in parts": lambda *texts: chat(in_parts(*texts)),
    "chat in parts with a system prompt": lambda *texts: chat(LEADING + in_parts(*texts)),
    "chat in another script": lambda *texts: chat(said(*(f'"\\\u4f60\u597d\n{text}' for text in texts))),
    "chat after 30 KB of tools": lambda *texts: (CHAT, json.dumps({"tools": TOOLS, "messages": said(*texts)}).encode()),
    "messages": lambda *texts: (MESSAGES, json.dumps({"model": "m", "messages": in_parts(*texts), "system": SYSTEM}).encode()),
    "responses": lambda *texts: (RESPONSES, json.dumps({"input": DEVELOPER + in_parts(*texts)}).encode()),
    "completions": lambda *texts: (COMPLETIONS, json.dumps({"prompt": "\n".join(texts), "max_tokens": len(texts)}).encode()),
    "grpc chat": lambda *texts: grpc_chat(said(*texts)),
    "grpc chat with a system prompt": lambda *texts: grpc_chat(LEADING + said(*texts)),
    "grpc text": lambda *texts: generate("\n".join(texts)),
    "grpc token ids": lambda *texts: generate_ids("\n".join(texts)),
}
"""A call by the texts of its conversation: its path and body, or its method and message."""


def send(edge: Edge, call: tuple[str, bytes], **key: str) -> int:
    """Make a call and return which replica it reached."""
    path, body = call
    before = [len(replica.calls) for replica in edge.replicas]
    if not path.startswith("/"):
        edge.channel.unary_unary(f"/attend.v1.GenerationService/{path}")(body, metadata=[*key.items()], timeout=30)
    else:
        caller = http.client.HTTPConnection(*edge.address, timeout=30)
        caller.request("POST", path, body, {"content-type": "application/json"} | key)
        assert caller.getresponse().status == 200
        caller.close()
    after = [len(replica.calls) for replica in edge.replicas]
    [reached] = [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if new > old]
    return reached


def text_of(conversation: int, turn: int) -> str:
    return f"What follows is text {turn} of conversation {conversation}. " + "It goes on for a while. " * 60


def conversation(edge: Edge, kind: str, number: int, **key: str) -> list[int]:
    """The replicas that its turns reach."""
    texts = [text_of(number, place) for place in range(2 * NUM_TURNS)]
    return [send(edge, KINDS[kind](*texts[: 2 * turn + 1]), **key) for turn in range(NUM_TURNS)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_turn_of_a_conversation_reaches_one_replica_and_conversations_are_spread(edge, kind):
    reached = [conversation(edge, kind, number) for number in range(NUM_CONVERSATIONS)]
    assert {len(set(turns)) for turns in reached} == {1}
    loads = Counter(turns[0] for turns in reached)
    assert min(loads[0], loads[1]) >= NUM_CONVERSATIONS / 4, "what they have in common puts them on one replica"


@pytest.mark.parametrize("kind", ["chat", "grpc chat"])
def test_what_begins_alike_with_different_keys_is_spread(edge, kind):
    for header in ("authorization", "x-api-key"):
        keys = [{header: f"Bearer key-{number}"} for number in range(NUM_CONVERSATIONS)]
        reached = [set(conversation(edge, kind, 0, **key)) for key in keys]
        assert {len(replicas) for replicas in reached} == {1}
        assert len(set.union(*reached)) == 2


def http_named(model: str, *texts: str) -> tuple[str, bytes]:
    return CHAT, json.dumps({"model": model, "max_tokens": len(texts), "messages": said(*texts)}, indent=len(texts)).encode()


def grpc_named(model: str, *texts: str) -> tuple[str, bytes]:
    call = pb.ChatRequest(request_id=f"r{len(texts)}", model=model, messages=[pb.ChatMessage(**turn) for turn in said(*texts)])
    return "Chat", call.SerializeToString()


@pytest.mark.parametrize("named", [http_named, grpc_named])
def test_what_begins_alike_for_different_adapters_is_spread(edge, named):
    """They share no KV blocks. The model's name is the body's first field, as most clients send it."""
    texts = [text_of(0, 0), *["A long answer or question. " * 2500] * 4]
    reached = [{send(edge, named(f"adapter-{number}", *texts[:length])) for length in (1, 3, 5)} for number in range(12)]
    assert {len(replicas) for replicas in reached} == {1}
    assert len(set.union(*reached)) == 2


@pytest.mark.parametrize("kind", ["chat", "chat in parts", "messages", "responses", "completions"])
def test_a_message_that_no_buffer_holds_counts_by_its_beginning(edge, kind):
    reached = []
    for number in range(12):
        first = text_of(number, 0) * (200_000 // len(text_of(number, 0)))
        reached.append({send(edge, KINDS[kind](first, *more)) for more in ((), ("yes", "and then?"))})
    assert {len(replicas) for replicas in reached} == {1}
    assert len(set.union(*reached)) == 2


def test_a_beginning_that_all_send_is_answered_by_all_within_the_bound(edge):
    """Of 20 calls at a time, one replica answers at most 1.25 times the mean, and two."""
    free = threading.Event()
    held = [0, 0]

    def hold(place: int) -> Callable[..., int]:
        def judge(*_: object) -> int:
            held[place] += 1
            free.wait(20)
            return 200

        return judge

    for place, replica in enumerate(edge.replicas):
        replica.judge = hold(place)
    with ThreadPoolExecutor(20) as pool:
        try:
            done = []
            for _ in range(20):
                done.append(pool.submit(edge.post, CHAT, body=chat(said("The same. " * 200))[1]))
                assert wait_for(lambda: sum(held) == len(done))
        finally:
            free.set()
    assert {each.result()[0] for each in done} == {200}
    assert 10 < max(held) <= 14


@pytest.mark.parametrize("kind", ["chat", "grpc chat"])
def test_conversations_of_a_dead_replica_go_on_at_the_other_and_no_other_conversation_moves(kind, tmp_path):
    with in_front(tmp_path) as edge:
        before = [conversation(edge, kind, number)[0] for number in range(12)]
        assert set(before) == {0, 1}
        edge.replicas[0].stop()
        for _ in range(2):
            assert {turn for number in range(12) for turn in conversation(edge, kind, number)} == {1}


def test_short_calls_and_those_without_a_conversation_go_where_least_is_running(edge):
    long = text_of(0, 0)
    calls = [chat(said("Hello.")), grpc_chat(said("Hello.")), generate("def f(x):"), ("Tokenize", long.encode())]
    calls += [(path, json.dumps({"input": long, "messages": said(long)}).encode()) for path in ("/tokenize", "/v1/embeddings")]
    for call in calls:
        assert {send(edge, call) for _ in range(8)} == {0, 1}


BAD = {
    "nothing": b"",
    "no JSON": b"\x00\xff{{{",
    "messages that are a text": b'{"messages": "x"}',
    "a message that is none": b'{"messages": [null, 3]}',
    "a content that is null": b'{"messages": [{"role": "user", "content": null}]}',
    "an escape that is cut": b'{"messages": [{"role": "user", "content": "\\u00',
    "nested deeper than any call": b'{"messages": ' + b"[" * 60_000,
    "half a pair of escapes": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "no text but quotes": b'"' * 100_000,
    "another role with a format": b'{"messages": [{"role": "%[path]%%$(id)", "content": "%[path]"}]}',
}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, COMPLETIONS])
@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_whatever_a_body_is_a_replica_gets_to_judge_it(edge, path, body):
    send(edge, (path, body.replace(b"messages", b"input") if path == RESPONSES else body))


@pytest.mark.parametrize("body", [b"", b"\xff" * 50, b"\x1a\xff\xff\xff\xff\x0f", b"\x1a\x04\x0a\x06syst", b"\x0a" * 300_000])
@pytest.mark.parametrize("method", ["Chat", "Generate"])
def test_whatever_a_message_is_a_replica_gets_to_judge_it(edge, method, body):
    send(edge, (method, body))


def test_where_it_is_off_calls_go_where_least_is_running(tmp_path):
    with in_front(tmp_path, by_prefix=False) as edge:
        assert {len(set(conversation(edge, "chat", number))) for number in range(4)} == {2}
