"""A distribution over a vocabulary that is read slice by slice is that of the whole."""

import pytest
import torch

from attend.model.explain import next_tokens as module
from attend.model.explain.next_tokens import predict_next_tokens
from attend.model.explain.reference import reference
from tests.model.checkpoints import tiny_config, tiny_decoder


@pytest.mark.parametrize("rows", [1, 2, 7, 96, 1000])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_the_slices_of_a_head_add_up_to_the_whole(rows, scale, monkeypatch):
    monkeypatch.setattr(module, "NUMBERS", rows * 32)
    served = tiny_decoder(tiny_config())
    hidden_NE = torch.randn(9, 32) * scale
    asked_N = torch.arange(9) * 10
    found = predict_next_tokens(reference(served), hidden_NE, asked_N, 5)
    with torch.no_grad():
        logprobs_NV = served.logits(hidden_NE).log_softmax(dim=-1)
    best = logprobs_NV.topk(5)
    near = {"rtol": 1e-4, "atol": 1e-4}
    assert torch.equal(found.best_NG, best.indices)
    torch.testing.assert_close(found.logprobs_NG, best.values, **near)
    torch.testing.assert_close(found.asked_N, logprobs_NV.gather(-1, asked_N[:, None])[:, 0], **near)
    torch.testing.assert_close(found.entropy_N, -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1), **near)
