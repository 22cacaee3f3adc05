"""The laws of matrices in codes in Triton: the reference makes them plain and multiplies. Run by `test_triton.py`."""

import pytest
import torch
import torch.nn.functional as F

from attend.model.net.formats.codes import FP8, INT4, INT8, IQ4_NL, MXFP4, Codes, quantise
from attend.model.net.linear import Linear
from attend.model.net.quantised import QuantisedLinear
from attend.model.net.triton import codes as under_test
from attend.model.net.triton.backend import INTERPRETED
from attend.model.net.triton.codes import CodesLinear

DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def matrix(kind, size_in, size_out, *, minima=False, bias=False, seed=0):
    """A matrix in codes with random numbers."""
    dice = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shape = Linear(size_in, [size_out], bias=bias)
    form = QuantisedLinear.form(shape, kind, has_minima=minima)
    form.make_room("weight", torch.float32, DEVICE)
    groups = -(-size_in // 32)
    codes_OI = torch.randint(0 if kind.values else -127, 16 if kind.values else 127, (size_out, size_in), generator=dice)
    if kind == FP8:
        codes_OI[codes_OI == -1] = 0  # which is no number
    scales_OG = torch.rand(size_out, groups, generator=dice) * 1e-2 * torch.arange(1, size_out + 1)[:, None]
    minima_OG = torch.randn(size_out, groups, generator=dice) * 1e-2 if minima else None
    form.store("weight", 0, Codes(kind, codes_OI.to(torch.uint8 if kind.values else torch.int8), scales_OG, minima_OG))
    if bias:
        form.make_room("bias", torch.float32, DEVICE)
        form.bias.copy_(torch.randn(size_out, generator=dice))
    return form


def tokens(count, width, dtype, seed=5):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def wanted(form, x_TI):
    """In float32, of the numbers that W has once it is rounded."""
    w_OI = form.dense().to(x_TI.dtype).float()
    return F.linear(x_TI.float(), w_OI, form.bias).to(x_TI.dtype)


def assert_close(found, right):
    bound = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, right, rtol=bound, atol=bound * float(right.abs().max()))


@pytest.mark.parametrize("kind", [INT8, INT4, IQ4_NL, MXFP4, FP8], ids=lambda kind: kind.name)
@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_product_is_that_of_the_plain_matrix(kind, minima, dtype):
    """Sizes that fill neither tiles nor groups."""
    for size_in, size_out, count in ((32, 16, 1), (200, 70, 3), (288, 130, 17), (96, 33, 70)):
        form = matrix(kind, size_in, size_out, minima=minima, bias=count == 17)
        x_TI = tokens(count, size_in, dtype)
        assert_close(CodesLinear.take(form)(x_TI), wanted(form, x_TI))


@pytest.mark.parametrize("kind", [MXFP4, INT8], ids=lambda kind: kind.name)
def test_a_gpu_without_wide_matrix_units_multiplies_smaller_tiles_of_the_same_matrix(monkeypatch, kind):
    monkeypatch.setattr(under_test, "has_wide_units", lambda: False)
    form = matrix(kind, 200, 130)
    for count in (1, 100):
        x_TI = tokens(count, 200, torch.bfloat16)
        assert_close(CodesLinear.take(form)(x_TI), wanted(form, x_TI))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", [INT8, FP8], ids=lambda kind: kind.name)
def test_what_is_multiplied_is_the_plain_matrix_rounded_to_the_type_of_the_tokens(dtype, kind):
    """The identity reads its numbers, to the bit."""
    form = matrix(kind, 96, 40, minima=kind == INT8)
    found_TO = CodesLinear.take(form)(torch.eye(96, device=DEVICE, dtype=dtype))
    assert torch.equal(found_TO, form.dense().to(dtype).T)


def test_every_float_of_8_bits_is_multiplied_as_what_it_is():
    """Zeros, those without a leading bit, and the largest; all codes but the two that are no numbers."""
    codes = [code for code in range(-128, 128) if code not in (-1, 127)]
    form = matrix(FP8, 32, len(codes))
    form.codes.view(torch.int8)[:] = torch.tensor(codes, dtype=torch.int8)[:, None]
    form.scales.fill_(1.0)
    form.units.fill_(1.0)
    wanted_O = torch.tensor(codes, dtype=torch.int8).view(torch.float8_e4m3fn).float()
    found_TO = CodesLinear.take(form)(torch.eye(32, device=DEVICE)[:1])
    assert torch.equal(found_TO[0].cpu(), wanted_O)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [INT8, FP8], ids=lambda kind: kind.name)
def test_a_token_has_the_same_bits_beside_any_others(dtype, kind):
    """In any tile of tokens: here 16 to 128."""
    form = CodesLinear.take(matrix(kind, 288, 80))
    x_TI = tokens(200, 288, dtype)
    alone_1O = form(x_TI[150:151])
    for first, last in ((150, 152), (140, 160), (120, 170), (90, 170), (0, 200)):
        assert torch.equal(form(x_TI[first:last])[150 - first], alone_1O[0])


def test_what_is_quantised_here_is_multiplied_here():
    """From plain numbers by `quantise`, at sizes of a tile and more."""
    dice = torch.Generator().manual_seed(2)
    w_OI = torch.randn(96, 256, generator=dice)
    for kind in (INT8, INT4, FP8):
        form = matrix(kind, 256, 96)
        form.store("weight", 0, quantise(w_OI, kind))
        x_TI = tokens(5, 256, torch.float32)
        found_TO = CodesLinear.take(form)(x_TI)
        assert_close(found_TO, wanted(form, x_TI))
        error = (found_TO.cpu() - F.linear(x_TI.cpu(), w_OI)).norm() / found_TO.norm().cpu()
        assert error < {INT8: 0.01, INT4: 0.12, FP8: 0.03}[kind]
