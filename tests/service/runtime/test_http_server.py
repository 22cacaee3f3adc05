"""HTTP without Ray: what a connection may cost. A real uvicorn serves a made-up application."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from attend.model.errors import Overloaded
from attend.service.contract.routes import PROBES
from attend.service.generation.unread_bodies import CALL_BYTES, UnreadBodies
from attend.service.http_api.problems import error_response
from attend.service.runtime import http_protocol, http_server
from tests.fakes import build_server, until

ROOT = Path(__file__).parents[3]
LOAD_BALANCER_SECONDS = 60
"""For which common ones keep a connection to a server: AWS's, and nginx."""


class App:
    """Answers "ok" once it has read the body, and `gate` is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        try:
            while (await receive()).get("more_body"):
                pass
        except Overloaded as error:
            return await error_response(error, "id")(scope, receive, send)
        if scope["path"] not in PROBES:
            await self.gate.wait()
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for piece in (b"data: 1\n\n", b"", b"data: 2\n\n"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


class Served(App):
    """The application, and where it is served."""

    port = 0
    server: Any = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def answer(self, sent: bytes) -> bytes:
        """What comes back until the server closes the connection."""
        reader, writer = await self.connect()
        writer.write(sent)
        async with asyncio.timeout(10):
            got = await reader.read()
        writer.close()
        return got


@asynccontextmanager
async def serving(most_calls: int = 8, of: Any = None, **limits: Any) -> AsyncIterator[Served]:
    app = Served()
    server = http_server.http_server(of or app, most_calls, **limits)
    app.server = server
    with http_server.bind_socket("127.0.0.1", 0) as sock:
        app.port = sock.getsockname()[1]
        task = asyncio.create_task(server.serve([sock]))
        try:
            await until(lambda: server.started)
            yield app
        finally:
            app.gate.set()
            server.end()
            await task


def run(law: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(law())


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


def code_of(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"])


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def test_a_connection_serves_several_calls():
    async def law() -> None:
        async with serving() as app:
            reader, writer = await app.connect()
            for _ in range(3):
                writer.write(GET)
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            writer.close()

    run(law)


def test_a_connection_that_rests_ends(monkeypatch):
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 0.1)

    async def law() -> None:
        async with serving() as app:
            assert (await app.answer(GET)).endswith(b"ok")

    run(law)


@pytest.mark.parametrize(("sent", "status"), [(b"", 0), (b"GET / HT", 408), (GET[:-2] + b"x-a: ", 408)])
def test_a_head_that_does_not_come_ends_the_connection(monkeypatch, sent, status):
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.5)

    async def law() -> None:
        async with serving() as app:
            got = await app.answer(sent)
            assert (status_of(got), code_of(got)) == (408, "request_timeout") if status else got == b""
            assert app.calls == 0

    run(law)


def test_a_head_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(http_server, "MAX_HEAD_BYTES", 1000)

    async def law() -> None:
        async with serving() as app:
            got = await app.answer(b"GET / HTTP/1.1\r\nx-long: " + b"a" * 5000)
            assert (status_of(got), code_of(got)) == (431, "request_too_large")
            whole = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 5000\r\n\r\n" + b"a" * 5000
            assert status_of(await app.answer(whole)) == 200, "a body is no head"

    run(law)


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01 hello\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n: x\r\n\r\n"]
)
def test_what_is_no_http_gets_an_error_in_our_shape(sent):
    async def law() -> None:
        async with serving() as app:
            got = await app.answer(sent)
            assert (status_of(got), code_of(got)) == (400, "invalid_request")
            assert app.calls == 0

    run(law)


async def ends(reader: asyncio.StreamReader) -> bool:
    """True if the server closes the connection without a byte."""
    with suppress(OSError):  # it may be reset
        async with asyncio.timeout(10):
            return await reader.read() == b""
    return True


def test_one_connection_too_many_takes_the_place_of_the_one_that_has_been_idle_longest():
    async def law() -> None:
        async with serving(most_connections=3) as app:
            first, second, third = [await app.connect() for _ in range(3)]
            for reader, writer in (
                first,
                second,
            ):  # the third has never carried a call, and is the oldest of those that carry none
                writer.write(GET)
                assert b"200" in await reader.readuntil(b"ok")
            assert (await app.answer(PROBE)).startswith(b"HTTP/1.1 200")
            assert await ends(third[0])
            for reader, writer in (first, second):
                writer.write(GET)
                assert b"200" in await reader.readuntil(b"ok")
            for _, writer in (first, second, third):
                writer.close()

    run(law)


def test_a_connection_with_a_call_is_never_ended_for_another():
    async def law() -> None:
        async with serving(most_connections=2) as app:
            app.gate.clear()
            running = [await app.connect() for _ in range(2)]
            for _, writer in running:
                writer.write(GET)
            await until(lambda: app.calls == 2)
            reader, third = await app.connect()
            assert await ends(reader)
            third.close()
            app.gate.set()
            for reader, writer in running:
                assert b"200" in await reader.readuntil(b"ok")
                writer.close()

    run(law)


def test_a_connection_ends_whose_peer_takes_nothing(monkeypatch):
    """Also where nobody waits for the write any more, as when its call is over and the server stops."""
    monkeypatch.setattr(http_protocol, "STALL_SECONDS", 0.5)
    sent = asyncio.Event()

    async def large(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sending = asyncio.ensure_future(send({"type": "http.response.body", "body": bytes(32 << 20)}))
        sent.set()
        await sending

    async def law():
        async with serving(of=large) as app:
            reader, writer = await app.connect()
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            reader._transport.pause_reading()
            await sent.wait()
            assert len(app.server.server_state.connections) == 1
            await until(lambda: not app.server.server_state.connections)
            writer.close()

    run(law)


def test_calls_over_the_bound_are_refused_with_an_id_and_come_in_again_later():
    async def law() -> None:
        async with serving(most_calls=2) as app:
            app.gate.clear()
            held = [await app.connect() for _ in range(2)]
            for _, writer in held:
                writer.write(GET)
            await until(lambda: app.calls == 2)
            got = await app.answer(GET.replace(b"host: x", b"host: x\r\nconnection: close\r\nx-request-id: mine"))
            assert (status_of(got), code_of(got)) == (429, "queue_full")
            assert b"x-request-id: mine" in got
            app.gate.set()
            for reader, _ in held:
                assert b"200" in await reader.readuntil(b"ok")
            assert status_of(await app.answer(GET.replace(b"host: x", b"host: x\r\nconnection: close"))) == 200
            for _, writer in held:
                writer.close()

    run(law)


POST = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 100\r\n\r\n"
PROBE = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def test_bodies_that_do_not_come_stop_neither_probes_nor_calls_and_are_bounded():
    most, app = 20, build_server(unread_bodies=UnreadBodies(20 * CALL_BYTES + CALL_BYTES // 2)).app
    start = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    body = b'{"prompt": "a", "max_tokens": 1}'
    post = start + b"content-length: %d\r\n\r\n" % len(body)

    async def law() -> None:
        async with serving(most_calls=2, of=app) as served:
            slow = [await served.connect() for _ in range(most + 3)]
            for _, writer in slow:
                writer.write(post + body[:1])
                await asyncio.sleep(0.01)
            over = [await reader.read() for reader, _ in slow[:3]]
            assert [(status_of(got), code_of(got)) for got in over] == [(429, "queue_full")] * 3, "the oldest ones"
            models = GET.replace(b"GET / ", b"GET /v1/models ").replace(b"x\r\n", b"x\r\nconnection: close\r\n")
            for sent in (PROBE, models):
                assert status_of(await served.answer(sent)) == 200
            reader, writer = slow[-1]
            writer.write(body[1:])
            assert status_of(await reader.read()) == 200
            for _, writer in slow:
                writer.close()

    run(law)


def test_probes_are_answered_while_every_place_is_taken_and_a_body_that_comes_then_is_refused():
    async def law() -> None:
        async with serving(most_calls=2) as app:
            app.gate.clear()
            held = [await app.connect() for _ in range(2)]
            for _, writer in held:
                writer.write(POST + b"x" * 100)
            await until(lambda: app.calls == 2)
            for path in PROBES:
                assert status_of(await app.answer(PROBE.replace(b"/healthz", path.encode()))) == 200
            got = await app.answer(POST + b"x" * 100)
            assert (status_of(got), code_of(got)) == (429, "queue_full")
            app.gate.set()
            for reader, writer in held:
                assert status_of(await reader.read()) == 200
                writer.close()
            assert status_of(await app.answer(POST + b"x" * 100)) == 200

    run(law)


def test_an_idle_connection_outlives_those_of_load_balancers_wherever_attend_serves():
    """Who closes it first loses nothing: a call that the server gets as it closes the connection fails."""
    in_the_cluster = yaml.safe_load((ROOT / "deploy/serve/attend.yaml").read_text())["http_options"]["keep_alive_timeout_s"]
    assert min(http_server.IDLE_SECONDS, in_the_cluster) > LOAD_BALANCER_SECONDS


def undated(head: bytes) -> list[bytes]:
    return [line for line in head.split(b"\r\n") if not line.startswith((b"date:", b"server:"))]


@pytest.mark.parametrize("more", [b"", b"connection: keep-alive\r\n", b"content-length: 1\r\nexpect: 100-continue\r\n"])
def test_a_caller_of_http_1_0_gets_no_chunks_and_the_connection_ends_the_answer(more):
    """RFC 9112, 6.1; and a server ignores what such a caller expects (RFC 9110, 10.1.1)."""

    async def law() -> None:
        async with serving() as app:
            head, _, body = (
                await app.answer(b"POST /stream HTTP/1.0\r\n" + more + b"\r\n" + b"x" * (b"length" in more))
            ).partition(b"\r\n\r\n")
            assert undated(head) == [b"HTTP/1.1 200 OK", b"connection: close"]
            assert body == b"data: 1\n\ndata: 2\n\n"
            head, _, body = (await app.answer(b"GET / HTTP/1.0\r\n" + more + b"\r\n" + b"x" * (b"length" in more))).partition(
                b"\r\n\r\n"
            )
            assert undated(head) == [b"HTTP/1.1 200 OK", b"content-length: 2", b"connection: close"]
            assert body == b"ok"

    run(law)


@pytest.mark.parametrize("offer", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n"])
@pytest.mark.parametrize("pieces", [1, 1000])
def test_an_application_never_sees_trailers(offer, pieces):
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        seen.append(list(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    sent = b"POST / HTTP/1.1\r\nhost: x\r\n" + offer + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    sent += b"x-tenant: acme\r\nx-forwarded-for: 127.0.0.2\r\nauthorization: Bearer a\r\n\r\n"

    async def law() -> None:
        async with serving(of=app) as served:
            reader, writer = await served.connect()
            for start in range(0, len(sent), size := len(sent) // pieces + 1):
                writer.write(sent[start : start + size])
                await asyncio.sleep(0)
            assert status_of(await reader.readuntil(b"ok")) == 200
            writer.close()
        names = {name for name, _ in seen[0]}
        assert names - {b"connection", b"upgrade"} == {b"host", b"transfer-encoding"}

    run(law)


BAD, CHUNKED = b"GET / HTTP/9.9\r\n\r\n", POST.replace(b"content-length: 100", b"transfer-encoding: chunked")


@pytest.mark.parametrize("behind", [(BAD,), (GET, BAD), (CHUNKED + b"zz\r\n",), (GET, CHUNKED + b"zz\r\n"), (GET[:9],)])
def test_what_is_no_request_is_answered_after_the_calls_before_it(monkeypatch, behind):
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)

    async def law() -> None:
        async with serving() as app:
            app.gate.clear()
            asyncio.get_running_loop().call_later(0.8, app.gate.set)
            got = await app.answer(GET + b"".join(behind))
            statuses = [int(each[:3]) for each in got.split(b"HTTP/1.1 ")[1:]]
            assert statuses[:-1] == [200] * len(behind) and statuses[-1] in (400, 408, 505), got

    run(law)


def test_requests_that_wait_on_a_connection_are_bounded_and_no_more_is_read(monkeypatch):
    most, read, receive = http_protocol.MAX_PIPELINED, [0], http_protocol.HttpProtocol.data_received

    def count(self: Any, data: bytes) -> None:
        read[0] += len(data)
        receive(self, data)

    monkeypatch.setattr(http_protocol.HttpProtocol, "data_received", count)

    async def law() -> None:
        async with serving() as app:
            app.gate.clear()
            asyncio.get_running_loop().call_later(0.5, app.gate.set)
            got = await app.answer(GET * (most + 9))
            assert [int(each[:3]) for each in got.split(b"HTTP/1.1 ")[1:]] == [200] * (most + 1) + [429]
            app.gate.clear()
            read[0] = 0
            _, writer = await app.connect()
            for _ in range(10):
                writer.write(GET)
                await asyncio.sleep(0.05)
            assert read[0] <= 3 * len(GET)
            writer.close()

    run(law)


def test_a_call_that_has_an_answer_gets_no_second_one():
    async def early(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    async def law() -> None:
        async with serving(of=early) as served:
            reader, writer = await served.connect()
            writer.write(CHUNKED.replace(b"connection: close\r\n", b""))
            assert status_of(await reader.readuntil(b"no")) == 401
            writer.write(b"zz\r\n")
            assert await ends(reader)
            writer.close()

    run(law)


@pytest.mark.parametrize("origins", [(), ("https://page.example",), ("*",)])
def test_a_page_may_read_the_servers_own_answers_where_it_may_call(monkeypatch, origins):
    monkeypatch.setattr(http_server, "MAX_HEAD_BYTES", 1000)
    origin = b"host: x\r\norigin: https://page.example\r\nconnection: close"
    allowed = {"*": b"access-control-allow-origin: *"}.get(
        "".join(origins), b"access-control-allow-origin: https://page.example"
    )

    async def law() -> None:
        async with serving(0, cors_origins=origins) as app:
            full = await app.answer(GET.replace(b"host: x", origin))
            long = await app.answer(GET[:-2].replace(b"host: x", origin) + b"x-long: " + b"a" * 5000)
            bad = await app.answer(GET[:-2].replace(b"host: x", origin) + b": x\r\n\r\n")
            assert [status_of(answer) for answer in (full, long, bad)] == [429, 431, 400]
            for answer in (full, long, bad):
                head = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
                assert (allowed in head) == (b"access-control-expose-headers: *" in head) == bool(origins)
            asked = GET.replace(b"GET", b"OPTIONS").replace(b"host: x", origin + b"\r\naccess-control-request-method: POST")
            assert status_of(await app.answer(asked)) == (200 if origins else 429)

    run(law)
