"""Products of whole numbers are those of the definition, at the extremes too, with the same bits whatever is beside them."""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from attend.model.net.formats.codes import GROUP, INT8, KINDS, Codes, Kind
from attend.model.net.linear import Linear, replace_linears
from attend.model.net.native import library
from attend.model.net.native.decoder import NativeDecoder
from attend.model.net.paged_attention import ReferenceBackend
from attend.model.net.quantised import PLAIN, QuantisedEmbedding, QuantisedLinear
from attend.model.net.transformer import Decoder
from tests.model.checkpoints import tiny_config, tiny_decoder
from tests.model.net.native.test_native import distance, pair, run, run_native, shaped

needs_library = pytest.mark.skipif(
    library.load_library() is None, reason="the native decoder is not built here: python -m attend.model.net.native"
)
pytestmark = [needs_library, pytest.mark.by_loops("avx2-vnni", "avx512", "avx512-vnni", "amx")]
FORMS = [(kind, minima) for kind in KINDS.values() for minima in (False, True)]
each_form = pytest.mark.parametrize(("kind", "minima"), FORMS, ids=lambda value: getattr(value, "name", str(value)))


def filled(form: type[QuantisedLinear], plain: nn.Module, kind: Kind, minima: bool) -> QuantisedLinear:
    """The matrix nearest to a plain one; minima are drawn, and what they add is taken from the numbers first."""
    weight = plain.weight.detach().float()
    linear = plain if isinstance(plain, Linear) else Linear(weight.shape[1], [weight.shape[0]], bias=False)
    matrix = form.form(linear, kind, has_minima=minima)
    matrix.make_room("weight", torch.bfloat16, "cpu")
    matrix.fill("weight", 0, near(weight.flatten(0, -2), kind, minima))
    matrix.bias = linear.bias
    return matrix


def near(weight_OI: Tensor, kind: Kind, minima: bool) -> Codes:
    groups = nn.functional.pad(weight_OI, (0, -weight_OI.shape[1] % GROUP)).unflatten(-1, (-1, GROUP))
    least = groups.amin(-1) if minima else torch.zeros(groups.shape[:2])
    values = torch.tensor(kind.values or range(-127, 128), dtype=torch.float32)
    first = values.min() if minima else 0  # the least number of a group is the least value
    scales = ((groups - least[..., None]).abs().amax(-1) / (values - first).abs().max()).clamp(min=1e-9)
    least = least - first * scales if minima else least
    wanted = (groups - least[..., None]) / scales[..., None]
    codes = (wanted[..., None] - values).abs().argmin(-1).flatten(-2)[:, : weight_OI.shape[1]]
    codes = codes.to(torch.uint8) if kind.values else (codes - 127).to(torch.int8)
    return Codes(kind, codes, scales, least if minima else None)


def quantised(net: Decoder, kind: Kind, minima: bool = False) -> Decoder:
    twin = copy.deepcopy(net)
    kinds = {"head": INT8}
    forms = lambda name, linear: (  # noqa: E731
        linear if name.endswith(PLAIN) else filled(QuantisedLinear, linear, kinds.get(name, kind), minima and name != "head")
    )
    replace_linears(twin, forms)
    twin.embedding.tokens = filled(QuantisedEmbedding, net.embedding.tokens, INT8, False)
    return twin


def plainly(net: Decoder, small: Decoder) -> Decoder:
    """A float32 decoder with the numbers that the codes stand for."""
    plain = tiny_decoder(net.config)
    plain.load_state_dict(net.state_dict())
    with torch.no_grad():
        for name, module in small.named_modules():
            if isinstance(module, QuantisedLinear):
                plain.get_submodule(name).weight.copy_(module.dense())
    return plain


SHAPES = [
    ({}, (4, 2, 32)),
    ({"qkv_bias": True, "out_bias": True, "mlp_bias": True, "mlp_size": 72}, (6, 2, 80)),
    ({"tied_head": True, "gated_mlp": False, "activation": "gelu", "mlp_size": 1024}, (9, 3, 64)),
    ({"num_experts": 4, "experts_per_token": 2, "expert_size": 40, "shared_expert_size": 24}, (4, 4, 32)),
]


