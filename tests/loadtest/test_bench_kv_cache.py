"""Steps over two caches, without any timing but of a tiny model."""

import asyncio

import pytest
import torch

from attend.model.net.native import library
from loadtest.bench.kv_cache import AT_ONCE, Steps, measure
from tests.model.checkpoints import tiny_config

pytestmark = pytest.mark.skipif(library.load_library() is None, reason="the native decoder is not built")


def test_a_step_is_one_token_of_each_request_at_its_context_in_both_caches(monkeypatch):
    steps = Steps(tiny_config(head_size=32, max_positions=64, vocab_size=2048))
    assert [cache.in_8_bits for cache in steps.caches.values()] == [True, False]
    kept, logits = [], steps.net.logits
    monkeypatch.setattr(steps.net, "logits", lambda hidden: kept.append(logits(hidden)))
    for cache in steps.caches.values():
        assert asyncio.run(steps.step(cache, AT_ONCE, 64)) > 0
        used = cache.keys[0].view(1 + AT_ONCE * 2, -1).any(-1)
        assert used.tolist() == [at > 0 and at % 2 == 0 for at in range(1 + AT_ONCE * 2)], "the last token of each request"
    assert [len(scores) for scores in kept] == [AT_ONCE] * 2
    assert torch.isfinite(torch.cat(kept)).all()


def test_every_number_of_requests_is_measured_with_every_context(monkeypatch):
    steps = Steps(tiny_config(head_size=32, max_positions=64, vocab_size=2048))
    monkeypatch.setattr("loadtest.bench.kv_cache.CONTEXTS", (8, 64))
    names = [f"{requests} at once, context {context}" for requests in (1, AT_ONCE) for context in (8, 64)]
    assert [each.what for each in measure(steps, 1)] == names
