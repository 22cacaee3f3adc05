"""Structured output in the engine: keeps the drawn tokens of a step within their grammars.

It runs beside the scheduler: the runner sees masks, and no grammar.

Where possible a token is drawn without a mask and checked here afterwards: a mask takes longer, and mostly the token fits.
Where limits need the mask first, it is worked out while a device computes the scores, and the token drawn then.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Protocol

from attend.model.engine.plan import Plan, StepInput
from attend.model.errors import EngineFailed
from attend.model.sampling_plan import Draw

if TYPE_CHECKING:  # it needs llguidance, and a request without a grammar does not
    from attend.model.text.mask import Grammar

NEXT_BEST = 2
"""Tokens that are tried after a refused one."""


class SampledStep(Protocol):
    """A step that has drawn its tokens, and still has their scores."""

    def tokens(self) -> Sequence[int]:
        """What each row has drawn; below 0 where there is nothing to draw."""

    def redraw(self, draws: Mapping[int, Draw], banned_tokens: Mapping[int, Sequence[int]]) -> Sequence[int]:
        """Draw some rows again, in another way or without some tokens; returns their tokens. Both mappings are by row."""


def unmasked_grammars(plan: Plan, step: StepInput) -> "dict[int, Grammar]":
    """The grammars of the rows that draw without their masks. A request aborted in the meantime needs no check."""
    rows = [row for row, draw in enumerate(step.draws) if draw.plan.has_grammar and draw.mask is None]
    if not rows:
        return {}
    live = {item.request.request_id: item.request for item in plan.scheduled_tokens if item.request.finish_reason is None}
    requests = ((row, live.get(step.draw_ids[row])) for row in rows)
    return {row: request.grammar for row, request in requests if request is not None and request.grammar is not None}


def begin_masks(plan: Plan, step: StepInput, *, beside: bool) -> Future[None] | None:
    """Work out the masks that draws of this step await; None where none does. With `beside` on another thread: nobody else may
    touch their grammars until it is done. Else before the step, which has them; one whose grammar fails goes on waiting, for
    its error.
    """
    if not any(draw.awaits_mask for draw in step.draws):
        return None
    from attend.model.text.mask import compute_masks  # needs llguidance, and a request without a grammar does not

    grammars = {row: grammar for row, grammar in unmasked_grammars(plan, step).items() if step.draws[row].awaits_mask}
    if beside:
        return _beside().submit(compute_masks, list(grammars.values()))
    compute_masks(grammars.values())
    for row, grammar in grammars.items():
        draw = step.draws[row]
        with suppress(EngineFailed):
            draw.mask, draw.awaits_mask = grammar.mask(), False
    return None


@cache
def _beside() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "attend-masks")


def keep_to_grammars(
    step: SampledStep, draws: Sequence[Draw], grammars: "Mapping[int, Grammar]", masks: Future[None] | None = None
) -> dict[int, str]:
    """Draw rows again whose token their grammar does not allow; returns the rows whose grammar failed, with the reason.

    The next best tokens are tried before a mask is computed: a mask takes longer, and mostly one of them fits. `masks`: what
    `begin_masks` has begun.
    """
    if masks is not None:
        masks.result()
    if not grammars:
        return {}
    drawn = step.tokens()
    scored = {row: grammar for row, grammar in grammars.items() if drawn[row] >= 0}
    refused: dict[int, tuple[int, ...]] = {
        row: (drawn[row],) for row, grammar in scored.items() if not draws[row].awaits_mask and not grammar.allows(drawn[row])
    }
    for _ in range(NEXT_BEST):
        if not refused:
            break
        tokens = step.redraw({row: draws[row] for row in refused}, refused)
        refused = {
            row: (*known, token)
            for (row, known), token in zip(refused.items(), tokens, strict=True)
            if token >= 0 and not grammars[row].allows(token)
        }
    return _draw_under_masks(
        step, draws, {row: each for row, each in scored.items() if row in refused or draws[row].awaits_mask}
    )


def _draw_under_masks(step: SampledStep, draws: Sequence[Draw], grammars: "Mapping[int, Grammar]") -> dict[int, str]:
    if not grammars:
        return {}
    from attend.model.text.mask import compute_masks

    compute_masks(grammars.values())
    masked: dict[int, Draw] = {}
    errors: dict[int, str] = {}
    for row, grammar in grammars.items():
        try:
            masked[row] = replace(draws[row], mask=grammar.mask(), awaits_mask=False)
        except EngineFailed as error:
            errors[row] = str(error)
    if masked:
        step.redraw(masked, {})
    return errors
