"""HAProxy's statistics as metrics of the server."""

import warnings

import pytest
from prometheus_client.parser import text_string_to_metric_families

from attend.service.observe import edge

with warnings.catch_warnings():
    # Ray 2.60 declares its own fields in pydantic's old way; nothing of ours does.
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field` is deprecated")
    from attend.service.observe import cluster_state

ROWS = [
    {"pxname": "http_frontend", "svname": "FRONTEND", "scur": "7", "slim": "6144"},
    {"pxname": "http-default", "svname": "replica-1", "scur": "3", "slim": ""},
    {"pxname": "http-default", "svname": "BACKEND", "scur": "6", "slim": "615", "act": "2"},
    {"pxname": "grpc_frontend", "svname": "FRONTEND", "scur": "2", "slim": "1920"},
    {"pxname": "grpc-default", "svname": "BACKEND", "scur": "1", "slim": "192", "act": "2"},
    {"pxname": "http-other", "svname": "BACKEND", "scur": "0", "slim": "615", "act": "0"},
    {"pxname": "stats", "svname": "FRONTEND", "scur": "1", "slim": "10"},
]
"""What one HAProxy tells."""


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels."""
    families = text_string_to_metric_families(text)
    return {(s.name, *(s.labels[key] for key in sorted(s.labels))): s.value for one in families for s in one.samples}


@pytest.fixture
def told(monkeypatch):
    """Gives each address its statistics: rows, or the error that is raised."""

    def tell(**answers: object) -> None:
        def statistics(host: str, port: int, seconds: float) -> list[edge.Row]:
            assert port == 8404 and 0 < seconds <= edge.SECONDS
            if isinstance(answers[host], Exception):
                raise answers[host]
            return answers[host]

        monkeypatch.setattr(edge, "statistics", statistics)

    return tell


def test_connections_and_limits_of_each_side_are_on_the_page(told):
    told(a=ROWS)
    assert samples(edge.edge_page({"n1": "a"}, 8404, 2)) == {
        ("attend_edge_ok", "n1"): 1,
        ("attend_edge_connections", "n1", "http"): 7,
        ("attend_edge_connections", "n1", "grpc"): 2,
        ("attend_edge_connections_limit", "n1", "http"): 6144,
        ("attend_edge_connections_limit", "n1", "grpc"): 1920,
    }


def test_every_node_is_a_sample_of_the_same_family_and_of_one_that_is_gone_there_is_that_it_is_not_ok(told):
    told(a=ROWS, b=OSError("refused"), c=ROWS)
    page = edge.edge_page({"n1": "a", "n2": "b", "n3": "c"}, 8404, 2)
    assert {labels[0] for name, *labels in samples(page) if name != "attend_edge_ok"} == {"n1", "n3"}
    assert [samples(page)["attend_edge_ok", node] for node in ("n1", "n2", "n3")] == [1, 0, 1]


@pytest.mark.parametrize("side", ["http", "grpc"])
def test_a_haproxy_that_does_not_know_a_replica_that_runs_is_not_ok(told, side):
    told(a=[row | {"act": "1"} if row["pxname"] == f"{side}-default" else row for row in ROWS])
    assert samples(edge.edge_page({"n1": "a"}, 8404, 1))["attend_edge_ok", "n1"] == 1
    assert samples(edge.edge_page({"n1": "a"}, 8404, 2))["attend_edge_ok", "n1"] == 0


def test_of_a_certificate_its_end_and_whether_it_is_that_of_the_files_are_on_the_page():
    assert samples(edge.to_exposition(edge.certificate("n1", 5e9, False))) == {
        ("attend_tls_certificate_expiry_timestamp_seconds", "n1"): 5e9,
        ("attend_tls_reload_ok", "n1"): 0,
    }
    assert samples(edge.to_exposition(edge.certificate("n2", None, True))) == {("attend_tls_reload_ok", "n2"): 1}


def test_nodes_that_do_not_answer_hold_the_page_for_a_second_at_most(monkeypatch):
    now, asked = [0.0], []

    def hangs(host: str, port: int, seconds: float) -> list[edge.Row]:
        asked.append(host)
        now[0] += seconds
        raise TimeoutError

    monkeypatch.setattr(edge, "statistics", hangs)
    monkeypatch.setattr(edge.time, "monotonic", lambda: now[0])
    page = edge.edge_page({str(node): str(node) for node in range(9)}, 8404, 1)
    assert samples(page) == {("attend_edge_ok", "0"): 0}
    assert (asked, now) == (["0"], [edge.SECONDS])


def test_before_haproxy_has_a_way_for_calls_nothing_is_made_up(told):
    told(a=[])
    assert samples(edge.edge_page({"n1": "a"}, 8404, 0)) == {("attend_edge_ok", "n1"): 1}


@pytest.mark.parametrize("haproxy", [True, False])
def test_only_where_haproxy_stands_in_front_is_it_asked(told, monkeypatch, haproxy):
    told(a=ROWS)
    monkeypatch.setattr(cluster_state, "RAY_SERVE_ENABLE_HA_PROXY", haproxy)
    monkeypatch.setattr(cluster_state, "RAY_SERVE_HAPROXY_STATS_PORT", 8404)
    page = cluster_state.cluster_page(cluster_state.ClusterState(addresses={"0123456789abcdef": "a"}))
    assert ("attend_edge_connections" in page) == haproxy
    assert ('node="01234567"' in page) == haproxy
