"""Each row of the table of bad inputs is refused in the right words, and nobody else notices."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest

from attend.service.access.keys import Entry, KeyRing, digest_of, write_keys
from attend.service.errors import TABLE
from tests.fakes import FakeEngine, Server, grpc_channel
from tests.service import refused, refused_bytes, refused_chats
from tests.service.bad_calls import COMPLETIONS, Answer, asgi, check_answer, check_sentence, grpc_bytes, whole_server
from tests.service.refused import SECRET, STATUSES, Row
from tests.service.server import Server as RealServer
from tests.service.server import wait_for

CODES = {row.code: row.grpc for row in TABLE.values()}
ROWS: tuple[Row, ...] = (*refused.ROWS, *refused_chats.ROWS, *refused_bytes.ROWS)
SENT = [(row, transport) for row in ROWS for transport in row.transports]
NAMES = [f"{row.name} ({transport})" for row, transport in SENT]
LONG = {"prompt": "def f(", "max_tokens": 500, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}


async def over_http(client: httpx.AsyncClient, row: Row) -> None:
    """Send a row and judge its answer."""
    answer = await client.request(row.method, row.path, content=row.body, headers=row.headers)
    check_refusal(row, Answer(answer.status_code, answer.content))


def check_refusal(row: Row, answer: Answer) -> None:
    assert answer.status == STATUSES[row.code], (row.name, answer.status, answer.body[:300])
    error = answer.error
    if answer.status not in (401, 405):
        check_answer(answer)
    check_sentence(error["message"])
    assert (error["code"], error["param"]) == (row.code, row.param), (row.name, error)
    assert row.word in error["message"], (row.name, error)
    assert SECRET not in error["message"]


async def over_grpc(channel: grpc.aio.Channel, row: Row) -> None:
    """Send the bytes of a row and judge the status."""
    make = channel.unary_stream if row.rpc.endswith("Stream") else channel.unary_unary
    call = make(f"/attend.v1.GenerationService/{row.rpc}")(row.message, metadata=row.metadata)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if row.rpc.endswith("Stream") else call)
    check_status(row, caught.value.code(), caught.value.details())


def check_status(row: Row, code: grpc.StatusCode, details: str) -> None:
    assert code is CODES[row.code], (row.name, code, details)
    check_sentence(details)
    assert row.word in details, (row.name, details)
    assert SECRET not in details


@pytest.fixture(scope="module")
def ring(tmp_path_factory) -> KeyRing:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    write_keys(path, {"ann": Entry(digest_of(SECRET.encode()))})
    return KeyRing(path)


async def send(row: Row, transport: str, server: Server) -> None:
    """One row to a replica without Ray."""
    if transport == "http":
        async with server.http() as client:
            await over_http(client, row)
    elif row.keyed:
        context = await grpc_bytes(server, row.rpc, row.message, row.metadata)
        check_status(row, context.code, context.details)
    else:
        async with grpc_channel(server) as channel:
            await over_grpc(channel, row)


@pytest.mark.parametrize(("row", "transport"), SENT, ids=NAMES)
def test_a_bad_input_is_refused_by_its_field_and_costs_the_engine_nothing(row, transport, ring):
    engine = FakeEngine()
    server = whole_server(engine, ring if row.keyed else None)
    asyncio.run(send(row, transport, server))
    assert not engine.requests
    assert {outcome for _, _, outcome in server.outcomes()} <= {"invalid"}


def test_a_content_length_of_thousands_of_digits_is_too_large():
    """Not a row: no client and no HTTP server passes it on."""
    answer = asyncio.run(asgi(whole_server(), COMPLETIONS, b"{}", {"content-length": "9" * 5000}))
    check_answer(answer)
    assert answer.status == 413


def test_most_fields_are_refused_on_both_transports():
    """A row that no message can hold is sent by HTTP alone, in silence."""
    assert sum(len(row.transports) == 2 for row in ROWS) >= 95


def neighbour(url: str) -> list[int]:
    """The tokens of one long greedy stream."""
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=120) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [token for event in events for token in json.loads(event)["choices"][0]["token_ids"]]


async def send_all(server: RealServer) -> list[str]:
    """Every row that needs no keys, one after the other; what was wrong with the answers."""
    wrong = []
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
        grpc.aio.insecure_channel(server.target, options) as channel,
    ):
        for row, transport in SENT:
            if row.keyed:
                continue
            try:
                await (over_http(client, row) if transport == "http" else over_grpc(channel, row))
            except (AssertionError, pytest.fail.Exception) as error:
                wrong.append(f"{row.name} ({transport}): {error}")
    return wrong


def neighbours_until(over: threading.Event, url: str) -> list[list[int]]:
    streams = []
    while not over.is_set():
        streams.append(neighbour(url))
    return streams


@pytest.mark.long
@pytest.mark.ray
def test_all_bad_inputs_leave_a_neighbours_tokens_and_the_count_of_errors_as_they_were(server):
    alone = neighbour(server.url)
    before = {name: server.metric("attend_requests_total", outcome=name) for name in ("error", "invalid")}
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        streams = pool.submit(neighbours_until, over, server.url)
        try:
            wrong = asyncio.run(send_all(server))
        finally:
            over.set()
        assert not wrong, "\n".join(wrong)
        assert len(alone) == LONG["max_tokens"]
        assert streams.result() == [alone] * len(streams.result())
    assert server.metric("attend_requests_total", outcome="error") == before["error"]
    assert server.metric("attend_requests_total", outcome="invalid") >= before["invalid"] + 100
    assert wait_for(lambda: server.metric("attend_requests_running") == 0)
    assert server.metric("attend_requests_waiting") == 0
    assert neighbour(server.url) == alone
