"""One step of continuous batching: schedule, run, commit. For one thread.

Asynchronous scheduling, for a device that computes by itself: a step is submitted before the tokens drawn in the previous step
have reached the host, where the scheduler can tell what it computes (`Scheduler.schedule_async`). Then the device does not wait
for Python. At most two steps are under way.
"""

import logging
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

from attend.model.engine.grammars import SampledStep, begin_masks, keep_to_grammars, unmasked_grammars
from attend.model.engine.offload.offloader import KVOffload
from attend.model.engine.plan import Plan, ScheduledTokens, StepInput, StepResult, step_input
from attend.model.engine.request import EngineStats, FinishReason, Output, Request, StepReport
from attend.model.engine.scheduler import Scheduler
from attend.model.errors import DeviceFailed, EngineFailed, OutOfMemory
from attend.model.params import SamplingParams

log = logging.getLogger("attend.engine")


class Pending(SampledStep, Protocol):
    """A step that was submitted and whose result was not read yet."""

    def result(self) -> StepResult:
        """Wait for the step and return its result. Raises what computing it raised."""


class Runner(Protocol):
    """What computes steps: `ModelRunner`, or a fake."""

    def submit(self, step: StepInput) -> Pending:
        """Start computing a step, without waiting for its result where the runner can."""


