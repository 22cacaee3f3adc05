"""The parent of a server: what it tells Ray, and that it leaves no process behind."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from attend.model.errors import SettingError
from attend.service.runtime.models.run import folder_of_sockets
from attend.service.runtime.supervisor import ray_environment
from attend.service.settings import Settings

SUBREAPER = """
import ctypes, subprocess, sys
from attend.service.runtime.supervisor import PR_SET_CHILD_SUBREAPER, end_orphans
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
subprocess.run(["sh", "-c", sys.argv[1]], stdout=sys.stdout)
end_orphans(float(sys.argv[2]))
print("over")
"""


SUPERVISED = """
import subprocess, sys
from attend.service.runtime.supervisor import supervise
driver = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(supervise(driver, 1), flush=True)
"""
TIRED = "import time; print('runs', flush=True); time.sleep(60)"
HANDLED = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(15)); " + TIRED
"""As Ray has it."""
READY = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); " + TIRED
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + TIRED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("driver", [TIRED, HANDLED, STUBBORN])
@pytest.mark.parametrize("shell", [[], ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]], ids=["", "in the background"])
def test_a_driver_is_told_to_stop_and_killed_if_it_does_not(driver, number, shell):
    """Told before it was ready, it ends in several ways, and the supervisor in one; each time it says at once that it stops."""
    status = 128 + (signal.SIGKILL if driver == STUBBORN else number)
    command = [*shell, sys.executable, "-c", SUPERVISED, driver]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "runs\n"
        parent.send_signal(number)
        assert parent.stderr.readline() == "Stopping ...\n"
        assert parent.stdout.readline() == f"{status}\n"


@pytest.mark.usefixtures("hangup_ends")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_driver_that_had_served_and_stops_in_order_ends_with_status_zero(number):
    with subprocess.Popen([sys.executable, "-c", SUPERVISED, READY], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "runs\n"
        parent.send_signal(number)
        assert parent.stdout.readline() == "0\n"


def test_under_nohup_a_closed_terminal_stops_nothing():
    command = ["nohup", sys.executable, "-c", SUPERVISED, READY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout.readline() == "runs\n"
        parent.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert parent.poll() is None
        parent.send_signal(signal.SIGTERM)
        assert parent.stdout.readline() == "0\n"


def test_a_stop_that_nobody_reads_about_is_a_stop():
    """The terminal, or the program that took the lines, may be gone."""
    command = [sys.executable, "-c", SUPERVISED, READY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "runs\n"
        parent.stderr.close()
        parent.send_signal(signal.SIGTERM)
        assert parent.stdout.readline() == "0\n"


LEAVES_ORPHANS = """
import os, subprocess, time
from pathlib import Path
for _ in range(9):
    subprocess.run(["sh", "-c", "sleep 0.1 &"])
children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
deadline = time.monotonic() + 60
while children.read_text().split() != [str(os.getpid())] and time.monotonic() < deadline:
    time.sleep(0.01)
print(children.read_text().split() == [str(os.getpid())])
"""


def test_orphans_that_end_are_reaped_while_the_driver_runs():
    """Else each change of the replicas would leave a process without a body, for days."""
    adopting = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n" + SUPERVISED
    done = subprocess.run([sys.executable, "-c", adopting, LEAVES_ORPHANS], capture_output=True, text=True, timeout=90)
    assert done.stdout.split() == ["True", "0"], done.stderr


@pytest.fixture
def bare(monkeypatch):
    """An environment in which the user has set nothing of Ray's."""
    for name in tuple(os.environ):
        if name.startswith(("RAY_", "OMP_")):
            monkeypatch.delenv(name)


def test_the_token_is_long_private_and_fresh(bare, tmp_path):
    tokens = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        environment = ray_environment(Settings(), tmp_path / name)
        path = tmp_path / name / "token"
        assert environment["RAY_AUTH_TOKEN_PATH"] == str(path)
        assert environment["RAY_AUTH_MODE"] == "token"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        tokens.add(path.read_text())
    assert {len(token) for token in tokens} == {64}
    assert len(tokens) == 2


