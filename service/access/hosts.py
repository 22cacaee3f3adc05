"""Host header check: the names that a server answers to (allowed hosts, DNS rebinding).

A web page can lead a name of its own to a loopback address (DNS rebinding), so that a browser there asks a server that listens
for its own machine alone, and hands the page the answers. The browser's Host header has that name: it gives it away.
"""

import re
from collections.abc import Set as AbstractSet
from ipaddress import ip_address

ANY = "*"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
DOTLESS = "names without a dot"
"""Nobody can own one in the public DNS, and machines and containers of one's own have such names."""
NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")
AUTHORITY = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d*)?")


def is_loopback(host: str) -> bool:
    """True if a server that binds this listens for its own machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def hosts(text: str) -> frozenset[str]:
    """The names of `allowed_hosts`, comma-separated; `*` is any. Raises ValueError that says what is none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if parts == [ANY]:
        return frozenset(parts)
    found = frozenset(_plain(part.removeprefix("[").removesuffix("]")) for part in parts)
    for name in found:
        if not NAME.fullmatch(name) and not _is_address(name):
            raise ValueError(f"{name[:64]!r} is not a host name or an address without a port, and not *")
    return found


def allowed_names(text: str, host: str, *, has_api_keys: bool) -> AbstractSet[str]:
    """The names that a server which binds `host` answers to; none is any. By default, on a loopback address, its own names."""
    names = hosts(text)
    if names:
        return names - {ANY}
    return {*LOOPBACK, DOTLESS, _plain(host)} if is_loopback(host) and not has_api_keys else frozenset()


def answers(names: AbstractSet[str], host: str) -> bool:
    """True if a server that answers to these names answers to this one."""
    return host in names or (DOTLESS in names and "." not in host and NAME.fullmatch(host) is not None)


def host_of(value: str) -> str:
    """The host in a Host header, without its port; empty where it is none."""
    match = AUTHORITY.fullmatch(value.strip())
    return _plain(match[1] or match[2] or "") if match else ""


def _plain(host: str) -> str:
    """A host in one spelling: in lower case, without a final dot; an IP address in its shortest form."""
    return str(ip_address(host)) if _is_address(host) else host.lower().removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
