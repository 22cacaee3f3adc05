"""The runner lays rows of one token first, draws only where a request has caught up, and says who failed."""

import pytest
import torch

from attend.model.engine.plan import Plan, ScheduledTokens
from attend.model.engine.request import NO_SCORE, Request
from attend.model.engine.runner import ModelRunner, PendingStep
from attend.model.errors import DeviceFailed, OutOfMemory
from attend.model.net.paged_attention import KVCache, ReferenceBackend
from attend.model.params import DecodingParams, SamplingParams
from attend.model.sampling_plan import Draw, SamplingPlan
from tests.model.checkpoints import tiny_config, tiny_decoder
from tests.model.engine.machines import Counted, ask, given, run, tiny_engine

CONFIG = tiny_config(tied_head=False)
POISON = 9


class SpyBackend(ReferenceBackend):
    """Remembers the layouts it was given."""

    def __init__(self):
        self.layouts = []

    def forward(self, layer, q_THD, k_TKD, v_TKD, cache, layout):
        self.layouts.append(layout)
        return super().forward(layer, q_THD, k_TKD, v_TKD, cache, layout)


@pytest.fixture
def runner() -> ModelRunner:
    net = tiny_decoder(CONFIG)
    with torch.no_grad():
        net.embedding.tokens.weight[POISON] = torch.nan
    return ModelRunner(net, SpyBackend(), KVCache.allocate(CONFIG, 32, 4, torch.float32, "cpu"), "cpu")


def at_work(name: str, blocks: list[int], length: int = 8, **fields) -> Request:
    request = ask(name, range(10, 10 + length), **fields)
    request.tables = [blocks]
    return request


def mixed_plan() -> Plan:
    """In order of age: a chunk, a single token, a whole prompt, a single token, a prompt that is not finished."""
    return Plan(
        (
            ScheduledTokens(at_work("chunk", [1, 2]), 2, 3),
            ScheduledTokens(at_work("single", [3, 4]), 7, 1),
            ScheduledTokens(at_work("whole", [5, 6]), 0, 8),
            ScheduledTokens(at_work("first", [7]), 0, 1),
            ScheduledTokens(at_work("prompt of one", [8], length=1), 0, 1),
        )
    )


def test_rows_of_one_token_come_first_and_age_orders_the_rest(runner):
    runner.submit(given(mixed_plan()))
    layout = runner.backend.layouts[0]
    assert [(7, 1), (0, 1), (0, 1), (2, 3), (0, 8)] == [(row.start, row.count) for row in layout.rows]
    assert [[3, 4], [7], [8], [1, 2], [5, 6]] == [row.blocks for row in layout.rows]
    assert 3 == layout.num_single
    assert [7, 0, 0, 2, 3, 4, *range(8)] == layout.positions_T.tolist()


def test_only_rows_that_caught_up_draw(runner):
    pending = runner.submit(given(mixed_plan()))
    assert ["single", "prompt of one", "whole"] == pending.step.draw_ids
    result = pending.result()
    assert {"single", "prompt of one", "whole"} == result.tokens.keys()
    assert {} == result.errors


def test_a_plan_in_which_nobody_catches_up_draws_nothing_but_fills_the_cache(runner):
    result = runner.submit(given(Plan((ScheduledTokens(at_work("a", [3, 5]), 0, 5),)))).result()
    assert ({}, {}) == (result.tokens, result.errors)
    written = runner.cache.keys[0].abs().sum(dim=(1, 2)).nonzero().flatten().tolist()
    assert [12, 13, 14, 15, 20] == written


def test_a_row_that_is_not_finite_is_an_error_of_its_request_alone(runner):
    bad = ask("bad", [1, POISON, 2])
    bad.tables = [[1]]
    result = runner.submit(given(Plan((ScheduledTokens(bad, 0, 3), ScheduledTokens(at_work("good", [2, 3]), 0, 8))))).result()
    assert {"good"} == result.tokens.keys()
    assert {"bad": NO_SCORE} == result.errors


def test_a_draw_is_keyed_by_seed_answer_and_position_of_the_new_token(runner, monkeypatch):
    draws = []
    monkeypatch.setattr(runner, "draw", lambda logits, asked: draws.extend(asked) or torch.zeros(len(asked)))
    request = at_work("a", [1, 2, 3], seed=-5, answer_index=2, sampling=SamplingParams(top_k=3))
    request.output = [11, 12]
    runner.submit(given(Plan((ScheduledTokens(request, 9, 1),))))
    assert [Draw(SamplingPlan(SamplingParams(top_k=3), -5, 2), 10)] == draws


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_a_step_reads_no_long_text_again(sampling):
    """Each of its tokens is read once by the step that computes it, and once for the penalty."""
    engine = tiny_engine(tiny_decoder(CONFIG), num_blocks=200)
    request = ask("a", [1], 40, sampling=SamplingParams(**sampling), decoding=DecodingParams(repetition_penalty=1.2))
    request.prompt, request.output = Counted([11, 12, 13] * 20), Counted()
    run(engine, [request])
    assert 60 <= request.prompt.num_read <= 2 * 60
    assert 40 <= request.output.num_read <= 2 * 40


DEVICE_ERRORS = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    RuntimeError("CUDA driver error: an illegal memory access was encountered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
]
MEMORY_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    MemoryError("out of memory: the native decoder's buffers of this step do not fit"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    ),
]
STEP_ERRORS = [
    RuntimeError("index 128 is out of bounds"),
    ValueError("anything else"),
]


class Broken:
    """Raises at the first touch, as an event or a tensor of a broken device does."""

    def __init__(self, error):
        self.error = error

    def synchronize(self):
        raise self.error


@pytest.mark.parametrize("error", DEVICE_ERRORS, ids=str)
def test_an_error_of_the_device_is_told_from_one_of_a_step_wherever_it_shows(runner, monkeypatch, error):
    """It may come late: with the step's numbers."""
    with pytest.raises(DeviceFailed, match=r"the device failed: (CUDA|cuDNN|Triton)"):
        PendingStep(ready=Broken(error)).result()
    monkeypatch.setattr(runner.backend, "forward", lambda *given: Broken(error).synchronize())
    with pytest.raises(DeviceFailed):
        runner.submit(given(mixed_plan()))


@pytest.mark.parametrize("error", MEMORY_ERRORS, ids=lambda error: str(error)[:40])
def test_a_lack_of_memory_is_told_from_both(runner, monkeypatch, error):
    with pytest.raises(OutOfMemory):
        PendingStep(ready=Broken(error)).result()
    monkeypatch.setattr(runner.backend, "forward", lambda *given: Broken(error).synchronize())
    with pytest.raises(OutOfMemory):
        runner.submit(given(mixed_plan()))


@pytest.mark.parametrize("error", STEP_ERRORS, ids=str)
def test_other_errors_stay_those_of_a_step(runner, monkeypatch, error):
    with pytest.raises(type(error)) as raised:
        PendingStep(ready=Broken(error)).result()
    assert error is raised.value
    monkeypatch.setattr(runner.backend, "forward", lambda *given: Broken(error).synchronize())
    with pytest.raises(type(error)) as raised:
        runner.submit(given(mixed_plan()))
    assert error is raised.value
