"""A stream that is idle says so in a comment that no decoder takes for an event."""

import asyncio
from collections.abc import AsyncIterator

from openai._streaming import SSEDecoder

from service.http_api.sse import KEEP_ALIVE, EventStream
from tests.fakes import until

EVENT = b'data: {"choices":[]}\n\n'


def play(content: AsyncIterator[bytes], keep_alive: float, sent: list[bytes]) -> None:
    """Run a response to its end; what it wrote is in `sent`."""

    async def send(message: dict) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    async def receive() -> dict:
        await asyncio.Event().wait()
        raise AssertionError

    scope = {"type": "http", "method": "POST", "asgi": {"version": "3.0", "spec_version": "2.4"}}
    asyncio.run(EventStream(content, keep_alive)(scope, receive, send))


def test_an_idle_stream_sends_comments_between_its_events():
    sent: list[bytes] = []

    async def content() -> AsyncIterator[bytes]:
        yield EVENT
        await until(lambda: sent.count(KEEP_ALIVE) >= 2)
        yield EVENT

    play(content(), 0.001, sent)
    assert [EVENT, KEEP_ALIVE] == sent[:2]
    assert sent.index(EVENT, 1) > 2
    assert sent[-1] == b"", "nothing follows the end"


def test_a_stream_that_speaks_sends_no_comment():
    sent: list[bytes] = []

    async def content() -> AsyncIterator[bytes]:
        for _ in range(20):
            await asyncio.sleep(0.005)
            yield EVENT

    play(content(), 0.08, sent)
    assert [EVENT] * 20 == [piece for piece in sent if piece]


def test_the_comments_end_with_a_reader_who_leaves():
    async def content() -> AsyncIterator[bytes]:
        yield EVENT
        await asyncio.Event().wait()

    async def leave() -> int:
        async def send(message: dict) -> None:
            pass

        task = asyncio.create_task(EventStream(content(), 0.001).stream_response(send))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert 1 == asyncio.run(leave())


def test_the_official_decoder_reads_over_a_comment_wherever_it_stands():
    body = KEEP_ALIVE + EVENT + KEEP_ALIVE + KEEP_ALIVE + EVENT + KEEP_ALIVE + b"data: [DONE]\n\n"
    events = list(SSEDecoder().iter_bytes(iter([body])))
    assert ['{"choices":[]}', '{"choices":[]}', "[DONE]"] == [event.data for event in events]
