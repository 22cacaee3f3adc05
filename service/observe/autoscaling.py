"""The autoscaling policy of Ray Serve, from the loads that the engines report: places, KV blocks and the queue."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from attend.model.engine.request import EngineInfo, EngineStats

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

FULL, ROOMY = 0.75, 0.5
"""Replicas are added until each is at most FULL, and removed as long as the rest would be at most ROOMY. Between the two
the number stays, so that a steady load changes nothing."""
ROUNDING = 1e-9
"""Taken off the load, in replicas: a sum of shares may come out a last bit above a mark that it is just at."""
LOOK_BACK_SECONDS, UP_SECONDS, DOWN_SECONDS = 15.0, 15.0, 600.0
"""Loads are means over the first; a decision must hold for the second to add, and for the third to remove: starting a replica
is expensive, since it loads weights and may need a node."""


class Reading(NamedTuple):
    """The load of one replica, or its mean over a while."""

    running: float
    """Requests that run in the replica."""
    waiting: float
    kv_usage: float
    """Share of the KV blocks that requests hold, 0 to 1."""
    max_batch_requests: float


def reported_load(info: EngineInfo, stats: EngineStats) -> Reading:
    """What a replica reports to Serve's controller."""
    usage = 1 - stats.num_free_blocks / info.num_blocks
    return Reading(stats.num_running, stats.num_waiting, usage, info.max_batch_requests)


def demand(reading: Reading) -> float:
    """How many replicas the load of this one would fill, by the scarcest of three things; 1.0 is just full."""
    places = (reading.running + reading.waiting) / reading.max_batch_requests
    queue = reading.waiting / max(1.0, reading.running)
    return max(places, reading.kv_usage * (1 + queue), queue)


def decide(readings: Sequence[Reading], running: int, target: int, least: int, most: int) -> int:
    """The number of replicas, from `least` to `most`. It does not fall while one that runs is not among the readings."""
    total = sum(map(demand, readings)) - ROUNDING
    wanted = max(math.ceil(total / FULL), min(target, math.ceil(total / ROOMY)))
    if not 0 < running <= len(readings):
        wanted = max(wanted, target)
    return max(least, min(most, wanted))


def policy(context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
    """`decide`, as Serve's controller calls it: (replicas, no state)."""
    metrics = context.aggregated_metrics or {}
    columns = [metrics.get(name, {}) for name in Reading._fields]
    known = [replica for replica in context.running_replicas if all(replica in column for column in columns)]
    readings = [Reading(*(column[replica] for column in columns)) for replica in known]
    bounds = (context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas)
    return decide(readings, len(context.running_replicas), context.target_num_replicas, *bounds), {}


def config(least: int, most: int) -> dict[str, Any]:
    """Serve's `autoscaling_config` for that many replicas. One in a Serve configuration file replaces it as a whole."""
    return {
        "min_replicas": least,
        "max_replicas": most,
        "policy": {"policy_function": f"{__name__}:{policy.__name__}"},
        "look_back_period_s": LOOK_BACK_SECONDS,
        "upscale_delay_s": UP_SECONDS,
        "downscale_delay_s": DOWN_SECONDS,
    }
