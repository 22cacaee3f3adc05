"""Mixtures of experts: who is chosen, how much it weighs, and that a token's result does not depend on its neighbours."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.backends import BACKENDS, BatchLayout, KVCache, Paged, Row
from attend.model.net.checkpoint import load, read_config
from attend.model.net.experts import Mixture, route
from attend.model.net.linear import ExpertLinear, Linear
from attend.model.net.transformer import Decoder
from attend.model.rope import LongScaling
from attend.model.train.loss import hidden_states
from tests.model.checkpoints import KINDS, edit_config, edit_tensors, their_logits, their_model, tiny_config, write_checkpoint

NOISE = 1e-4
"""A hundred times what float32 paths differ by in a router's scores."""
LENGTHS = (1, 23, 9, 40)
TEXTS = [[(7 * at * at + 13 * row + at) % 96 for at in range(length)] for row, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def net(folder) -> Decoder:
    return load(folder, torch.float32, "cpu")


@pytest.fixture(scope="module")
def expected(folder) -> list[Tensor]:
    theirs = their_model(folder)
    return [their_logits(theirs, text) for text in TEXTS]


@torch.inference_mode()
def chunked(net: Decoder, backend: str, chunk: int) -> list[Tensor]:
    """Logits [T, V] of each text, all of them side by side in one batch, so many tokens of each in a step."""
    cache = KVCache.allocate(net.config, 40, 8, torch.float32, "cpu")
    attention = BACKENDS[backend](net.config.attention_variants)
    blocks = [list(range(1 + row, 41, 4)) for row in range(4)]
    found: list[list[Tensor]] = [[] for _ in TEXTS]
    for start in range(0, max(LENGTHS), chunk):
        rows = [(min(chunk, len(text) - start), row) for row, text in enumerate(TEXTS) if len(text) > start]
        rows.sort(key=lambda pair: pair[0] != 1)
        layout = BatchLayout.build(
            [Row(blocks[row], start, count) for count, row in rows], 8, "cpu", states=[4 - row for _, row in rows]
        )
        tokens = [token for count, row in rows for token in TEXTS[row][start : start + count]]
        logits = net.logits(net(torch.tensor(tokens), layout.positions_T, Paged(attention, cache, layout)))
        for (_, row), part in zip(rows, logits.split([count for count, _ in rows]), strict=True):
            found[row].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [7, 40])
def test_texts_side_by_side_and_in_chunks_have_the_logits_of_transformers(net, expected, backend, chunk):
    """At every position, for every kind of checkpoint. A LongRoPE of ours is that of the served context, theirs of the text."""
    least = net.config.rope_scaling.original_positions if isinstance(net.config.rope_scaling, LongScaling) else 0
    compared = [pair for pair in zip(chunked(net, backend, chunk), expected, strict=True) if len(pair[1]) > least]
    assert compared
    for ours, theirs in compared:
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 2e-4 * theirs.abs().max()


