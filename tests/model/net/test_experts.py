"""Mixtures of experts: who is chosen, how much it weighs, and that a token's result does not depend on its neighbours."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import inspect, load_decoder
from attend.model.net.experts import Mixture, route
from attend.model.net.paged_attention import BatchLayout, KVCache, PagedAttention, Row
from attend.model.net.transformer import Decoder
from attend.model.rope import LongScaling
from tests.model.attention import BACKENDS
from tests.model.checkpoints import KINDS, edit_tensors, their_logits, their_model, tiny_config, write_checkpoint

LENGTHS = (1, 23, 9, 40)
TEXTS = [[(7 * at * at + 13 * row + at) % 96 for at in range(length)] for row, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def net(folder) -> Decoder:
    return load_decoder(folder, torch.float32, "cpu")


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
        logits = net.logits(net(torch.tensor(tokens), layout.positions_T, PagedAttention(attention, cache, layout)))
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


SIGMOID = {"scoring_func": "sigmoid", "score_correction": True, "routed_scaling_factor": 2.5, "routing_eps": 0.1}


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("routing", ["all", "chosen"])
@torch.no_grad()
def test_a_correction_chooses_within_the_best_groups_and_weighs_nothing(scoring, routing):
    """Four groups of two, of which two are open: by hand, with numbers that decide otherwise without each of the parts."""
    scores_X = torch.tensor([2.0, -3.0, 1.0, 0.9, 1.5, -2.0, 0.5, 0.4])
    correction_X = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.5])
    switches = SIGMOID | {"scoring_func": scoring, "expert_groups": 4, "groups_per_token": 2, "routing": routing}
    config = tiny_config(**MIXTURE | {"num_experts": 8, "experts_per_token": 3}, **switches)
    experts_1C, weights_1C = route(scores_X[None], config.layers[0].experts, correction_X)
    parts_X = scores_X.sigmoid() if scoring == "sigmoid" else scores_X.softmax(-1)
    merits_X = parts_X + correction_X
    groups = sorted(range(4), key=lambda group: -float(merits_X[2 * group : 2 * group + 2].sum()))[:2]
    inside = [expert for expert in range(8) if expert // 2 in groups]
    chosen = sorted(inside, key=lambda expert: -float(merits_X[expert]))[:3]
    assert chosen != sorted(range(8), key=lambda expert: -float(merits_X[expert]))[:3]
    assert experts_1C[0].tolist() == chosen
    divisor = 0.1 + float(parts_X[chosen].sum()) if routing == "chosen" else 1.0
    torch.testing.assert_close(weights_1C[0], parts_X[chosen] * 2.5 / divisor)


@torch.no_grad()
def test_a_shared_expert_without_a_gate_is_added_as_it_is():
    mixture = whole_numbers(tiny_config(**MIXTURE, shared_expert_size=20, shared_expert_gate=False))
    assert mixture.shared_gate is None
    x_TE = torch.randint(-2, 3, (9, 32)).float()
    found_TE, shared_TE = mixture(x_TE), mixture.shared(x_TE)
    mixture.shared = None
    assert torch.equal(found_TE, mixture(x_TE) + shared_TE)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("glm4_moe", ["model.layers.4.eh_proj.weight", "model.layers.4.shared_head.head.weight"]),
        ("deepseek_v3", ["model.layers.4.eh_proj.weight", "model.layers.4.embed_tokens.weight"]),
        ("glm4_moe_lite", ["model.layers.4.shared_head.norm.weight"]),
        ("exaone_moe", ["mtp.layers.0.mlp.gate_proj.weight"]),
        ("ernie4_5_moe", ["model.mtp_block.0.mlp.gate_proj.weight", "model.mtp_emb_norm.0.weight"]),
    ],
)
def test_layers_that_guess_further_tokens_are_left_out_and_said_so(tmp_path, caplog, kind, names):
    folder = write_checkpoint(kind, tmp_path)
    edit_tensors(folder, **{name.replace(".", "__"): torch.zeros(3, 2) for name in names})
    inspect(folder)
    with caplog.at_level("INFO", logger="attend.model"):
        load_decoder(folder, torch.float32, "cpu")
    assert "are left out: multi-token prediction (MTP) is not supported" in caplog.text
    path = folder / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path)
    inspect(folder)
    edit_tensors(folder, layers__5__eh_proj__weight=torch.zeros(3, 2))
    with pytest.raises(CheckpointError, match=r"tensor layers\.5\.eh_proj\.weight is unexpected"):
        load_decoder(folder, torch.float32, "cpu")
