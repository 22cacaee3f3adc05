"""The native decoder computes what the plain decoder computes, in every variant."""

from dataclasses import replace

import pytest
import torch

from attend.model.backends.backend import Placement
from attend.model.backends.choice import choose_backend
from attend.model.backends.native import Native
from attend.model.errors import SettingError
from attend.model.net.features import NATIVE
from attend.model.net.native import library
from attend.model.net.native.decoder import NativeBackend, NativeDecoder
from attend.model.net.paged_attention import BatchLayout, KVCache, PagedAttention, ReferenceBackend, Row
from attend.model.net.transformer import Decoder
from attend.model.sublayers import DeltaSpec
from tests.model.checkpoints import VOCAB, tiny_config, tiny_decoder

built = library.load_library()
needs_library = pytest.mark.skipif(
    built is None, reason="the native decoder is not built here: python -m attend.model.net.native"
)
pytestmark = pytest.mark.by_loops("amx")
SHAPES = [  # query heads, key/value heads, head size
    (4, 2, 32),
    (5, 5, 64),
    (9, 3, 64),
    (6, 1, 96),
    (16, 1, 32),
    (8, 2, 128),
    (2, 1, 256),
    (2, 1, 512),
    (4, 2, 8),
    (6, 2, 80),
]
LENGTHS = [1, 2, 31, 32, 33, 64, 65, 200]


def shaped(heads: int, kv_heads: int, head_size: int, **changes):
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": head_size, "max_positions": 256}
    return tiny_config(**{**sizes, **changes})