def test_what_the_user_has_set_stays(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_SERVE_HAPROXY_NBTHREAD", "16")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    environment = ray_environment(Settings(), tmp_path)
    assert environment["RAY_SERVE_HAPROXY_NBTHREAD"] == "16"
    assert environment["RAY_AUTH_MODE"] == "disabled"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_reload_cuts_no_stream_that_may_still_run(bare, tmp_path):
    environment = ray_environment(Settings(request_timeout_seconds=100.5), tmp_path)
    assert int(environment["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > 100
    assert all(isinstance(value, str) for value in environment.values())


def test_the_files_of_haproxy_lie_in_a_folder_for_us_alone(bare, tmp_path):
    environment = ray_environment(Settings(), tmp_path)
    for name in ("CONFIG_FILE_LOC", "SOCKET_PATH", "METRICS_SOCKET_PATH", "SERVER_STATE_FILE"):
        folder = Path(environment[f"RAY_SERVE_HAPROXY_{name}"]).parent.resolve()
        assert folder.parent == tmp_path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_haproxys_program_knows_where_the_servers_log_is(bare, tmp_path):
    environment = ray_environment(Settings(log_file=str(tmp_path / "log"), log_format="json"), tmp_path)
    assert (environment["ATTEND_LOG_FILE"], environment["ATTEND_LOG_FORMAT"]) == (str(tmp_path / "log"), "json")


@pytest.mark.parametrize(("given", "wanted"), [({}, "1"), ({"prefix_routing": False}, "0"), ({"prefix_caching": False}, "0")])
def test_calls_are_routed_by_their_prefix_where_there_is_a_cache_of_prefixes(bare, tmp_path, given, wanted):
    assert ray_environment(Settings(**given), tmp_path)["ATTEND_PREFIX_ROUTING"] == wanted


@pytest.mark.parametrize("length", [0, 20, 40, 200])
def test_sockets_find_room_in_a_temporary_folder_of_any_length(bare, tmp_path, monkeypatch, length):
    folder = tmp_path
    while len(str(folder)) < length:
        folder /= "long" * 10
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    environment = ray_environment(Settings(), folder)
    haproxy = Path(environment["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    session = "ray/session_2026-11-28_14-57-12_345678_4194304/sockets/plasma_store"
    with folder_of_sockets() as models:
        folders = (haproxy.parent / ("f" * 56), 97, haproxy.name), (models / "100", 107, "http.sock")
        for place, most, name in (
            *folders,
            ((Path(environment.get("RAY_TMPDIR", folder)) / session).parent, 107, "plasma_store"),
        ):
            place.mkdir(parents=True)
            assert len(str(place / name)) <= most
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(place / name))
    assert (folder / session).exists() and (folder / "edge" / ("f" * 56) / haproxy.name).exists()


def test_a_binary_that_cannot_be_run_is_named_before_anything_starts(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "nothing"))
    with pytest.raises(SettingError, match="nothing"):
        ray_environment(Settings(), tmp_path)


def under_a_supervisor(command: str, seconds: float) -> list[str]:
    """What `command`, whose own process ends at once, printed under a parent that then ends its orphans."""
    words = [sys.executable, "-c", SUBREAPER, command, str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def runs(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def test_orphans_that_will_not_go_are_killed_and_so_are_theirs(tmp_path):
    mark = tmp_path / "mark"
    inner = f'trap "" TERM; sleep 600 & echo $!; touch {mark}; wait'
    stubborn = f"trap '' TERM INT HUP; setsid sh -c '{inner}' & echo $!; until [ -e {mark} ]; do sleep 0.01; done"
    *pids, over = under_a_supervisor(stubborn, 0.01)
    assert over == "over"
    assert len(pids) == 2
    assert not any(map(runs, pids))


def test_an_orphan_that_goes_by_itself_in_time_is_let_finish(tmp_path):
    mark = tmp_path / "mark"
    assert under_a_supervisor(f"(sleep 0.01; echo done > {mark}) & exit", 30) == ["over"]
    assert mark.read_text() == "done\n"
