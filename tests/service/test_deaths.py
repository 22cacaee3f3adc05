"""What callers see when a replica or HAProxy dies or freezes. HAProxy is the real one; replicas are fakes."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from attend.service.runtime import haproxy, supervisor
from tests.service.runtime.edges import ray_config
from tests.service.server import free_ports, wait_for

FAIL_SECONDS = 5.0
ID = "the-callers-own"


class Edge:
    """HAProxy as Ray starts it, before two replicas. This process stands for Ray's manager of it."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.environment = folder, {**os.environ, **environment}
        self.state = folder / "state"
        self.state.mkdir(mode=0o700, parents=True)
        self.http, self.grpc, stats, metrics, *self.ports = free_ports(12)
        self.others = {"stats_port": stats, "metrics_port": metrics}
        self.wrapper = supervisor.write_edge(folder)
        self.replicas: dict[str, subprocess.Popen[str]] = {}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start_replicas(self, *names: str) -> None:
        """Start them; HAProxy comes to know them when it is started."""
        for name in names:
            self.replicas[name] = self.start_replica(name, *self.ports[2 * len(self.replicas) :][:2])
        for name in names:
            assert self.replicas[name].stdout.readline() == "ready\n"

    def start_replica(self, name: str, *ports: int) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tests.service.fake_replica", *map(str, ports), name]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def write(self) -> Path:
        """The configuration that Ray writes for these replicas."""
        pairs = {name: (self.ports[2 * index], self.ports[2 * index + 1]) for index, name in enumerate(self.replicas)}
        ports = {"http": self.http, "grpc": self.grpc, "http_proxy": self.ports[-2], "grpc_proxy": self.ports[-1]}
        return ray_config(self.state, ports, {"default": pairs}, **self.others)

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        """Start HAProxy as Ray does; returns when it listens."""
        command = [str(self.wrapper), "-db", "-f", str(self.write()), "-dR", *words]
        self.processes.append(subprocess.Popen(command, env=self.environment, stderr=subprocess.DEVNULL))
        assert wait_for(lambda: self.commanded_process() == self.processes[-1].pid), self.processes[-1].poll()
        return self.processes[-1]

    def commanded_process(self) -> int:
        """The process that answers on HAProxy's socket."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self.state / "socket_path"))
            sock.sendall(b"show info\n")
            lines = sock.makefile().read().splitlines()
            return int(next(line.split()[1] for line in lines if line.startswith("Pid:")))
        return 0

    def ask(self, path: str, seconds: float = 30.0, **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
        """(status, body, headers) of a POST."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=seconds)
        with contextlib.closing(connection):
            connection.request("POST", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers

    def call(self, method: str, seconds: float = 30.0) -> tuple[grpc.StatusCode, str]:
        """(code, details or answer) of an RPC on a channel of its own."""
        with self.channel() as channel:
            try:
                return grpc.StatusCode.OK, channel.unary_unary(f"/fake.Service/{method}")(b"", timeout=seconds).decode()
            except grpc.RpcError as error:
                return error.code(), error.details()

    def channel(self) -> grpc.Channel:
        """A gRPC channel that shares no connection with another."""
        return grpc.insecure_channel(f"127.0.0.1:{self.grpc}", options=[("grpc.use_local_subchannel_pool", 1)])

    def are_checked(self) -> bool:
        """True if HAProxy has asked each replica once whether it is alive."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.others['stats_port']}/stats;csv", timeout=10) as page:
            rows = [line for line in page.read().decode().splitlines() if line.startswith("grpc-default,SERVE_REPLICA-")]
        return len(rows) == len(self.replicas) and all(",L7OK," in row for row in rows)

    def has_both(self) -> bool:
        """True if replicas a and b both answer calls."""
        return {self.ask("/now")[1].split()[0] for _ in range(4)} == {"a", "b"}

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[http.client.HTTPResponse]:
        """An answer whose body has begun."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=30)
        with contextlib.closing(connection):
            connection.request("POST", path)
            with connection.getresponse() as answer:
                assert answer.readline() == b".\n"
                yield answer

    def stop(self) -> None:
        for replica in self.replicas.values():
            replica.kill()
            replica.communicate()
        for process in self.processes:
            process.kill()
            process.wait()
        for pid in self.ours():
            os.kill(pid, signal.SIGKILL)

    def ours(self) -> list[int]:
        """Processes of HAProxy and its helpers that still run."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
        return found


@pytest.fixture
def front() -> Iterator[Edge]:
    """HAProxy before two replicas. The folder's name is short, as a socket's must be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        made = Edge(Path(folder))
        try:
            made.start_replicas("a", "b")
            made.start()
            assert wait_for(made.has_both)
            assert wait_for(made.are_checked)  # a first check that fails is enough; later it takes two
            yield made
        finally:
            made.stop()


def is_refusal(answer: tuple[int, str, http.client.HTTPMessage]) -> bool:
    """True if it is a 503 in our shape that says when to come again."""
    status, body, headers = answer
    return status == 503 and headers["retry-after"] == "1" and json.loads(body)["error"]["type"] == "unavailable_error"


def stands_in(front: Edge) -> bool:
    """True if calls are answered although the HAProxy of Ray's is gone."""
    with contextlib.suppress(OSError):
        return front.ask("/now", 1)[0] == 200
    return False


def is_stopped(pid: int) -> bool:
    return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text(encoding="ascii")


def seconds_until_end(answer: http.client.HTTPResponse) -> float:
    """How long a stream goes on; it ends without its last chunk."""
    started = time.monotonic()
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        while answer.readline():
            pass
    return time.monotonic() - started


def test_calls_to_a_frozen_replica_fail_in_five_seconds_and_its_streams_end(front):
    front.replicas["b"].kill()  # so that nobody else can take the calls
    assert wait_for(lambda: {front.ask("/now")[1][:1] for _ in range(4)} == {"a"})
    with front.open("/stream") as stream:
        front.replicas["a"].send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert is_refusal(front.ask("/now"))
        assert time.monotonic() - started < FAIL_SECONDS
        assert seconds_until_end(stream) < 1
    for ask in (lambda: is_refusal(front.ask("/now")), lambda: front.call("Now")[0] is grpc.StatusCode.UNAVAILABLE):
        began = time.monotonic()
        assert ask()
        assert time.monotonic() - began < 1, "the second call waited too"
    front.replicas["a"].send_signal(signal.SIGCONT)
    assert wait_for(lambda: front.ask("/now")[0] == 200)


def test_calls_over_grpc_to_a_frozen_replica_are_unavailable_in_five_seconds(front):
    front.replicas["b"].kill()
    front.replicas["a"].send_signal(signal.SIGSTOP)
    started = time.monotonic()
    assert front.call("Now")[0] is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - started < FAIL_SECONDS


@pytest.mark.long
def test_a_replica_whose_event_loop_is_busy_for_three_seconds_loses_nothing(front):
    """Its own streams on both transports, and the call that makes it busy."""
    front.replicas["b"].kill()
    with front.open("/stream") as stream, grpc.insecure_channel(f"127.0.0.1:{front.grpc}") as channel:
        messages = iter(channel.unary_stream("/fake.Service/Stream")(b"", timeout=30))
        assert next(messages) == b"."
        assert front.ask("/block")[0] == 200
        assert front.ask("/now")[0] == 200
        assert all(next(messages) == b"." for _ in range(100))
        assert all(stream.readline() == b".\n" for _ in range(100))


def test_a_replica_that_leaves_keeps_its_streams_and_gets_no_calls_over_http(front):
    front.replicas["b"].kill()
    with front.open("/stream") as stream:
        assert front.ask("/leave")[0] == 200
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            assert stream.readline() == b".\n"


def test_a_call_whose_replica_dies_before_the_first_byte_is_tried_once_more_under_its_id(front):
    first = front.replicas["a"]
    first.send_signal(signal.SIGSTOP)
    assert wait_for(lambda: is_stopped(first.pid))
    for _ in range(2):  # one of two goes to it
        status, body, _ = front.ask("/now", **{"X-Request-Id": ID})
        assert (status, body) == (200, f"b {ID}")


@pytest.mark.long
def test_calls_and_streams_to_a_lost_machine_end_in_five_seconds_although_haproxy_has_just_been_replaced(front):
    """A HAProxy that leaves checks no replica any more."""
    lost = front.replicas["a"]
    front.replicas["b"].send_signal(signal.SIGSTOP)
    with front.open("/stream") as stream:
        assert front.call("Now") == (grpc.StatusCode.OK, "a")
        front.replicas["b"].send_signal(signal.SIGCONT)
        # HAProxy takes b for dead where the stream was sent to it first. Alive, it gets the next call: a has the stream.
        assert wait_for(lambda: front.ask("/now")[1].startswith("b"))
        lost.send_signal(signal.SIGUSR1)
        assert wait_for(lambda: is_stopped(lost.pid))
        started = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            http = [pool.submit(front.ask, "/now") for _ in range(4)]
            rpc = [pool.submit(front.call, "Now") for _ in range(4)]
            front.start("-sf", str(front.processes[-1].pid))
            assert [answer.result()[0] for answer in http] == [200] * 4
            assert {answer.result()[0] for answer in rpc} <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
        seconds_until_end(stream)
    assert time.monotonic() - started < FAIL_SECONDS
    assert front.processes[0].wait(5) == 0


def test_a_large_body_for_a_busy_event_loop_arrives(front):
    """For three seconds the replica's kernel has room for no byte more."""
    front.replicas["b"].kill()
    assert wait_for(lambda: {front.ask("/now")[1][:1] for _ in range(4)} == {"a"})
    connection = http.client.HTTPConnection("127.0.0.1", front.http, timeout=30)
    with concurrent.futures.ThreadPoolExecutor() as pool, contextlib.closing(connection):
        busy = pool.submit(front.ask, "/block")
        connection.request("POST", "/eat", bytes(8 << 20))
        assert (connection.getresponse().status, busy.result()[0]) == (200, 200)


def test_a_call_whose_every_replica_dies_is_refused_in_our_shape_also_where_calls_came_before_it(front):
    """`front` has called both: their connections would be used again. HAProxy ends a call on such a one without an answer."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read(replica: "subprocess.Popen[str]") -> None:
        for line in replica.stdout:
            lines.put(line)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(front.ask, "/wait") for _ in range(4)]
        for replica in front.replicas.values():
            pool.submit(read, replica)
        try:
            assert [lines.get(timeout=30) for _ in calls] == ["waits\n"] * 4
        finally:
            for replica in front.replicas.values():
                replica.kill()
        assert all(is_refusal(call.result()) for call in calls)


def test_a_call_is_never_tried_a_third_time(front):
    """Two replicas die of it; the caller gets an error to try again, and no other replica dies."""
    front.start_replicas("c")
    front.start("-sf", str(front.processes[-1].pid))
    assert is_refusal(front.ask("/die"))
    assert wait_for(lambda: [one.poll() for one in front.replicas.values()].count(1) == 2)
    assert front.ask("/now")[0] == 200


def test_without_a_replica_calls_are_refused_at_once(front):
    """Serve's own proxy is there; it would hold them."""
    proxy = front.start_replica("proxy", *front.ports[-2:])
    assert proxy.stdout.readline() == "ready\n"
    for replica in front.replicas.values():
        replica.kill()
    front.replicas["proxy"] = proxy
    code, details = front.call("Now")  # HAProxy tries before it knows
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "http2" not in details
    assert wait_for(lambda: is_refusal(front.ask("/now")))
    assert wait_for(lambda: front.call("Now") == (grpc.StatusCode.UNAVAILABLE, "no replica can take the request now"), 5)
    started = time.monotonic()
    assert is_refusal(front.ask("/now"))
    assert front.call("Now")[0] is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - started < 1


def test_a_killed_haproxy_is_replaced_in_five_seconds_and_gives_the_ports_up_to_rays_next(front):
    front.processes[-1].kill()
    front.processes[-1].wait()
    started = time.monotonic()
    assert wait_for(lambda: stands_in(front))
    assert time.monotonic() - started < FAIL_SECONDS
    assert front.call("Now")[0] is grpc.StatusCode.OK
    assert front.commanded_process() == 0, "Ray would take it for its own and never know"
    standing_in = int((front.state / "current").read_text())
    with front.open("/stream") as stream:
        front.start()
        assert front.ask("/now")[0] == 200
        assert stream.readline() == b".\n"
    assert wait_for(lambda: not Path(f"/proc/{standing_in}").exists())


def test_what_stands_in_serves_also_while_ray_starts_a_manager_anew(front):
    """Ray ends a manager whose HAProxy has died, and the next one takes seconds to start."""
    front.processes[-1].kill()
    front.processes.pop().wait()
    manager = ["sh", "-c", '"$@" & echo $!; wait', "manager", str(front.wrapper), "-db", "-f", str(front.write()), "-dR"]
    with subprocess.Popen(manager, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        haproxy = int(process.stdout.readline())
        assert wait_for(lambda: front.commanded_process() == haproxy)
        os.kill(haproxy, signal.SIGKILL)
        assert wait_for(lambda: int((front.state / "current").read_text()) != haproxy and stands_in(front))
        standing_in = int((front.state / "current").read_text())
        process.kill()
    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert stands_in(front)
    front.start()
    assert wait_for(lambda: not Path(f"/proc/{standing_in}").exists())
    assert stands_in(front)


def test_a_reload_ends_the_old_haproxy_and_nobody_stands_in_for_it(front):
    old = front.processes[-1]
    front.start("-sf", str(old.pid))
    assert old.wait(10) == 0
    assert front.ask("/now")[0] == 200
    assert wait_for(lambda: len(front.ours()) == 2), "HAProxy and its watch"
    assert not (front.state / "stand-in.cfg").exists()


@pytest.mark.long
def test_while_haproxy_is_replaced_no_first_call_of_a_grpc_client_waits_and_a_stream_goes_on(front):
    """A connection that is told to go away before its first call keeps its client waiting until it ends."""
    over, waits = threading.Event(), []

    def first_calls() -> None:
        while not over.is_set():
            began = time.monotonic()
            code, _ = front.call("Now")
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED)
            waits.append(time.monotonic() - began)

    with front.channel() as channel, concurrent.futures.ThreadPoolExecutor(4) as pool:
        messages = channel.unary_stream("/fake.Service/Stream")(b"", timeout=60)
        callers = [pool.submit(first_calls) for _ in range(4)]
        for _ in range(12):
            front.start("-sf", str(front.processes[-1].pid), "-x", str(front.state / "socket_path"))
            until = time.monotonic() + 2 * haproxy.LAST_CALL_MS / 1000
            while time.monotonic() < until:
                next(messages)
        over.set()
        for caller in callers:
            caller.result()
        messages.cancel()
    late = [wait for wait in waits if wait > FAIL_SECONDS]
    assert len(late) <= 1, f"{late} of {len(waits)}"  # without LAST_CALL_MS three or more; with it one of 60,000, not explained


def test_replicas_that_ray_does_not_name_while_it_builds_an_update_serve_on(front):
    known, front.replicas = front.replicas, {}
    try:
        front.start("-sf", str(front.processes[-1].pid))
    finally:
        front.replicas = known
    assert wait_for(front.has_both)
    assert front.call("Now")[0] == grpc.StatusCode.OK
    front.replicas["a"].kill()
    assert wait_for(lambda: {front.ask("/now")[1][:1] for _ in range(4)} == {"b"}), "their checks go on"


def test_the_haproxy_of_another_server_is_left_alone(front):
    """Its process has the id of one of ours that is long gone."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, contextlib.ExitStack() as ending:
        other = Edge(Path(folder))
        ending.callback(other.stop)
        other.start_replicas("c")
        foreign = other.start()
        front.processes[-1].kill()
        front.processes.pop().wait()
        assert wait_for(lambda: stands_in(front))
        os.kill(int((front.state / "current").read_text()), signal.SIGKILL)
        (front.state / "current").write_text(f"{foreign.pid}\n", encoding="ascii")
        front.start()
        assert front.ask("/now")[0] == 200
        with pytest.raises(subprocess.TimeoutExpired):
            foreign.wait(2)


def test_an_end_by_ray_leaves_no_process(front):
    """Ray kills HAProxy and then its manager."""
    front.processes[-1].kill()
    front.processes.pop().wait()
    manager = ["sh", "-c", '"$@" & echo $!; wait', "manager", str(front.wrapper), "-db", "-f", str(front.write()), "-dR"]
    with subprocess.Popen(manager, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        haproxy = int(process.stdout.readline())
        assert wait_for(lambda: front.commanded_process() == haproxy)
        os.kill(haproxy, signal.SIGKILL)
        process.kill()
    assert wait_for(lambda: not front.ours())


def test_the_socket_that_commands_haproxy_is_for_its_owner_alone(front):
    assert stat.S_IMODE((front.state / "socket_path").stat().st_mode) == 0o600


def test_4096_idle_connections_shut_nobody_out(front):
    with idle(front, 4096):
        assert front.ask("/now", 5)[0] == 200
        assert front.call("Now", 5)[0] is grpc.StatusCode.OK


@contextlib.contextmanager
def idle(front: Edge, count: int) -> Iterator[None]:
    """So many connections that say nothing; HAProxy ends them after ten seconds."""
    with contextlib.ExitStack() as held:
        for _ in range(count):
            held.enter_context(socket.create_connection(("127.0.0.1", front.http)))
        yield
