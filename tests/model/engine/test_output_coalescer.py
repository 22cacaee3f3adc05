"""Outputs come whole, in order and in time, however many of them go together."""

import itertools
import random

import pytest

from attend.model.engine.output_coalescer import MAX_SECONDS, SECONDS_OF_A_STREAM, OutputCoalescer
from attend.model.engine.request import FinishReason, Output

STEP = 1.9e-3


def token(name: str, at: int) -> Output:
    return Output(name, (at,))


def end(name: str, at: int) -> Output:
    return Output(name, (at,), FinishReason.LENGTH)


def steps_of(num_streams: int, num_steps: int) -> list[list[Output]]:
    """The outputs of streams that begin together and do not end."""
    return [[token(f"r{row}", at) for row in range(num_streams)] for at in range(num_steps)]


def paced(steps: list[list[Output]], seconds: float = STEP) -> list[tuple[int, list[Output]]]:
    """(after which step, what was due) of steps that take as long as each other."""
    pace = OutputCoalescer()
    found = [(at, pace.due(outputs, 1 + at * seconds, seconds)) for at, outputs in enumerate(steps)]
    return [(at, outputs) for at, outputs in found if outputs]


@pytest.mark.parametrize("seconds", [SECONDS_OF_A_STREAM * 0.6, STEP, 1.0])
def test_who_streams_alone_gets_each_token_at_once(seconds):
    steps = steps_of(1, 20)
    assert list(enumerate(steps)) == paced(steps, seconds)


@pytest.mark.parametrize("num_streams", [8, 16, 64, 1000])
def test_tokens_of_a_crowd_go_together_as_long_as_the_first_of_them_may_wait(num_streams):
    most = min(MAX_SECONDS, SECONDS_OF_A_STREAM * num_streams)
    found = paced(steps_of(num_streams, 60))
    gaps = [(later - earlier) * STEP for (earlier, _), (later, _) in itertools.pairwise(found)]
    assert all(most - STEP < gap <= most + 1e-9 for gap in gaps), gaps


def test_steps_longer_than_anything_may_wait_go_out_one_by_one():
    steps = steps_of(64, 20)
    assert list(enumerate(steps)) == paced(steps, MAX_SECONDS / 1.9)


@pytest.mark.parametrize("last", [[token("new", 0)], [end("r3", 2)]])
def test_a_first_token_and_an_end_wait_for_nothing_and_take_the_others_along(last):
    steps = [*steps_of(16, 2), last]
    assert [(0, steps[0]), (2, [*steps[1], *last])] == paced(steps, 1e-4)


def test_every_output_comes_once_and_in_order_through_any_life():
    for seed in range(50):
        dice, pace, running, made, come = random.Random(seed), OutputCoalescer(), [], [], []
        for at in range(200):
            running += [f"{at}"] * (dice.random() < 0.2)
            outputs = [end(name, at) if dice.random() < 0.03 else token(name, at) for name in running]
            running = [output.request_id for output in outputs if output.finish_reason is None]
            made += outputs
            come += pace.due(outputs, at * STEP, dice.choice([STEP, STEP, 9e-3]))
            assert come == made[: len(come)]
            assert running or come == made, "an engine without work holds nothing"
        assert made == [*come, *pace.all()]
        assert [] == pace.all()