def test_no_router_of_the_checkpoints_decides_within_the_noise(net):
    """Or which expert comes next to last would be luck, and the comparisons with it."""
    margins: list[float] = []

    def note(_: object, __: object, scores_TX: Tensor) -> None:
        best, chosen = scores_TX.sort(dim=-1, descending=True).values, net.config.experts_per_token
        margins.append(float((best[:, chosen - 1] - best[:, chosen]).min()))

    routers = [module.router for module in net.modules() if isinstance(module, Mixture)]
    hooks = [router.register_forward_hook(note) for router in routers]
    for text in TEXTS:
        hidden_states(net, torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    assert len(margins) == len(TEXTS) * len(routers)
    assert all(margin > NOISE for margin in margins)
    assert bool(routers) == (net.config.num_experts is not None)


def whole_numbers(config: ModelConfig, seed: int = 0) -> Mixture:
    """A mixture whose matrices hold small whole numbers: float32 computes each expert exactly, in a batch of any size."""
    torch.manual_seed(seed)
    mixture = Mixture(config, config.layers[0].experts)
    for name, parameter in mixture.named_parameters():
        most = 1024 if name.startswith("router") else 3  # scores in steps so fine that none are equal
        parameter.data = torch.randint(-most, most + 1, parameter.shape) / (1024.0 if most == 1024 else 1.0)
    return mixture


MIXTURE = {"num_experts": 7, "experts_per_token": 4, "expert_size": 12, "mlp_bias": True, "activation": "relu"}


@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.parametrize("routing", ["all", "chosen"])
@torch.no_grad()
def test_experts_are_summed_in_the_order_of_their_numbers(routing, count):
    """To the bit, number by number, whatever the order of their scores; one of seven, some, and all of them."""
    mixture = whole_numbers(tiny_config(**MIXTURE | {"experts_per_token": count}, routing=routing))
    x_TE = torch.randint(-2, 3, (50, 32)).float()
    found_TE, (numbers_TC, _) = mixture(x_TE), route(mixture.router(x_TE), mixture.mixture)
    assert (count == 1) == torch.equal(numbers_TC, numbers_TC.sort(dim=-1).values)
    for x_E, found_E in zip(x_TE, found_TE, strict=True):
        numbers_1C, weights_1C = route(mixture.router(x_E[None]), mixture.mixture)
        weights = dict(zip(numbers_1C[0].tolist(), weights_1C[0], strict=True))
        scores_X = torch.nn.functional.linear(x_E, mixture.router.weight, mixture.router.bias)
        chosen = scores_X.argsort(descending=True)[:count]
        norm = scores_X.exp().sum() if routing == "all" else scores_X[chosen].exp().sum()
        total_E = torch.zeros(32)
        for expert in sorted(chosen.tolist()):
            assert float(weights[expert]) == pytest.approx(float(scores_X[expert].exp() / norm), rel=1e-5)
            total_E = total_E + weights[expert] * mixture.experts(x_E, expert)
        assert torch.equal(total_E, found_E)


@torch.no_grad()
def test_a_token_has_the_same_bits_beside_any_others():
    mixture = whole_numbers(tiny_config(**MIXTURE, routing="all"))
    x_TE = torch.randint(-2, 3, (40, 32)).float()
    whole_TE = mixture(x_TE)
    for part in (slice(0, 1), slice(3, 20), slice(39, 40)):
        assert torch.equal(whole_TE[part], mixture(x_TE[part]))


@torch.no_grad()
def test_without_tokens_no_expert_is_asked():
    assert whole_numbers(tiny_config(**MIXTURE))(torch.zeros(0, 32)).shape == (0, 32)


def test_every_matrix_of_a_mixture_is_a_linear():
    """Whoever packs matrices puts a module in its place that multiplies, and does nothing else."""
    linears = [module for module in whole_numbers(tiny_config(**MIXTURE)).modules() if isinstance(module, torch.nn.Linear)]
    assert {Linear, ExpertLinear} == {type(linear) for linear in linears}


BAD = [
    ("mixtral", {"num_experts_per_tok": 6}, "experts_per_token 6 are more than num_experts 5"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
    ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
    ("qwen2_moe", {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size"),
]


@pytest.mark.parametrize(("kind", "changes", "named"), BAD, ids=str)
def test_a_mixture_that_is_not_understood_is_named(tmp_path, kind, changes, named):
    folder = write_checkpoint(kind, tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=named):
        read_config(folder)


def test_a_published_qwen3_moe_calls_its_experts_num_experts(tmp_path):
    folder = write_checkpoint("qwen3_moe", tmp_path)
    expected = read_config(folder)
    count = json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_local_experts"]
    edit_config(folder, num_experts=count, num_local_experts=...)
    assert read_config(folder) == expected


def test_a_missing_expert_is_named(tmp_path):
    folder = write_checkpoint("mixtral", tmp_path)
    edit_tensors(folder, model__layers__1__block_sparse_moe__experts__3__w2__weight=...)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.block_sparse_moe\.experts\.3\.w2\.weight is missing"):
        load(folder, torch.float32, "cpu")