@cache
def in_codes(kind: Kind, minima: bool, at: int) -> tuple[Decoder, Tensor]:
    """A decoder of SHAPES in codes, and what it computes in float32: for all instruction sets."""
    changes, shape = SHAPES[at]
    whole, half = pair(shaped(*shape, **changes))
    small = quantised(half, kind, minima)
    plain = plainly(whole, small)
    return small, run(plain, ReferenceBackend(plain.config.attention_variants), 1000, 32, torch.float32)


@pytest.mark.by_loops("amx")
@each_form
@pytest.mark.parametrize("shape", range(len(SHAPES)), ids=[str(shape) for shape in SHAPES])
@torch.inference_mode()
def test_the_decoder_is_the_plain_one_with_the_numbers_of_the_codes_up_to_rounding(variant, kind, minima, shape):
    small, wanted = in_codes(kind, minima, shape)
    for chunk in (1000, 1, 7):
        assert distance(run_native(small, chunk, 32), wanted) < 0.12


# --- the product by itself: that of the head


def product(codes: Codes, x_TI: Tensor) -> Tensor:
    """What the native decoder makes of x."""
    rows, columns = codes.shape
    net = tiny_decoder(tiny_config(hidden_size=columns, vocab_size=rows, num_layers=1)).bfloat16()
    head = QuantisedLinear.form(net.head, codes.kind, has_minima=codes.minima_OG is not None)
    head.make_room("weight", torch.bfloat16, "cpu")
    head.fill("weight", 0, codes)
    net.head = head
    return NativeDecoder(net).logits(x_TI)


def defined(codes: Codes, x_TI: Tensor, variant: str) -> Tensor:
    """The definition: x in whole numbers of 127 steps a group, times what the codes stand for, in float64."""
    groups = nn.functional.pad(x_TI.float(), (0, -x_TI.shape[1] % GROUP)).unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True)
    steps = torch.full_like(most, 127)  # torch multiplies a number by the inverse of a tensor, which is rounded twice
    wanted = groups.double() * (steps / most).double()
    if variant == "portable":  # others multiply and round at once
        wanted = wanted.float()
    x = (wanted.round().double() * (most / steps)).flatten(-2)[:, : x_TI.shape[1]]
    return x @ codes.dense().double().T


def codes_of(kind: Kind, rows: int, columns: int, minima: bool, codes: Tensor | None = None) -> Codes:
    dice = torch.Generator().manual_seed(columns)
    low, high, dtype = (0, 16, torch.uint8) if kind.values else (-127, 128, torch.int8)
    drawn = torch.randint(low, high, (rows, columns), generator=dice) if codes is None else codes.expand(rows, columns)
    scales, least = (torch.randn(rows, -(-columns // GROUP), generator=dice).half().float() for _ in range(2))
    return Codes(kind, drawn.to(dtype), scales, least if minima else None)


@each_form
@pytest.mark.parametrize("columns", [32, 40, 416, 4864])
@torch.inference_mode()
def test_a_product_is_that_of_the_definition_for_any_number_of_rows(variant, kind, minima, columns):
    codes = codes_of(kind, 100, columns, minima)
    x = torch.randn(130, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, wanted = product(codes, x), defined(codes, x, variant)
    torch.testing.assert_close(found.double() / wanted.abs().max(), wanted / wanted.abs().max(), rtol=0, atol=3e-6)
    for rows in (1, 2, 3, 4, 5, 6, 9, 16, 17, 97):
        assert torch.equal(product(codes, x[:rows]), found[:rows]), rows


@each_form
@pytest.mark.parametrize("signs", [1, -1, 0])
@torch.inference_mode()
def test_the_largest_numbers_of_both_sides_do_not_overflow(variant, kind, minima, signs):
    """All products have their largest size and one sign, or signs that differ in each group's halves and pairs."""
    columns = 4864
    low, high = (0, 15) if kind.values else (-128, 127)
    if kind.values:
        low, high = min(range(16), key=kind.values.__getitem__), max(range(16), key=kind.values.__getitem__)
    pattern = torch.arange(columns) // 3 % 2 if signs == 0 else torch.full((columns,), int(signs > 0))
    codes = codes_of(kind, 40, columns, minima, torch.where(pattern == 1, high, low))
    x = torch.where(pattern == 1, 3.0, -3.0).expand(20, columns).clone()
    x[1::2] *= -1
    x = x.bfloat16()
    found, wanted = product(codes, x), defined(codes, x, variant)
    torch.testing.assert_close(found.double() / wanted.abs().max(), wanted / wanted.abs().max(), rtol=0, atol=1e-5)