class Engine:
    """The loop of scheduling, submitting and committing steps, over a scheduler and a runner."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float],
        *,
        async_scheduling: bool = False,
        idle: Callable[[], None] = lambda: None,
        offload: KVOffload | None = None,
    ) -> None:
        """`async_scheduling`: for runners that can begin a step before the previous one has ended. `idle` is called in place
        of a step where there is none. `offload` keeps what the scheduler's KV cache forgets.
        """
        self.offload = offload
        self.scheduler = scheduler
        self.runner = runner
        self.async_scheduling = async_scheduling
        self._idle = idle
        self._next: _Step | None = None
        """The step that was submitted before the tokens of the previous one were known."""
        self.observer: Callable[[StepReport], None] = lambda report: None
        self._clock = clock
        self._num_ended = 0  # at the last report

    @property
    def has_work(self) -> bool:
        """True if any request is in flight, but for those whose blocks are being read from disk."""
        scheduler = self.scheduler
        if self.offload is not None and self.offload.has_results:
            return True
        return scheduler.num_running + scheduler.num_waiting > len(scheduler.awaiting_kv)

    def add(self, request: Request) -> None:
        """Queue a request for the scheduler."""
        self.scheduler.add(request)
        if self.offload is not None:
            self.offload.reader.begin(request)

    def abort(self, request_id: str, reason: FinishReason) -> Output | None:
        """End a request, and free its blocks; None where it is not in flight."""
        return self.scheduler.abort(request_id, reason)

    def abort_all(self, reason: FinishReason) -> list[Output]:
        """End every request that is in flight."""
        return self.scheduler.abort_all(reason)

    def step(self) -> list[Output]:
        """Let every scheduled request catch up by one step."""
        started = self._clock()
        if self.offload is not None:
            self.offload.take_results()
        if self._next is not None and self._next.plan.is_over:
            self.scheduler.drop(self._next.plan)
            self._next = None
        if self._next is None:
            plan = self.scheduler.schedule()
            if not plan.scheduled_tokens:
                self._idle()
                return []
            self._next = self._submit(plan)
        step, plan = self._next, self._next.plan
        following = self.scheduler.schedule_async(plan) if self.async_scheduling else None
        self._next = None if following is None else self._submit(following)
        result = self._result(step)
        if (result.errors or result.put_off) and not self.scheduler.tables.has_states:
            self._drop_next()  # who shared blocks with a failed request begins again; where there are states, these are filled
        dropped = None if following is None or self._next is not None else following
        outputs = self.scheduler.commit(plan, result, dropped)
        drawn = sum(len(output.token_ids) for output in outputs)
        num_tokens = plan.num_tokens - plan.num_drafted
        self.observer(StepReport(self._clock() - started, len(plan.scheduled_tokens), num_tokens, drawn, self._end_step()))
        if not self.has_work:
            self.scheduler.tables.check_all_free()
        return outputs

    def _end_step(self) -> int:
        before, self._num_ended = self._num_ended, self.scheduler.num_ended
        return self._num_ended - before

    def stats(self) -> EngineStats:
        """The load after the last step."""
        scheduler = self.scheduler
        return EngineStats(
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.tables.num_free,
            scheduler.num_preemptions,
            scheduler.num_prefix_queries,
            scheduler.num_prefix_hits,
            scheduler.num_drafted,
            scheduler.num_accepted,
            None if self.offload is None else self.offload.stats(),
        )

    def _submit(self, plan: Plan) -> "_Step":
        """The plan, and the step under way."""
        step = _Step(plan)
        try:
            step.step_input = step_input(plan)
            step.masks = begin_masks(plan, step.step_input, beside=self.async_scheduling)  # a CPU has no core to spare
            step.pending = self.runner.submit(step.step_input)
        except Exception as error:
            step.error = error
        return step

    def _result(self, step: "_Step") -> StepResult:
        """What came of a step. One that fails as a whole ends neither the engine nor, where it can be repeated, more
        requests than those that fail alone. Raises DeviceFailed, which ends the engine.
        """
        try:
            return self._step_result(step)
        except DeviceFailed:
            raise
        except Exception as raised:
            log.exception("a step of %d requests failed", len(step.plan.scheduled_tokens))
            error = without_frames(raised)
        self._drop_next()
        if isinstance(error, OutOfMemory):
            self.scheduler.shrink()
        if self.scheduler.tables.has_states:
            return failed_step(step.plan.scheduled_tokens, error)
        return compute_in_halves(step.plan, error, self._again, self.scheduler.least_budget)

    def _again(self, part: Plan) -> StepResult:
        """Compute a part of a step that failed."""
        return self._step_result(self._submit(part))

    def _step_result(self, step: "_Step") -> StepResult:
        """The result of a step, its tokens within their grammars. Raises what the step raised."""
        if step.error is not None:
            if step.masks is not None:
                step.masks.result()  # nobody else may touch their grammars until then
            raise step.error
        assert step.pending is not None
        refused = keep_to_grammars(
            step.pending, step.step_input.draws, unmasked_grammars(step.plan, step.step_input), step.masks
        )
        result = step.pending.result()
        errors = {step.step_input.draw_ids[row]: reason for row, reason in refused.items()}
        return replace(result, errors={**result.errors, **errors}) if errors else result

    def _drop_next(self) -> None:
        """Wait for the step that was submitted after a failed one, and forget it: it began with tokens that were not drawn."""
        step, self._next = self._next, None
        for begun in () if step is None else (step.masks, step.pending):
            if begun is not None:
                with suppress(Exception):
                    begun.result()


@dataclass(slots=True)
class _Step:
    """A submitted step, or why its submission failed."""

    plan: Plan
    step_input: StepInput = field(default_factory=StepInput)
    pending: Pending | None = None
    masks: Future[None] | None = None
    """Ends once the grammar masks are computed that some draws wait for; None: no draw waits."""
    error: Exception | None = None


def warm_up(engine: Engine) -> None:
    """Two steps of a short request: lazy set-up is done before the first caller, and a model that cannot run never serves.

    Its observer is not called. Raises EngineFailed.
    """
    observer, engine.observer = engine.observer, lambda report: None
    length = min(8, engine.scheduler.config.max_model_len - 2)
    engine.add(Request("warm-up", [0] * max(1, length), 2, SamplingParams()))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise EngineFailed(f"the model's first step failed: {output.error}")
    engine.observer = observer


Compute = Callable[[Plan], StepResult]


def compute_in_halves(plan: Plan, error: Exception, compute: Compute, least: int) -> StepResult:
    """The results of a step that raised `error`, computed again by halves: one bad request costs the others little.

    A request whose part of one fails with OutOfMemory is put off, if that part is of more than `least` tokens. Any other ends
    with an error. A request that was aborted in the meantime is put off too. Raises DeviceFailed.
    """
    live = [item for item in plan.scheduled_tokens if item.request.finish_reason is None]
    known = [ScheduledTokens(item.request, item.start, item.count, item.draft) for item in live]
    gone = {item.request.request_id: "aborted" for item in plan.scheduled_tokens if item.request.finish_reason is not None}
    if not gone:
        return _split(known, error, compute, least)
    return _join([StepResult(put_off=gone), _compute(known, compute, least) if known else StepResult()])


def _split(items: Sequence[ScheduledTokens], error: Exception, compute: Compute, least: int) -> StepResult:
    if len(items) > 1:
        middle = len(items) // 2  # the first half first: the second may share blocks that it fills
        return _join([_compute(half, compute, least) for half in (items[:middle], items[middle:])])
    if isinstance(error, OutOfMemory) and items and items[0].count > least:
        return StepResult(put_off={items[0].request.request_id: str(error)})
    return failed_step(items, error)


def _compute(items: Sequence[ScheduledTokens], compute: Compute, least: int) -> StepResult:
    try:
        return compute(Plan(tuple(items), num_drafted=sum(len(item.draft) for item in items)))
    except DeviceFailed:
        raise
    except Exception as raised:
        error = without_frames(raised)
    return _split(items, error, compute, least)


def _join(results: Sequence[StepResult]) -> StepResult:
    """The results of disjoint parts of a step as those of all of it."""
    names = [each.name for each in fields(StepResult)]
    return StepResult(**{name: {key: value for one in results for key, value in getattr(one, name).items()} for name in names})


def without_frames(error: Exception) -> Exception:
    """The error without what its frames hold, such as the tensors of the step that raised it: others need their memory."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def failed_step(items: Sequence[ScheduledTokens], error: Exception) -> StepResult:
    """The result of a step in which all of these fail."""
    reason = f"the step failed: {type(error).__name__}"
    return StepResult(errors={item.request.request_id: reason for item in items})
