"""The files of a running server are removed, as a cleaner of /tmp does with what nobody has touched for days."""

import os
import signal
from pathlib import Path

import pytest

from tests.service.server import Server, running, wait_for

pytestmark = pytest.mark.ray


def edge_folder(server: Server) -> Path:
    """Where `attend serve` keeps what HAProxy is started with."""
    variables = Path(f"/proc/{server.pid_of('attend.service.runtime.driver_main')}/environ").read_bytes().decode().split("\0")
    return Path(dict(each.partition("=")[::2] for each in variables)["RAY_SERVE_HAPROXY_BINARY_PATH"]).parent


@pytest.mark.long
def test_calls_are_answered_again_after_a_replicas_death_or_the_server_ends(tmp_path):
    with running(tmp_path / "log", "--num-threads", "1") as server:
        folder = edge_folder(server)
        for path in [*folder.rglob("*")]:
            if path.is_file():
                path.unlink()
        os.kill(server.pid_of("ServeReplica"), signal.SIGKILL)
        assert wait_for(lambda: server.process.poll() is not None or not is_ready(server))
        assert wait_for(lambda: server.process.poll() is not None or is_ready(server), 120), server.output()
        assert server.process.poll() in (None, 1)
        assert "were removed" in server.output()


def is_ready(server: Server) -> bool:
    try:
        return server.get("/readyz")[0] == 200
    except OSError:
        return False
