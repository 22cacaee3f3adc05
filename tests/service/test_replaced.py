"""What dies in a real server and what does not: a slow replica, a frozen one, the driver."""

import contextlib
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.server import Server, running, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.long]

STEP_SECONDS = 10.0
SLOW = """
# Every process of the server reads this at its start. Once a file is there, the engine's next step takes ten seconds longer.
import sys, threading, time
from pathlib import Path

def patch():
    while not hasattr(sys.modules.get("attend.model.engine.engine"), "Engine"):
        time.sleep(0.1)
    engine = sys.modules["attend.model.engine.engine"].Engine
    step = engine.step

    def slow(self, *arguments, **named):
        if (mark := Path({mark!r})).exists():
            mark.unlink()
            time.sleep({seconds})
            Path({mark!r} + ".done").touch()
        return step(self, *arguments, **named)

    engine.step = slow

threading.Thread(target=patch, daemon=True).start()
"""
ASK = {"prompt": "def f(x):", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def slowable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server, and the file that makes its next step slow."""
    folder = tmp_path_factory.mktemp("slow")
    mark = folder / "mark"
    (folder / "sitecustomize.py").write_text(SLOW.format(mark=str(mark), seconds=STEP_SECONDS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        with running(folder / "log", "--dtype", "float32") as server:
            yield server, mark


def stream(server: Server, **more: object) -> Iterator[bytes]:
    """The lines of a streamed answer, as they come."""
    body = json.dumps({**ASK, "max_tokens": 900, "ignore_eos": True, "stream": True, **more}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        yield from answer


def served(server: Server) -> bool:
    """True if a short call is answered."""
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(ASK).encode(), {"Content-Type": "application/json"}
    )
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:
        return answer.status == 200
    return False


def test_a_replica_whose_step_takes_ten_seconds_keeps_its_calls_and_is_not_replaced(slowable: tuple[Server, Path]) -> None:
    server, mark = slowable
    before, deaths = server.replicas(), server.metric("attend_replica_deaths_total")
    lines = stream(server)
    next(lines)
    mark.touch()
    assert list(lines)[-2:] == [b"data: [DONE]\n", b"\n"]
    assert mark.with_name("mark.done").exists(), "no step was slow"
    assert server.replicas() == before
    assert server.metric("attend_replica_deaths_total") == deaths
    assert served(server)


def test_a_frozen_replica_is_replaced_told_and_counted(slowable: tuple[Server, Path]) -> None:
    server, _ = slowable
    deaths = server.metric("attend_replica_deaths_total")
    (name,) = server.replicas()
    lines = stream(server)
    next(lines)
    frozen = server.pid_of("ray::ServeReplica")
    os.kill(frozen, signal.SIGSTOP)
    began = time.monotonic()
    with contextlib.suppress(OSError, ValueError):
        assert b"data: [DONE]\n" not in list(lines)
    assert time.monotonic() - began < 8, "a stream of a frozen replica was silent"
    assert wait_for(lambda: served(server), 60)
    assert wait_for(lambda: not Path(f"/proc/{frozen}").exists()), "the frozen process is still there"
    assert wait_for(lambda: server.metric("attend_replica_deaths_total") == deaths + 1)
    assert wait_for(lambda: re.search(rf"^Replica {name} died$", server.output(), re.MULTILINE) is not None)


def test_a_server_whose_driver_is_killed_leaves_no_process(slowable: tuple[Server, Path]) -> None:
    """The last test of this server. Without the supervisor, HAProxy would keep the ports and answer 500 for ever."""
    server, _ = slowable
    os.kill(server.pid_of("attend.service.runtime.driver"), signal.SIGKILL)
    assert wait_for(lambda: server.processes() == [], 60), server.processes()
