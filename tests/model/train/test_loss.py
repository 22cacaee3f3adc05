"""The loss in pieces is the loss at once, in value and in gradient; and bits per byte count every token once."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import attend.model.train.loss
from attend.model.train.loss import IGNORED, backward, hidden_states, summed_loss, unlikelihood_targets
from tests.conftest import examples
from tests.model.checkpoints import VOCAB, tiny_config, tiny_decoder


@settings(max_examples=examples(50), derandomize=True, deadline=None)
@given(
    tokens=st.integers(1, 12),
    vocab=st.integers(1, 40),
    spread=st.sampled_from([0.1, 3.0, 20.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_the_loss_is_torchs_cross_entropy(tokens, vocab, spread, seed):
    """In value and in gradient, for flat logits and for ones so steep that a probability underflows."""
    dice = torch.Generator().manual_seed(seed)
    ours = (torch.randn(tokens, vocab, generator=dice) * spread).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    targets = torch.randint(-1, vocab, (tokens,), generator=dice)
    loss = summed_loss(ours, targets)
    expected = F.cross_entropy(theirs, targets, reduction="sum", ignore_index=-1)
    (loss / 3).backward()
    (expected / 3).backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_an_unlearned_token_costs_what_the_others_lack():
    """-log(1 - p), in value and in gradient, beside tokens that are learned and ones that are ignored."""
    ours = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    tokens = np.array([3, 0, 8])
    loss = summed_loss(ours, torch.tensor([2, *unlikelihood_targets(tokens), IGNORED, 5]))
    loss.backward()
    logs = theirs.log_softmax(dim=-1)
    others = (1 - logs[1:4].exp()[torch.arange(3), torch.from_numpy(tokens)]).log()
    expected = -logs[0, 2] - logs[5, 5] - others.sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.randint(VOCAB, (3, 13), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("chunk", [1, 5, 12, 36, 2048])
@pytest.mark.parametrize("tied", [True, False])
def test_backward_in_chunks_is_backward_at_once(monkeypatch, batch, chunk, tied):
    """Loss and every gradient equal those of plain autograd over the mean cross-entropy."""
    monkeypatch.setattr(attend.model.train.loss, "CHUNK", chunk)
    ours, plain = (tiny_decoder(tiny_config(tied_head=tied)) for _ in range(2))
    tokens, targets = batch[:, :-1], batch[:, 1:].clone()
    targets[1, 3:8] = -1
    loss = backward(ours, tokens, targets)
    expected = F.cross_entropy(plain.logits(hidden_states(plain, tokens)), targets.flatten(), ignore_index=-1)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
