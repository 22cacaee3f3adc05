"""`attend serve --single`: one process without Ray keeps the laws of a server."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from attend.model.errors import EngineFailed
from attend.service.runtime import lifecycle, single
from attend.service.runtime.http_server import bind_socket
from attend.service.settings import Settings
from tests.service.certificates import Authority
from tests.service.framing import misread
from tests.service.server import Server, free_port, free_ports, running, started, wait_for
from tests.service.test_contract import (  # noqa: F401 - the laws of any server
    stub,
    test_an_answer_goes_on_after_the_tokens_received,
    test_constrained_answers_obey_on_both_transports,
    test_tokens_travel_both_ways_on_both_transports,
)
from tests.service.test_end_to_end import (  # noqa: F401
    LONG,
    PROMPT,
    attend,
    post,
    test_a_client_that_leaves_before_a_whole_answer_frees_its_blocks,
    test_a_client_that_leaves_over_grpc_frees_its_blocks,
    test_a_client_that_leaves_over_http_frees_its_blocks,
    test_both_transports_give_the_same_greedy_text,
)

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model, served by one process."""
    with running(tmp_path_factory.mktemp("single") / "log", "--single", "--dtype", "float32") as server:
        yield server


def test_it_is_one_process_that_never_loaded_ray(server: Server) -> None:
    assert server.processes() == [server.process.pid]
    mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "torch" in mapped
    assert "_raylet" not in mapped


def test_check_finds_nothing_wrong(server: Server) -> None:
    done = attend("check", server.url, "--grpc", server.target)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_line_is_json_where_log_lines_are_and_a_certificate_is_served(tmp_path: Path, monkeypatch) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    cert, key = authority.sign("server")
    words = ["--single", "--log-format", "json", "--tls-cert", str(cert), "--tls-key", str(key)]
    with running(tmp_path / "log", *words) as server:
        done = attend("check", f"https://127.0.0.1:{server.http}")
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [json.loads(line)["message"] for line in server.output().splitlines()]
        assert f"Open:  https://localhost:{server.http}/ in a browser" in lines
        server.stop()
    assert any("Stopping" in json.loads(line)["message"] for line in server.output().splitlines())


def test_a_call_gets_its_own_id_back_and_one_id_alone(server: Server) -> None:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=30)
    connection.request("GET", "/v1/models", headers={"X-Request-Id": "mine-1"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert answer.headers.get_all("x-request-id") == ["mine-1"]


def test_the_metrics_page_tells_of_one_replica(server: Server) -> None:
    assert server.metric("attend_scrape_replicas_answered") == 1
    assert server.metric("attend_replicas", state="running") == 1
    assert server.replicas() == {single.REPLICA}


def test_a_taken_port_stops_the_start_with_its_number(server: Server) -> None:
    for flags, name, port in (
        (("--port", server.http, "--grpc-port", free_port()), "port", server.http),
        (("--port", free_port(), "--grpc-port", server.grpc), "grpc_port", server.grpc),
    ):
        done = attend("serve", "--single", *map(str, flags))
        assert done.returncode == 2
        assert done.stderr == f"attend: {name} {port} is taken: another process listens on it; choose another {name}\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--replicas", "2"), "replicas = 2 needs Ray"),
    ],
)
def test_settings_that_need_ray_are_refused_by_name(flags: tuple[str, ...], words: str) -> None:
    done = attend("serve", "--single", *flags)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_bad_checkpoint_stops_the_start_with_a_sentence(tmp_path: Path) -> None:
    port, grpc_port = map(str, free_ports(2))
    (tmp_path / "config.json").write_text("{}")
    command = [
        sys.executable,
        "-m",
        "attend.service.commands.cli",
        "serve",
        str(tmp_path),
        "--single",
        "--port",
        port,
        "--grpc-port",
        grpc_port,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("hangup_ends")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_loads_ends_it_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path / "log", "--single") as server:
        assert wait_for(lambda: "Loading" in server.output(), 60), server.output()
        server.stop(number, within=10)
        assert server.process.returncode == 128 + number, server.output()
        assert server.processes() == []


def test_callers_can_connect_when_the_line_comes_that_says_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the server's own task has not yet run."""
    connected: list[int] = []

    def heard(line: str) -> None:
        with socket.socket() as caller:
            connected.append(caller.connect_ex(http.getsockname()))

    class Other(SimpleNamespace):
        """Stands for the replica and for both servers."""

        async def nothing(self, *given: object) -> None: ...

        start = stop = describe = drain = count_requests = nothing

        def end(self) -> None: ...

        async def serve(self, sockets: list[socket.socket]) -> None:
            assert connected, "this task runs too early to show anything"
            for each in sockets[1:]:
                each.close()

    engine = SimpleNamespace(info=SimpleNamespace(device="cpu", max_model_len=128))
    other = Other(config=SimpleNamespace(backlog=8), engine=engine, application=lambda *given, **named: None)
    monkeypatch.setattr("attend.service.runtime.http_server.http_server", lambda *given, **named: other)
    monkeypatch.setattr("attend.service.grpc_api.server.grpc_server", lambda *given, **named: other)
    monkeypatch.setattr(single, "ready_line", lambda *given: "Ready")
    monkeypatch.setattr(single, "print_line", heard)

    async def serve() -> int:
        (stop := lifecycle.Stop()).set()
        monkeypatch.setattr(single, "watch", lambda *given: stop.wait())
        return await single.serve_until(other, Settings(), http, stop)  # type: ignore[arg-type]

    with bind_socket("127.0.0.1", 0) as http:
        assert asyncio.run(serve()) == 0
    assert connected[0] == 0


@pytest.mark.parametrize(
    ("files", "http", "grpc"),
    [(1 << 20, 6144, 1920), (single.RESERVE + 8064, 6144, 1920), (1024, 585, 183), (300, 33, 11), (64, 1, 1)],
)
def test_connections_leave_files_for_everything_else(monkeypatch, caplog, files, http, grpc) -> None:
    monkeypatch.setattr(single.resource, "getrlimit", lambda kind: (files, files))
    assert single.connections_allowed() == (http, grpc)
    assert [f"at most {files} files" in record.message for record in caplog.records] == [True] * (http < 6144)


def test_a_step_thread_that_is_dead_or_stuck_ends_the_watch() -> None:
    class Dead:
        def check_health(self) -> None:
            raise EngineFailed("stuck")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single, "WATCH_SECONDS", 0.0)
        with pytest.raises(EngineFailed):
            asyncio.run(asyncio.wait_for(single.watch(Dead()), 5))  # type: ignore[arg-type]


def test_odd_framing_has_one_reading(server: Server) -> None:
    assert misread(server.http) == []
