"""The loss in pieces is the loss at once, in value and in gradient; and bits per byte count every token once."""

import math

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


def test_a_token_that_is_almost_sure_is_unlearned_with_all_force_and_finite():
    logits = torch.tensor([[10.0, 0.0], [200.0, 0.0], [0.0, 0.0]], requires_grad=True)
    loss = summed_loss(logits, torch.from_numpy(unlikelihood_targets(np.array([0, 0, 0]))))
    loss.backward()
    assert loss.isfinite()
    torch.testing.assert_close(logits.grad, torch.tensor([[1.0, -1.0], [0.0, 0.0], [0.5, -0.5]]), atol=1e-2, rtol=0)


def test_the_loss_is_float32_whatever_the_logits_are():
    """Sums over many tokens in bfloat16 would lose them; the gradient keeps the logits' dtype."""
    logits = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    targets = torch.arange(2000) % 8
    loss = summed_loss(logits, targets)
    loss.backward()
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), targets, reduction="sum"))
    assert [torch.float32, torch.bfloat16] == [loss.dtype, logits.grad.dtype]


def test_logits_are_not_altered_by_their_loss():
    logits = torch.randn(4, 5)
    before = logits.clone()
    summed_loss(logits, torch.arange(4))
    assert torch.equal(before, logits)


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


def test_backward_adds_to_the_gradient(batch):
    net = tiny_decoder(tiny_config())
    backward(net, batch[:, :-1], batch[:, 1:])
    once = [parameter.grad.clone() for parameter in net.parameters()]
    backward(net, batch[:, :-1], batch[:, 1:])
    for first, parameter in zip(once, net.parameters(), strict=True):
        torch.testing.assert_close(2 * first, parameter.grad)


def uniform() -> Decoder:
    """A model to which every token is equally likely, always."""
    net = tiny_decoder(tiny_config(tied_head=False))
    torch.nn.init.zeros_(net.head.weight)
    return net


@pytest.mark.parametrize("context", [2, 3, 8, 16])
@pytest.mark.parametrize("length", [2, 3, 8, 9, 16, 17, 18, 25, 40, 64])
def test_every_token_but_the_first_is_scored_once(length, context):
    """A model that knows nothing needs log2(V) bits for each token, however the windows fall."""
    tokens = torch.arange(length, dtype=torch.int32) % VOCAB
    bits = bits_per_byte(uniform(), tokens, num_bytes=7, context=context)
    assert bits == pytest.approx((length - 1) * math.log2(VOCAB) / 7, rel=1e-5)


@pytest.mark.parametrize("length", [2, 9, 17])
def test_a_text_within_one_window_is_scored_in_one_pass(length):
    """Up to context + 1 tokens, bits per byte are the plain cross-entropy of the text."""
    net = tiny_decoder(tiny_config())
    tokens = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length))
    nats = F.cross_entropy(net.logits(hidden_states(net, tokens[None, :-1])), tokens[1:], reduction="sum").item()
    assert bits_per_byte(net, tokens, num_bytes=5, context=16) == pytest.approx(nats / math.log(2) / 5, rel=1e-5)


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
