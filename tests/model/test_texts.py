"""What the founding texts on attention claim, as laws of this code.

Bahdanau et al. 2014 · Vaswani et al. 2017 · Ba et al. 2016 (LayerNorm) · Zhang & Sennrich 2019 (RMSNorm) ·
Su et al. 2021 (rotary positions) · Shazeer 2019 (shared key/value heads).
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attend.model.net.attention import MultiHeadAttention, attend, attention_weights, causal_mask
from attend.model.net.layers import make_norm, sinusoidal_table
from attend.model.net.rope import Rotation, apply_rotary, rotary_table
from attend.model.net.transformer import Block, PostNormBlock
from attend.model.rope import Rope
from attend.model.train.loss import hidden_states, summed_loss
from tests.model.checkpoints import tiny_config, tiny_decoder

T, S, H, K, D = 5, 7, 4, 2, 16


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(T, H, D), torch.randn(S, K, D), torch.randn(S, K, D)


@pytest.fixture
def mask() -> Tensor:
    return causal_mask(torch.arange(S - T, S), S)


def own_value(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """An attention in which each token sees itself alone."""
    return v_TKD.repeat_interleave(q_THD.shape[1] // v_TKD.shape[1], dim=1)


def test_attention_is_a_weighted_mean_of_the_values(qkv, mask):
    """Bahdanau et al., equations 5 and 6: weights are not negative, sum to 1, and the context is their sum of values."""
    q, k, v = qkv
    weights_HTS = attention_weights(q, k, mask)
    assert (weights_HTS >= 0).all()
    torch.testing.assert_close(weights_HTS.sum(-1), torch.ones(H, T))
    for head in range(H):
        by_hand = weights_HTS[head] @ v[:, head // (H // K)]
        torch.testing.assert_close(attend(q, k, v, mask)[:, head], by_hand)


@pytest.mark.parametrize("size", [16, 64, 256])
def test_scores_have_unit_variance_whatever_the_head_size(size):
    """Vaswani et al., 3.2.1: for unit-normal q and k, q·k has variance d, and q·k / sqrt(d) has variance 1."""
    torch.manual_seed(size)
    q, k = torch.randn(400, 1, size), torch.randn(400, 1, size)
    raw = torch.einsum("thd,shd->ts", q, k)
    # softmax hides a constant only, so the log-weights' spread within a row is that of the scores
    scaled = attention_weights(q, k, torch.ones(400, 400, dtype=torch.bool))[0].log()
    assert raw.var().item() == pytest.approx(size, rel=0.1)
    assert scaled.var(dim=-1).mean().item() == pytest.approx(1.0, rel=0.1)


def test_query_heads_share_key_value_heads_in_groups(qkv, mask):
    """Shazeer 2019, Ainslie et al. 2023: query head h reads key/value head h // (H / K)."""
    q, k, v = qkv
    for head in range(H):
        shared = head // (H // K)
        alone = attend(q[:, [head]], k[:, [shared]], v[:, [shared]], mask)
        torch.testing.assert_close(attend(q, k, v, mask)[:, [head]], alone)


