"""How a server begins and how it ends: before it is ready, under a signal, with streams that run, with a bad checkpoint."""

import concurrent.futures
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from safetensors.torch import load_file, save_file

from attend.model.config import DEFAULT_MODEL as DEFAULT
from attend.v1 import generation_pb2 as pb
from tests.service.server import START_SECONDS, Server, free_ports, started, wait_for
from tests.service.test_end_to_end import LONG, PROMPT, complete, post, stub

pytestmark = [pytest.mark.ray, pytest.mark.alone]

SLOW = ("--dtype", "float32", "--num-threads", "1")
"""Of a server whose long streams outlive what is done to it."""


class Early(NamedTuple):
    """A server, and what callers got who called until it was ready."""

    server: Server
    answers: set[tuple[int, str | None, str]]
    """Over HTTP: status, Retry-After, the error's code."""
    codes: set[tuple[grpc.StatusCode, bool]]
    """Of refusals over gRPC: the status, and whether the sentence is ours."""

    def call(self) -> bool:
        """Call over both transports; whether somebody listens and the start-up line is there."""
        try:
            complete(self.server, PROMPT, max_tokens=1)
            self.answers.add((200, None, ""))
        except urllib.error.HTTPError as refusal:
            self.answers.add((refusal.code, refusal.headers["retry-after"], json.load(refusal)["error"]["code"]))
        except (urllib.error.URLError, ConnectionError, HTTPException):  # nobody listens yet
            return False
        try:
            stub(self.server).Generate(pb.GenerateRequest(text=PROMPT, max_tokens=1), timeout=60)
        except grpc.RpcError as refusal:
            self.codes.add((refusal.code(), "no replica can take" in (refusal.details() or "")))
        return "Ready:" in self.server.output()


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Early]:
    """A server that has become ready under its callers' eyes."""
    with started(tmp_path_factory.mktemp("early") / "log", "--drain-seconds", "60", *SLOW) as server:
        callers = Early(server, set(), set())
        assert wait_for(callers.call, START_SECONDS), server.output()
        callers.call()
        yield callers


def test_early_callers_are_told_to_come_again(early: Early) -> None:
    assert early.answers == {(503, "1", "unavailable"), (200, None, "")}
    assert {code for code, _ in early.codes} == {grpc.StatusCode.UNAVAILABLE}
    assert any(ours for _, ours in early.codes)


def test_sigterm_lets_streams_end_refuses_new_calls_and_leaves_nothing(early: Early) -> None:
    """The last test of this server."""
    server = early.server
    with concurrent.futures.ThreadPoolExecutor() as pool:
        started = threading.Event()
        http = pool.submit(read_all, post(server, prompt=PROMPT, stream=True, **LONG | {"max_tokens": 400}), started)
        request = pb.GenerateRequest(text=PROMPT, max_tokens=400, stopping=pb.StoppingCriteria(ignore_eos=True))
        messages = pool.submit(list, stub(server).GenerateStream(request, timeout=120))
        assert started.wait(60)
        assert wait_for(lambda: server.metric("attend_requests_running") == 2)
        ending = pool.submit(server.stop, within=60 + 5)
        assert wait_for(lambda: server.get("/readyz")[0] == 503)
        assert not http.done() and not messages.done()
        with pytest.raises(grpc.RpcError) as caught:
            stub(server).Generate(request, timeout=30)
        lines = http.result()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert lines[-2] == b"data: [DONE]\n"
        assert json.loads(lines[-4][6:])["choices"][0]["finish_reason"] == "length"
        assert messages.result()[-1].outputs[0].finish_info.num_output_tokens == 400
        assert ending.result() < 60 + 5
        assert server.process.returncode == 0
        assert server.processes() == []


def read_all(lines: Iterator[bytes], started: threading.Event) -> list[bytes]:
    """Every line, with an event at the first."""
    kept = []
    for line in lines:
        started.set()
        kept.append(line)
    return kept


class End(NamedTuple):
    """How a server ended that was told to stop."""

    seconds: float
    status: int
    output: str
    left: list[int]
    """Processes of it that still live."""


def stopped_while_it_starts(log: Path, number: signal.Signals) -> End:
    """A server that loads its model, with HAProxy up, and gets a signal."""
    with started(log) as server:
        assert wait_for(lambda: "Loading" in server.output(), 60), server.output()
        assert wait_for(lambda: any("haproxy" in line for line in command_lines(server)), 60), server.output()
        seconds = server.stop(number, within=20)
        return End(seconds, server.process.returncode, server.output(), server.processes())


def command_lines(server: Server) -> list[str]:
    """What each process of the server runs."""
    found = []
    for pid in server.processes():
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_a_signal_during_the_start_ends_it_within_seconds_and_leaves_nothing(tmp_path: Path) -> None:
    end = stopped_while_it_starts(tmp_path / "log", signal.SIGINT)
    assert end.seconds < 15
    assert end.status == 128 + signal.SIGINT, end.output
    assert end.output.count("Stopping ...") == 1
    assert "Traceback" not in end.output
    assert end.left == []


def started_on_a_bad_checkpoint(folder: Path) -> subprocess.CompletedProcess[str]:
    """`attend serve` of a checkpoint with NaN among its values, to its end."""
    shutil.copytree(DEFAULT, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    port, grpc_port = map(str, free_ports(2))
    command = [
        sys.executable,
        "-m",
        "attend.service.commands.cli",
        "serve",
        "--single",
        str(folder),
        "--port",
        port,
        "--grpc-port",
        grpc_port,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_a_checkpoint_that_is_only_found_bad_by_its_values_stops_the_start_too(tmp_path: Path) -> None:
    done = started_on_a_bad_checkpoint(tmp_path / "checkpoint")
    assert done.returncode == 2
    assert "model.safetensors: tensor model.norm.weight holds NaN or infinity" in done.stderr
    assert "Traceback" not in done.stderr
