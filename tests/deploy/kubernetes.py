"""What Kubernetes makes of disruption budgets and network policies, after its documentation, in a few lines each."""

from dataclasses import dataclass
from typing import Any

from tests.deploy.render import of_kind

Objects = list[dict[str, Any]]
Labels = dict[str, str]


def matches(selector: dict[str, Any], labels: Labels) -> bool:
    """True if a label selector takes these labels; an empty one takes all."""
    expressions = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions)
    wanted = all(labels.get(each["key"]) in each["values"] for each in expressions)
    return wanted and selector.get("matchLabels", {}).items() <= labels.items()


def disruptions_allowed(budget: dict[str, Any], healthy: int, wanted: int | None) -> int:
    """How many pods may be evicted now. `wanted` is what their controller's scale says, None where it has none."""
    spec = budget["spec"]
    least = spec.get("minAvailable")
    if isinstance(least, int):
        return max(0, healthy - least)
    if wanted is None:
        return 0  # the number of pods that there should be is unknown, and nothing may go
    assert least is None and isinstance(spec["maxUnavailable"], int), "no manifest here has a share"
    return max(0, healthy - (wanted - spec["maxUnavailable"]))


@dataclass(frozen=True)
class Peer:
    """A pod: its labels, and its namespace's name and labels."""

    namespace: str
    labels: tuple[tuple[str, str], ...] = ()
    space: tuple[tuple[str, str], ...] = ()

    def namespace_labels(self) -> Labels:
        return {"kubernetes.io/metadata.name": self.namespace, **dict(self.space)}


def _takes(rule: dict[str, Any], way: str, other: Peer, home: str, port: int) -> bool:
    """True if a rule of a policy in the namespace `home` lets `other` be the far end."""
    if "ports" in rule and port not in [each["port"] for each in rule["ports"]]:
        return False
    if way not in rule:
        return True
    for peer in rule[way]:
        if "ipBlock" in peer:
            continue  # for what is no pod
        near = matches(peer["namespaceSelector"], other.namespace_labels()) if "namespaceSelector" in peer else None
        if (other.namespace == home if near is None else near) and matches(peer.get("podSelector", {}), dict(other.labels)):
            return True
    return False


def reaches(objects: Objects, source: Peer, target: Peer, port: int) -> bool:
    """True if the network policies of these objects let `source` call a port of `target`: at both ends."""
    for end, far, kind, way in ((source, target, "Egress", "to"), (target, source, "Ingress", "from")):
        mine = [
            policy
            for policy in of_kind(objects, "NetworkPolicy")
            if policy["metadata"].get("namespace", "default") == end.namespace
            and kind in policy["spec"]["policyTypes"]
            and matches(policy["spec"]["podSelector"], dict(end.labels))
        ]
        rules = [rule for policy in mine for rule in policy["spec"].get(kind.lower(), [])]
        if mine and not any(_takes(rule, way, far, end.namespace, port) for rule in rules):
            return False
    return True
