"""A step as bytes, for the ranks that compute it and do not draw: texts, masks and hidden sums stay on rank 0.

A head in JSON, and behind it the numbers that may be many, int64.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attend.model.engine.plan import PromptScores, StepInput
from attend.model.params import SamplingParams
from attend.model.sampling_plan import Draw, SamplingPlan

ALL_SCORES = Draw(SamplingPlan(SamplingParams(top_k=1), seed=0), position=0)
"""Stands for a draw that needs more than the best scores."""


def needs_best_alone(draw: Draw) -> bool:
    """True if the best of each rank's scores decides a token: nothing is left out, changed or reported."""
    return draw.plan.draws_from_scores and not draw.plan.is_limited and not draw.may_exclude


def pack_step(step: StepInput) -> bytes:
    """A step as bytes for the other ranks; `unpack_step` reads them."""
    numbers, sizes = array("q"), []
    for part in (
        step.starts,
        step.counts,
        step.versions,
        step.draw_rows,
        step.tokens,
        *(row for group in step.tables for row in group),
    ):
        numbers.extend(part)
        sizes.append(len(part))
    head = {
        "early": step.early,
        "pending": step.pending,
        "ids": step.request_ids,
        "draw_ids": step.draw_ids,
        "draws": [_pack_draw(draw) for draw in step.draws],
        "scores": [(each.request_id, each.row, list(each.tokens), each.top) for each in step.prompt_scores],
        "sizes": sizes,
    }
    return json.dumps(head).encode() + b"\n" + numbers.tobytes()


def unpack_step(message: bytes) -> StepInput:
    """The step, with other draws in the place of those that need more than the best scores."""
    line, _, rest = message.partition(b"\n")
    head, numbers = json.loads(line), array("q")
    numbers.frombytes(rest)
    starts, counts, versions, draw_rows, tokens, *rows = _split_numbers(numbers, head["sizes"])
    num_rows = len(starts)
    return StepInput(
        early=head["early"],
        pending=head["pending"],
        request_ids=head["ids"],
        tables=[rows[at : at + num_rows] for at in range(0, len(rows), num_rows)] if num_rows else [],
        starts=starts.tolist(),
        counts=counts.tolist(),
        versions=versions.tolist(),
        tokens=tokens,
        draws=[_unpack_draw(told) for told in head["draws"]],
        draw_rows=draw_rows.tolist(),
        draw_ids=head["draw_ids"],
        prompt_scores=[PromptScores(*each) for each in head["scores"]],
    )


def _split_numbers(numbers: "array[int]", sizes: Iterable[int]) -> "Iterator[array[int]]":
    at = 0
    for size in sizes:
        yield numbers[at : at + size]
        at += size


def _pack_draw(draw: Draw) -> list[Any] | None:
    """What decides a draw from the best scores; None for another one."""
    if not (draw.takes_the_best or needs_best_alone(draw)):
        return None
    plan = draw.plan
    return [plan.params.temperature, plan.seed, plan.answer_index, draw.position, needs_best_alone(draw)]


def _unpack_draw(told: Sequence[Any] | None) -> Draw:
    if told is None:
        return ALL_SCORES
    temperature, seed, answer_index, position, alone = told
    logprobs = None if alone else 0  # a report of scores: then more than the best is gathered
    return Draw(SamplingPlan(SamplingParams(temperature=temperature), seed, answer_index, logprobs=logprobs), position)
