"""Large answers: the same bytes as in one go, in small pieces, between which every neighbour has a turn."""

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from attend.model.engine.request import TokenLogprob
from attend.service.contract.texts import EmbeddingsRequest
from attend.service.generation.embed import EmbeddingResult
from attend.service.http_api import openapi
from attend.service.http_api.embeddings import answer_of
from attend.service.http_api.json_pieces import PIECE, json_bytes, json_pieces
from attend.service.http_api.sse import EventStream
from tests.conftest import examples
from tests.fakes import FakeEngine, Server, build_server, info
from tests.service.http_api.described import ask
from tests.service.sse import events_of

WORDS = st.text(max_size=8)
LEAVES = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | WORDS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner), max_leaves=6)


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(st.dictionaries(WORDS, VALUES, max_size=4), st.lists(LEAVES, max_size=40), st.lists(VALUES, max_size=4))
def test_pieces_together_are_what_orjson_writes(document, leaves, nested):
    items = leaves + nested
    plain = document | {"items": items, "none": [], "choices": [{"of": items}, {}]}
    lazy = document | {"items": iter(items), "none": iter(()), "choices": [{"of": iter(items)}, {}]}
    assert b"".join(json_pieces(lazy)) == orjson.dumps(plain)


@given(st.recursive(LEAVES | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner), max_leaves=6))
@example([{"a": (10**399, -(2**63) - 1, 2**64, float("inf"), True)}])
def test_integers_of_any_width_are_written(value):
    plain = json.loads(json.dumps(value).replace("Infinity", "null"))
    assert json.loads(json_bytes(value)) == plain
    assert json.loads(b"".join(json_pieces({"a": value, "b": iter([value])}))) == {"a": plain, "b": [plain]}


def test_a_piece_is_small_and_its_items_are_made_when_it_is_asked_for():
    made: list[int] = []

    def items() -> Iterator[str]:
        for place in range(10_000):
            made.append(place)
            yield "x" * 100

    parts = json_pieces({"items": items()})
    assert not made
    first = next(parts)
    assert PIECE <= len(first) < 2 * PIECE
    assert len(made) < 500
    assert max(map(len, parts)) < 2 * PIECE


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_a_vector_is_written_out_when_its_piece_is_asked_for(encoding_format):
    """A call may ask for thousands, of which each takes as long as a piece."""
    vectors = [np.zeros(PIECE, "<f4") for _ in range(9)]
    body = EmbeddingsRequest(input="a", encoding_format=encoding_format)
    parts = json_pieces(answer_of(body, EmbeddingResult(vectors, 1), "m"))
    text = next(parts)
    vectors[-1][:] = 1.0
    *others, last = json.loads(text + b"".join(parts))["data"]
    ones = vectors[-1].tolist() if encoding_format == "float" else base64.b64encode(vectors[-1].tobytes()).decode()
    assert last["embedding"] == ones
    assert ones not in [each["embedding"] for each in others]


TOKENS = 8000
SCORED = TokenLogprob(97, -0.5, tuple((token, -0.5) for token in range(97, 117)))


class LogprobFields(FakeEngine):
    """Gives each token of a prompt the same twenty alternatives."""

    def _step(self, request):
        made = super()._step(request)
        return made._replace(prompt_logprobs=(SCORED,) * len(made.prompt_logprobs))


def large_server() -> Server:
    return build_server(LogprobFields(info=replace(info(), max_model_len=2 * TOKENS, num_blocks=1000)))


async def sent(
    server: Server, path: str, body: dict[str, Any], look: Callable[[], object] = lambda: None
) -> list[tuple[int, bytes]]:
    """The writes of an answer, each with the number of rounds of the event loop that came before it. Each calls `look`."""
    rounds, writes = 0, []

    async def count() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        if message.get("body"):
            writes.append((rounds, message["body"]))
            look()

    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST"}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "scheme": "http", "root_path": ""}
    scope |= {"headers": [(b"content-type", b"application/json")], "client": None, "server": None}
    neighbour = asyncio.create_task(count())
    await server.app(scope, receive, send)
    neighbour.cancel()
    return writes


PROMPT = {"prompt": [97 + place % 20 for place in range(TOKENS)], "max_tokens": 1, "seed": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [{"prompt_logprobs": 20}, {"logprobs": 5, "echo": True}])
def test_a_large_answer_is_written_in_small_pieces_with_a_turn_for_every_neighbour_between_them(stream, asked):
    writes = asyncio.run(sent(large_server(), "/v1/completions", PROMPT | asked | {"stream": stream}))
    rounds = [place for place, _ in writes]
    text = b"".join(body for _, body in writes).decode()
    assert len(text) > 10 * PIECE
    assert max(len(body) for _, body in writes) < 2 * PIECE
    assert all(earlier < later for earlier, later in pairwise(rounds[1:-1]))
    choice = (events_of(text) if stream else [json.loads(text)])[0]["choices"][0]
    rows = choice["prompt_logprobs"] if "prompt_logprobs" in asked else choice["logprobs"]["top_logprobs"]
    assert len(rows) >= TOKENS
    assert rows[0] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
async def test_log_probabilities_of_a_prompt_hold_their_places_until_the_caller_has_taken_them_or_left(stream, leaves):
    server, taken = large_server(), []

    def look() -> None:
        taken.append(server.service._scores.num_held)
        if leaves and len(taken) == 3:
            raise OSError("the caller has left")

    with suppress(ClientDisconnect):
        await sent(server, "/v1/completions", PROMPT | {"prompt_logprobs": 20, "stream": stream}, look)
    assert not server.service._scores.num_held
    assert [21 * TOKENS] * len(taken[:-2]) == taken[:-2]
    assert len(taken) == 3 if leaves else len(taken) > 10


def test_the_document_of_the_api_is_made_beside_the_event_loop(monkeypatch):
    server, threads = large_server(), []
    made = openapi.openapi_document

    def watched(*given: Any, **more: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return made(*given, **more)

    monkeypatch.setattr(openapi, "openapi_document", watched)
    assert ask(server, "GET", "/openapi.json").status_code == 200
    assert threads and threading.main_thread() not in threads


def test_no_comment_stands_inside_an_event_that_is_written_in_pieces():
    async def run() -> list[bytes]:
        writes: list[bytes] = []
        inside, between = asyncio.Event(), asyncio.Event()

        async def content():
            yield b"data: {"
            await asyncio.sleep(0.05)
            inside.set()
            yield b"}\n\n"
            await between.wait()

        async def send(message: Any) -> None:
            if message.get("body"):
                writes.append(message["body"])
                if message["body"].startswith(b":"):
                    assert inside.is_set()
                    between.set()

        await asyncio.wait_for(EventStream(content(), seconds=0.001).stream_response(send), 10)
        return writes

    writes = asyncio.run(run())
    assert writes[:3] == [b"data: {", b"}\n\n", b": keep-alive\n"]
