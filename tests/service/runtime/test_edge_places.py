"""Connections of HAProxy, divided by address: one caller who holds as many as he can leaves places to others."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from attend.service.runtime import haproxy
from attend.service.runtime.edge import MAX_GRPC, MAX_HTTP
from tests.service.runtime.edges import Edge, in_front
from tests.service.runtime.test_edge_refusals import GOOD, OPENAI, told
from tests.service.runtime.test_edge_refusals import post as post_of_page
from tests.service.server import wait_for

PLACES = {"connections": 40, "http_connections": 24, "grpc_connections": 16}
CALLED, OPENED = 18, 21
"""Three quarters and seven eighths of HTTP's places: what one address may call on, and open."""
ME, OTHER, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
"""What holds places: the beginning of a call, as any number of connections may send it."""
STATES = {"nothing": b"", "part of a head": POST, "part of a body": POST + b"100\r\n\r\n{"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with in_front(tmp_path_factory.mktemp("edge"), PLACES, ATTEND_CORS_ORIGINS="https://page.example") as made:
        yield made


@pytest.fixture
def edge(running: Edge) -> Edge:
    """The same, without connections."""
    assert wait_for(lambda: not any(opened(running, source) for source in (ME, OTHER, THIRD)))
    return running


@contextmanager
def held(
    edge: Edge, count: int, total: int, sent: bytes = b"", source: str = ME, side: str = "http"
) -> Iterator[list[socket.socket]]:
    """So many connections from one address; HAProxy then counts `total` of it, or less where calls on some were refused.

    One that was cut is opened again: the places of connections that were closed just before are still taken for a moment.
    """
    least = total if not sent or count == total else total * 3 // 4
    with ExitStack() as stack:
        address = edge.address if side == "http" else ("127.0.0.1", edge.grpc_port)

        found: list[socket.socket] = []

        def counted() -> bool:
            if least <= opened(edge, source, side) <= total:
                return True
            found[:] = [each for each in found if not over(each)]
            for _ in range(count - len(found)):
                with suppress(ConnectionError):  # it may have been cut
                    found.append(stack.enter_context(socket.create_connection(address, 5, (source, 0))))
                    found[-1].sendall(sent)
            return False

        assert wait_for(counted), opened(edge, source, side)
        yield found


def opened(edge: Edge, source: str, side: str = "http") -> int:
    """How many connections of an address HAProxy counts."""
    rows = edge.command(f"show table attend_{side}_places").splitlines()
    return next((int(row.rpartition("conn_cur=")[2]) for row in rows if f"{source} " in row), 0)


@pytest.mark.parametrize("state", STATES)
def test_one_address_that_opens_all_it_can_keeps_nobody_out(edge: Edge, state: str) -> None:
    with held(edge, 2 * PLACES["http_connections"], OPENED, STATES[state]) as mine:
        assert edge.send(post_of_page(OPENAI, GOOD), source=OTHER)[0][2] == b"replica"
        assert wait_for(lambda: sum(not over(each) for each in mine) <= OPENED)


def over(connection: socket.socket) -> bool:
    """True if HAProxy has ended it, or answered."""
    connection.settimeout(0.01)
    try:
        connection.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_a_call_on_one_connection_too_many_is_told_why_and_those_before_go_on(edge: Edge) -> None:
    with edge.connect() as first, first.makefile("rb") as reader, held(edge, CALLED - 1, CALLED):
        [answer] = edge.send(post_of_page(OPENAI, GOOD))
        told(answer, 429, "too_many_connections", "rate_limit_error", OPENAI, **{"retry-after": "1", "connection": "close"})
        first.sendall(post_of_page(OPENAI, GOOD))
        assert reader.readline().startswith(b"HTTP/1.1 200 ")
        assert edge.send(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")[0][0] == 200, "probes are outside of it"
    assert edge.send(post_of_page(OPENAI, GOOD))[0][2] == b"replica"


def test_over_grpc_too(edge: Edge) -> None:
    channel = edge.channel
    assert edge.call()[0] is grpc.StatusCode.OK
    with held(edge, 12, 13, side="grpc"), edge.another_channel() as late:
        code, details, metadata = replace(edge, channel=late).call()
        assert (code, details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many connections from your address")
        assert metadata["retry-after"] == "1"
        assert replace(edge, channel=channel).call()[0] is grpc.StatusCode.OK, "it was there before"
        assert edge.send(post_of_page(OPENAI, GOOD))[0][2] == b"replica", "HTTP has places of its own"


def test_a_trusted_proxy_carries_the_calls_of_many(tmp_path: Path) -> None:
    networks = " 127.0.0.0/31, ::1"
    with in_front(tmp_path, PLACES, ATTEND_TRUSTED_PROXIES=networks, ATTEND_MAX_CONNECTIONS_PER_SOURCE="2") as edge:
        with held(edge, PLACES["http_connections"] - 1, PLACES["http_connections"] - 1):
            assert edge.send(post_of_page(OPENAI, GOOD))[0][2] == b"replica"
        with held(edge, 3, 3, source=OTHER):
            assert edge.send(post_of_page(OPENAI, GOOD), source=OTHER)[0][0] == 429, "whom nobody trusts has limits"


def test_a_proxy_that_is_no_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not appear to be"):
        haproxy.render_config("", PLACES, tmp_path, {"ATTEND_TRUSTED_PROXIES": "10.0.0.1 } evil"})


def test_two_addresses_leave_places_too(edge: Edge) -> None:
    with held(edge, OPENED, OPENED), held(edge, 2 * PLACES["http_connections"], 2, source=OTHER):
        assert edge.send(post_of_page(OPENAI, GOOD), source=THIRD)[0][2] == b"replica"


def test_a_late_connection_is_served_once_there_are_fewer(edge: Edge) -> None:
    with ExitStack() as stack:
        before = stack.enter_context(held(edge, OPENED - 1, OPENED - 1))
        late = stack.enter_context(edge.connect())
        assert wait_for(lambda: opened(edge, ME) == OPENED)
        for each in before[: OPENED - CALLED]:
            each.close()
        assert wait_for(lambda: opened(edge, ME) == CALLED)
        late.sendall(post_of_page(OPENAI, GOOD))
        assert late.makefile("rb").readline().startswith(b"HTTP/1.1 200 ")


def test_a_thousand_streams_of_one_address_are_far_from_its_share() -> None:
    assert 3 * MAX_HTTP // 4 > 4500 and 3 * MAX_GRPC // 4 > 1400
