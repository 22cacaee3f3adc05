"""Recovery from a step that failed as a whole: each request is computed again alone, to find those that fail by themselves.

A step may be computed again because it writes keys and values to the same places, with the same numbers. That is not so for a
state, which a step changes: a model that has states cannot repeat one.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields

from attend.model.engine.plan import Plan, ScheduledTokens, StepResult
from attend.model.errors import DeviceFailed, OutOfMemory

Compute = Callable[[Plan], StepResult]


def compute_alone(plan: Plan, compute: Compute, least: int) -> StepResult:
    """The results of a step that failed, one request after the other, since a later one may share blocks that an earlier fills.

    A request whose part fails with OutOfMemory is put off, if that part is of more than `least` tokens. Any other ends with an
    error. A request that was aborted in the meantime is put off too. Raises DeviceFailed.
    """
    results = list[StepResult]()
    for item in plan.scheduled_tokens:
        name = item.request.request_id
        if item.request.finish_reason is not None:
            results.append(StepResult(put_off={name: "aborted"}))
            continue
        alone = ScheduledTokens(item.request, item.start, item.count, item.draft)
        try:
            results.append(compute(Plan((alone,), num_drafted=len(item.draft))))
        except DeviceFailed:
            raise
        except Exception as raised:
            error = without_frames(raised)
            if isinstance(error, OutOfMemory) and item.count > least:
                results.append(StepResult(put_off={name: str(error)}))
            else:
                results.append(failed_step((item,), error))
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
