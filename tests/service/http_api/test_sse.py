"""Idle streams send comments that no decoder takes for an event; events that are filled in are as if written out."""

import asyncio
import json
from collections.abc import AsyncIterator

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from attend.model.engine.request import FinishReason, Times, TokenLogprob
from attend.model.errors import QueueFull
from attend.service.contract.requests import ChatRequest, CompletionRequest
from attend.service.http_api.chat_writer import ChatWriter
from attend.service.http_api.completion_writer import CompletionWriter
from attend.service.http_api.sse import KEEP_ALIVE, KEEP_ALIVE_SECONDS, EventLines, EventStream, Writer, begin, one_line
from attend.service.records import Chunk, PromptPart, TokenCounts
from tests.conftest import examples
from tests.fakes import byte_tokenizer
from tests.virtual_time import run_at_once

EVENT = b'data: {"choices":[]}\n\n'


SCOPE = {"type": "http", "method": "POST", "asgi": {"version": "3.0", "spec_version": "2.3"}}
"""As uvicorn's."""


async def receive() -> dict:
    """Nothing: the caller stays."""
    await asyncio.Event().wait()
    raise AssertionError


def play(content: AsyncIterator[bytes], keep_alive: float, sent: list[bytes]) -> None:
    """Run a response to its end, in virtual time; what it wrote is in `sent`."""

    async def send(message: dict) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    run_at_once(EventStream(content, keep_alive)(SCOPE, receive, send))


def test_an_idle_stream_sends_comments_between_its_events():
    sent: list[bytes] = []

    async def content() -> AsyncIterator[bytes]:
        yield EVENT
        await asyncio.sleep(4.5 * KEEP_ALIVE_SECONDS)
        yield EVENT

    play(content(), KEEP_ALIVE_SECONDS, sent)
    assert sent == [EVENT, *[KEEP_ALIVE] * 4, EVENT, b""], "one each time that nothing came, and nothing follows the end"


def test_a_stream_that_speaks_sends_no_comment():
    sent: list[bytes] = []

    async def content() -> AsyncIterator[bytes]:
        for _ in range(20):
            await asyncio.sleep(0.99 * KEEP_ALIVE_SECONDS)
            yield EVENT

    play(content(), KEEP_ALIVE_SECONDS, sent)
    assert sent == [*[EVENT] * 20, b""]


def test_the_official_decoder_reads_over_a_comment_wherever_it_stands():
    body = KEEP_ALIVE + EVENT + KEEP_ALIVE + KEEP_ALIVE + EVENT + KEEP_ALIVE + b"data: [DONE]\n\n"
    events = list(SSEDecoder().iter_bytes(iter([body])))
    assert ['{"choices":[]}', '{"choices":[]}', "[DONE]"] == [event.data for event in events]


