"""Models of short convolutions: through scheduler, runner and decoder, nobody meets the state of another."""

from functools import cache

import pytest
import torch

from attend.model.engine.config import GroupSize
from attend.model.engine.engine import Engine
from tests.model.checkpoints import tiny_config
from tests.model.engine.machines import run
from tests.model.engine.test_states import COMINGS, crowd, needs_library
from tests.model.net.laws.test_engine_laws import Answer, answer, assert_near, engine
from tests.model.net.laws.ways import Way

CONFIG = tiny_config(num_layers=3, max_positions=256, conv_kernel=4, conv_bias=True, conv_layers=(0, 2), head_gate=True)


def convolving(way: Way, *, num_blocks: int = 64, **changes) -> Engine:
    """An engine of CONFIG with NaN in every state."""
    settings = {"max_batch_requests": 4, "max_model_len": 160} | changes
    groups = GroupSize(num_blocks), GroupSize(settings["max_batch_requests"], has_state=True)
    machine = engine(way, CONFIG, num_blocks=num_blocks, groups=groups, **settings)
    for [part] in machine.runner.cache.states.values():
        part.fill_(torch.nan)
    return machine


@pytest.mark.parametrize("coming", ["chunked", "preempted, in chunks", "async scheduling, preempted"])
def test_a_request_gets_the_scores_of_a_dense_pass(coming):
    way = Way("torch", torch.float32)
    machine = convolving(way, **COMINGS[coming])
    found = {name: answer(outputs) for name, outputs in run(machine, crowd()).items()}
    assert_near(way, CONFIG, crowd(), found)
    assert ("preempted" in coming) == (machine.stats().num_preemptions > 0)


NATIVE = Way("native", torch.bfloat16)


@cache
def bits_alone() -> dict[str, Answer]:
    """What each of the crowd gets from an engine of its own, its whole prompt at once."""
    return {name: answer(outputs) for each in crowd() for name, outputs in run(convolving(NATIVE), [each]).items()}


@needs_library
@pytest.mark.parametrize("coming", ["chunked", "batched", "preempted, in chunks", "async scheduling, preempted"])
def test_on_the_native_backend_its_scores_have_the_same_bits_however_it_comes(coming):
    machine = convolving(NATIVE, **COMINGS[coming])
    assert {name: answer(outputs) for name, outputs in run(machine, crowd()).items()} == bits_alone()
