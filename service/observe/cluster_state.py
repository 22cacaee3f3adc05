"""Replicas and proxies as Serve's controller reports them, and replicas that died.

Each replica signs in to Ray's key-value store before it loads, and signs out when it ends in order. A replica that is signed in
and unknown to the controller has died. The store belongs to the cluster's head: it outlives every replica.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.experimental import internal_kv
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY, RAY_SERVE_HAPROXY_STATS_PORT
from ray.serve.context import _get_global_client

from attend.service.observe import edge
from attend.service.observe.exposition import serving_metrics

NAMESPACE, PREFIX = b"attend", b"replica/"
SIGN_OUT_SECONDS = 2.0
"""How long the end of a replica waits for a head that may be gone too."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """One look at the cluster. `replicas` has each one's state, as `running`, `proxies` (status, id of the process) by node."""

    replicas: Mapping[str, str] = field(default_factory=dict)
    proxies: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    dead: frozenset[str] = frozenset()
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Where the healthy proxies are, by node."""


def sign_in(replica: str) -> None:
    """Register a replica in Ray's key-value store."""
    internal_kv._internal_kv_put(PREFIX + replica.encode(), b"", namespace=NAMESPACE)


def sign_out(replica: str) -> None:
    """Sign a replica out: it ends in order."""
    arguments = {"namespace": NAMESPACE}
    thread = threading.Thread(
        target=internal_kv._internal_kv_del, args=(PREFIX + replica.encode(),), kwargs=arguments, daemon=True
    )
    thread.start()
    thread.join(SIGN_OUT_SECONDS)


def take(application: str) -> ClusterState:
    """Ask Serve's controller and the store. Blocks until both answer; raises RayError or RayServeException."""
    before = signed_in()
    details = _get_global_client().get_serve_details()
    return parse_state(details, before & signed_in(), application)  # a replica that signs in or out meanwhile has not died


def signed_in() -> set[str]:
    """Replicas that have signed in and not out."""
    return {key.removeprefix(PREFIX).decode() for key in internal_kv._internal_kv_list(PREFIX, namespace=NAMESPACE)}


def parse_state(details: Mapping[str, Any], signed_in_replicas: set[str], application: str) -> ClusterState:
    """The state from the controller's answer, and the replicas that were signed in before and after it."""
    deployments = details.get("applications", {}).get(application, {}).get("deployments", {}).values()
    replicas = {each["replica_id"]: str.lower(each["state"]) for deployment in deployments for each in deployment["replicas"]}
    proxies = {node: (str.lower(each["status"]), str(each["actor_id"])) for node, each in details.get("proxies", {}).items()}
    healthy = {node: each["node_ip"] for node, each in details.get("proxies", {}).items() if proxies[node][0] == "healthy"}
    return ClusterState(replicas, proxies, frozenset(signed_in_replicas - replicas.keys()), healthy)


def news(before: ClusterState, after: ClusterState) -> list[str]:
    """The changes, one sentence each."""
    lines = [f"Replica {name} died" for name in sorted(after.dead - before.dead)]
    lines += [
        f"Replica {name}: {state}" for name, state in sorted(after.replicas.items()) if before.replicas.get(name) != state
    ]
    for node, (status, process) in sorted(after.proxies.items()):
        old_status, old_process = before.proxies.get(node, ("", ""))
        again = " again, as a new process" if old_process not in ("", process) else ""
        if again or status != old_status:
            lines.append(f"Proxy of node {node[:8]}: {status}{again}")
    return lines + [f"Proxy of node {node[:8]} is gone" for node in sorted(before.proxies.keys() - after.proxies.keys())]


def cluster_page(serve_state: ClusterState) -> str:
    """The cluster's state, and what its HAProxies report, in the Prometheus text format. Blocks for `edge.SECONDS` at most."""
    told = serving_metrics(serve_state.replicas.values(), len(serve_state.dead))
    edges = {node[:8]: address for node, address in serve_state.addresses.items()}
    running = list(serve_state.replicas.values()).count("running")
    return told + (edge.edge_page(edges, RAY_SERVE_HAPROXY_STATS_PORT, running) if RAY_SERVE_ENABLE_HA_PROXY else "")
