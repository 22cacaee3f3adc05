"""Who serves and who died, from what Serve's controller says and who signed in."""

import threading
import warnings
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

with warnings.catch_warnings():
    # Ray 2.60 declares its own fields in pydantic's old way; nothing of ours does.
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field` is deprecated")
    from ray.serve._private.common import ReplicaState
    from ray.serve.schema import ProxyStatus

    from attend.service.observe import cluster_state
from attend.service.observe.cluster_state import ClusterState


def details(replicas: dict[str, str], proxies: dict[str, tuple[str, str]] | None = None) -> dict:
    """What Serve's controller tells, as far as it is read."""
    listed = [{"replica_id": name, "state": ReplicaState(state.upper())} for name, state in replicas.items()]
    nodes = {
        node: {"status": ProxyStatus(status.upper()), "actor_id": process, "node_ip": f"at {node}"}
        for node, (status, process) in (proxies or {}).items()
    }
    return {"applications": {"app": {"deployments": {"Attend": {"replicas": listed}}}}, "proxies": nodes}


def test_a_replica_that_signed_in_and_is_known_no_more_has_died():
    taken = cluster_state.parse_state(details({"b": "running", "c": "starting"}), {"a", "b"}, "app")
    assert taken.dead == {"a"}
    assert [str(state) for state in taken.replicas.values()] == ["running", "starting"]
    assert taken.replicas == {"b": "running", "c": "starting"}


def test_only_healthy_proxies_have_an_address():
    taken = cluster_state.parse_state(details({}, {"a": ("healthy", "1"), "b": ("starting", "2")}), set(), "app")
    assert taken.addresses == {"a": "at a"}


def test_a_replica_that_stops_in_order_is_no_death():
    assert cluster_state.parse_state(details({"a": "stopping"}), {"a"}, "app").dead == frozenset()
    assert cluster_state.parse_state(details({}), set(), "app").dead == frozenset()


def test_a_replica_that_signs_in_or_out_while_the_controller_answers_is_no_death(monkeypatch):
    signed = [{"leaves", "dead"}, {"dead", "comes"}]
    keys = [[cluster_state.PREFIX + name.encode() for name in names] for names in signed]
    monkeypatch.setattr(cluster_state.internal_kv, "_internal_kv_list", lambda prefix, namespace: keys.pop(0))
    monkeypatch.setattr(cluster_state, "_get_global_client", lambda: SimpleNamespace(get_serve_details=lambda: details({})))
    assert cluster_state.take("app").dead == {"dead"}


def test_without_the_application_there_is_nobody():
    assert cluster_state.parse_state({"applications": {}, "proxies": {}}, set(), "app") == ClusterState()


def test_every_change_is_a_line():
    before = ClusterState({"a": "running"}, {"node": ("healthy", "1")})
    after = ClusterState({"b": "starting"}, {"node": ("starting", "2")}, frozenset({"a"}))
    assert cluster_state.news(before, after) == [
        "Replica a died",
        "Replica b: starting",
        "Proxy of node node: starting again, as a new process",
    ]
    assert cluster_state.news(after, after) == []
    assert cluster_state.news(after, ClusterState({"b": "running"}, {}, frozenset({"a"}))) == [
        "Replica b: running",
        "Proxy of node node is gone",
    ]


def test_the_page_counts_states_and_deaths():
    taken = ClusterState({"a": "running", "b": "running", "c": "starting"}, {"n": ("healthy", "1")}, frozenset({"x", "y"}))
    samples = [
        sample for family in text_string_to_metric_families(cluster_state.cluster_page(taken)) for sample in family.samples
    ]
    assert {(sample.name, *sample.labels.values()): sample.value for sample in samples} == {
        ("attend_replicas", "running"): 2,
        ("attend_replicas", "starting"): 1,
        ("attend_replica_deaths_total",): 2,
    }


def test_signing_out_waits_no_longer_than_its_limit_for_a_silent_head(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(cluster_state, "SIGN_OUT_SECONDS", 0.01)
    monkeypatch.setattr(cluster_state.internal_kv, "_internal_kv_del", lambda *_, **__: release.wait(60))
    cluster_state.sign_out("a")
    release.set()


def test_the_state_of_nobody_is_no_sample():
    assert 'state="' not in cluster_state.cluster_page(ClusterState())