def test_multi_head_attention_concatenates_heads_and_projects():
    """Vaswani et al., 3.2.2: MultiHead(X) = Concat(head_1, ..., head_H) W_O with head_i = Attention(X W_i^Q, ...)."""
    torch.manual_seed(0)
    config = tiny_config(qkv_bias=True, out_bias=True, mlp_bias=True)
    layer, size, x_TE = MultiHeadAttention(config, config.layer(0)), config.head_size, torch.randn(S, config.hidden_size)
    causal = causal_mask(torch.arange(S), S)
    q, k, v = layer.qkv(x_TE).split(layer.qkv.parts, dim=-1)
    heads = []
    for head in range(config.num_heads):
        mine = slice(head * size, (head + 1) * size)
        shared = slice(head // 2 * size, (head // 2 + 1) * size)
        scores = (q[:, mine] @ k[:, shared].T / math.sqrt(size)).masked_fill(~causal, -math.inf)
        heads.append(scores.softmax(-1) @ v[:, shared])
    by_hand = torch.cat(heads, dim=-1) @ layer.out.weight.T + layer.out.bias
    torch.testing.assert_close(layer(x_TE, None, 0, lambda _, q, k, v: attend(q, k, v, causal)), by_hand)


def test_a_token_never_sees_its_future():
    """The logits at t are the same, to the bit, whatever comes after t."""
    net = tiny_decoder(tiny_config())
    tokens = torch.arange(24) % 90
    changed = torch.cat((tokens[:15], tokens[15:] + 5))
    before, after = (net.logits(hidden_states(net, x[None])) for x in (tokens, changed))
    assert torch.equal(before[:15], after[:15])
    assert not torch.isclose(before[15:], after[15:]).all(-1).any()


@pytest.mark.parametrize("width", [16, 64])
def test_a_sinusoidal_shift_is_a_linear_map(width):
    """Vaswani et al., 3.5: for any offset k, PE(p + k) = M_k PE(p) with an M_k that does not depend on p."""
    table = sinusoidal_table(200, width).double()
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    for shift in (1, 7, 50):
        matrix = torch.zeros(width, width, dtype=torch.float64)
        for i, frequency in enumerate(frequencies):
            a = shift * frequency
            matrix[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor([[a.cos(), a.sin()], [-a.sin(), a.cos()]])
        torch.testing.assert_close(table[:-shift] @ matrix.T, table[shift:], atol=1e-6, rtol=0)


def test_embeddings_are_scaled_before_positions_are_added():
    """Vaswani et al., 3.4 and 3.5: the input of the first block is sqrt(d_model) times the embedding, plus PE."""
    net = tiny_decoder(tiny_config(positions="sinusoidal", embedding_scale=math.sqrt(32)))
    tokens, positions = torch.tensor([4, 4, 70]), torch.tensor([0, 9, 3])
    by_hand = net.embedding.tokens.weight[tokens] * math.sqrt(32) + sinusoidal_table(10, 32)[positions]
    torch.testing.assert_close(net.embedding(tokens, positions), by_hand)


def test_rotary_scores_depend_on_the_distance_alone():
    """Su et al., equation 16: the score of a query at m and a key at n is a function of m - n; rotation keeps lengths."""
    cos, sin = rotary_table(Rope(10000.0, D, None), 128)
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, D).double(), torch.randn(1, 1, D).double()

    def at(x: Tensor, position: int) -> Tensor:
        return apply_rotary(x, Rotation(cos[position].double(), sin[position].double()))

    score = [[(at(q, m + n) * at(k, n)).sum().item() for n in (0, 1, 40, 99)] for m in (0, 3, 20)]
    for row in score:
        assert row == pytest.approx([row[0]] * len(row), abs=1e-4)
    assert len({round(row[0], 2) for row in score}) == len(score)
    assert at(q, 77).norm().item() == pytest.approx(q.norm().item(), rel=1e-6)


def test_rms_norm_scales_each_token_and_keeps_its_direction():
    """Zhang & Sennrich, equation 4: root mean square 1 before the gain, and no shift."""
    torch.manual_seed(0)
    norm = make_norm(tiny_config(norm="rmsnorm"), 64)
    x = torch.randn(9, 64) * 5 + 3
    torch.testing.assert_close(norm(x).square().mean(-1).sqrt(), torch.ones(9), atol=1e-5, rtol=0)
    torch.testing.assert_close(F.cosine_similarity(norm(x), x), torch.ones(9))
    nn.init.constant_(norm.weight, 3.0)
    torch.testing.assert_close(norm(x).square().mean(-1).sqrt(), torch.full((9,), 3.0))


@pytest.mark.parametrize(
    "cross_entropy",
    [summed_loss, lambda logits, targets: F.cross_entropy(logits, targets, reduction="sum")],
    ids=["ours", "torch"],
)
def test_the_gradient_of_cross_entropy_is_softmax_minus_one_hot(cross_entropy):
    """Bridle 1990: what was predicted, less what came."""
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 11, requires_grad=True), torch.randint(11, (6,))
    cross_entropy(logits, targets).backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(-1) - F.one_hot(targets, 11))


def test_a_post_norm_block_normalises_each_sum():
    """Vaswani et al., 3.1: the output of each sublayer is LayerNorm(x + Sublayer(x))."""
    torch.manual_seed(0)
    config = tiny_config(norm="layernorm", norm_place="post")
    block = PostNormBlock(config, config.layers[0])
    x = torch.randn(S, 32)
    middle = block.attention_norm(x + block.attention(x, None, 0, own_value))
    torch.testing.assert_close(block(x, None, 0, own_value), block.mlp_norm(middle + block.mlp(middle)))


def test_a_pre_norm_block_leaves_the_residual_stream_untouched():
    """Radford et al. 2019, 2.3: the norm moves to the input of each sublayer; the sum itself is never normalised."""
    torch.manual_seed(0)
    block = Block(tiny_config(), tiny_config().layers[0])
    x = torch.randn(S, 32)
    middle = x + block.attention(block.attention_norm(x), None, 0, own_value)
    torch.testing.assert_close(block(x, None, 0, own_value), middle + block.mlp(block.mlp_norm(middle)))
