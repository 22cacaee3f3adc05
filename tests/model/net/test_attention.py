"""The oracle itself, against the equation written out number by number."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from attend.model.net.attention import attend, causal_mask
from attend.model.sublayers import AttentionVariant
from attend.model.train.loss import DenseCausal

VARIANTS = {
    "plain": AttentionVariant(),
    "window": AttentionVariant(window=2),
    "softcap": AttentionVariant(softcap=1.5),
    "scale": AttentionVariant(scale=0.7),
    "everything": AttentionVariant(window=3, softcap=0.8, scale=2.0),
}
each_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def by_numbers(q: Tensor, k: Tensor, v: Tensor, at: int, variant: AttentionVariant, sink: float = -math.inf) -> list[float]:
    """What one head of the query at position `at` gets, in plain Python floats."""
    seen = range(max(0, at - variant.window + 1) if variant.window else 0, min(at + 1, len(k)))
    scale = variant.scale or 1 / math.sqrt(len(q))
    scores = [scale * sum(a * b for a, b in zip(q.tolist(), k[key].tolist(), strict=True)) for key in seen]
    if variant.softcap:
        scores = [variant.softcap * math.tanh(score / variant.softcap) for score in scores]
    weights = [math.exp(score) for score in scores]
    columns = zip(*(v[key].tolist() for key in seen), strict=True)
    return [sum(w * x for w, x in zip(weights, column, strict=True)) / (sum(weights) + math.exp(sink)) for column in columns]


@each_variant
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(1, 1, 2), (4, 2, 16), (6, 2, 8), (8, 1, 32)])
def test_the_oracle_is_the_equation(heads, kv_heads, size, variant):
    torch.manual_seed(heads)
    positions = [2, 0, 4]
    q, k, v = torch.randn(3, heads, size), torch.randn(5, kv_heads, size), torch.randn(5, kv_heads, size)
    out = attend(q, k, v, causal_mask(torch.tensor(positions), 5, variant.window), variant)
    for token, head in product(range(3), range(heads)):
        shared = head // (heads // kv_heads)
        expected = by_numbers(q[token, head], k[:, shared], v[:, shared], positions[token], variant)
        assert out[token, head].tolist() == pytest.approx(expected, abs=1e-5)


@each_variant
def test_a_sink_takes_its_part_of_the_softmax_and_has_no_value(variant):
    """In the oracle, and in training; each head has its own."""
    torch.manual_seed(3)
    q, k, v, sinks = torch.randn(5, 6, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8), torch.tensor([0.0, -9, 9, 1, 2, 3])
    mask = causal_mask(torch.arange(5), 5, variant.window)
    for out in (attend(q, k, v, mask, variant, sinks), DenseCausal(5, [variant])(0, q, k, v, sinks)):
        for token, head in product(range(5), range(6)):
            expected = by_numbers(q[token, head], k[:, head // 3], v[:, head // 3], token, variant, float(sinks[head]))
            assert out[token, head].tolist() == pytest.approx(expected, abs=1e-5)


@each_variant
@pytest.mark.parametrize("group", [1, 3])
def test_attention_in_training_is_the_oracle_for_each_sequence(group, variant):
    """And each layer has its own variant."""
    torch.manual_seed(0)
    q, k, v = torch.randn(18, 2 * group, 16), torch.randn(18, 2, 16), torch.randn(18, 2, 16)
    mask = causal_mask(torch.arange(9), 9, variant.window)
    found = DenseCausal(9, [AttentionVariant(window=1), variant])(1, q, k, v)
    for part in (slice(9), slice(9, 18)):
        torch.testing.assert_close(found[part], attend(q[part], k[part], v[part], mask, variant))