def random_text(length: int, seed: int) -> torch.Tensor:
    return torch.randint(8, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def dirty_cache(config, num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCache:
    """NaN wherever a request could have left something."""
    cache = KVCache.allocate(config, num_blocks, block_size, dtype, "cpu")
    for tensor in (*cache.keys, *cache.values, *(part for state in cache.states.values() for part in state)):
        tensor.fill_(-1 if tensor.dtype == torch.int8 else torch.nan)  # in 8 bits scales are NaN then
    return cache


def run(net, backend, chunk: int, block_size: int, dtype: torch.dtype, texts=None) -> torch.Tensor:
    """Hidden states of several texts, computed side by side in chunks, in blocks and states that hold NaN from before."""
    generator = torch.Generator().manual_seed(5)
    texts = [random_text(length, at) for at, length in enumerate(LENGTHS)] if texts is None else texts
    lengths = [len(text) for text in texts]
    needed = [-(-length // block_size) for length in lengths]
    cache = dirty_cache(net.config, sum(needed), block_size, dtype)
    order = iter((torch.randperm(sum(needed), generator=generator) + 1).tolist())
    tables = [[next(order) for _ in range(count)] for count in needed]
    done, found = [0] * len(lengths), [[] for _ in lengths]
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        turns = [(i, done[i], min(chunk, lengths[i] - done[i])) for i in range(len(lengths)) if done[i] < lengths[i]]
        turns.sort(key=lambda turn: turn[2] != 1)
        rows, states = [Row(tables[i], start, count) for i, start, count in turns], [tables[i][0] for i, *_ in turns]
        layout = BatchLayout.build(rows, block_size, "cpu", states=states)
        tokens = torch.cat([texts[i][start : start + count] for i, start, count in turns])
        hidden = (
            net(tokens, layout.positions_T, PagedAttention(backend, cache, layout))
            .float()
            .split([count for *_, count in turns])
        )
        for (i, start, count), part in zip(turns, hidden, strict=True):
            found[i].append(part)
            done[i] = start + count
    return torch.cat([part for parts in found for part in parts])


def run_native(
    net, chunk: int, block_size: int, lengths=LENGTHS, *, first: int = 0, texts=None, held: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The same by the native decoder; the text of `lengths[0]` is number `first`."""
    texts = [random_text(length, at) for at, length in enumerate(lengths, first)] if texts is None else texts
    backend = NativeBackend(net.config.attention_variants)
    return run(NativeDecoder(net), backend, chunk, block_size, held, [torch.as_tensor(text) for text in texts])


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def pair(config) -> tuple[Decoder, Decoder]:
    """The same weights in float32, rounded to bfloat16 first, and in bfloat16."""
    half = tiny_decoder(config).bfloat16()
    whole = tiny_decoder(config)
    whole.load_state_dict(half.state_dict())
    return whole, half


@needs_library
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_the_decoder_is_the_plain_one_up_to_rounding(variant, shape):
    """For all groupings, head sizes, lengths about the borders of blocks, chunks, and blocks that hold NaN from before."""
    for changes, block_size in (
        ({}, 32),
        ({"qk_norm": "head", "qkv_bias": True, "out_bias": True, "mlp_bias": True, "mlp_size": 72}, 64),
    ):
        whole, half = pair(shaped(*shape, **changes))
        wanted = run(whole, ReferenceBackend(whole.config.attention_variants), 1000, block_size, torch.float32)
        for chunk in (1000, 1, 7):
            found = run_native(half, chunk, block_size)
            assert torch.isfinite(found).all()
            assert distance(found, wanted) < 0.02


@needs_library
@pytest.mark.parametrize(("shape", "view"), [((9, 3, 64), {}), ((5, 5, 64), {}), ((8, 1, 32), {"sliding_window": 40})], ids=str)
@torch.inference_mode()
def test_a_token_has_the_same_bits_whatever_is_computed_beside_it(variant, shape, view):
    """Alone and in a batch, in one chunk and in many, on one thread and on two: bfloat16 or not."""
    net = pair(shaped(*shape, **view, max_positions=512))[1]
    lengths = [400, 3, 65, 130]
    wanted = run_native(net, 1000, 32, lengths).split(lengths)
    for chunk in (1, 7, 16, 33, 256):
        assert torch.equal(run_native(net, chunk, 32, lengths), torch.cat(wanted)), chunk
    torch.set_num_threads(1)
    for at, length in enumerate(lengths):
        assert torch.equal(run_native(net, 50, 32, [length], first=at), wanted[at]), length
    torch.set_num_threads(2)


@needs_library
@pytest.mark.by_loops("avx512", "avx512-bf16", "amx")
@torch.inference_mode()
def test_scores_are_those_of_the_head_and_do_not_depend_on_how_many_are_asked(variant):
    half = pair(shaped(4, 2, 32, vocab_size=VOCAB))[1]
    hidden = torch.randn(70, half.config.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()
    decoder = NativeDecoder(half)
    scores = decoder.logits(hidden)
    torch.testing.assert_close(scores, hidden.float() @ half.head.weight.float().T, rtol=1e-3, atol=1e-4)
    for count in (1, 2, 15, 17, 33):
        assert torch.equal(decoder.logits(hidden[:count]), scores[:count])


@needs_library
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_experts": 5, "experts_per_token": 2, "shared_expert_size": 24, "sinks": True},
        {"attention_gate": True, "delta": DeltaSpec(2, 4, 8, 12, 4), "delta_layers": (0,)},
        {"conv_kernel": 3, "conv_layers": (0,)},
    ],
    ids=str,
)
@torch.inference_mode()
def test_what_is_not_a_number_stays_in_its_own_request(variant, more):
    """One bad request harms only itself."""
    net = pair(shaped(4, 2, 32, **more))[1]
    net.embedding.tokens.weight[7] = torch.nan
    texts = [[7] * 40, [5, 6] * 20]
    found = run_native(net, 1000, 32, texts=texts).split([40, 40])
    assert found[0].isnan().all()
    assert torch.equal(found[1], run_native(net, 1000, 32, texts=texts[1:]))


@pytest.mark.parametrize(
    "other",
    [
        {"head_size": 544},
        {"num_heads": 34},
        {"delta": DeltaSpec(1, 1, 257, 8, 4), "delta_layers": (0,)},
        {"delta": DeltaSpec(1, 1, 8, 257, 4), "delta_layers": (0,)},
        {"delta": DeltaSpec(1, 1, 8, 8, 17), "delta_layers": (0,)},
        {"conv_kernel": 17, "conv_layers": (0,)},
    ],
    ids=str,
)
def test_what_the_kernels_do_not_know_is_left_to_torch(other):
    config = shaped(4, 2, 32)
    at = Placement(torch.bfloat16, "cpu", 32)
    assert Native.refusal(config, at) is None
    assert Native.refusal(replace(config, **other), at) is not None
    assert Native.refusal(config, replace(at, block_size=16)) is not None


def test_a_backend_that_cannot_pass_for_the_model_is_refused_by_name(monkeypatch):
    with pytest.raises(SettingError, match="backend is native, but dtype is float32, and it computes in bfloat16"):
        choose_backend("native", shaped(4, 2, 32), Placement(torch.float32, "cpu", 32))
    monkeypatch.setattr(Native, "computes", NATIVE - {"sinks", "experts"})
    with pytest.raises(SettingError, match="backend is native, but it does not support experts, sinks, which"):
        choose_backend("native", shaped(4, 2, 32, sinks=True, num_experts=2), Placement(torch.float32, "cpu", 32))
    assert "torch" == choose_backend("auto", shaped(4, 2, 32), Placement(torch.bfloat16, "cpu", 16)).name
