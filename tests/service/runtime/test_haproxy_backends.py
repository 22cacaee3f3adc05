"""When HAProxy's statistics say that calls reach the replicas."""

import asyncio
import http.server
import threading
from collections.abc import Callable, Iterator

import pytest

from attend.service.runtime.haproxy_backends import END_SECONDS, RESTART_SECONDS, UnreachableTime, lead_to

HEAD = "# pxname,svname,status,act,bck\n"
FRONTENDS = HEAD + "http_frontend,FRONTEND,OPEN,,\n"
ROUND = (
    FRONTENDS + "http-app,SERVE_PROXY,UP,0,1\nhttp-app,BACKEND,UP,0,1\ngrpc-app,SERVE_PROXY,UP,0,1\ngrpc-app,BACKEND,UP,0,1\n"
)
HALF = ROUND.replace("http-app,BACKEND,UP,0", "http-app,BACKEND,UP,1")
DIRECT = HALF.replace("grpc-app,BACKEND,UP,0", "grpc-app,BACKEND,UP,1")


@pytest.fixture
def statistics() -> Iterator[Callable[..., int]]:
    """Serves these pages in turn, the last one for ever, and an error for None; returns the port."""
    servers = []

    def serve(*pages: str | None) -> int:
        left = list(pages)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = left.pop(0) if len(left) > 1 else left[0]
                self.send_response(503 if page is None or self.path != "/stats;csv" else 200)
                self.end_headers()
                self.wfile.write((page or "").encode())

            def log_message(self, *_: object) -> None:
                pass

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1].server_address[1]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def leads(port: int, replicas: int = 1, seconds: float = 0.3) -> bool:
    return asyncio.run(lead_to(replicas, "app", port, seconds=seconds))


@pytest.mark.parametrize("page", [FRONTENDS, ROUND, HALF, DIRECT.replace("-app", "-other"), None, ""])
def test_a_way_round_by_another_proxy_is_none_to_the_replicas(statistics: Callable[..., int], page: str | None) -> None:
    assert not leads(statistics(page))


def test_every_replica_is_waited_for(statistics: Callable[..., int]) -> None:
    port = statistics(DIRECT)
    assert leads(port)
    assert not leads(port, replicas=2)
    assert leads(statistics(DIRECT.replace("UP,1", "UP,2")), replicas=2)


def test_a_restart_between_is_waited_out(statistics: Callable[..., int]) -> None:
    assert leads(statistics(ROUND, None, HALF, DIRECT), seconds=30)


def test_nobody_at_the_port_is_no_way(statistics: Callable[..., int]) -> None:
    port = statistics(DIRECT)
    assert leads(port)
    assert not asyncio.run(lead_to(1, "app", 1, seconds=0.1))


def test_a_haproxy_that_leads_nowhere_is_started_again_once_and_then_the_server_ends():
    lost = UnreachableTime()
    assert lost.look(False, 100) == lost.look(False, 100 + RESTART_SECONDS - 1) == ""
    assert lost.look(False, 100 + RESTART_SECONDS) == "restart"
    assert lost.look(False, 100 + END_SECONDS - 1) == ""
    assert lost.look(False, 100 + END_SECONDS) == "end"


def test_time_counts_anew_once_it_leads_to_a_replica():
    lost = UnreachableTime()
    for start in (0, 1000):
        assert lost.look(True, start) == lost.look(False, start + 1) == ""
        assert lost.look(False, start + 1 + RESTART_SECONDS) == "restart"
