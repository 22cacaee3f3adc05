"""The native decoder with a KV cache in 8 bits: the same codes give the same numbers, and nothing beside a token its bits."""

import pytest
import torch

from attend.model.net.paged_attention import ReferenceBackend, TorchBackend
from attend.model.sublayers import DeltaSpec
from tests.model.net.native.test_native import SHAPES, distance, needs_library, pair, run, run_native, shaped

pytestmark = needs_library
LENGTHS = [130, 3, 65, 33]
WINDOW = {"qk_norm": "head", "qkv_bias": True, "sliding_window": 40}
SHARED = {"num_layers": 4, "kv_shared_layers": 2, "global_head_size": 80, "global_kv_heads": 1, "keys_are_values": True}
SHARED |= {"value_norm": True, "sliding_window": 9, "window_layers": (1, 3)}
DELTA = {"attention_gate": True, "delta": DeltaSpec(2, 4, 16, 32, 4), "delta_layers": (0,)}
SINKS = {"sinks": True, "softcap": 5.0, "sliding_window": 9, "window_layers": (1,)}


@pytest.mark.by_loops("avx512-bf16")
@pytest.mark.parametrize("shape", [*SHAPES, (4, 2, 40), (3, 1, 96), (2, 2, 128)], ids=str)
@torch.inference_mode()
def test_the_decoder_is_no_farther_from_the_plain_one_than_torch_is(variant, shape):
    """For all groupings and head sizes, whole groups or not, in few lanes and in many, in blocks that hold NaN from before."""
    for changes, block_size in (({}, 32), (WINDOW, 64)):
        whole, half = pair(shaped(*shape, **changes))
        variants = whole.config.attention_variants
        wanted = run(whole, ReferenceBackend(variants), 1000, block_size, torch.float32)
        theirs = distance(run(half, TorchBackend(variants), 1000, block_size, torch.int8), wanted)
        for chunk in (1000, 7):
            found = run_native(half, chunk, block_size, held=torch.int8)
            assert torch.isfinite(found).all()
            assert distance(found, wanted) < min(theirs, 0.05)


@pytest.mark.parametrize(
    ("shape", "view"),
    [((9, 3, 64), {}), ((6, 2, 80), {}), ((8, 1, 32), WINDOW), ((4, 2, 32), SINKS), ((4, 2, 32), DELTA), ((4, 2, 32), SHARED)],
    ids=str,
)
@torch.inference_mode()
def test_a_token_has_the_same_bits_whatever_is_computed_beside_it(variant, shape, view):
    """A tile of a few queries reads codes, one of many numbers that were made of them."""
    net = pair(shaped(*shape, **view))[1]
    torch.set_num_threads(2)
    wanted = run_native(net, 1000, 32, LENGTHS, held=torch.int8).split(LENGTHS)
    for chunk in (1, 7, 33):
        assert torch.equal(run_native(net, chunk, 32, LENGTHS, held=torch.int8), torch.cat(wanted)), chunk
    torch.set_num_threads(1)
    for at, length in enumerate(LENGTHS):
        assert torch.equal(run_native(net, 50, 32, [length], first=at, held=torch.int8), wanted[at]), length
    torch.set_num_threads(2)
