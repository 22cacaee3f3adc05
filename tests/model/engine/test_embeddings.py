"""Requests that draw nothing and report hidden states: those of the decoder alone, whoever is beside them."""

import random
from array import array

import numpy as np
import pytest
import torch

from attend.model.engine.engine import Engine
from attend.model.engine.plan import HiddenSum, StepInput
from attend.model.engine.request import NO_HIDDEN, FinishReason, Output, Request
from attend.model.engine.runner import PendingStep
from attend.model.net.checkpoint import load_decoder
from attend.model.pooling import Pooling
from attend.model.train.loss import hidden_states
from tests.model.checkpoints import VOCAB, their_model, tiny_config, tiny_decoder, write_checkpoint
from tests.model.engine.machines import ask, run, tiny_engine, told
from tests.model.net.laws.test_engine_laws import COMINGS, engine, net_of
from tests.model.net.laws.ways import Way, each_exact_way, each_guessing_way, each_way

NEAR = 1e-5
"""In float32, of vectors of length 1."""
CONFIG = tiny_config(num_heads=4, num_kv_heads=2, head_size=32, max_positions=256)
LENGTHS = [31, 1, 64, 97, 33, 2, 100]
each_pooling = pytest.mark.parametrize("pooling", Pooling)
each_coming = pytest.mark.parametrize("coming", COMINGS)


def embed(name: str, prompt: list[int], pooling: Pooling) -> Request:
    return ask(name, prompt, 0, pooling=pooling)


def texts() -> list[list[int]]:
    """They share their beginning of two blocks."""
    dice = random.Random(8)
    stem = dice.choices(range(VOCAB), k=64)
    return [[*stem, *dice.choices(range(VOCAB), k=40)][:length] for length in LENGTHS]


def streams() -> list[Request]:
    dice = random.Random(9)
    return [ask(f"s{at}", dice.choices(range(VOCAB), k=1 + 20 * at), 50, seed=at) for at in range(3)]


def crowd(pooling: Pooling) -> list[Request]:
    """Streams and embeddings in turn, the oldest a stream."""
    few, others = streams(), [embed(f"e{at}", text, pooling) for at, text in enumerate(texts())]
    return [few[0], *others[:2], *few[1:], *others[2:]]


def vector(outputs: list[Output]) -> np.ndarray:
    """What one output, the only one, reports, with length 1."""
    [last] = outputs
    assert ((), FinishReason.STOP, None) == (last.token_ids, last.finish_reason, last.error)
    found = np.array(last.hidden)
    return found / np.linalg.norm(found)


def pooled(hidden_TE: torch.Tensor, pooling: Pooling) -> np.ndarray:
    """The reference: plain float64 over the whole text."""
    states = hidden_TE.detach().double().numpy()
    found = {Pooling.MEAN: states.mean(axis=0), Pooling.LAST: states[-1], Pooling.CLS: states[0]}[pooling]
    return found / np.linalg.norm(found)


@each_way
@each_pooling
@each_coming
def test_a_vector_is_that_of_a_dense_forward(way: Way, pooling, coming):
    machine = engine(way, CONFIG, **COMINGS[coming])
    found = run(machine, crowd(pooling))
    assert ("preempted" in coming) == (machine.scheduler.num_preemptions > 0)
    net = net_of(CONFIG, torch.float32)
    for at, text in enumerate(texts()):
        expected = pooled(hidden_states(net, torch.tensor([text])), pooling)
        assert np.abs(vector(found[f"e{at}"]) - expected).max() < (NEAR if way.fine else 0.05)


@each_exact_way
@each_pooling
@each_coming
def test_a_vector_has_the_same_bits_however_it_comes(way: Way, pooling, coming):
    alone = {}
    for at, text in enumerate(texts()):
        alone |= run(engine(way, CONFIG), [embed(f"e{at}", text, pooling)])
    found = run(engine(way, CONFIG, **COMINGS[coming]), crowd(pooling))
    assert {name: outputs[0].hidden for name, outputs in alone.items()} == {name: found[name][0].hidden for name in alone}


@pytest.mark.parametrize("cut", [1, 7, 64, 99])
def test_a_sum_has_the_same_bits_however_a_prompt_is_cut(cut):
    """Of numbers that float64 rounds, as those of bfloat16 are not."""
    rows_TE = torch.randn(100, 8, generator=torch.Generator().manual_seed(1)) * torch.logspace(-12, 12, 100)[:, None]

    def added(before: array, some_TE: torch.Tensor) -> array:
        step = StepInput(hidden_sums=[HiddenSum("a", 0, len(some_TE), before)])
        return PendingStep(step, hidden=[some_TE]).result().hidden_sums["a"]

    whole, parts = added(array("d"), rows_TE), array("d")
    for some_TE in rows_TE.split(cut):
        parts = added(parts, some_TE)
    assert parts == whole
    assert np.allclose(whole, rows_TE.double().sum(dim=0))


@each_guessing_way
@each_pooling
@each_coming
def test_streams_keep_their_tokens_beside_embeddings(way: Way, pooling, coming):
    expected = {name: told(outputs) for name, outputs in run(engine(way, CONFIG), streams()).items()}
    found = run(engine(way, CONFIG, **COMINGS[coming]), crowd(pooling))
    assert {name: told(found[name]) for name in expected} == expected


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-tied", "gemma2", "gpt2"])
@each_pooling
def test_a_vector_is_made_of_the_last_hidden_state_of_transformers(tmp_path, kind, pooling):
    folder = write_checkpoint(kind, tmp_path)
    text = random.Random(3).choices(range(VOCAB), k=29)
    with torch.no_grad():
        theirs = their_model(folder)(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
    machine = tiny_engine(load_decoder(folder, torch.float32, "cpu"), max_batch_tokens=11)
    found = run(machine, [embed("a", text, pooling)])["a"]
    assert np.abs(vector(found) - pooled(theirs, pooling)).max() < NEAR


@pytest.fixture
def machine() -> Engine:
    return tiny_engine(net_of(CONFIG, torch.float32), max_batch_tokens=16, prefix_caching=True)


@pytest.mark.parametrize(("pooling", "cached"), [(Pooling.LAST, 36), (Pooling.MEAN, 0), (Pooling.CLS, 0)])
def test_only_a_last_token_may_follow_a_cached_prefix(machine, pooling, cached):
    """The hidden states of cached tokens are gone."""
    run(machine, [ask("a", range(40), 1)])
    found = run(machine, [embed("b", [*range(40)], pooling)])["b"]
    assert found[0].times.cached_tokens == cached


@each_pooling
@pytest.mark.parametrize("budget", [4, 256])
def test_hidden_states_that_are_not_finite_end_their_own_request_alone(pooling, budget):
    net = tiny_decoder(tiny_config(tied_head=False))
    with torch.no_grad():
        net.embedding.tokens.weight[7] = torch.nan
    others = [embed("good", [1, 2, 3, 4, 5, 6], pooling), *(ask(f"s{at}", [at, at + 1], 1) for at in range(4))]
    found = run(
        tiny_engine(net, max_batch_tokens=budget),
        [embed("bad", [7] if pooling is Pooling.CLS else [1, 2, 3, 4, 5, 7], pooling), *others],
    )
    [last] = found.pop("bad")
    assert (last.finish_reason, last.error, last.hidden) == (FinishReason.ERROR, NO_HIDDEN, None)
    assert np.isfinite(vector(found.pop("good"))).all()
    assert {told(outputs)[1] for outputs in found.values()} == {FinishReason.LENGTH}
