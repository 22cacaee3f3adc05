"""Recovery from a step that failed as a whole: it is computed again by halves, to find the requests that fail by themselves.

A step may be computed again because it writes keys and values to the same places, with the same numbers. That is not so for a
state, which a step changes: a model that has states cannot repeat one.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields

from attend.model.engine.plan import Plan, ScheduledTokens, StepResult
from attend.model.errors import DeviceFailed, OutOfMemory

Compute = Callable[[Plan], StepResult]


def bisect_step(plan: Plan, error: Exception, compute: Compute, least: int) -> StepResult:
    """The results of a step that raised `error`, computed again by halves; `compute` raises what a part raises.

    A request whose part of one fails with OutOfMemory is put off, if that part is of more than `least` tokens. Any other ends
    with an error. A request that was aborted in the meantime is put off too. Raises DeviceFailed.
    """
    live = [item for item in plan.scheduled_tokens if item.request.finish_reason is None]
    known = [ScheduledTokens(item.request, item.start, item.count, item.draft) for item in live]
    gone = {item.request.request_id: "aborted" for item in plan.scheduled_tokens if item.request.finish_reason is not None}
    if not gone:
        return _bisect(known, error, compute, least)
    return _join_results([StepResult(put_off=gone), _compute_again(known, compute, least) if known else StepResult()])


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


def _bisect(items: Sequence[ScheduledTokens], error: Exception, compute: Compute, least: int) -> StepResult:
    if len(items) > 1:
        middle = len(items) // 2  # the first half first: the second may share blocks that it fills
        return _join_results([_compute_again(half, compute, least) for half in (items[:middle], items[middle:])])
    if isinstance(error, OutOfMemory) and items and items[0].count > least:
        return StepResult(put_off={items[0].request.request_id: str(error)})
    return failed_step(items, error)


def _compute_again(items: Sequence[ScheduledTokens], compute: Compute, least: int) -> StepResult:
    try:
        return compute(Plan(tuple(items), num_drafted=sum(len(item.draft) for item in items)))
    except DeviceFailed:
        raise
    except Exception as raised:
        error = without_frames(raised)
    return _bisect(items, error, compute, least)


def _join_results(results: Sequence[StepResult]) -> StepResult:
    """The results of disjoint parts of a step as those of all of it."""
    names = [each.name for each in fields(StepResult)]
    return StepResult(**{name: {key: value for one in results for key, value in getattr(one, name).items()} for name in names})
