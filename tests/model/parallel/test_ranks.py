"""An engine over ranks answers as one over a whole decoder, and ends when a rank does: gloo, on CPUs."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from attend.model.engine.build import build_engine, build_runner
from attend.model.engine.plan import StepInput
from attend.model.engine.ranks import Leader
from attend.model.errors import DeviceFailed, SettingError
from attend.model.net.checkpoint import save
from attend.model.parallel.group import ProcessGroup
from attend.model.params import DecodingParams, SamplingParams
from attend.model.text.grammar import GrammarCompiler, GrammarSpec
from tests.fakes import END, VOCAB, byte_tokenizer
from tests.model.checkpoints import tiny_config, tiny_decoder
from tests.model.engine.machines import ask, run
from tests.model.parallel.rank import OPTIONS, OPTIONS_OF
from tests.service.server import wait_for

CONFIG = tiny_config(vocab_size=VOCAB, num_heads=8, num_kv_heads=4, max_positions=128)
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=2.0),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=0.5, min_p=0.05),
]
DECODING = DecodingParams(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 3.0})
LATE, UNHEALTHY = 4.0, 10.0
SOON, SILENT = 1.0, 20.0
"""Of a group whose ranks wait for rank 0 for ten times as long, and by when they have ended then."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    save(tiny_decoder(CONFIG), path, torch.float32)
    return path


@contextmanager
def engine_of(folder, number, *words, late=60.0, kind="plain"):
    """Rank 0 of so many, in this process, and the processes of the others, each with a GPU of its own if with any."""
    group = ProcessGroup(0, number, OPTIONS_OF[kind].device, late=late)
    command = [sys.executable, "-m", "tests.model.parallel.rank"]
    started = [
        subprocess.Popen(
            [*command, *map(str, (rank, number, group.port, late, kind, folder)), *words],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(rank)},
        )
        for rank in range(1, number)
    ]
    try:
        engine = build_engine(folder, OPTIONS_OF[kind], group=group)
        yield engine, started
        engine.close()
    finally:
        for process in started:
            process.kill()
            process.wait()


def crowd():
    """Requests that draw in every way, of many lengths."""
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB, (END,))
    regex = compiler.compile(GrammarSpec("regex", r"(ab|ba){3,9};"))
    asks = [
        ask(f"{at}", [5, 6, 7, 8] * (at % 5) + [9 + at], 12, sampling=SAMPLINGS[at % len(SAMPLINGS)], seed=at)
        for at in range(12)
    ]
    asks.append(ask("penalised", [3, 4, 3, 4], 12, sampling=SAMPLINGS[1], decoding=DECODING))
    asks.append(ask("greedy with scores", [3, 4, 5], 12, logprobs=3, prompt_logprobs=2))
    asks.append(ask("drawn with scores", [3, 4, 5], 12, sampling=SAMPLINGS[1], logprobs=0))
    asks.append(ask("without its end", [8, 9], 12, stop_token_ids=frozenset(range(0, VOCAB, 2)), min_tokens=6))
    asks.append(ask("grammar", [8, 9], 12, grammar=regex.start()))
    asks.append(ask("grammar, drawn among some", [8, 9], 12, sampling=SAMPLINGS[3], grammar=regex.start()))
    return asks


def told(outputs):
    """Tokens, reason, and scores as they are."""
    tokens = [token for output in outputs for token in output.token_ids]
    return tokens, outputs[-1].finish_reason, [score for output in outputs for score in output.logprobs or ()]


@pytest.fixture(scope="module")
def wanted(folder):
    """Of an engine that has the decoder whole."""
    return {name: told(outputs) for name, outputs in run(build_engine(folder, OPTIONS).engine, crowd()).items()}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)], ids="{} ranks".format)
def engine(request, folder):
    with engine_of(folder, request.param) as (engine, _):
        assert engine.info.fingerprint != build_engine(folder, OPTIONS).info.fingerprint
        yield engine.engine


def same(found, wanted, within=1e-4):
    for name, (tokens, reason, scores) in wanted.items():
        assert found[name][:2] == (tokens, reason), name
        assert len(found[name][2]) == len(scores)
        for one, other in zip(found[name][2], scores, strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=within)


