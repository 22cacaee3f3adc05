"""Hundreds of lives of the scheduler. tests/model/engine/test_simulation.py has a few, and the bugs that they find."""

import pytest

from tests.simulation.simulate import scheduler_life

LIVES, PART, STEPS = 600, 50, 200
"""Lives in all, in a test, and the steps that a life has at least, as a mean."""


@pytest.mark.parametrize("first", range(1000, 1000 + LIVES, PART))
def test_every_law_holds_after_every_step_of_every_life(first):
    reports = [scheduler_life(seed, "full") for seed in range(first, first + PART)]
    assert [] == [fault for fault, _ in reports if fault]
    assert sum(steps for _, steps in reports) >= STEPS * PART
