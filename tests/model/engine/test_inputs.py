"""What crosses from the scheduler to the runner holds plain values alone: pickled and read again, it is the same step."""

import gc
import pickle
import types

import pytest
import torch

from attend.model.engine.engine import Engine
from attend.model.engine.plan import StepResult
from attend.model.engine.request import FinishReason, Output, Request
from attend.model.engine.scheduler import Scheduler
from attend.model.net.transformer import Decoder
from attend.model.params import DecodingParams, SamplingParams
from tests.model.checkpoints import tiny_config, tiny_decoder
from tests.model.engine.machines import ask, run, tiny_engine
from tests.model.engine.test_grammars import Multiples

GREEDY, DRAWN, AMONG_SOME = (
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.9, top_k=12, top_p=0.9),
)
WAYS = {
    "greedy": {"sampling": GREEDY},
    "drawn": {"sampling": DRAWN, "seed": 2**63 - 1},
    "among some": {"sampling": AMONG_SOME, "seed": -3, "answer_index": 2},
    "penalized": {"decoding": DecodingParams(repetition_penalty=1.7, frequency_penalty=0.3, presence_penalty=0.2)},
    "biased": {"decoding": DecodingParams(logit_bias={3: 2.0, 40: -100}), "sampling": DRAWN},
    "allowed": {"decoding": DecodingParams(allowed_token_ids=tuple(range(30, 60)))},
    "bad words": {"bad_words": [[31], [8, 40]], "decoding": DecodingParams(bad_words=("x",))},
    "no end yet": {"stop_token_ids": frozenset(range(0, 96, 2)), "min_tokens": 5},
    "scored": {"logprobs": 3, "prompt_logprobs": 2},
    "checked": {"grammar": Multiples},
    "masked": {"grammar": Multiples, "sampling": AMONG_SOME, "logprobs": 0},
    "failing": {"grammar": lambda: Multiples(last=3), "sampling": AMONG_SOME},
    "banned": {"banned_tokens": (30, 31), "sampling": DRAWN},
}
COMINGS = {
    "whole": {},
    "in chunks": {"max_batch_tokens": 7, "chunk_size": 3},
    "preempted": {"num_blocks": 17, "block_size": 2},
    "prefix hits": {"prefix_caching": True, "max_batch_requests": 3},
}


@pytest.fixture(scope="module")
def net() -> Decoder:
    decoder = tiny_decoder(tiny_config(tied_head=False))
    with torch.no_grad():
        decoder.head.weight.mul_(3)
    return decoder


def crowd(*ways: str) -> list[Request]:
    """A request of each kind, with prompts that begin alike."""
    asked = []
    for at, way in enumerate(ways or WAYS):
        given = dict(WAYS[way])
        if "grammar" in given:
            given["grammar"] = given["grammar"]()
        asked.append(ask(way, [5, 6, 7, 8, *range(30, 30 + at)], 9, **given))
    return asked


def sent(engine: Engine) -> Engine:
    """The same engine, whose steps, masks drawn late and results cross as bytes."""
    submit = engine.runner.submit

    class Far:
        def __init__(self, pending):
            self.pending = pending

        def tokens(self):
            return crossed(self.pending.tokens())

        def redraw(self, draws, banned_tokens):
            return crossed(self.pending.redraw(crossed(draws), crossed(banned_tokens)))

        def result(self) -> StepResult:
            return crossed(self.pending.result())

    engine.runner.submit = lambda step: Far(submit(crossed(step)))
    return engine


def crossed(value):
    return pickle.loads(pickle.dumps(value))


def seen(outputs: dict[str, list[Output]]) -> dict[str, list[tuple]]:
    """All that callers get but for times: bit for bit."""
    return {name: [output._replace(times=None) for output in each] for name, each in outputs.items()}


@pytest.mark.parametrize("changes", COMINGS.values(), ids=COMINGS)
def test_a_step_that_crossed_as_bytes_gives_the_same_tokens_and_scores(net, changes):
    here, there = run(tiny_engine(net, **changes), crowd()), run(sent(tiny_engine(net, **changes)), crowd())
    assert seen(here) == seen(there)
    ends = {name: outputs[-1].finish_reason for name, outputs in here.items()}
    assert {FinishReason.LENGTH, FinishReason.ERROR} == {*ends.values()}
    assert FinishReason.ERROR is ends["failing"]


def test_nothing_that_the_scheduler_owns_can_be_reached_from_a_step(net):
    """But arrays of numbers, which it reads and does not keep."""
    engine, steps = tiny_engine(net, prefix_caching=True), []
    submit = engine.runner.submit
    engine.runner.submit = lambda step: steps.append(step) or submit(step)
    for request in crowd():
        engine.add(request)
    for _ in range(3):
        engine.step()
    assert 3 == len(steps)
    for step in steps:
        assert {Request, Scheduler, Multiples}.isdisjoint(map(type, reachable(step)))


def reachable(start: object) -> list[object]:
    """Every object that another one refers to, but for classes, functions and modules."""
    found, left = {id(start): start}, [start]
    while left:
        for each in gc.get_referents(left.pop()):
            if id(each) not in found and not isinstance(each, type | types.FunctionType | types.ModuleType):
                found[id(each)] = each
                left.append(each)
    return list(found.values())
