"""The native kernels compute what the plain decoder computes, in every variant that this CPU has."""

import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from model.errors import SettingError
from model.net.backends import BatchLayout, KVCache, Paged, ReferenceBackend, Row
from model.net.native import library
from model.net.native.__main__ import main
from model.net.native.decoder import NativeBackend, NativeDecoder, supports
from model.net.packed import multiplies_bfloat16, pack
from model.net.transformer import Decoder
from tests.model.checkpoints import VOCAB, tiny_config, tiny_decoder

built = library.load()
needs_library = pytest.mark.skipif(built is None, reason="the native kernels are not built here: python -m model.net.native")
needs_units = pytest.mark.skipif(not multiplies_bfloat16(), reason="this CPU has no units for bfloat16")
SHAPES = [  # query heads, key/value heads, head size
    (4, 2, 32),
    (5, 5, 64),
    (9, 3, 64),
    (6, 1, 96),
    (16, 1, 32),
    (8, 2, 128),
    (2, 1, 256),
]
LENGTHS = [1, 2, 31, 32, 33, 64, 65, 200]


@pytest.fixture(params=range(4), ids=library.VARIANTS)
def variant(request):
    """One variant after the other, as far as this CPU has them."""
    best = built.attend_best()
    if request.param > best:
        pytest.skip(f"this CPU has no {library.VARIANTS[request.param]}")
    built.attend_choose(request.param)
    yield library.VARIANTS[request.param]
    built.attend_choose(best)


def shaped(heads: int, kv_heads: int, head_size: int, **changes):
    return tiny_config(num_heads=heads, num_kv_heads=kv_heads, head_size=head_size, max_positions=256, **changes)


