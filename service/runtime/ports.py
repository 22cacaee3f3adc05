"""Every port that a server takes, derived from its HTTP port and checked free before Ray starts.

Two servers that share Ray's range of replica gRPC ports answer each other's calls in silence, because those
sockets are bound with SO_REUSEPORT. So each server owns a slot of 100 + 100 ports, held by a file lock.
"""

import errno
import fcntl
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from attend.model.errors import SettingError

SLOTS = 50
WIDTH = 100
SINGLES = 4
"""Ports at the end of the HTTP half that are not for replicas."""
HTTP_START, GRPC_START = 20000, 25000
"""Below the kernel's range for outgoing connections, and above Ray's for its workers."""


@dataclass(frozen=True, slots=True)
class Ports:
    """A server's public ports, and the slot that its inner ones come from."""

    http: int
    grpc: int
    slot: int

    @property
    def inner(self) -> list[int]:
        """Every port that the slot reserves."""
        starts = (HTTP_START + self.slot * WIDTH, GRPC_START + self.slot * WIDTH)
        return [port for start in starts for port in range(start, start + WIDTH)]

    def environment(self) -> dict[str, str]:
        """The slot in Ray's variables."""
        http, grpc = HTTP_START + self.slot * WIDTH, GRPC_START + self.slot * WIDTH
        stats, metrics, fallback_http, fallback_grpc = range(http + WIDTH - SINGLES, http + WIDTH)
        ports = {
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": http,
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": http + WIDTH - SINGLES - 1,
            "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": grpc,
            "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": grpc + WIDTH - 1,
            "RAY_SERVE_HAPROXY_STATS_PORT": stats,
            "RAY_SERVE_HAPROXY_METRICS_PORT": metrics,
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": fallback_http,
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": fallback_grpc,
        }
        return {name: str(port) for name, port in ports.items()}


def claim(http: int, grpc: int) -> tuple[Ports, IO[str]]:
    """Ports for a server, and the lock to keep open while it lives. Raises SettingError naming a port that it cannot have.

    It also does where the temporary folder takes no lock.
    """
    check_ports(http, grpc)
    for step in range(SLOTS):
        ports = Ports(http, grpc, (http + step) % SLOTS)
        if {http, grpc} & set(ports.inner) or (lock := _lock(ports.slot)) is None:
            continue
        if all(is_free(port) for port in ports.inner):
            return ports, lock
        lock.close()
    raise SettingError(f"all {SLOTS} ranges of internal ports from {HTTP_START} on are taken by other servers")


def check_ports(http: int, grpc: int) -> None:
    """Raise SettingError naming a public port that the server cannot have, and why."""
    if http == grpc:
        raise SettingError(f"port and grpc_port are both {http}: they must differ")
    for name, port in (("port", http), ("grpc_port", grpc)):
        error = _bind_error(port)
        if error is None:
            continue
        if error.errno == errno.EADDRINUSE:
            raise SettingError(f"{name} {port} is taken: another process listens on it; choose another {name}")
        advice = ": ports below 1024 need root" if error.errno == errno.EACCES and port < 1024 else ""
        raise SettingError(f"{name} {port}: {error.strerror}{advice}")


def is_free(port: int) -> bool:
    """True if the port of this machine can be had on every address of IPv4 and IPv6."""
    return _bind_error(port) is None


def _bind_error(port: int) -> OSError | None:
    """Why a port cannot be had on every address; None where it can. A machine may lack a family of addresses."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection in TIME_WAIT takes no port
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(("", port))
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                return error
    return None


def _lock(slot: int) -> IO[str] | None:
    """The lock of a slot; None while another server holds it. Raises SettingError where it cannot be made at all."""
    path = Path(tempfile.gettempdir()) / f"attend-ports-{slot}.lock"
    try:
        file = path.open("a")
    except OSError as error:
        if path.exists():  # another user's
            return None
        raise SettingError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
