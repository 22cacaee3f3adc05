"""Steps that are handed over before the one before them has ended: the same answers, and no waiting in between."""

import copy
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
import torch

from attend.model.backends.backend import Placement
from attend.model.backends.choice import choose_backend
from attend.model.engine.engine import Engine
from attend.model.engine.plan import StepResult
from attend.model.engine.request import FinishReason, TokenLogprob
from attend.model.engine.runner import ModelRunner
from attend.model.engine.scheduler import Scheduler
from attend.model.net.paged_attention import KVCache
from attend.model.net.transformer import Decoder
from attend.model.params import DecodingParams, SamplingParams
from attend.model.pooling import Pooling
from tests.model.checkpoints import tiny_config, tiny_decoder
from tests.model.engine.machines import Clock, FakeRunner, answers, ask, fake_answer, fake_engine, run, sizes, tiny_engine, told

POISON = 95


class Log(FakeRunner):
    """Writes down when a step is handed over, and when its result is asked for."""

    def __init__(self) -> None:
        super().__init__(block_size=4)
        self.events: list[str] = []

    def submit(self, step):
        number = len(self.plans)
        self.events.append(f"submit {number}")
        outcome = replace(super().submit(step).result(), logprobs=defaultdict(lambda: TokenLogprob(0, 0.0)))
        return Logged(outcome, number, self.events)


@dataclass
class Logged:
    """A step whose end is written down."""

    outcome: StepResult
    number: int
    events: list[str]

    def result(self) -> StepResult:
        self.events.append(f"result {self.number}")
        return self.outcome


def logging_engine(**changes):
    engine = fake_engine(async_scheduling=True, **changes)
    engine.runner = Log()
    return engine


@pytest.fixture(scope="module")
def net() -> Decoder:
    """Its head is its own, so that a spoilt embedding spoils no other row."""
    decoder = tiny_decoder(tiny_config(tied_head=False))
    with torch.no_grad():
        decoder.embedding.tokens.weight[POISON] = torch.nan
    return decoder


def crowd() -> list:
    ways = [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.3, "top_p": 0.8}]
    return [
        ask(f"r{at}", [7 + at, 8, 9], 9 + at, sampling=SamplingParams(**way), seed=at, stop_token_ids=frozenset(range(20 * at)))
        for at, way in enumerate([*ways, {"temperature": 1.1, "min_p": 0.1}])
    ]


def test_a_step_is_handed_over_before_the_result_of_the_one_before_it_is_asked_for():
    engine = logging_engine()
    assert {"a": fake_answer(ask("a", max_tokens=4))} == answers(engine, [ask("a", max_tokens=4)])
    order = ["submit 0", "submit 1", "result 0", "submit 2", "result 1", "submit 3", "result 2", "result 3"]
    assert order == engine.runner.events


@pytest.mark.parametrize(
    "fields",
    [
        {"decoding": DecodingParams(presence_penalty=0.5)},
        {"bad_words": [[4, 5]]},
        {"logprobs": 0},
        {"min_tokens": 4},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_step_waits_where_a_draw_looks_back_at_the_tokens(fields):
    """For everybody in it: a stream that is left out of a step would wait for longer."""
    engine = logging_engine()
    engine.add(ask("b", **fields))
    engine.add(ask("a", max_tokens=9))
    engine.step()
    engine.step()
    assert ["submit 0", "result 0", "submit 1", "result 1"] == engine.runner.events


def early(engine) -> list[bool]:
    """Of each step, whether it was handed over before the result of the one before it was asked for."""
    events = engine.runner.events
    return [f"result {at - 1}" not in events[: events.index(f"submit {at}")] for at in range(1, len(engine.runner.plans))]


def test_under_steady_arrivals_no_step_waits_for_the_one_before_it():
    """But where nobody was in flight. Before parts of prompts were foreseen, each arrival stopped the pipeline for a step at
    least, and each part of its prompt too.
    """
    engine, asked, step = logging_engine(max_batch_tokens=8, prefix_caching=True), [], 0
    while step < 60 or engine.has_work:
        if step < 60 and step % 3 == 0:
            asked.append(ask(f"r{step}", [step % 7, *range(9 + step % 5)], 6, seed=step))
            engine.add(asked[-1])
        engine.step()
        step += 1
    assert all(early(engine))
    assert all(request.output == fake_answer(request)[0] for request in asked)


@pytest.mark.parametrize(
    "fields", [{"decoding": DecodingParams(presence_penalty=0.5)}, {"bad_words": [[4, 5]]}, {"min_tokens": 2}]
)
def test_a_prompt_whose_draws_look_back_is_computed_ahead_up_to_its_first_token(fields):
    engine = logging_engine(max_batch_tokens=4)
    run(engine, [ask("a", range(10), 3, **fields)])
    assert [True, True, False, False] == early(engine)


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 0}, {"pooling": Pooling.MEAN, "max_tokens": 0}], ids=str)
def test_what_is_added_up_over_a_prompt_is_not_computed_ahead(fields):
    engine = logging_engine(max_batch_tokens=4)
    engine.add(ask("a", range(10), **{"max_tokens": 3} | fields))
    engine.step()
    engine.step()
    assert [False] == early(engine)


