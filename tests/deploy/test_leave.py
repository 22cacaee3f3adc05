"""A deleted RayService leaves with its last request; a node that leaves alone waits for its replicas' successors."""

import contextlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from attend.service.runtime import leave
from tests.deploy.ray_nodes import cluster
from tests.deploy.test_ray_cluster import CONFIGURATIONS, deploy, stream_over_http
from tests.service.server import SLOWNESS, wait_for

GONE_SECONDS = 60
RUNNING = 'attend_requests_running{replica="a",model="m"} 1.0\nattend_requests_waiting{replica="a",model="m"} 0.0\n'


@pytest.fixture
def page():
    """A function: whether all is quiet where a page of metrics has this status and text."""

    def quiet(status, text):
        class Page(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
            threading.Thread(target=server.handle_request, daemon=True).start()
            return leave.is_quiet(f"http://127.0.0.1:{server.server_port}/metrics")

    return quiet


@pytest.mark.parametrize(
    ("status", "text", "quiet"),
    [
        (200, RUNNING, False),
        (200, RUNNING.replace("0.0", "2.0").replace("1.0", "0.0"), False),
        (200, RUNNING.replace("1.0", "0.0"), True),
        (200, "attend_replicas 2.0\n", False),  # replicas that are too busy to answer the scrape
        (503, "", True),  # HAProxy without a replica
        (404, "", False),  # an application below another path
    ],
)
def test_a_cluster_is_quiet_when_no_request_runs_or_waits(page, status, text, quiet):
    assert page(status, text) == quiet


def test_a_port_that_nobody_listens_on_is_quiet():
    assert leave.is_quiet("http://127.0.0.1:1/metrics")


HEAD, ALL = {"gcs_server": 11, "raylet": 12}, {"a", "b"}


@pytest.mark.parametrize(
    ("processes", "looks", "ended"),
    [
        ({"raylet": 12}, [(ALL, set(), True)], True),
        ({"raylet": 12}, [(ALL, {"a"}, True)], False),  # one node is drained, or evicted
        ({"raylet": 12}, [(ALL, set(), False)], False),  # a stream
        ({"raylet": 12}, [(ALL, set(), True), (ALL, set(), False)], False),  # calls by a kept connection
        (HEAD, [(ALL, set(), True)], False),  # streams of other nodes need it
        (HEAD, [({"a"}, set(), False)], True),  # no replica is left that could answer
        (HEAD, [({"a"}, {"a"}, True)], False),
    ],
)
def test_a_node_ends_when_every_node_leaves_and_all_is_quiet(monkeypatch, processes, looks, ended):
    clock, killed, at = [0.0], [], [0]

    def sleep(seconds):
        clock[0] += seconds
        at[0] += 1
        if at[0] > 60:
            raise TimeoutError

    monkeypatch.setattr(leave.time, "sleep", sleep)
    monkeypatch.setattr(leave.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(leave, "below", lambda first: processes)
    monkeypatch.setattr(leave.os, "kill", lambda *words: killed.append(words))

    def look():
        return looks[at[0] % len(looks)]

    try:
        leave.watch(lambda: look()[:2], lambda: look()[2], 1)
    except TimeoutError:
        assert not ended and not killed
    else:
        assert ended and killed == [(12, signal.SIGTERM)] and clock[0] >= leave.QUIET


def test_the_processes_below_one_are_found_by_name():
    with subprocess.Popen(["sh", "-c", "sleep 30 & wait"], start_new_session=True) as shell:
        try:
            assert wait_for(lambda: "sleep" in leave.below(shell.pid))
            assert leave.below(os.getpid())["sleep"] == leave.below(shell.pid)["sleep"]
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


def test_the_hook_waits_and_leaves_a_watch_behind(monkeypatch):
    left = []
    monkeypatch.setattr(leave.subprocess, "Popen", lambda words, **options: left.append((words, options["start_new_session"])))
    began = time.monotonic()
    leave.main(["0.2"])
    assert time.monotonic() - began >= 0.2
    assert left == [([sys.executable, "-m", leave.__name__], True)]


WATCH = """import sys
from attend.service.runtime.leave import *
watch(look_at(sys.argv[1]), lambda: is_quiet(sys.argv[2]), int(sys.argv[3]))"""


def deployed(nodes) -> bool:
    """True if Serve runs the file. On a busy machine its own parts may come up too late for it at first."""
    with contextlib.suppress(AssertionError):
        deploy(nodes, CONFIGURATIONS[0])
        return True
    return False


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("busy", [False, True])
def test_a_deleted_cluster_is_gone_within_a_minute_or_with_its_last_stream(tmp_path, busy):
    """All nodes get SIGTERM at once, as by `helm uninstall`. By Ray alone each would wait for successors, here 300 s."""
    with cluster(tmp_path, node_drain=300) as nodes:
        assert wait_for(lambda: deployed(nodes), 600)
        url = f"http://127.0.0.1:{nodes.worker_http}"
        assert wait_for(lambda: httpx.get(f"{url}/readyz", timeout=10).status_code == 200, 30)
        lines: list = []
        stream = threading.Thread(target=stream_over_http, args=(url, lines))
        if busy:
            stream.start()
            assert wait_for(lambda: bool(lines))
        watches = []
        for node in (nodes.head, *nodes.workers):
            command = [sys.executable, "-c", WATCH, f"127.0.0.1:{nodes.gcs}", f"{url}/metrics", str(node.pid)]
            watches.append(subprocess.Popen(command, env=nodes.environment, cwd="/tmp"))
        for node in (nodes.head, *nodes.workers):
            node.send_signal(signal.SIGTERM)
        if busy:
            stream.join(60)
            assert lines[-1][1] == "data: [DONE]"
        began = time.monotonic()
        for node in (*nodes.workers, nodes.head):
            node.wait(GONE_SECONDS * SLOWNESS - (time.monotonic() - began))
        for watch in watches:
            watch.wait(30)
        print(f"gone after {time.monotonic() - began:.1f} s")
