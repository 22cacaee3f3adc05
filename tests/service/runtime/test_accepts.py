"""Connections that wait to be accepted are taken many at a time: probes come on new ones."""

import asyncio
import socket
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from attend.service.runtime import http_server
from tests.fakes import until

CONNECTIONS = 10 * http_server.ACCEPTS


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    """An application that is never called."""


async def most_at_once() -> int:
    """How many connections the server takes in one round of the event loop, of many that wait."""
    server = http_server.http_server(nothing, 8)
    with http_server.bind_socket("127.0.0.1", 0) as sock, ExitStack() as callers:
        sock.listen(2048)
        task = asyncio.create_task(server.serve(http_server.listening(sock)))
        await until(lambda: server.started)
        for _ in range(CONNECTIONS):
            callers.enter_context(socket.create_connection(sock.getsockname(), timeout=5))
        taken = []
        while not taken or taken[-1] < CONNECTIONS:
            await asyncio.sleep(0)
            taken.append(len(server.server_state.connections))
        server.end()
        callers.close()
        await task
    return max(after - before for before, after in pairwise(taken))


def test_many_connections_are_accepted_in_one_round_of_the_event_loop():
    with asyncio.Runner(loop_factory=http_server.Loop) as runner:
        assert runner.run(most_at_once()) >= http_server.ACCEPTS