def test_a_step_whose_requests_were_all_aborted_is_not_waited_for():
    """It counts for nobody: neither in the reports, nor in what a step is thought to cost."""
    engine, reports = logging_engine(), []
    engine.add(ask("a", max_tokens=30))
    engine.step()
    engine.abort("a", FinishReason.ABORT)
    engine.observer = reports.append
    assert {"b": fake_answer(ask("b", max_tokens=2))} == answers(engine, [ask("b", max_tokens=2)])
    assert 2 == len(reports)
    assert "result 1" not in engine.runner.events


def test_a_row_without_a_score_is_followed_harmlessly(net):
    """Its request fails; the step that computes it all the same reads no token that there is none of."""
    engine = tiny_engine(net, async_scheduling=True)
    found = run(engine, [ask("bad", [3, POISON], 5), *crowd()])
    [last] = found.pop("bad")
    assert ((), FinishReason.ERROR) == (last.token_ids, last.finish_reason)
    assert answers(tiny_engine(net), crowd()) == {name: told(outputs) for name, outputs in found.items()}


@pytest.mark.parametrize("failing", range(3, 8))
def test_a_part_behind_a_step_that_failed_counts_for_nothing(failing):
    """The step is repeated in halves, and what followed it is lost: neither its request nor another finds its blocks."""
    engine, calls = fake_engine(async_scheduling=True, prefix_caching=True, max_batch_tokens=9), []
    submit = engine.runner.submit

    def submit_but_once(step):
        calls.append(step.early)
        if len(calls) == failing or (len(calls) == failing + 1 and step.early):
            raise RuntimeError("a step failed, and what followed it")
        return submit(step)

    engine.runner.submit = submit_but_once
    stream, prompt, later = ask("s", [9], 20, seed=1), ask("a", range(30), 3), ask("b", range(31), 3)
    outputs = []
    engine.add(stream)
    while len(calls) < failing:
        outputs += engine.step()
        if len(calls) == 2:
            engine.add(prompt)
    outputs += engine.step()
    if prompt.finish_reason is None:  # else its part is computed again before another reads it
        engine.abort("a", FinishReason.ABORT)
    engine.add(later)
    for more in run(engine, []).values():
        outputs += more
    for request in (stream, later):
        assert fake_answer(request) == told(each for each in outputs if each.request_id == request.request_id)


def test_blocks_of_a_step_that_nobody_waits_for_are_not_known():
    engine = fake_engine(async_scheduling=True, prefix_caching=True, max_batch_tokens=4)
    submit = engine.runner.submit
    engine.runner.submit = lambda step: submit(step) if not step.early else (_ for _ in ()).throw(RuntimeError("it fails"))
    engine.add(ask("a", range(20), 3))
    engine.step()
    engine.abort("a", FinishReason.ABORT)
    engine.runner.submit = submit
    again = ask("b", range(20), 3)
    assert {"b": fake_answer(again)} == answers(engine, [again])


PROTOTYPE = "Synchronization debug mode is a prototype feature"
"""How torch's warning begins where it is first asked to raise: it is not what is tested here."""


def watch(runner):
    """Have torch raise where a step that follows another waits for the device as it is handed over; returns what was seen."""
    submit, early = runner.submit, []

    def watched(step):
        early.append(step.early)
        torch.cuda.set_sync_debug_mode("error" if step.early else "default")
        try:
            return submit(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.submit = watched
    return early


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.filterwarnings(f"ignore:{PROTOTYPE}")
@pytest.mark.parametrize("recorded", [False, True])
def test_handing_a_step_over_does_not_wait_on_a_gpu(net, recorded):
    """torch raises where it would wait for the device, and a step that raises ends its requests with an error."""
    config, device = sizes(block_size=16), "cuda"
    backend = choose_backend("triton", net.config, Placement(torch.float32, device, config.block_size))
    cache = KVCache.allocate(net.config, config.num_blocks, config.block_size, torch.float32, device)
    form = backend.decoder(copy.deepcopy(net).to(device))
    graphs, pieces = backend.record(form, cache, config) if recorded else (None, None)
    runner = ModelRunner(form, backend.attention, cache, device, graphs, pieces=pieces)
    early, clock = watch(runner), Clock()
    found = answers(Engine(Scheduler(config, clock), runner, clock, async_scheduling=True), crowd())
    assert any(early)
    assert {FinishReason.STOP, FinishReason.LENGTH} == {reason for _, reason in found.values()}
