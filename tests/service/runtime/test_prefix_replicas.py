"""Prefix-aware routing with real replicas: each turn of a conversation finds what the one before it left in a prefix cache."""

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from tests.service.server import Server

pytestmark = pytest.mark.ray

NUM_CONVERSATIONS, NUM_TURNS, AT_ONCE = 10, 3, 3


def said(number: int, turn: int) -> list[dict[str, str]]:
    """The messages of a conversation's turn."""
    first = f"Conversation {number}. " + " ".join(f"def f{number}_{line}(x): return x" for line in range(60))
    texts = [first, *(f"Part {part} of conversation {number} says this and that." for part in range(2 * turn))]
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def by_http(server: Server, number: int, turn: int) -> tuple[int, int]:
    """(tokens of the prompt, those of them that a prefix cache had)."""
    body = json.dumps({"max_tokens": 1, "temperature": 0, "messages": said(number, turn)}).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        usage = json.load(answer)["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def by_grpc(server: Server, number: int, turn: int) -> tuple[int, int]:
    with grpc.insecure_channel(server.target) as channel:
        messages = [pb.ChatMessage(**each) for each in said(100 + number, turn)]
        answer = GenerationServiceStub(channel).Chat(pb.ChatRequest(messages=messages, max_tokens=1, temperature=0), timeout=60)
    return answer.prompt_info.num_prompt_tokens, answer.prompt_info.num_cached_tokens


@pytest.mark.parametrize("call", [by_http, by_grpc])
def test_each_turn_of_a_conversation_reaches_the_replica_that_has_its_prefix(pair, call):
    """One in ten may go elsewhere, where that replica is busy."""
    order, missed = list(range(NUM_CONVERSATIONS)), 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for turn in range(NUM_TURNS):
            random.Random(turn).shuffle(order)
            for answer in [pool.submit(call, pair, number, turn) for number in order]:
                prompt, cached = answer.result()
                missed += turn > 0 and cached < prompt / 2
    assert missed <= NUM_CONVERSATIONS * (NUM_TURNS - 1) / 10
