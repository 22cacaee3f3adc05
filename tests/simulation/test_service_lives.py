"""Hundreds of random lives of the whole service keep every law; and all that may happen to a call happens in some."""

import os
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from unittest.mock import patch

import pytest

from attend.model.engine.loop import AsyncEngine
from attend.model.engine.request import FinishReason
from attend.service.chat.parts import CallArguments, Reasoning
from attend.service.observe.metrics import OUTCOMES, REASONS
from tests.simulation.life import Life
from tests.simulation.simulate import live, main

LIVES, PART, STEPS = 300, 25, 60
"""Lives in all, in a test, and the steps that a life has at least, as a mean."""
HARD = 200
"""Lives in which all that may happen must have happened."""


@pytest.mark.parametrize("first", range(0, LIVES, PART))
def test_every_law_holds_after_every_step_of_every_life(first):
    reports = [live(seed) for seed in range(first, first + PART)]
    assert [] == [fault for fault, _ in reports if fault]
    assert sum(steps for _, steps in reports) >= STEPS * PART


@pytest.mark.long
def test_the_lives_are_hard():
    seen: Counter[str] = Counter()
    for seed in range(HARD):
        life = Life(seed).run()
        scheduler = life.scheduler
        seen += Counter(
            {
                "preemptions": scheduler.num_preemptions,
                "hits": scheduler.num_prefix_hits,
                "right guesses": scheduler.num_accepted,
                "wrong guesses": scheduler.num_drafted - scheduler.num_accepted,
                "deaths": life.died,
                "parts begun early": scheduler.num_early_parts,
            }
        )
        for caller in life.callers:
            seen.update([caller.outcome, f"rejected: {caller.rejection}"])
            seen.update(["left in preparation" if not caller.places else "left"] if caller.left else [])
            seen.update(["expired in preparation"] if caller.outcome == "deadline" and not caller.places else [])
            for answer in caller.answers.values():
                seen.update([f"answer: {answer.reason}", "stop string" if isinstance(answer.expected.stop, str) else "other"])
                seen.update({type(part).__name__ for part in answer.parts})
                seen.update(["resumed"] if answer.resumed else [])
            seen.update(["vectors"] if caller.vectors else [])
    wanted = {"preemptions", "hits", "right guesses", "wrong guesses", "deaths", "left", "left in preparation", "vectors"}
    wanted |= {"parts begun early"}
    wanted |= {"expired in preparation", "stop string", "resumed", Reasoning.__name__, CallArguments.__name__}
    wanted |= {*OUTCOMES} | {f"rejected: {reason}" for reason in REASONS if reason != "busy"}
    wanted |= {f"answer: {reason}" for reason in FinishReason if reason is not FinishReason.ERROR}
    assert [] == sorted(name for name in wanted if seen[name] < 5)


def digest(seed: int) -> str:
    """Of all that the callers of a life saw, and when."""
    return sha256(repr(Life(seed).run().trace).encode()).hexdigest()


def test_a_life_is_a_function_of_its_seed():
    """Also in another process, where objects lie elsewhere and texts have other hashes."""
    seeds = range(12)
    ours = [digest(seed) for seed in seeds]
    assert ours == [digest(seed) for seed in seeds]
    assert len({*ours}) == len(ours)
    code = f"from {__name__} import digest; print(*map(digest, range(12)))"
    theirs = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    assert theirs.stdout.split() == ours


def silent_reader(self, name, reason):
    """An abort that is never sent."""


def test_make_simulate_names_the_seeds_that_broke_a_law(capsys):
    assert main(["--lives", "2", "--workers", "1"]) == 0
    assert "2 lives" in capsys.readouterr().out
    with patch.object(AsyncEngine, "abort", silent_reader):
        seed = next(seed for seed in range(100) if live(seed)[0])
        assert main(["--lives", "1", "--first", str(seed), "--workers", "1"]) == 1
    assert f"seed {seed}:" in capsys.readouterr().out
