"""Who serves: replicas and proxies as Serve's controller knows them, and the replicas that ended without being told to.

Each replica signs in to Ray's key-value store before it loads, and signs out when it ends in order. One that is signed in
and that the controller does not know any more has died. The store belongs to the cluster's head: it outlives every replica.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.experimental import internal_kv
from ray.serve.context import _get_global_client

NAMESPACE, PREFIX = b"attend", b"replica/"
SIGN_OUT_SECONDS = 2.0
"""How long the end of a replica waits for a head that may be gone too."""


@dataclass(frozen=True, slots=True)
class Census:
    """One look at the cluster. `replicas` has each one's state, as `running`, `proxies` (status, id of the process) by node."""

    replicas: Mapping[str, str] = field(default_factory=dict)
    proxies: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    dead: frozenset[str] = frozenset()


def sign_in(replica: str) -> None:
    """A replica begins."""
    internal_kv._internal_kv_put(PREFIX + replica.encode(), b"", namespace=NAMESPACE)


def sign_out(replica: str) -> None:
    """A replica ends in order."""
    arguments = {"namespace": NAMESPACE}
    thread = threading.Thread(
        target=internal_kv._internal_kv_del, args=(PREFIX + replica.encode(),), kwargs=arguments, daemon=True
    )
    thread.start()
    thread.join(SIGN_OUT_SECONDS)


def take(application: str) -> Census:
    """Ask Serve's controller and the store. Blocks until both answer; raises RayError or RayServeException."""
    before = signed_in()
    details = _get_global_client().get_serve_details()
    return read(details, before & signed_in(), application)  # one that signs in or out meanwhile has not died


def signed_in() -> set[str]:
    """Replicas that have signed in and not out."""
    return {key.removeprefix(PREFIX).decode() for key in internal_kv._internal_kv_list(PREFIX, namespace=NAMESPACE)}


def read(details: Mapping[str, Any], signed: set[str], application: str) -> Census:
    """A census from what the controller says, and the replicas that were signed in before and after it said so."""
    deployments = details.get("applications", {}).get(application, {}).get("deployments", {}).values()
    replicas = {each["replica_id"]: str.lower(each["state"]) for deployment in deployments for each in deployment["replicas"]}
    proxies = {node: (str.lower(each["status"]), str(each["actor_id"])) for node, each in details.get("proxies", {}).items()}
    return Census(replicas, proxies, frozenset(signed - replicas.keys()))


def news(before: Census, after: Census) -> list[str]:
    """What has changed, a sentence each."""
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


def page(census: Census) -> str:
    """The census in the Prometheus text format."""
    states, statuses = Counter(census.replicas.values()), Counter(status for status, _ in census.proxies.values())
    return (
        "# HELP attend_replicas Replicas by their state, as Serve's controller knows them\n# TYPE attend_replicas gauge\n"
        + "".join(f'attend_replicas{{state="{state}"}} {number}\n' for state, number in sorted(states.items()))
        + "# HELP attend_proxies Proxies of the nodes by their status\n# TYPE attend_proxies gauge\n"
        + "".join(f'attend_proxies{{status="{status}"}} {number}\n' for status, number in sorted(statuses.items()))
        + "# HELP attend_replica_deaths_total Replicas that ended without being told to, or did not start\n"
        + f"# TYPE attend_replica_deaths_total counter\nattend_replica_deaths_total {len(census.dead)}\n"
    )
