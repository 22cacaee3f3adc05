"""Metrics of HAProxy, from its statistics: connections, limits, requests and errors.

The errors come in two counters, all of them and those that a replica gave: HAProxy made the rest itself. Their difference would
be no counter, since an answer is counted when a replica begins it, and at the edge when it has ended.
"""

import csv
import time
import urllib.request
from collections.abc import Mapping
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
    "attend_edge_ok": (
        "gauge",
        "1 if HAProxy answers, took its last configuration and routes to every running replica",
    ),
    "attend_edge_connections": (
        "gauge",
        "Client connections open on HAProxy, without those from before a reload",
    ),
    "attend_edge_connections_limit": ("gauge", "Limit of concurrent client connections on HAProxy"),
    "attend_edge_requests_total": ("counter", "Requests that HAProxy accepted since it was last started or reloaded"),
    "attend_edge_refusals_total": (
        "counter",
        "Load shedding: requests that HAProxy rejected because the queue of every replica was full",
    ),
    "attend_edge_prefix_routed_total": (
        "counter",
        "Requests routed by prefix: own: to the replica that caches it; other: elsewhere, as that was busy",
    ),
    "attend_edge_errors_total": (
        "counter",
        "Errors that clients got through HAProxy: 5xx; over gRPC codes 2, 13, 14 and 15 before a stream",
    ),
    "attend_edge_replica_errors_total": ("counter", "Those of attend_edge_errors_total that a replica sent"),
}
"""Every metric of the edge: its type and its help. Each sample has the label `node`."""
CERTIFICATE = {
    "attend_tls_certificate_expiry_timestamp_seconds": (
        "gauge",
        "When the TLS certificate that is served expires, in seconds since 1970",
    ),
    "attend_tls_reload_ok": (
        "gauge",
        "1 if the TLS certificate that is served is that of the files, 0 while these cannot be used",
    ),
}
"""The same, of the certificate, where there is one."""


def statistics(host: str, port: int, seconds: float) -> list[Row]:
    """HAProxy's statistics, a row for each of its sides and servers. Raises OSError where it gives none."""
    at = f"[{host}]" if ":" in host else host
    try:
        with _direct.open(f"http://{at}:{port}/stats;csv", timeout=seconds) as answer:
            return list(csv.DictReader(answer.read().decode().removeprefix("# ").splitlines()))
    except HTTPException as error:  # it ended within the answer
        raise OSError(str(error)) from error


def haproxy_facts(host: str, port: int, seconds: float) -> dict[str, float]:
    """What HAProxy knows of itself beside: `reload_ok`, `grpc_errors`, `grpc_replica_errors`, with TLS `tls_reload_ok` and
    `tls_expiry`, with prefix-aware routing `routed_own` and `routed_other`. Raises OSError.
    """
    at = f"[{host}]" if ":" in host else host
    try:
        with _direct.open(f"http://{at}:{port}/attend", timeout=seconds) as answer:
            pairs = (line.split() for line in answer.read().decode().splitlines())
            return {words[0]: float(words[1]) for words in pairs if len(words) == 2}
    except (HTTPException, ValueError) as error:
        raise OSError(str(error)) from error


def certificate(node: str, expiry: float | None, is_ok: bool) -> Samples:
    """The metrics of a certificate that is served; `expiry` in seconds since 1970, None or 0 where it is not known."""
    expires, reloads = CERTIFICATE
    return ({expires: [({"node": node}, expiry)]} if expiry else {}) | {reloads: [({"node": node}, float(is_ok))]}


def to_exposition(samples: Samples) -> str:
    """Samples in the Prometheus text format."""
    return "".join(family(name, *(ABOUT | CERTIFICATE)[name], found) for name, found in samples.items())


def edge_page(addresses: Mapping[str, str], port: int, running: int) -> str:
    """The metrics of the HAProxies at these addresses, by node, in the Prometheus text format; `running` replicas serve.

    Of one that does not answer in time there is no more than that it is not ok.
    """
    deadline = time.monotonic() + SECONDS
    found: Samples = {}
    for node, host in sorted(addresses.items()):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            rows, own = statistics(host, port, left), haproxy_facts(host, port, left)
        except OSError:  # between two of its processes, or gone
            found.setdefault("attend_edge_ok", []).append(({"node": node}, 0.0))
            continue
        told = parse_statistics(rows, node, running)
        if not own.get("reload_ok", 1.0):
            told["attend_edge_ok"] = [({"node": node}, 0.0)]
        routed = [({"node": node, "to": to}, own[f"routed_{to}"]) for to in ("own", "other") if f"routed_{to}" in own]
        told["attend_edge_prefix_routed_total"] = routed
        for name, fact in (("errors", "grpc_errors"), ("replica_errors", "grpc_replica_errors")):
            if fact in own:
                told[f"attend_edge_{name}_total"].append(({"node": node, "transport": "grpc"}, own[fact]))
        if "tls_reload_ok" in own:
            told |= certificate(node, own.get("tls_expiry"), bool(own["tls_reload_ok"]))
        for name, samples in told.items():
            found.setdefault(name, []).extend(samples)
    return to_exposition(found)


def parse_statistics(rows: list[Row], node: str, running: int) -> Samples:
    """What one HAProxy's statistics say, where `running` replicas serve."""
    found: Samples = {name: [] for name in ABOUT}
    refusals: dict[str, float] = {}  # each application has a backend of its own
    alive = dict.fromkeys(FRONTENDS.values(), 0)
    for row in rows:
        side = row["pxname"].partition("-")[0]
        if side in FRONTENDS.values() and row["svname"] == "BACKEND":
            refusals[side] = refusals.get(side, 0.0) + float(row["dreq"])
            alive[side] += int(row["act"])
        transport = FRONTENDS.get(row["pxname"])
        if transport is None or row["svname"] != "FRONTEND":
            continue
        labels = {"node": node, "transport": transport}
        for name, column in (("connections", "scur"), ("connections_limit", "slim"), ("requests_total", "req_tot")):
            found[f"attend_edge_{name}"].append((labels, float(row[column])))
        if transport == "http":
            found["attend_edge_errors_total"].append((labels, float(row["hrsp_5xx"])))
    servers = (row for row in rows if row["pxname"].startswith("http-") and row["svname"] not in ("FRONTEND", "BACKEND"))
    replicas = sum(float(row["hrsp_5xx"] or 0) for row in servers)
    found["attend_edge_replica_errors_total"].append(({"node": node, "transport": "http"}, replicas))
    found["attend_edge_ok"] = [({"node": node}, float(min(alive.values()) >= running))]
    found["attend_edge_refusals_total"] = [({"node": node, "transport": side}, count) for side, count in refusals.items()]
    return found
