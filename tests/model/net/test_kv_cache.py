"""A cache in 8 bits: what it gives back, what it takes, and what it does with numbers that are not finite."""

import pytest
import torch
from torch import Tensor

from attend.model.net.kv_cache import KVCache, decode, encode
from attend.model.net.native import library
from attend.model.net.native.decoder import NativeBackend
from attend.model.net.paged_attention import BatchLayout, Row
from tests.model.checkpoints import tiny_config

SIZES = [8, 10, 32, 36, 64, 80, 96, 128, 256]
each_size = pytest.mark.parametrize("size", SIZES)
GROUP, STEP = 32, 1.008 / 127
"""A step of codes over the largest magnitude of a group, with what rounding its scale up to bfloat16 adds."""


def numbers(size: int, tokens: int = 40) -> Tensor:
    """Of all magnitudes, a hundred times larger in one column, and all zero in one head of a token. [T, 3, D]."""
    dice = torch.Generator().manual_seed(size)
    x = torch.randn(tokens, 3, size, generator=dice) * torch.exp(20 * torch.rand(tokens, 3, 1, generator=dice) - 10)
    x[..., size // 2] *= 100
    x[1, 1] = 0
    return x


def largest(x: Tensor) -> Tensor:
    """The largest magnitude of each number's group, in float64."""
    groups = [part.double().abs().amax(-1, keepdim=True).expand_as(part) for part in x.split(GROUP, dim=-1)]
    return torch.cat(groups, dim=-1)


@each_size
def test_a_number_comes_back_within_half_a_step_of_its_own_group(size):
    """A column that is far larger than the others costs the other groups nothing."""
    x = numbers(size)
    off = (decode(encode(x)).double() - x.double()).abs()
    assert (off <= largest(x) * STEP / 2).all()
    assert (off > largest(x) * STEP / 4).any(), "steps are as fine as they can be"


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
@each_size
def test_a_cache_takes_the_bytes_that_are_counted_for_it(size, dtype):
    config = tiny_config(num_layers=2, head_size=size)
    cache = KVCache.allocate(config, 5, 16, dtype, "cpu")
    assert sum(part.nbytes for part in (*cache.keys, *cache.values)) == 6 * 16 * config.kv_bytes_per_token(dtype.itemsize)
    if dtype == torch.int8 and size % GROUP == 0:
        assert config.kv_bytes_per_token(1) / config.kv_bytes_per_token(2) == 34 / 64


@pytest.mark.skipif(library.load_library() is None, reason="the native decoder is not built")
@each_size
@torch.inference_mode()
def test_the_native_decoder_writes_the_same_codes_and_scales(size):
    """In every variant, number for number; also where a number is not finite."""
    k, v = numbers(size), numbers(size).flip(0)
    k[7, 1, size - 1], v[8, 0, 0], v[9, 2, 1] = torch.nan, torch.inf, -torch.inf
    k, v = k.bfloat16(), v.bfloat16()
    config = tiny_config(num_layers=1, num_heads=3, num_kv_heads=3, head_size=size)
    layout = BatchLayout.build([Row([2, 1], 0, 40)], 32, "cpu")
    built = library.load_library()
    for number in range(built.attend_best() + 1):
        built.attend_choose(number)
        cache = KVCache.allocate(config, 2, 32, torch.int8, "cpu")
        NativeBackend(config.attention_variants).forward(0, torch.zeros_like(k), k, v, cache, layout)
        for held, given in ((cache.keys[0], k), (cache.values[0], v)):
            pieces = held.view(3, 3, -1)  # [blocks, K, ..]
            codes = pieces[..., : 32 * size].unflatten(-1, (32, size))
            scales = pieces[..., 32 * size :].unflatten(-1, (32, -1))
            slots = torch.cat((codes, scales), dim=-1).transpose(1, 2).flatten(0, 1)
            assert torch.equal(slots[layout.slots_T], encode(given)), library.VARIANTS[number]
    built.attend_choose(built.attend_best())
