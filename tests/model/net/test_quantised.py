"""Matrices in whole numbers hold what they are given, and a decoder with them is one with the numbers they stand for."""

import pytest
import torch
from torch import Tensor

from attend.model.net.checkpoint import load_decoder, save
from attend.model.net.formats.codes import GROUP, INT4, INT8, quantise
from attend.model.net.linear import ExpertLinear, Linear
from attend.model.net.quantised import QuantisedLinear
from attend.model.train.loss import hidden_states
from tests.model.checkpoints import tiny_config, tiny_decoder

TOKENS = torch.tensor([[5, 17, 80, 3, 44, 61, 9, 2]])
WIDTHS = (32, 40, 7, 96)
SCALES = (2.0**-100, 2.0**-10, 1.0, 2.0**100)


def numbers(rows: int, columns: int, scale: float = 1.0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * scale


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("scale", SCALES)
def test_eight_bits_are_off_by_half_a_step(columns, scale):
    plain = numbers(9, columns, scale)
    codes = quantise(plain, INT8)
    assert codes.codes_OI.abs().max() == 127
    steps = codes.scales_OG.repeat_interleave(GROUP, dim=-1)[:, :columns]
    assert ((codes.dense() - plain).abs() <= steps * 0.5001).all()


def test_experts_are_quantised_each_by_itself():
    plain = numbers(3 * 8, 40).view(3, 8, 40)
    with torch.device("meta"):
        experts = ExpertLinear(3, 40, 8, bias=False)
    matrix = QuantisedLinear.form(experts, INT8)
    matrix.make_room("weight", torch.float32, "cpu")
    matrix.fill("weight", 0, plain)
    x = numbers(5, 40)
    for expert in range(3):
        torch.testing.assert_close(matrix.forward(x, expert), x @ matrix.dense()[expert].T)
        torch.testing.assert_close(matrix.dense()[expert], plain[expert], rtol=0, atol=0.02)


SWITCHES = [
    {},
    {"tied_head": True},
    {"positions": "sinusoidal"},
    {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    {"num_experts": 4, "experts_per_token": 2, "shared_expert_size": 20},
]


@pytest.mark.parametrize("kind", [INT8, INT4], ids=lambda kind: kind.name)
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_a_quantised_decoder_is_the_plain_one_with_the_numbers_that_the_codes_stand_for(tmp_path, kind, switches):
    net = tiny_decoder(tiny_config(**switches))
    save(net, tmp_path, torch.float32)
    small = load_decoder(tmp_path, torch.float32, "cpu", quantize=kind)
    changed = 0
    with torch.no_grad():
        for name, matrix in small.named_modules():
            if isinstance(matrix, QuantisedLinear):
                changed += 1
                dense, plain = matrix.dense(), net.get_submodule(name)
                allowed = plain.weight.abs().amax() * (0.004 if matrix.kind == INT8 else 0.16)
                assert (plain.weight - dense).abs().max() <= allowed, name
                plain.weight.copy_(dense)
    kept = sum(name.endswith(("router", "shared_gate")) for name, _ in small.named_modules())
    assert changed + kept == sum(isinstance(module, Linear) for module in small.modules())
    expected, given = (each.logits(hidden_states(each, TOKENS)) for each in (net, small))
    torch.testing.assert_close(given, expected)
