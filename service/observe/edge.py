"""Metrics of HAProxy, from its statistics; and those of a certificate."""

import csv
import time
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException

from attend.service.observe.exposition import family

FRONTENDS = {"http_frontend": "http", "grpc_frontend": "grpc"}
"""Ray's names of HAProxy's sides, and their transports."""
SECONDS = 1.0
"""How long the page waits for the statistics of all HAProxies together."""
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Never through a proxy that the environment names."""

Row = dict[str, str]
Samples = dict[str, list[tuple[dict[str, str], float]]]

ABOUT = {
    "attend_edge_ok": ("gauge", "1 if HAProxy answers and routes to every running replica"),
    "attend_edge_connections": ("gauge", "Client connections open on HAProxy, without those from before a reload"),
    "attend_edge_connections_limit": ("gauge", "Limit of concurrent client connections on HAProxy"),
    "attend_tls_certificate_expiry_timestamp_seconds": (
        "gauge",
        "When the TLS certificate that is served expires, in seconds since 1970",
    ),
    "attend_tls_reload_ok": (
        "gauge",
        "1 if the TLS certificate that is served is that of the files, 0 while these cannot be used",
    ),
}
"""Every metric of the edge and of the certificate: its type and its help. Each sample has the label `node`."""


def statistics(host: str, port: int, seconds: float) -> list[Row]:
    """HAProxy's statistics, a row for each of its sides and servers. Raises OSError where it gives none."""
    at = f"[{host}]" if ":" in host else host
    try:
        with _direct.open(f"http://{at}:{port}/stats;csv", timeout=seconds) as answer:
            return list(csv.DictReader(answer.read().decode().removeprefix("# ").splitlines()))
    except HTTPException as error:  # it ended within the answer
        raise OSError(str(error)) from error


def ask_readiness(host: str, port: int, seconds: float) -> None:
    """Have HAProxy pass on a replica's readiness, and so learn of it. Raises OSError where that is no longer given."""
    _direct.open(f"http://{f'[{host}]' if ':' in host else host}:{port}/readyz", timeout=seconds).close()


def reachable_replicas(rows: Sequence[Row]) -> int:
    """Replicas that calls of either transport reach."""
    found = dict.fromkeys(FRONTENDS.values(), 0)
    for row in rows:
        side = row["pxname"].partition("-")[0]
        if side in found and row["svname"] == "BACKEND":  # each application has one of its own
            found[side] += int(row["act"])
    return min(found.values())


def certificate(node: str, expiry: float | None, is_ok: bool) -> Samples:
    """The metrics of a certificate that is served; `expiry` in seconds since 1970, None where it is not known."""
    found: Samples = {"attend_tls_reload_ok": [({"node": node}, float(is_ok))]}
    return found | ({"attend_tls_certificate_expiry_timestamp_seconds": [({"node": node}, expiry)]} if expiry else {})


def to_exposition(samples: Samples) -> str:
    """Samples in the Prometheus text format."""
    return "".join(family(name, *ABOUT[name], found) for name, found in samples.items())


def edge_page(addresses: Mapping[str, str], port: int, running: int) -> str:
    """The metrics of the HAProxies at these addresses, by node. One that does not answer in time is not ok."""
    deadline = time.monotonic() + SECONDS
    found: Samples = {}
    for node, host in sorted(addresses.items()):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            told = parse_statistics(statistics(host, port, left), node, running)
        except OSError:  # between two of its processes, or gone
            told = {"attend_edge_ok": [({"node": node}, 0.0)]}
        for name, samples in told.items():
            found.setdefault(name, []).extend(samples)
    return to_exposition(found)


def parse_statistics(rows: Sequence[Row], node: str, running: int) -> Samples:
    """What one HAProxy's statistics say, where `running` replicas serve."""
    found: Samples = {"attend_edge_connections": [], "attend_edge_connections_limit": []}
    for row in rows:
        transport = FRONTENDS.get(row["pxname"])
        if transport is not None and row["svname"] == "FRONTEND":
            labels = {"node": node, "transport": transport}
            for name, column in (("connections", "scur"), ("connections_limit", "slim")):
                found[f"attend_edge_{name}"].append((labels, float(row[column])))
    found["attend_edge_ok"] = [({"node": node}, float(reachable_replicas(rows) >= running))]
    return found