NAMES = ("fake", "\0", '"token_ids":[-1]', "[-1]")
PIECES = st.lists(
    st.tuples(st.text(max_size=4) | st.sampled_from(NAMES), st.lists(st.integers(0, 256), max_size=3)), max_size=5
)
OPTIONS = st.none() | st.fixed_dictionaries({"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()})
FLAGS = st.fixed_dictionaries({"return_token_ids": st.booleans(), "timing": st.booleans(), "echo": st.booleans()})


def answer(index: int, pieces: list[tuple[str, list[int]]], *, scored: bool) -> list[Chunk]:
    """The chunks of one answer, from its prompt to its end."""
    chunks, count = [], 0
    for place, (text, ids) in enumerate([("", [1]), *pieces, ("!", [2])]):
        count += len(ids)
        chunk = Chunk(index, text, tuple(ids), count, 3, 5)
        chunk.logprobs = tuple(TokenLogprob(token, -1.5) for token in ids) if scored else ()
        if not place:
            chunk.prompt = PromptPart((7, 8, 9), (), "pqr", 1)
        chunks.append(chunk)
    chunks[-1].finish_reason, chunks[-1].times = FinishReason.LENGTH, Times(0.0, 1.0, 2.0)
    return chunks


def writer_of(chat: bool, name: str, options: dict | None, flags: dict, *, scored: bool) -> Writer:
    asked = flags | {"stream": True, "stream_options": options}
    usage, tokenizer = TokenCounts(2), byte_tokenizer()
    if not chat:
        body = CompletionRequest(prompt="", logprobs=0 if scored else None, **asked)
        return CompletionWriter(body, "id", name, "fp", usage, tokenizer, created=1)
    del asked["echo"]
    chat_body = ChatRequest(messages=[{"role": "user", "content": ""}], logprobs=scored, **asked)
    return ChatWriter(chat_body, "id", name, "fp", usage, tokenizer, created=1)


@settings(max_examples=examples(300), derandomize=True, deadline=None)
@given(
    pieces=st.lists(PIECES, min_size=1, max_size=2),
    chat=st.booleans(),
    name=st.sampled_from(NAMES),
    options=OPTIONS,
    flags=FLAGS,
    scored=st.booleans(),
    size=st.integers(1, 4),
)
def test_events_are_the_same_whether_filled_in_or_written_out(pieces, chat, name, options, flags, scored, size):
    """Whatever is asked for, however many chunks come together, and whatever a text or the model's name looks like."""
    answers = [answer(index, each, scored=scored) for index, each in enumerate(pieces)]
    chunks = [chunk for each in zip(*answers, strict=False) for chunk in each]
    chunks += [chunk for each in answers for chunk in each[min(map(len, answers)) :]]
    filled, written = (writer_of(chat, name, options, flags, scored=scored) for _ in range(2))
    lines, others = EventLines(filled), EventLines(written)
    found = b"".join(piece for place in range(0, len(chunks), size) for piece in lines.of(chunks[place : place + size]))
    assert found == b"".join(piece for chunk in chunks for piece in others.written_out(chunk))
    assert filled.usage == written.usage


@pytest.mark.parametrize("chat", [False, True])
def test_of_a_long_answer_only_the_ends_and_one_event_between_are_written_out(chat, monkeypatch):
    writer = writer_of(chat, "fake", None, {"echo": False}, scored=False)
    lines, made = EventLines(writer), []
    original = type(writer).events
    monkeypatch.setattr(type(writer), "events", lambda self, chunk: made.append(chunk) or original(self, chunk))
    for chunk in answer(0, [("x", [3])] * 50, scored=False):
        list(lines.of([chunk]))
    assert len(made) == 3


# --- a late first token


async def late(seconds: float, error: Exception | None = None, said: list[str] | None = None):
    """Chunks of an answer whose first comes after so many seconds."""
    try:
        await asyncio.sleep(seconds)
        if error is not None:
            raise error
        yield answer(0, [("x", [3])], scored=False)
    finally:
        if said is not None:
            said.append("closed")


def told(batches, leave_after: float | None = None) -> list[tuple[float, object]]:
    """When what of a streamed response was sent."""
    sent: list[tuple[float, object]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        async def send(message: dict) -> None:
            sent.append((loop.time(), message.get("status", message.get("body"))))

        async def respond() -> None:
            writer = writer_of(True, "fake", None, {"echo": False}, scored=False)
            await (await begin(batches, writer))(SCOPE, receive, send)

        task = asyncio.create_task(respond())
        if leave_after is not None:
            await asyncio.sleep(leave_after)
            task.cancel()
        await task

    run_at_once(run())
    return sent


def test_the_headers_of_a_stream_wait_for_its_first_token_and_no_longer_than_a_proxy_does():
    assert told(late(KEEP_ALIVE_SECONDS - 1))[0][0] == KEEP_ALIVE_SECONDS - 1
    sent = told(late(2.5 * KEEP_ALIVE_SECONDS))
    at = KEEP_ALIVE_SECONDS
    assert sent[:3] == [(at, 200), (at, KEEP_ALIVE), (2 * at, KEEP_ALIVE)]
    assert sent[3][0] == 2.5 * at
    assert sent[3][1].startswith(b'data: {"id"')


def test_an_error_before_the_headers_is_raised_and_after_them_is_an_event():
    with pytest.raises(QueueFull):
        told(late(KEEP_ALIVE_SECONDS - 1, QueueFull("full")))
    pieces = [piece for _, piece in told(late(KEEP_ALIVE_SECONDS + 1, QueueFull("full")))]
    assert pieces[:2] == [200, KEEP_ALIVE]
    assert b'"code":"queue_full"' in pieces[2]
    assert pieces[3:] == [b"data: [DONE]\n\n", b""]


@pytest.mark.parametrize("seconds", [1, KEEP_ALIVE_SECONDS + 1])
def test_a_caller_who_leaves_before_the_first_token_ends_the_call(seconds):
    closed: list[str] = []
    with pytest.raises(asyncio.CancelledError):
        told(late(10 * KEEP_ALIVE_SECONDS, said=closed), leave_after=seconds)
    assert closed == ["closed"]


STUCK_AT = {"the headers": 0, "the first comment": 1, "the opening": 2}


@pytest.mark.parametrize("disconnects", [False, True], ids=["cancelled", "disconnects"])
@pytest.mark.parametrize("stuck_at", STUCK_AT.values(), ids=STUCK_AT)
def test_a_late_call_ends_whatever_is_being_written_when_its_caller_leaves(stuck_at, disconnects, monkeypatch):
    """Its caller has stopped to read, so that a write waits: of the headers, or of what comes before the first token."""
    monkeypatch.setattr(ChatWriter, "opening", lambda self: [{"object": "opening"}])
    closed: list[str] = []

    async def run() -> int:
        sent, stuck = [], asyncio.Event()

        async def send(message: dict) -> None:
            sent.append(message)
            if len(sent) > stuck_at:
                stuck.set()
                await asyncio.Event().wait()

        async def leave() -> dict:
            await stuck.wait()
            if not disconnects:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        writer = writer_of(True, "fake", None, {"echo": False}, scored=False)
        response = await begin(late(10 * KEEP_ALIVE_SECONDS, said=closed), writer)
        task = asyncio.create_task(response(SCOPE, leave, send))
        await stuck.wait()
        if not disconnects:
            task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        assert ended is None if disconnects else isinstance(ended, asyncio.CancelledError)
        assert closed == ["closed"], "at once, and not when the garbage is collected"
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert run_at_once(run()) == 1


# --- line ends


def test_no_event_holds_a_character_that_a_client_takes_for_a_line_end():
    text = "a\u2028b\u2029c\u0085d\x0b\x0c\x1c\x1d\x1e\u00a5\u2027\ue805€"
    for chat in (False, True):
        lines = EventLines(writer_of(chat, text, None, {"echo": False}, scored=False))
        body = b"".join(piece for chunk in answer(0, [(text, [3])] * 3, scored=False) for piece in lines.of([chunk])).decode()
        assert [line for line in body.splitlines() if line] == [line for line in body.split("\n") if line]
        events = [json.loads(line.removeprefix("data: ")) for line in body.split("\n\n") if line]
        said = [choice.get("text", choice.get("delta", {}).get("content")) for event in events for choice in event["choices"]]
        assert said.count(text) == 3
        assert {event["model"] for event in events} == {text}


@given(st.text())
def test_one_line_is_the_same_json(text):
    assert json.loads(one_line(orjson.dumps(text))) == text
