"""The number of replicas follows the load: by table, by law, and on a real Ray, where no call fails meanwhile."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import settings as law
from hypothesis import strategies as st

from attend.model.engine.request import EngineStats
from attend.service.observe.autoscaling import FULL, ROOMY, Reading, config, decide, policy, reported_load
from tests.deploy import two_nodes
from tests.fakes import FakeEngine

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # Ray Serve's own models
MOST = 90
IDLE, BUSY, FILLED = Reading(0, 0, 0, 64), Reading(40, 0, 0.3, 64), Reading(64, 32, 0.6, 64)
readings = st.builds(
    lambda running, waiting, usage, batch: Reading(min(running, batch), waiting, usage, batch),
    st.floats(0, 64),
    st.floats(0, 256),
    st.floats(0, 1),
    st.integers(1, 64),
)
fleets = st.lists(readings, min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("loads", "target", "wanted"),
    [
        ([IDLE], 1, 1),
        ([IDLE, IDLE], 2, 1),
        ([IDLE] * 9, 9, 1),
        ([BUSY], 1, 1),  # 0.625 full
        ([BUSY, BUSY], 2, 2),  # 1.25 in all: too much for one, and no reason for three
        ([BUSY, IDLE], 2, 2),  # 0.625 in all: one would be above ROOMY
        ([Reading(32, 0, 0.2, 64), IDLE], 2, 1),  # 0.5 in all
        ([Reading(49, 0, 0.2, 64)], 1, 2),  # places: 0.766
        ([FILLED], 1, 2),  # 96 requests in 64 places
        ([Reading(64, 256, 0.6, 64)], 1, 7),
        ([Reading(8, 0, 0.8, 64)], 1, 2),  # few requests, but the blocks run out
        ([Reading(8, 8, 1.0, 64)], 1, 3),  # those that wait need as much again
        ([Reading(3, 6, 0.1, 64)], 1, 3),  # long prompts: the queue is twice what runs
        ([Reading(10, 0.2, 0.1, 64)], 1, 1),  # calls wait for the next step only
        ([Reading(0, 5, 0, 4)], 1, 7),  # just before the first step: five in four places
    ],
)
def test_replicas_for_a_load(loads, target, wanted):
    assert decide(loads, len(loads), target, 1, MOST) == wanted


@law(derandomize=True, deadline=None)
@given(fleets, st.integers(1, 12), st.integers(1, 5), st.integers(0, 9))
def test_the_number_stays_within_its_bounds(loads, target, least, more):
    assert least <= decide(loads, len(loads), target, least, least + more) <= least + more


@law(derandomize=True, deadline=None)
@given(fleets, st.integers(1, 12), st.data())
def test_more_waiting_or_more_blocks_never_mean_fewer_replicas(loads, target, data):
    at = data.draw(st.integers(0, len(loads) - 1))
    one = loads[at]
    more = one._replace(waiting=one.waiting + data.draw(st.floats(0, 99)), kv_usage=data.draw(st.floats(one.kv_usage, 1)))
    after = [*loads[:at], more, *loads[at + 1 :]]
    assert decide(after, len(loads), target, 1, MOST) >= decide(loads, len(loads), target, 1, MOST)


@law(derandomize=True, deadline=None)
@given(st.floats(0, 40), st.integers(1, 60))
def test_a_steady_load_moves_the_number_once_at_most(total, target):
    """The same load, spread evenly over whatever replicas there are."""

    def after(number):
        return decide([Reading(64 * total / number, 0, 0, 64)] * number, number, number, 1, MOST)

    settled = after(target)
    assert after(settled) == settled
    assert settled == 1 or total / settled <= FULL + 1e-9
    assert settled >= target or math.isclose(total / settled, ROOMY) or total / settled < ROOMY


@law(derandomize=True, deadline=None)
@given(fleets, st.integers(0, 5), st.integers(1, 12))
def test_the_number_does_not_fall_while_a_replica_is_silent(loads, silent, target):
    number = decide(loads, len(loads) + silent, target, 1, MOST)
    assert silent == 0 or number >= target


def test_a_reading_is_what_the_engine_says():
    engine = FakeEngine()
    info = engine.info
    stats = EngineStats(num_running=3, num_waiting=2, num_free_blocks=info.num_blocks // 4)
    got = reported_load(info, stats)
    assert got[:2] == (3, 2)
    assert got.kv_usage == pytest.approx(1 - (info.num_blocks // 4) / info.num_blocks)
    assert got.max_batch_requests == info.max_batch_requests
    assert reported_load(info, EngineStats(num_free_blocks=info.num_blocks)).kv_usage == 0


def context(metrics, replicas=("a", "b"), target=2, bounds=(1, 4)):
    """What Serve hands to a policy, as far as ours reads it."""
    return SimpleNamespace(
        aggregated_metrics=metrics,
        running_replicas=list(replicas),
        target_num_replicas=target,
        capacity_adjusted_min_replicas=bounds[0],
        capacity_adjusted_max_replicas=bounds[1],
    )


def columns(**loads):
    """Readings by replica, as Serve keeps them: one table for each figure."""
    return {name: {replica: getattr(load, name) for replica, load in loads.items()} for name in Reading._fields}


def test_the_policy_reads_each_replica_that_runs():
    assert policy(context(columns(a=FILLED, b=FILLED))) == (4, {})
    assert policy(context(columns(a=IDLE, b=IDLE))) == (1, {})
    assert policy(context(columns(a=FILLED, gone=FILLED, b=IDLE))) == (2, {})


def test_the_policy_removes_nothing_that_it_does_not_know():
    """A silent replica counts as one that runs, whichever of its figures is missing. Full ones add to the number."""
    whole = columns(a=IDLE, b=IDLE)
    silent = [whole | {name: {"a": whole[name]["a"]}} for name in whole]
    for metrics in (
        None,
        {},
        columns(a=IDLE),
        columns(b=IDLE),
        columns(gone=IDLE),
        *silent,
        *(whole | {name: {}} for name in whole),
    ):
        assert policy(context(metrics)) == (2, {})
        assert policy(context(metrics, target=3)) == (3, {})
    assert policy(context(columns(a=FILLED._replace(waiting=128)), bounds=(1, 9))) == (4, {})


def test_serve_takes_the_config_and_finds_the_policy():
    from ray.serve.config import AutoscalingConfig

    taken = AutoscalingConfig(**config(2, 5))
    assert (taken.min_replicas, taken.max_replicas) == (2, 5)
    found = taken.policy.get_policy()  # unpickled, by value, as in Serve's controller
    assert found(context(columns(a=FILLED, b=FILLED))) == (4, {})


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_replicas_come_and_go_with_the_load_and_no_call_fails():
    if not two_nodes.can_run():
        pytest.skip("this machine allows no user and network namespaces")
    seen = two_nodes.run("autoscaling", seconds=380)
    assert seen["both_took_requests"], seen
    assert seen["failed"] == [] and seen["streams_broken"] == 0, seen
    assert seen["streams_at_the_removal"] and seen["requests_in_the_removed_replica"], seen
