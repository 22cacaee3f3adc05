"""Matrices in whole numbers hold what they are given, and a decoder with them is one with the numbers they stand for."""

from itertools import product

import pytest
import torch
from torch import Tensor

from attend.model.net.checkpoint import load_decoder, save
from attend.model.net.formats.codes import FP8, GROUP, INT4, INT8, KINDS, Codes, Kind, quantise
from attend.model.net.linear import ExpertLinear, Linear
from attend.model.net.quantised import QuantisedLinear
from attend.model.train.loss import hidden_states
from tests.model.checkpoints import tiny_config, tiny_decoder

TOKENS = torch.tensor([[5, 17, 80, 3, 44, 61, 9, 2]])
WIDTHS = (32, 40, 7, 96)
SCALES = (2.0**-100, 2.0**-10, 1.0, 2.0**100)


def numbers(rows: int, columns: int, scale: float = 1.0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * scale


def some_codes(kind: Kind, rows: int, columns: int, *, minima: bool = False, scale: float = 1.0) -> Codes:
    dice = torch.Generator().manual_seed(columns)
    low, high, dtype = (0, 16, torch.uint8) if kind.values else (-127, 128, torch.int8)
    codes = torch.randint(low, high, (rows, columns), generator=dice).to(dtype)
    if kind == FP8:  # in which some codes are no numbers
        codes = torch.randn(rows, columns, generator=dice).to(torch.float8_e4m3fn).view(torch.int8)
    scales, least = (torch.randn(rows, -(-columns // GROUP), generator=dice).half().float() * scale for _ in range(2))
    return Codes(kind, codes, scales, least if minima else None)


def form(kind: Kind, rows: int, columns: int, *, minima: bool = False) -> QuantisedLinear:
    with torch.device("meta"):
        plain = Linear(columns, [rows], bias=False)
    matrix = QuantisedLinear.form(plain, kind, has_minima=minima)
    matrix.make_room("weight", torch.float32, "cpu")
    return matrix


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("scale", SCALES)
def test_eight_bits_are_off_by_half_a_step(columns, scale):
    plain = numbers(9, columns, scale)
    codes = quantise(plain, INT8)
    assert codes.codes_OI.abs().max() == 127
    steps = codes.scales_OG.repeat_interleave(GROUP, dim=-1)[:, :columns]
    assert ((codes.dense() - plain).abs() <= steps * 0.5001).all()


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("scale", SCALES)
def test_four_bits_come_nearer_than_if_the_largest_number_set_the_scale(columns, scale):
    plain = numbers(64, columns, scale)
    groups = torch.nn.functional.pad(plain / scale, (0, -columns % GROUP)).unflatten(-1, (-1, GROUP))
    steps = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    coarse = ((groups / steps).round().clamp(-8, 7) * steps).flatten(-2)[:, :columns]
    off, allowed = (((each - plain / scale) ** 2).sum() for each in (quantise(plain, INT4).dense() / scale, coarse))
    assert off < 0.95 * allowed


@pytest.mark.parametrize("kind", [*KINDS.values(), FP8], ids=lambda kind: kind.name)
@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize(("columns", "scale"), list(product(WIDTHS, SCALES)))
def test_a_matrix_holds_the_codes_that_it_is_given(kind, minima, columns, scale):
    codes = some_codes(kind, 6, columns, minima=minima, scale=scale)
    matrix = form(kind, 6, columns, minima=minima)
    for first in (0, 4, 2):
        matrix.fill("weight", first, codes.each(lambda part, first=first: part[first : first + 2]))
    size = codes.scales_OG.abs().max() * 127
    torch.testing.assert_close(matrix.dense() / size, codes.dense() / size, rtol=0, atol=2e-7)


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
