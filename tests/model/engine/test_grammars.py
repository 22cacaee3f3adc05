"""A request under a grammar draws what it would draw under its masks, whether the mask is worked out before or only after."""

import math
import threading
import time

import numpy as np
import pytest
import torch

from attend.model.engine.grammars import keep_to_grammars
from attend.model.engine.plan import StepInput
from attend.model.engine.request import NO_TOKEN_LEFT, FinishReason
from attend.model.engine.runner import PendingStep
from attend.model.params import SamplingParams
from attend.model.sampling import sample
from attend.model.sampling_plan import Draw
from attend.model.text.mask import GrammarFailed
from tests.model.checkpoints import VOCAB, tiny_config, tiny_decoder
from tests.model.engine.machines import answers, ask, masked_first, tiny_engine


class Multiples:
    """Every token must be a multiple of 3, or of 5 after an odd one; it fails after `last` tokens."""

    is_finished = False

    def __init__(self, last: int = 99) -> None:
        self.seen, self.masks, self.last = [], 0, last

    def allows(self, token: int) -> bool:
        return token % (5 if self.seen and self.seen[-1] % 2 else 3) == 0

    def mask(self):
        self.masks += 1
        if len(self.seen) >= self.last:
            raise GrammarFailed("structured output: the grammar allows no token here")
        return np.array([self.allows(token) for token in range(VOCAB)])

    def advance(self, token: int) -> None:
        assert self.allows(token)
        self.seen.append(token)


class From(Multiples):
    """Every token must be `first` or a larger one."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def allows(self, token: int) -> bool:
        return token >= self.first


def crowd(grammars, **sampling):
    """Bound and free requests side by side."""
    how = SamplingParams(**sampling)
    return [
        ask(f"r{at}", range(at, at + 5), 12, sampling=how, seed=4, answer_index=at, grammar=grammar)
        for at, grammar in enumerate(grammars)
    ]


def told(grammars, **sampling):
    return answers(tiny_engine(tiny_decoder(tiny_config())), crowd(grammars, **sampling))


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 2.0}], ids=str)
def test_drawing_first_and_looking_afterwards_draws_the_same(sampling):
    first = [Multiples(), None, Multiples(), None, Multiples()]
    found = told(first, **sampling)
    masked = [Multiples(), None, Multiples(), None, Multiples()]
    assert found == answers(tiny_engine(tiny_decoder(tiny_config())), masked_first(crowd(masked, **sampling)))
    assert sum(each.masks for each in first if each) < sum(each.masks for each in masked if each) == 36


def test_masks_that_draws_await_are_worked_out_while_the_model_computes(monkeypatch):
    """A step that waited for its masks before it began would wait for ever here."""
    engine, computes, worked_out = tiny_engine(tiny_decoder(tiny_config())), threading.Event(), []
    engine.async_scheduling = True  # as for a device that computes by itself
    submit = engine.runner.submit

    def submitted(step):
        computes.set()
        return submit(step)

    def late(grammars):
        if threading.current_thread() is not threading.main_thread():
            worked_out.append(computes.wait(20))

    engine.runner.submit = submitted
    monkeypatch.setattr("attend.model.text.mask.compute_masks", late)
    answers(engine, crowd([Multiples(), Multiples()], temperature=1.0, top_p=0.8))
    assert worked_out == [True] * 12


def test_nothing_is_computed_again_while_masks_are_still_worked_out(monkeypatch):
    """Of a step that the device did not take: nobody else may touch their grammars meanwhile."""
    engine, begun, failed, ended = tiny_engine(tiny_decoder(tiny_config())), [], threading.Event(), []
    engine.async_scheduling = True
    submit = engine.runner.submit

    def submitted(step):
        begun.append(len(ended))
        if len(begun) == 1:
            failed.set()
            raise RuntimeError("the device did not take the step")
        return submit(step)

    def late(grammars):
        failed.wait(20)
        time.sleep(0.05)
        ended.append(grammars)

    engine.runner.submit = submitted
    monkeypatch.setattr("attend.model.text.mask.compute_masks", late)
    found = answers(engine, crowd([Multiples(), Multiples()], temperature=1.0, top_p=0.8))
    assert begun[:2] == [0, 1]
    assert all(reason is FinishReason.LENGTH for _, reason in found.values())


@pytest.mark.parametrize("sampling", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_where_other_tokens_decide_which_are_kept_the_mask_comes_first(sampling):
    grammars = [Multiples(), Multiples()]
    found = told(grammars, temperature=1.0, **sampling)
    assert [12, 12] == [grammar.masks for grammar in grammars]
    assert all(len(tokens) == 12 for tokens, _ in found.values())


@pytest.mark.parametrize(("num_refused", "masks"), [(0, 0), (1, 0), (2, 0), (3, 1), (9, 1)])
def test_a_mask_is_worked_out_only_where_the_next_best_tokens_do_not_fit_either(num_refused, masks):
    """It takes longer than to look at a few tokens."""
    scores = -torch.arange(float(VOCAB))[None]
    request = ask("a", [1], grammar=From(num_refused))
    greedy = Draw(request.sampling_plan, 1)
    pending = PendingStep(StepInput(draws=[greedy], draw_ids=["a"]), sample(scores, [greedy]), logits_RV=scores)
    assert {} == keep_to_grammars(pending, [greedy], {0: request.grammar})
    assert {"a": num_refused} == pending.result().tokens
    assert masks == request.grammar.masks


@pytest.mark.parametrize("finite", [1, 2, 4])
def test_a_grammar_that_allows_none_of_the_finite_scores_is_to_blame_and_not_the_model(finite):
    """However many tokens are tried one by one before the mask is worked out."""
    scores = torch.full((1, VOCAB), -math.inf)
    scores[0, 1 : 3 * finite : 3] = 1.0
    request = ask("a", [1], grammar=Multiples())
    greedy = Draw(request.sampling_plan, 1)
    pending = PendingStep(StepInput(draws=[greedy], draw_ids=["a"]), sample(scores, [greedy]), logits_RV=scores)
    assert {} == keep_to_grammars(pending, [greedy], {0: request.grammar})
    assert {"a": NO_TOKEN_LEFT} == pending.result().errors


class Poison(From):
    """Raises an error of ours in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__(0)
        setattr(self, method, self.fail)

    def fail(self, *given):
        raise ZeroDivisionError


@pytest.mark.parametrize("method", ["allows", "mask", "advance"])
def test_a_grammar_that_raises_ends_its_request_alone(method):
    """Wherever the engine asks it: before a draw, after it, and when the token is taken."""
    net = tiny_decoder(tiny_config())
    requests = crowd([None, Poison(method), From(5), None])
    if method == "mask":
        masked_first(requests)
    found = answers(tiny_engine(net), requests)
    assert found.pop("r1") == ([], FinishReason.ERROR)
    alone = answers(tiny_engine(net), crowd([None, None, From(5), None]))
    del alone["r1"]
    assert found == alone
