"""Callers who take their time: heads and bodies that do not end, connections at rest."""

import concurrent.futures
import time
from collections.abc import Iterator

import pytest

from attend.service.runtime.edge import IDLE_SECONDS
from tests.service.runtime.test_edge import HEALTH, KIB, SLOW_SECONDS, Wire, error_of, post
from tests.service.server import Server

pytestmark = [pytest.mark.ray, pytest.mark.long]
CLIENTS_REST = 15
"""Seconds for which aiohttp keeps a connection that it does not use."""


@pytest.fixture(scope="module")
def slow(server: Server) -> Iterator[dict[str, concurrent.futures.Future]]:
    """Callers that take their time, all at once: what each got, and after how long."""

    def timed(call) -> tuple[object, float]:
        started = time.monotonic()
        with Wire(server) as wire:
            return call(wire), time.monotonic() - started

    def drip(wire: Wire, head: bytes) -> bytes:
        wire.send(head)
        wire.socket.settimeout(0.5)
        while True:
            try:
                return wire.socket.recv(64 * KIB)
            except TimeoutError:
                wire.send(b"a")

    def keep(wire: Wire) -> tuple[list[int], float]:
        first = wire.send(HEALTH).answer()[0]
        time.sleep(CLIENTS_REST)
        wire.socket.settimeout(2 * IDLE_SECONDS)
        statuses = [first, wire.send(HEALTH).answer()[0]]
        rests = time.monotonic()
        assert wire.rest() == b""
        return statuses, time.monotonic() - rests

    calls = {
        "head": lambda wire: drip(wire, b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: "),
        "body": lambda wire: drip(wire, post(b'{"prompt":"', length=5000)),
        "silent": lambda wire: wire.rest(),
        "kept": keep,
    }
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        yield {name: pool.submit(timed, call) for name, call in calls.items()}


def test_a_head_that_does_not_end_is_cut_off_in_10_seconds(slow: dict) -> None:
    for name in ("head", "silent"):
        answer, seconds = slow[name].result(SLOW_SECONDS)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")
        assert 9 < seconds < 25, "not 30: that is for bodies"


def test_a_connection_may_rest_as_long_as_a_client_keeps_it_and_is_closed_in_the_end(slow: dict) -> None:
    statuses, rested = slow["kept"].result(2 * IDLE_SECONDS)[0]
    assert statuses == [200, 200]
    assert IDLE_SECONDS - 1 < rested < IDLE_SECONDS + 15


def test_a_body_that_does_not_end_is_refused_in_30_seconds(slow: dict) -> None:
    answer, seconds = slow["body"].result(SLOW_SECONDS)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_of(answer.partition(b"\r\n\r\n")[2])["code"] == "request_timeout"
    assert 29 < seconds < SLOW_SECONDS
