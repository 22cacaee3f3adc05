"""The loss in pieces is the loss at once, in value and in gradient; and bits per byte count every token once."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import attend.model.train.loss
from attend.model.net.transformer import Decoder
from attend.model.train.loss import IGNORED, backward, bits_per_byte, hidden_states, summed_loss, unlikelihood_targets
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


def test_the_loss_is_float32_whatever_the_logits_are():
    """Sums over many tokens in bfloat16 would lose them; the gradient keeps the logits' dtype."""
    logits = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    targets = torch.arange(2000) % 8
    loss = summed_loss(logits, targets)
    loss.backward()
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), targets, reduction="sum"))
    assert [torch.float32, torch.bfloat16] == [loss.dtype, logits.grad.dtype]


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


def uniform() -> Decoder:
    """A model to which every token is equally likely, always."""
    net = tiny_decoder(tiny_config(tied_head=False))
    torch.nn.init.zeros_(net.head.weight)
    return net


def test_each_score_is_that_of_its_own_token():
    """A model sure that each token repeats the last is right on a constant text and wrong on a changing one."""
    net = tiny_decoder(tiny_config(num_layers=1))
    for name, parameter in net.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            torch.nn.init.zeros_(parameter)
    torch.nn.init.eye_(net.embedding.tokens.weight.data)
    net.norm.weight.data.fill_(6.0)
    constant, changing = torch.full((30,), 5), torch.arange(30)
    assert bits_per_byte(net, constant, 30, context=8) < 1e-3
    assert bits_per_byte(net, changing, 30, context=8) > 10


@pytest.mark.parametrize("context", [8, 16])
def test_each_token_has_half_a_window_before_it(context):
    """Whatever is scored has seen at least context / 2 tokens, or all there are."""
    windows = []

    def spy(net, tokens_BL):
        windows.append(tokens_BL[0].tolist())
        return hidden_states(net, tokens_BL)

    bits_per_byte(uniform(), torch.arange(50), 1, context, spy)
    scored = 1
    for window in windows:
        assert len(window) <= context
        assert scored - window[0] >= min(scored, context // 2)
        scored = window[-1] + 2
    assert scored == 50
