"""A request's sampling plan answers, in one place, how its tokens can be drawn."""

import pickle
from dataclasses import fields

import numpy as np
import pytest

from attend.model.params import NO_CHANGE, DecodingParams, SamplingParams
from attend.model.sampling_plan import Draw, SamplingPlan
from tests.model.engine.machines import ask

GREEDY, DRAWN, AMONG_SOME = SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0.5, top_k=3)
BIASED = DecodingParams(logit_bias={3: 1.0})


class Anything:
    """A grammar that allows everything."""


@pytest.mark.parametrize(
    ("given", "answers"),
    [
        ({"sampling": GREEDY}, {"is_greedy", "draws_from_scores", "can_sample_unmasked"}),
        ({"sampling": SamplingParams(temperature=0, top_k=3)}, {"is_greedy", "draws_from_scores", "can_sample_unmasked"}),
        ({"sampling": DRAWN}, {"draws_from_scores", "can_sample_unmasked"}),
        ({"sampling": AMONG_SOME}, {"is_limited", "draws_from_scores"}),
        ({"sampling": SamplingParams(top_p=0.5), "grammar": Anything()}, {"is_limited"}),
        ({"sampling": GREEDY, "grammar": Anything()}, {"is_greedy", "can_sample_unmasked"}),
        ({"sampling": DRAWN, "decoding": BIASED}, {"changes_scores", "can_sample_unmasked"}),
        ({"decoding": DecodingParams(presence_penalty=1)}, {"is_greedy", "changes_scores", "penalizes", "can_sample_unmasked"}),
        ({"sampling": DRAWN, "bad_words": [[4, 5]]}, {"can_sample_unmasked"}),
        ({"sampling": DRAWN, "logprobs": 0}, {"can_sample_unmasked"}),
    ],
    ids=lambda value: None if isinstance(value, dict) else "-".join(sorted(value)),
)
def test_a_plan_says_what_the_parameters_allow(given, answers):
    plan = ask("a", **given).sampling_plan
    asked = [each.name for each in fields(plan) if each.type in (bool, "bool") and not each.init]
    assert answers == {name for name in asked if getattr(plan, name)}


@pytest.mark.parametrize(
    ("plan", "step", "excludes", "best"),
    [
        (SamplingPlan(GREEDY, 0), {}, False, True),
        (SamplingPlan(DRAWN, 0), {}, False, False),
        (SamplingPlan(GREEDY, 0, decoding=BIASED), {}, True, False),
        (SamplingPlan(GREEDY, 0), {"banned_tokens": (2,)}, True, False),
        (SamplingPlan(GREEDY, 0), {"mask": np.ones(4, dtype=bool)}, True, False),
    ],
)
def test_a_draw_adds_what_holds_for_one_token(plan, step, excludes, best):
    draw = Draw(plan, 7, **step)
    assert (excludes, best) == (draw.may_exclude, draw.takes_the_best)


def test_a_plan_means_the_same_in_another_process():
    """What it has worked out is sent along: `NO_CHANGE` is another object there."""
    for plan in (SamplingPlan(AMONG_SOME, -3, 2, NO_CHANGE, 4), SamplingPlan(DRAWN, 1, decoding=BIASED, has_grammar=True)):
        copy = pickle.loads(pickle.dumps(plan))
        assert [getattr(plan, each.name) for each in fields(plan)] == [getattr(copy, each.name) for each in fields(plan)]