def test_ranks_answer_as_one(engine, wanted):
    assert len({tuple(tokens) for tokens, *_ in wanted.values()}) > 12, "the answers hardly differ: the test says little"
    same({name: told(outputs) for name, outputs in run(engine, crowd()).items()}, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no two CUDA devices")
def test_ranks_on_gpus_answer_as_one_gpu(folder):
    wanted = {name: told(outputs) for name, outputs in run(build_engine(folder, OPTIONS_OF["cuda"]).engine, crowd()).items()}
    with engine_of(folder, 2, kind="cuda") as (engine, _):
        same({name: told(outputs) for name, outputs in run(engine.engine, crowd()).items()}, wanted)


@pytest.mark.parametrize(("kind", "within"), [("guesses", 1e-4), ("keys in 8 bits", 1e-2)])
def test_ranks_of_another_kind_answer_as_one(folder, kind, within):
    """In 8 bits a sum in another order may give a key another code."""
    whole = build_engine(folder, OPTIONS_OF[kind]).engine
    wanted = {name: told(outputs) for name, outputs in run(whole, crowd()).items()}
    with engine_of(folder, 2, kind=kind) as (engine, _):
        same({name: told(outputs) for name, outputs in run(engine.engine, crowd()).items()}, wanted, within)


def test_tokens_that_did_not_reach_the_host_are_known_on_every_rank(engine, wanted, monkeypatch):
    """As on a GPU, where a step is submitted before the previous one has ended."""
    monkeypatch.setattr(engine, "async_scheduling", True)
    submitted, submit = [], engine.runner.submit
    monkeypatch.setattr(engine.runner, "submit", lambda step: submitted.append(step.early) or submit(step))
    found = {name: told(outputs) for name, outputs in run(engine, crowd()[:12]).items()}
    same(found, {name: wanted[name] for name in found})
    assert any(submitted)


def test_a_rank_that_computes_other_numbers_ends_the_engine(folder):
    with engine_of(folder, 2, "odd") as (engine, _):
        engine.start()
        assert wait_for(lambda: engine.heartbeat_age() == float("inf"), UNHEALTHY)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "busy"),
    [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGSTOP, False)],
    ids=["killed", "killed while busy", "frozen"],
)
def test_a_rank_that_is_gone_ends_the_engine_within_ten_seconds(folder, how, busy):
    """Then `check_health` raises, and Serve replaces the replica."""
    with engine_of(folder, 2, late=LATE) as (engine, [other]):
        engine.start()
        assert engine.heartbeat_age() < UNHEALTHY
        other.send_signal(how)
        if busy:
            engine._command(lambda: engine.engine.add(ask("late", max_tokens=100)))
        assert wait_for(lambda: engine.heartbeat_age() == float("inf"), UNHEALTHY)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "serves"),
    [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGSTOP, True)],
    ids=["killed before it serves", "killed", "frozen"],
)
def test_the_other_ranks_end_with_rank_0(folder, how, serves):
    code = (
        "import sys; from pathlib import Path; from attend.model.parallel.group import ProcessGroup\n"
        "from attend.model.engine.build import *\n"
        f"from tests.model.parallel.rank import OPTIONS\ngroup = ProcessGroup(0, 2, 'cpu', late={SOON})\n"
        "print(group.port, flush=True); engine = build_engine(Path(sys.argv[1]), OPTIONS, group=group)\n"
        f"if {serves}: engine.start()\n"
        "print('built', flush=True); sys.stdin.read()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    port, words = first.stdout.readline().strip(), ("plain", str(folder))
    other = subprocess.Popen([sys.executable, "-m", "tests.model.parallel.rank", "1", "2", port, str(SOON), *words])
    try:
        assert first.stdout.readline() == "built\n"
        time.sleep(3 * SOON * serves)
        assert other.poll() is None, "it waits as long as rank 0 is there"
        first.send_signal(how)
        assert other.wait(SILENT if how == signal.SIGSTOP else UNHEALTHY) == 4
    finally:
        for process in (first, other):
            process.kill()
            process.communicate()


def test_what_fails_on_rank_0_within_a_step_cannot_be_repeated(engine, monkeypatch):
    """Nor may another step follow: the others wait within that one. An engine may have dropped it unread."""
    monkeypatch.setattr(engine.runner.runner, "submit", lambda step: 1 // len(step.counts))
    monkeypatch.setattr(engine.runner.runner.group, "send", lambda message: None)
    leader = Leader(engine.runner.runner, time.monotonic)
    assert leader.submit(StepInput(counts=[1])) == 1
    with pytest.raises(DeviceFailed, match="ZeroDivisionError"):
        leader.submit(StepInput())
    leader._beat -= 60  # the next beat is due
    for later in (lambda: leader.submit(StepInput(counts=[1])), leader.idle):
        with pytest.raises(DeviceFailed, match="ZeroDivisionError"):
            later()


def test_a_rank_holds_its_share_of_matrices_and_of_keys_and_values(engine, folder):
    """Norms are whole, and no rank has two tokens of the vocabulary more than another."""
    whole, mine = build_engine(folder, OPTIONS).engine.runner, engine.runner.runner
    ranks = mine.group.ranks

    def held(runner):
        matrices = {p.data_ptr(): p for p in runner.net.parameters() if p.dim() > 1}
        return sum(p.untyped_storage().nbytes() for p in matrices.values())

    assert held(mine) * ranks == pytest.approx(held(whole), rel=0.02)
    assert mine.cache.keys[0].shape[-2] * ranks == CONFIG.num_kv_heads


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantize": "int8"}, "quantize is set"),
        ({"adapters": True}, "adapters is set"),
        ({"backend": "native"}, "does not support this model with tensor_parallel"),
    ],
)
def test_what_ranks_do_not_compute_is_refused_by_name(folder, changes, named):
    with pytest.raises(SettingError, match=named):
        build_runner(folder, replace(OPTIONS, **changes), group=ProcessGroup(0, 2, "cpu"))
