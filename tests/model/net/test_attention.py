"""The oracle itself, against the equation written out number by number, and against torch's fused kernel."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.net.attention import attend, causal_mask
from model.net.transformer import Decoder
from model.train.loss import dense_causal
from tests.model.checkpoints import tiny_config, tiny_decoder


def by_numbers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[float]:
    """softmax(q Kᵀ / sqrt(d)) V of one query of one head, in plain Python floats."""
    scores = [sum(a * b for a, b in zip(q.tolist(), row, strict=True)) / math.sqrt(len(q)) for row in k.tolist()]
    weights = [math.exp(score) if seen else 0.0 for score, seen in zip(scores, mask.tolist(), strict=True)]
    return [sum(w * x for w, x in zip(weights, column, strict=True)) / sum(weights) for column in v.T.tolist()]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(1, 1, 2), (4, 2, 16), (6, 2, 8), (8, 1, 32)])
def test_the_oracle_is_the_equation(heads, kv_heads, size):
    torch.manual_seed(heads)
    q, k, v = torch.randn(3, heads, size), torch.randn(5, kv_heads, size), torch.randn(5, kv_heads, size)
    mask = causal_mask(torch.tensor([2, 0, 4]), 5)
    out = attend(q, k, v, mask)
    for token in range(3):
        for head in range(heads):
            shared = head // (heads // kv_heads)
            expected = by_numbers(q[token, head], k[:, shared], v[:, shared], mask[token])
            assert out[token, head].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("group", [1, 3])
def test_the_oracle_is_torchs_fused_attention(group):
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 2 * group, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    mask = causal_mask(torch.arange(9), 9)
    theirs = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, enable_gqa=group != 1
    )
    torch.testing.assert_close(attend(q, k, v, mask), theirs[0].transpose(0, 1))


def test_a_query_sees_itself_and_what_came_before():
    expected = [[True, False, False, False], [True, True, True, False], [True, True, True, True]]
    assert causal_mask(torch.tensor([0, 2, 9]), 4).tolist() == expected


SWITCHES = {
    "plain": {},
    "qk-norm": {"qk_norm": True},
    "biases": {"qkv_bias": True, "linear_bias": True},
    "learned": {"positions": "learned"},
    "original": {"positions": "sinusoidal", "post_norm": True, "norm": "layernorm", "scale_embedding": True},
}


def decoders() -> list:
    return [pytest.param(tiny_decoder(tiny_config(**switches)), id=name) for name, switches in SWITCHES.items()]


@pytest.mark.parametrize("net", decoders())
def test_a_decoder_that_forgets_the_past_answers_otherwise(net: Decoder):
    """The logits use the context: the same token after another text scores otherwise, from the first layer on."""
    ours = net(torch.tensor([5, 7, 9]), torch.arange(3), dense_causal(3))
    other = net(torch.tensor([6, 7, 9]), torch.arange(3), dense_causal(3))
    assert (ours - other).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("net", decoders())
def test_order_matters(net: Decoder):
    """Every kind of position tells a text from its permutation."""
    last = [net(torch.tensor(text), torch.arange(4), dense_causal(4))[-1] for text in ([3, 4, 5, 9], [5, 3, 4, 9])]
    assert (last[0] - last[1]).abs().max() > 1e-3
