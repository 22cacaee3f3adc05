"""GET /v1/capacity: load, speed, and the estimated latency of a call.

The wait is estimated as for any queue that is served in order of arrival: so many requests must end before this one
starts, and they end at (requests that run) / (steps that a request takes * seconds of a step). What it assumes:

- Calls to come are like those of late in length; so a place, or the blocks, that one leaves are enough for the next.
- The batch stays as full, and a step as long, as now. Both hold while there is a queue.
- Steps that a request takes = (requests in a step, summed over steps) / (requests that ended). That is exact over a long
  time, and too much while a first batch of long answers is under way and hardly any of them has ended.
- Preemptions are rare. Where blocks are so few that requests give way, single waits scatter, and the mean is too long,
  by half or so.
- Serve sends the call to the replica with the least wait. It chooses by load, so mostly it does.

None means: not known yet, or the call does not fit the context.
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
MAX_TOKENS = 2**31 - 1
MAX_RETRY_SECONDS = 60
STEP_MEMORY, PROMPT_MEMORY, REQUEST_MEMORY = 64, 16, 64
"""A mean over steps, steps with prompts, or requests is mostly one over the last so many of them."""


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


class _Slot(NamedTuple):
    """Tokens of half a second; `number` counts half seconds since the clock's zero."""

    number: int = -SLOTS
    num_computed: int = 0
    num_drawn: int = 0


@dataclass(frozen=True, slots=True)
class CompletionRate:
    """How fast an engine is. Rates are over the last ten seconds; the rest is from its last steps, however long ago."""

    computed_per_second: float = 0.0
    """Tokens of prompts and answers."""
    drawn_per_second: float = 0.0
    """Generated tokens a second."""
    step_seconds: float | None = None
    prompt_tokens_per_second: float | None = None
    """Of the steps that computed mostly prompts; short ones do not fill a step, and make it look slow."""
    steps_per_request: float | None = None
    """Steps that a request takes part in before it ends."""


class LoadMeter:
    """Measures one engine. `observe_step` belongs to the step thread; `pace` may be called from any other.

    Nothing is locked: the step thread replaces immutable values, and a reader takes each of them once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._slots = [_Slot()] * (SLOTS + 1)  # the one under way, and those of a whole window before it
        self._step, self._prompt, self._request = Mean(), Mean(), Mean()

    def observe_step(self, report: StepReport) -> None:
        """Add a step of the engine to the means."""
        number = int(self._clock() / SLOT_SECONDS)
        at = number % len(self._slots)
        slot = self._slots[at] if self._slots[at].number == number else _Slot(number)
        self._slots[at] = _Slot(number, slot.num_computed + report.num_tokens, slot.num_drawn + report.num_drawn)
        self._step = self._step.add(report.seconds, 1, 1 - 1 / STEP_MEMORY)
        prompt = report.num_tokens - report.num_drawn
        if prompt > report.num_drawn:  # the step spent its time mostly on prompts
            self._prompt = self._prompt.add(prompt, report.seconds, 1 - 1 / PROMPT_MEMORY)
        fade: float = (1 - 1 / REQUEST_MEMORY) ** report.num_ended
        self._request = self._request.add(report.num_requests, report.num_ended, fade)

    def pace(self) -> CompletionRate:
        """How fast the engine is now."""
        now = self._clock()
        first = int(now / SLOT_SECONDS) - SLOTS
        recent = [slot for slot in tuple(self._slots) if slot.number >= first]
        seconds = max(SLOT_SECONDS, now - max(self._started, first * SLOT_SECONDS))
        return CompletionRate(
            sum(slot.num_computed for slot in recent) / seconds,
            sum(slot.num_drawn for slot in recent) / seconds,
            self._step.value,
            self._prompt.value,
            self._request.value,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica reports to the replica that answers."""

    info: EngineInfo
    stats: EngineStats
    pace: CompletionRate


@dataclass(frozen=True, slots=True)
class Question:
    """A possible call, in tokens."""

    prompt_tokens: int = 0
    max_tokens: int = 16


def fits_context(info: EngineInfo, question: Question) -> bool:
    """True if the context holds the prompt and the longest answer."""
    return max(1, question.prompt_tokens) + question.max_tokens <= info.max_model_len


def wait_seconds(load: Load, question: Question) -> float | None:
    """Seconds until the engine starts the call: 0 where its next step can, None where that is not known."""
    if not fits_context(load.info, question):
        return None
    ended = _must_end(load, question)
    if ended <= 0:
        return 0.0
    pace = load.pace
    if pace.steps_per_request is None or pace.step_seconds is None:
        return None
    at_once = load.stats.num_running or load.info.max_batch_requests  # none runs just before the first step
    return ended * pace.steps_per_request * pace.step_seconds / at_once


def retry_seconds(load: Load) -> int:
    """Whole seconds after which a call that a full queue refused may be tried again: those that a call which comes now would
    wait, or 1 while that is not known.
    """
    wait = wait_seconds(load, Question())
    return 1 if wait is None else min(MAX_RETRY_SECONDS, max(1, math.ceil(wait)))


def _must_end(load: Load, question: Question) -> float:
    """Requests that must end before the call has a place and its blocks, if all hold as many as those that run."""
    info, stats = load.info, load.stats
    places = stats.num_running + stats.num_waiting + 1 - info.max_batch_requests
    needed = -(-max(1, question.prompt_tokens) // info.block_size)
    held = (info.num_blocks - stats.num_free_blocks) / stats.num_running if stats.num_running else float(needed)
    each = max(1.0, held)
    return max(0.0, places, (stats.num_waiting * each + needed - stats.num_free_blocks) / each)


def answer_seconds(load: Load, question: Question) -> float | None:
    """Seconds until the call's last token: the wait, the prompt at the measured rate, and a step for each token."""
    wait, pace = wait_seconds(load, question), load.pace
    if wait is None or pace.step_seconds is None:
        return None
    if question.prompt_tokens and pace.prompt_tokens_per_second is None:
        return None
    prompt = question.prompt_tokens / (pace.prompt_tokens_per_second or 1.0)
    return wait + prompt + question.max_tokens * pace.step_seconds


def estimate(loads: Sequence[Load], num_expected: int, question: Question) -> server_answers.Capacity:
    """The answer of /v1/capacity: sums over the replicas that reported, and the times of the one with the least wait."""
    times = [(wait_seconds(load, question), answer_seconds(load, question)) for load in loads]
    wait, seconds = min(times, key=_unknown_last, default=(None, None))
    infos, stats, paces = ([getattr(load, part) for load in loads] for part in Load.__slots__)
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
        "tokens_per_second": round(sum(pace.drawn_per_second for pace in paces), 3),
        "computed_tokens_per_second": round(sum(pace.computed_per_second for pace in paces), 3),
        "prompt_tokens": question.prompt_tokens,
        "max_tokens": question.max_tokens,
        "fits": any(fits_context(info, question) for info in infos) if infos else None,
        "estimated_wait_seconds": None if wait is None else round(wait, 3),
        "estimated_seconds": None if seconds is None else round(seconds, 3),
    }


def _unknown_last(answer: tuple[float | None, float | None]) -> tuple[float, float]:
    wait, seconds = (float("inf") if part is None else part for part in answer)
    return wait, seconds
