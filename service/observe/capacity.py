"""GET /v1/capacity: load, speed, and the estimated wait of a call that comes now.

The wait is estimated as for any queue that is served in order of arrival: so many requests must end before this one
starts, and they end at (requests that run) / (steps that a request takes * seconds of a step). It assumes that calls to come
are like those of late, that the batch stays as full as now, and that preemptions are rare.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attend.model.engine.request import EngineInfo, EngineStats, StepReport
from attend.service.contract import server_answers

SLOTS, SLOT_SECONDS = 20, 0.5
"""Tokens a second are a mean over the last 20 half seconds, and the one under way."""
MAX_RETRY_SECONDS = 60
KEEP = 1 - 1 / 64
"""How much of a mean over steps or requests remains with one more of them."""


class Mean(NamedTuple):
    """A quotient of two sums that fade: old terms count little."""

    above: float = 0.0
    below: float = 0.0

    def add(self, above: float, below: float, keep: float) -> "Mean":
        """With one more term in each sum; the earlier terms count `keep` times as much."""
        return Mean(self.above * keep + above, self.below * keep + below)

    @property
    def value(self) -> float | None:
        """The quotient; None before there is anything to divide by."""
        return self.above / self.below if self.below > 0 else None


@dataclass(frozen=True, slots=True)
class CompletionRate:
    """How fast an engine is: over the last ten seconds, and by its last steps, however long ago."""

    tokens_per_second: float = 0.0
    """Generated tokens."""
    step_seconds: float | None = None
    steps_per_request: float | None = None
    """Steps that a request takes part in before it ends."""


class LoadMeter:
    """Measures one engine. The step thread replaces immutable values, and a reader in another takes each once: no lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        # Number of a half second and its tokens: the one under way, and those of a whole window before it.
        self._slots = [(-SLOTS, 0)] * (SLOTS + 1)
        self._step, self._request = Mean(), Mean()

    def observe_step(self, report: StepReport) -> None:
        """Add a step of the engine to the means."""
        number = int(self._clock() / SLOT_SECONDS)
        at = number % len(self._slots)
        earlier = self._slots[at][1] if self._slots[at][0] == number else 0
        self._slots[at] = (number, earlier + report.num_drawn)
        self._step = self._step.add(report.seconds, 1, KEEP)
        self._request = self._request.add(report.num_requests, report.num_ended, KEEP**report.num_ended)

    def pace(self) -> CompletionRate:
        """How fast the engine is now."""
        now = self._clock()
        first = int(now / SLOT_SECONDS) - SLOTS
        recent = sum(tokens for number, tokens in tuple(self._slots) if number >= first)
        seconds = max(SLOT_SECONDS, now - max(self._started, first * SLOT_SECONDS))
        return CompletionRate(recent / seconds, self._step.value, self._request.value)


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica reports to the replica that answers."""

    info: EngineInfo
    stats: EngineStats
    pace: CompletionRate


def wait_seconds(load: Load) -> float | None:
    """Seconds until the engine starts a short call: 0 where its next step can, None where that is not known."""
    info, stats, pace = load.info, load.stats, load.pace
    places = stats.num_running + stats.num_waiting + 1 - info.max_batch_requests
    blocks_each = max(1.0, (info.num_blocks - stats.num_free_blocks) / stats.num_running if stats.num_running else 1.0)
    must_end = max(places, (stats.num_waiting * blocks_each + 1 - stats.num_free_blocks) / blocks_each)
    if must_end <= 0:
        return 0.0
    if pace.steps_per_request is None or pace.step_seconds is None:
        return None
    at_once = stats.num_running or info.max_batch_requests  # none runs just before the first step
    return must_end * pace.steps_per_request * pace.step_seconds / at_once


def retry_seconds(load: Load) -> int:
    """Whole seconds after which a call that a full queue refused may be tried again; 1 while the wait is not known."""
    wait = wait_seconds(load)
    return 1 if wait is None else min(MAX_RETRY_SECONDS, max(1, math.ceil(wait)))


def estimate(loads: Sequence[Load], num_expected: int) -> server_answers.Capacity:
    """The answer of /v1/capacity: sums over the replicas that reported, and the least wait."""
    waits = [wait for load in loads if (wait := wait_seconds(load)) is not None]
    infos, stats = [load.info for load in loads], [load.stats for load in loads]
    return {
        "replicas": {"expected": num_expected, "answered": len(loads)},
        "free_blocks": sum(one.num_free_blocks for one in stats),
        "num_blocks": sum(info.num_blocks for info in infos),
        "block_size": next((info.block_size for info in infos), None),
        "running": sum(one.num_running for one in stats),
        "waiting": sum(one.num_waiting for one in stats),
        "max_batch_requests": sum(info.max_batch_requests for info in infos),
        "max_queued_requests": sum(info.max_queued_requests for info in infos),
        "max_model_len": next((info.max_model_len for info in infos), None),
        "tokens_per_second": round(sum(load.pace.tokens_per_second for load in loads), 3),
        "estimated_wait_seconds": round(min(waits), 3) if waits else None,
    }
