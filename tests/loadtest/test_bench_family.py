"""Who is compared with whom, without any timing but of a tiny model."""

import asyncio

import pytest
import torch

from attend.model.net.families.table import FAMILIES
from attend.model.net.features import NATIVE, features
from attend.model.net.native import library
from attend.model.sublayers import DeltaSpec
from loadtest.bench.family import SWITCHES, WORKS, Contestant, config_of, cost, llama_beside
from tests.model.checkpoints import TORCH_ALONE, tiny_config

SIZES = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "vocab_size", "tied_head")


def test_every_family_of_the_native_decoder_but_llama_and_our_own_spelling_is_compared():
    """Of two that differ in a name alone, one."""
    others = {kind.split("-")[0] for kind in TORCH_ALONE}
    others |= {"gemma4_text", "gemma4_unified", "gemma4_unified_text", "qwen3_5_text", "qwen3_5_moe_text"}  # the same models
    expected = set(FAMILIES) - {"llama", "attend"} - others
    assert expected == set(SWITCHES), "SWITCHES of loadtest/bench/family.py has each family that the native decoder computes"


@pytest.mark.parametrize("name", SWITCHES)
def test_llama_moves_as_much_or_computes_as_often_and_has_no_switch(name):
    config = config_of(name)
    assert (config.hidden_size, config.num_layers, config.head_size, config.vocab_size) == (576, 30, 64, 49152)
    assert features(config) <= NATIVE
    for work in WORKS:
        llama = llama_beside(config, work)
        assert [getattr(config, each) for each in SIZES] == [getattr(llama, each) for each in SIZES]
        assert cost(llama, work) == pytest.approx(cost(config, work), rel=0.005)
        assert features(llama) == features(tiny_config())


DELTA = {"delta": DeltaSpec(1, 2, 16, 16, 4), "delta_layers": (0,)}


@pytest.mark.skipif(library.load_library() is None, reason="the native decoder is not built")
@pytest.mark.parametrize("switches", [{"num_experts": 3}, DELTA], ids=["experts", "delta"])
def test_a_step_of_each_work_is_that_of_the_decoder(monkeypatch, switches):
    """Of so many tokens, with finite scores; tokens/s are those of the time that it took."""
    kept = []
    clock = iter([1.0, 1.5] * len(WORKS)).__next__
    contestant = Contestant(tiny_config(head_size=16, max_positions=2048, vocab_size=8192, **switches), clock)
    logits = contestant.net.logits
    monkeypatch.setattr(contestant.net, "logits", lambda hidden: kept.append(logits(hidden)))
    for work, tokens in WORKS.items():
        assert asyncio.run(contestant.step(work)) == tokens / 0.5
    assert [len(scores_TV) for scores_TV in kept] == [1, 16, 1]
    assert all(torch.isfinite(scores_TV).all() for scores_TV in kept)
