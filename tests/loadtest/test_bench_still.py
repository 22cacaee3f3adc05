"""Who is compared stands still while others are asked, with all that it started, and runs again afterwards."""

import subprocess
import sys

import psutil
import pytest

from loadtest.bench.still import awake, processes_at, still
from tests.service.server import wait_for

SERVER = """
import socket, subprocess, sys, time
listener = socket.create_server(("127.0.0.1", 0))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(listener.getsockname()[1], child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def server():
    """(URL, its process, its child's)."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    port, child = process.stdout.readline().split()
    yield f"http://127.0.0.1:{port}", process.pid, int(child)
    psutil.Process(int(child)).kill()
    process.kill()
    process.communicate()


def standing(processes: tuple[int, ...], stopped: bool) -> bool:
    """True if they all stand still, or all run; a signal takes a moment."""
    return wait_for(lambda: {psutil.Process(each).status() == psutil.STATUS_STOPPED for each in processes} == {stopped})


def test_a_server_and_its_children_run_only_while_they_are_asked(server):
    url, *family = server
    processes = processes_at(url)
    assert set(processes) == set(family)
    with still(processes):
        assert standing(processes, True)
        with awake(processes):
            assert standing(processes, False)
        assert standing(processes, True)
    assert standing(processes, False)


def test_servers_of_other_machines_and_closed_ports_have_no_processes_here(server):
    url, *_ = server
    assert processes_at(url.replace("127.0.0.1", "example.org")) == ()
    assert processes_at("http://127.0.0.1:1") == ()


def test_a_server_that_has_ended_keeps_nobody_from_standing_still_and_going_on(server):
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    _, process, _ = server
    with still((gone.pid, process)):
        assert standing((process,), True)
        with awake((gone.pid, process)):
            assert standing((process,), False)
        assert standing((process,), True)
    assert standing((process,), False)
