"""What clients see when a node or the head of a cluster dies under load. `two_nodes` acts; the laws are here."""

import os
import shutil

import pytest

from tests.deploy import two_nodes

REDIS = os.environ.get("ATTEND_TEST_REDIS") or shutil.which("redis-server") or ""
CHANGE_SECONDS = 90
pytestmark = [pytest.mark.ray, pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def seen():
    if not two_nodes.can_run():
        pytest.skip("this machine allows no user and network namespaces")
    return two_nodes.run("nodes", *(("--redis", REDIS) if REDIS else ()), seconds=880)


def test_replicas_are_spread_over_the_nodes(seen):
    assert seen["spread"] == [two_nodes.FIRST, two_nodes.SECOND]


def test_the_loss_of_the_head_is_seen_by_no_client(seen):
    if not REDIS:
        pytest.skip("no redis-server is installed, and ATTEND_TEST_REDIS names none")
    head = seen["head"]
    assert head["streams_at_the_kill"] == head["streams"], "no stream was left when the head died"
    assert head["streams_broken"] == head["failed"] == [], head
    assert head["same_replicas"], "a replica was started again"


def test_the_loss_of_a_node_breaks_the_streams_of_its_replica_alone(seen):
    node = seen["node"]
    assert node["broken_of_those"] == node["of_those_on_the_lost_replica"] > 0, node
    assert node["broken_of_those"] < node["streams_through_other_node"]
    assert node["broken_of_these"] == node["streams_through_lost_node"]
    assert node["last_break_after_seconds"] < 10, "a client waited for a replica that was gone"


def test_calls_through_the_other_node_are_answered_or_refused_in_our_shape_within_five_seconds(seen):
    node = seen["node"]
    assert node["answered_later"] > 0, "no call was answered any more"
    assert max(node["slowest_seconds"], node["slowest_failure_seconds"]) < two_nodes.RECOVERY_SECONDS, node
    others = [failure for failure in node["failed"] if "HTTP Error 503" not in failure[1] or "BARE" in failure[1]]
    # HAProxy closes without an answer what it is just connecting to a server when it marks that as dead.
    assert len(others) <= 1 and all("without response" in failure[1] for failure in others), node
    assert [failure for failure in node["failed"] if failure[0] > two_nodes.RECOVERY_SECONDS] == []


def test_the_lost_replica_comes_back_on_a_new_node(seen):
    assert seen["node"]["replicas_without_the_node"] == [two_nodes.SECOND]
    assert seen["node"]["replicas_with_a_new_node"] == [two_nodes.SECOND, two_nodes.THIRD]


def test_updates_in_place_end_without_a_spare_worker_and_lose_no_call(seen):
    for update in seen["updates"]:
        assert update["streams_broken"] == update["failed"] == [], update
        assert update["spread"] == [two_nodes.FIRST, two_nodes.SECOND]
        assert update["seconds"] < CHANGE_SECONDS, update


def test_a_drain_ends_with_its_streams_and_the_replica_moves_to_the_next_worker(seen):
    drain = seen["drain"]
    assert drain["busy_replicas"] == 2, "no stream ran in the replica that left"
    assert drain["streams_broken"] == drain["failed"] == [], drain
    assert drain["seconds"] < CHANGE_SECONDS, drain
    assert drain["spread"] == [two_nodes.FIRST, two_nodes.SECOND]
    assert drain["seconds_from_new_node_to_two_replicas"] < CHANGE_SECONDS, drain
