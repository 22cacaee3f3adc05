"""Several applications of Ray Serve behind one HAProxy, a model each: a call reaches its own, and each limit holds in each."""

import json
from collections.abc import Iterator

import grpc
import pytest

from tests.service.runtime.edges import APPLICATIONS, PATHS, Edge, in_front
from tests.service.server import wait_for

PREFIXES = ("/code", "/code/chat")
"""Of the application of each replica."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with in_front(tmp_path_factory.mktemp("edge"), config=APPLICATIONS) as edge:
        yield edge


@pytest.fixture
def edge(started: Edge) -> Edge:
    started.full(False, False)
    return started


@pytest.mark.parametrize("place", [0, 1])
def test_a_path_reaches_the_replica_of_its_prefix_and_keeps_it(edge, place):
    """Serve tells the replica which prefix is its own."""
    assert edge.post(f"{PREFIXES[place]}{PATHS[0]}")[0] == 200
    assert [replica.calls for replica in edge.replicas][place] == [f"{PREFIXES[place]}{PATHS[0]}"]
    assert edge.replicas[1 - place].calls == []


@pytest.mark.parametrize(("name", "place"), [("code", 0), ("chat", 1)])
def test_a_call_over_grpc_reaches_the_application_that_its_metadata_name(edge, name, place):
    assert edge.call(application=name)[0] == grpc.StatusCode.OK
    assert [len(replica.calls) for replica in edge.replicas] == [1 - place, place]


@pytest.mark.parametrize("path", ["/v1/completions", "/codes/v1/completions", "/"])
def test_a_path_of_no_application_is_not_found_and_names_those_that_are(edge, path):
    status, _, body = edge.post(path)
    assert status == 404
    error = json.loads(body)["error"]
    assert error["message"] == "no application is at this path: there are /code, /code/chat"
    assert (error["code"], edge.num_calls()) == ("not_found", 0)


@pytest.mark.parametrize("metadata", [{}, {"application": "other"}])
def test_a_call_over_grpc_for_no_application_is_not_found_and_names_those_that_are(edge, metadata):
    code, details, _ = edge.call(**metadata)
    assert (code, details) == (grpc.StatusCode.NOT_FOUND, "the metadata application must be one of chat, code")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("path", PATHS)
def test_a_full_application_refuses_at_the_edge_and_the_other_goes_on(edge, prefix, path):
    place = PREFIXES.index(prefix)
    edge.replicas[place].full = True
    assert wait_for(lambda: edge.post(prefix + path)[0] == 429 and edge.post(prefix + path)[2] != b"replica")
    assert edge.post(PREFIXES[1 - place] + path)[2] == b"replica"


def test_the_readiness_of_one_application_is_not_the_others(edge):
    edge.replicas[0].judge = lambda *_: 503
    try:
        for _ in range(5):
            assert edge.post("/code/chat/readyz", "GET", body=None)[0] == 200
            assert edge.post("/code/readyz", "GET", body=None)[0] == 503
    finally:
        edge.replicas[0].judge = lambda *_: 200


def test_errors_of_the_edge_have_the_shape_of_the_path_within_the_application(edge):
    edge.replicas[1].full = True
    assert wait_for(lambda: edge.post("/code/chat/v1/messages")[2] != b"replica")
    document = json.loads(edge.post("/code/chat/v1/messages")[2])
    assert (document["type"], document["error"]["type"]) == ("error", "rate_limit_error")


def test_probes_are_answered_under_every_prefix(edge):
    for prefix in ("", *PREFIXES):
        assert edge.post(f"{prefix}/healthz", "GET", body=None)[2] == b"ok\n"
