"""The parent process of a server: sets the scene, starts the driver, and leaves nothing behind.

Ray's helpers and HAProxy outlive a driver that is killed; they would hold the ports and answer 500. So the parent
adopts orphans (PR_SET_CHILD_SUBREAPER) and ends them when the driver is gone, and the driver is told to stop
(PR_SET_PDEATHSIG) when the parent is.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from service.ports import claim
from service.settings import Settings

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ORPHAN_SECONDS = 3.0
"""What Ray's helpers get to end by themselves once their driver is gone."""


def run(settings: Settings) -> int:
    """Run a server until it is told to stop; returns its exit status. Raises SettingError before anything starts."""
    ports, lock = claim(settings.port, settings.grpc_port)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with lock, tempfile.TemporaryDirectory(prefix="attend-") as private:
        environment = ray_environment(settings, Path(private)) | ports.environment()
        driver = subprocess.Popen(
            [sys.executable, "-m", "service.driver", settings.to_json()],
            env={**os.environ, **environment},
            # Our own lines go to standard error; Ray's farewells about actors it has just ended go here.
            stdout=None if settings.log_level == "debug" else subprocess.DEVNULL,
            preexec_fn=lambda: _leave_group(libc),
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: _forward(driver, number))
        status = driver.wait()
        end_orphans(ORPHAN_SECONDS)
    return status if status >= 0 else 128 - status


def ray_environment(settings: Settings, private: Path) -> dict[str, str]:
    """What must stand in the environment before Ray is imported. What the user has set stays, but for the choice of proxy."""
    token = private / "token"
    token.touch(mode=0o600)
    token.write_text(os.urandom(32).hex(), encoding="ascii")
    fast = "1" if settings.proxy == "haproxy" else "0"
    ours = {"RAY_SERVE_ENABLE_HA_PROXY": fast, "RAY_SERVE_THROUGHPUT_OPTIMIZED": fast}
    wanted = {
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        # A reload of HAProxy, as at each change of the replicas, cuts the streams that are older than this.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(int(settings.request_timeout_seconds) + 60),
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "32768",
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(4 << 20),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_DEDUP_LOGS": "0",
        # The proxies share the cores: threads that wait must not spin.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()} | ours


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


def _forward(driver: "subprocess.Popen[bytes]", number: int) -> None:
    if driver.poll() is None:
        driver.send_signal(number)
