"""Every port that a server takes, derived from its HTTP port and checked free before Ray starts.

Two servers that share Ray's range of replica gRPC ports answer each other's calls in silence, because those
sockets are bound with SO_REUSEPORT. So each server owns a slot of ports, and binds the last of them as a lock.
"""

import errno
import socket

from attend.model.errors import SettingError

START, SLOTS, WIDTH = 20000, 50, 200
"""Below the kernel's range for outgoing connections, and above Ray's for its workers."""


def claim(http: int, grpc: int) -> tuple[dict[str, str], socket.socket]:
    """Ray's variables for the ports of a server's slot, and the socket that holds it, to be kept open while the server lives.

    Raises SettingError naming a port that the server cannot have.
    """
    check_ports(http, grpc)
    for step in range(SLOTS):
        first = START + (http + step) % SLOTS * WIDTH
        *slot, last = range(first, first + WIDTH)
        if {http, grpc} & {*slot, last}:
            continue
        lock = socket.socket()
        try:
            lock.bind(("", last))
            if all(_bind_error(port) is None for port in slot):
                return _environment(slot), lock
        except OSError:  # another server's
            pass
        lock.close()
    raise SettingError(f"all {SLOTS} ranges of internal ports from {START} on are taken by other servers")


def _environment(slot: list[int]) -> dict[str, str]:
    """The ports in Ray's variables: four single ones, and a range for each transport of the replicas."""
    singles, http, grpc = slot[:4], slot[4 : WIDTH // 2], slot[WIDTH // 2 :]
    names = ("HAPROXY_STATS", "HAPROXY_METRICS", "FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC")
    ports = dict(zip(names, singles, strict=True))
    ports |= {"DIRECT_INGRESS_MIN_HTTP": http[0], "DIRECT_INGRESS_MAX_HTTP": http[-1]}
    ports |= {"DIRECT_INGRESS_MIN_GRPC": grpc[0], "DIRECT_INGRESS_MAX_GRPC": grpc[-1]}
    return {f"RAY_SERVE_{name}_PORT": str(port) for name, port in ports.items()}


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