def run(net, backend, chunk: int, block_size: int, dtype: torch.dtype, lengths=LENGTHS) -> torch.Tensor:
    """Hidden states of several texts, computed side by side in chunks, in blocks that hold NaN from before."""
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]
    needed = [-(-length // block_size) for length in lengths]
    cache = KVCache.allocate(net.config, sum(needed), block_size, dtype, "cpu")
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    order = iter((torch.randperm(sum(needed), generator=generator) + 1).tolist())
    tables = [[next(order) for _ in range(count)] for count in needed]
    done, found = [0] * len(lengths), [[] for _ in lengths]
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        turns = [(i, done[i], min(chunk, lengths[i] - done[i])) for i in range(len(lengths)) if done[i] < lengths[i]]
        turns.sort(key=lambda turn: turn[2] != 1)
        layout = BatchLayout.build([Row(tables[i], start, count) for i, start, count in turns], block_size, "cpu")
        tokens = torch.cat([texts[i][start : start + count] for i, start, count in turns])
        hidden = net(tokens, layout.positions_T, Paged(backend, cache, layout)).float().split([count for *_, count in turns])
        for (i, start, count), part in zip(turns, hidden, strict=True):
            found[i].append(part)
            done[i] = start + count
    return torch.cat([part for parts in found for part in parts])


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def pair(config) -> tuple[Decoder, Decoder]:
    """The same weights in float32, rounded to bfloat16 first, and in bfloat16."""
    half = tiny_decoder(config).bfloat16()
    half.cos, half.sin = tiny_decoder(config).cos, tiny_decoder(config).sin
    whole = tiny_decoder(config)
    whole.load_state_dict(half.state_dict())
    return whole, half


@needs_library
@needs_units
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_the_decoder_is_the_plain_one_up_to_rounding(variant, shape):
    """For all groupings, head sizes, lengths about the borders of blocks, chunks, and blocks that hold NaN from before."""
    for changes, block_size in (({}, 32), ({"qk_norm": True, "qkv_bias": True}, 64)):
        whole, half = pair(shaped(*shape, **changes))
        wanted = run(whole, ReferenceBackend(), 1000, block_size, torch.float32)
        pack(half)
        for chunk in (1000, 1, 7):
            found = run(NativeDecoder(half), NativeBackend(), chunk, block_size, torch.bfloat16)
            assert torch.isfinite(found).all()
            assert distance(found, wanted) < 0.02


@needs_library
@needs_units
@torch.inference_mode()
def test_the_backend_serves_a_plain_decoder_too(variant):
    whole, half = pair(shaped(4, 2, 32))
    wanted = run(whole, ReferenceBackend(), 1000, 32, torch.float32)
    assert distance(run(half, NativeBackend(), 7, 32, torch.bfloat16), wanted) < 0.02


@needs_library
@needs_units
@torch.inference_mode()
def test_a_token_does_not_depend_on_its_neighbours_nor_on_how_its_prompt_was_cut(variant):
    """The kernels alone: the same rows of a matrix come in, so the same bits must come out."""
    backend, config, generator = NativeBackend(), shaped(4, 2, 64), torch.Generator().manual_seed(1)
    length, heads = 90, (4, 2, 64)
    qkv = torch.randn(length, (4 + 2 * 2) * 64, generator=generator).bfloat16()
    found = []
    for chunk in (90, 1, 32, 7):
        cache = KVCache.allocate(config, 8, 32, torch.bfloat16, "cpu")
        parts = []
        for start in range(0, length, chunk):
            rows = [Row([3, 1, 2], start, min(chunk, length - start))]
            layout = BatchLayout.build(rows, 32, "cpu")
            part = qkv[start : start + chunk].clone()
            backend.write(0, part, heads, cache, layout)
            parts.append(backend.attend(0, part, heads, cache, layout))
        found.append(torch.cat(parts))
    assert all(torch.equal(each, found[0]) for each in found)


@needs_library
def test_the_activation_is_silu_at_every_size(variant):
    """Also far out, where an exponential overflows."""
    gate = torch.cat([torch.linspace(-100, 100, 4097), torch.tensor([-1e30, 1e30, 0.0])]).bfloat16()
    up = torch.ones_like(gate)
    both, found = torch.stack([gate, up]).flatten()[None].contiguous(), torch.empty_like(gate)
    built.attend_silu(both.data_ptr(), found.data_ptr(), 1, len(gate))
    torch.testing.assert_close(found, torch.nn.functional.silu(gate.float()).bfloat16(), rtol=0.008, atol=1e-7)


@needs_library
def test_norm_and_addition_are_one_pass(variant):
    x, r, gain = (torch.randn(37, 200, generator=torch.Generator().manual_seed(at)).bfloat16() for at in range(3))
    gain, y, residual = gain[0].contiguous(), torch.empty_like(x), r.clone()
    built.attend_norm(x.data_ptr(), residual.data_ptr(), gain.data_ptr(), y.data_ptr(), 37, 200, 1e-5)
    assert torch.equal(residual, x + r)
    wanted = torch.nn.functional.rms_norm(residual.float(), (200,), gain.float(), 1e-5)
    torch.testing.assert_close(y.float(), wanted, rtol=0.01, atol=1e-3)


@needs_library
def test_nan_stays_nan_in_its_own_row(variant):
    """One bad request harms only itself."""
    r, gain = torch.ones(3, 64).bfloat16(), torch.ones(64).bfloat16()
    r[1, 5] = torch.nan
    y = torch.empty_like(r)
    built.attend_norm(None, r.data_ptr(), gain.data_ptr(), y.data_ptr(), 3, 64, 1e-5)
    assert [False, True, False] == y.isnan().all(dim=1).tolist()


@pytest.mark.parametrize(
    "other",
    [
        {"positions": "learned"},
        {"norm": "layernorm"},
        {"activation": "gelu"},
        {"gated_mlp": False},
        {"head_size": 48},
        {"post_norm": True},
    ],
    ids=str,
)
def test_what_the_kernels_do_not_know_is_left_to_torch(other):
    config = shaped(4, 2, 32)
    assert supports(config, 32)
    assert not supports(replace(config, **other), 32)
    assert not supports(config, 16)


def test_a_compiler_that_fails_is_no_error_and_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    source = tmp_path / "kernels.cpp"
    source.write_text("this is no C++")
    monkeypatch.setattr(library, "SOURCE", source)
    monkeypatch.setattr(shutil, "which", lambda name: "false")
    assert 0 == main()
    assert "torch path will serve" in capsys.readouterr().err
    assert [source] == list(tmp_path.iterdir())


def test_a_library_replaces_the_one_of_an_older_source(tmp_path, monkeypatch):
    source = tmp_path / "kernels.cpp"
    source.write_text("")
    (tmp_path / "kernels-0123.so").touch()
    monkeypatch.setattr(library, "SOURCE", source)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: open(command[-1], "w").close())
    path = library.build("c++")
    assert [path] == list(tmp_path.glob("*.so"))
    source.write_text("// changed")
    assert path != library.library_path()


def test_a_backend_that_cannot_pass_for_the_model_is_refused_by_name(monkeypatch):
    from model.engine.build import choose_backend

    with pytest.raises(SettingError, match="backend is native, but it needs"):
        choose_backend("native", shaped(4, 2, 32), torch.float32, "cpu", 32)
    assert "torch" == choose_backend("auto", shaped(4, 2, 32), torch.bfloat16, "cpu", 16).name
