"""The slower path: named with its reason wherever another backend serves than the fastest of the machine, and only there."""

import pytest
import torch

from attend.model.backends.backend import Placement
from attend.model.backends.native import Native
from attend.model.backends.torch import Torch
from attend.model.backends.triton import Triton
from attend.model.engine import fallback
from attend.model.engine.build import build_engine
from attend.model.engine.fallback import slower_path
from attend.model.engine.options import EngineOptions
from attend.model.net.checkpoint import load_decoder
from attend.model.net.native.library import variant
from tests.model.checkpoints import tiny_config, write_checkpoint

needs_native = pytest.mark.skipif(variant() in ("", "portable"), reason="no fast native decoder is built here")


@pytest.fixture
def built(monkeypatch):
    """As if the native decoder were built, with vectors of AVX2."""
    monkeypatch.setattr("attend.model.backends.native.load_library", lambda: object())
    monkeypatch.setattr(fallback, "native_variant", lambda: "avx2")


def path(kind=Torch, dtype=torch.bfloat16, device="cpu", block_size=32, shared=False, **changes):
    config = tiny_config(**changes)
    return slower_path(kind(config), config, Placement(dtype, device, block_size, shared))


@pytest.mark.parametrize(
    ("asked", "reason", "why"),
    [
        ({"block_size": 16}, "block_size", "block_size is 16, and it takes multiples of 32"),
        ({"block_size": 8, "dtype": torch.float32}, "block_size", "block_size is 8, and it takes multiples of 32"),
        ({"dtype": torch.float16}, "dtype", "dtype is float16, and it computes in bfloat16"),
        ({"head_size": 1024}, "heads", "the model's head size is 1024, and it takes at most 512"),
        ({"num_heads": 34, "num_kv_heads": 2}, "heads", "17 query heads per KV head, and it takes at most 16"),
        ({"shared": True}, "tensor_parallel", "it does not support this model with tensor_parallel"),
    ],
)
def test_the_reason_is_the_one_for_which_the_native_decoder_does_not_serve(built, asked, reason, why):
    found = path(**asked)
    assert found.reason == reason
    assert found.cause.startswith("the torch backend serves, slower than the native decoder: ")
    assert found.cause.endswith(why)


def test_a_feature_that_is_not_computed_is_the_reason(built, monkeypatch):
    monkeypatch.setattr(Native, "computes", Native.computes - {"sinks"})
    assert path(sinks=True) == ("model", path(sinks=True).cause)
    assert path(sinks=True).cause.endswith("it does not support sinks, which this model needs")


def test_a_native_decoder_that_is_not_there_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr("attend.model.backends.native.load_library", lambda: None)
    monkeypatch.setattr(fallback, "native_variant", lambda: "")
    monkeypatch.setattr("attend.model.backends.native.absence", lambda: ("no_cache", "others can write there"))
    loss = "the torch backend serves, slower than the native decoder: others can write there"
    assert path(dtype=torch.float32) == ("no_cache", loss)


def test_the_fastest_backend_is_no_slower_path(built, monkeypatch):
    assert path(Native) is None
    assert path(Triton, device="cuda") is None
    monkeypatch.setattr(fallback, "native_variant", lambda: "portable")
    assert path() is None, "torch is the fastest there"


def test_on_a_gpu_the_reason_is_tritons(monkeypatch):
    monkeypatch.setattr("attend.model.backends.triton.find_spec", lambda name: None)
    assert path(device="cuda") == (
        "not_built",
        "the torch backend serves, slower than Triton's kernels: triton is not installed",
    )


@needs_native
@pytest.mark.parametrize(
    ("asked", "reason"), [({"block_size": 16}, "block_size"), ({}, None), ({"backend": "torch", "block_size": 16}, None)]
)
def test_an_engine_warns_of_its_slower_path_in_one_line_and_says_it_in_its_facts(tmp_path, caplog, asked, reason):
    """One that was asked for by its name is a choice."""
    folder = write_checkpoint("llama-tied", tmp_path / "tiny")
    with caplog.at_level("WARNING"):
        info = build_engine(folder, EngineOptions(device="cpu", kv_cache_memory=1 << 20, **asked)).info
    told = [record.getMessage() for record in caplog.records]
    assert told == ([info.slower_path.cause] if reason else [])
    assert (info.slower_path and info.slower_path.reason) == reason


@pytest.mark.parametrize(
    ("seconds", "told"), [(3.0, "about 4 times slower than the native decoder (3000.0 ms for a"), (0.9, "slower")]
)
def test_the_loss_is_told_in_times_a_read_of_the_weights(tmp_path, monkeypatch, seconds, told):
    """A read of all weights at the speed of memory takes 0.5 s here, of which the native decoder reaches three quarters."""
    turns = []

    def least_seconds(work) -> float:
        turns.append(work())
        return seconds if len(turns) == 1 else 0.5625 * part

    folder = write_checkpoint("llama", tmp_path)
    size = 2 * load_decoder(folder, torch.float32, "cpu").num_parameters
    part = 8 * (min(size, fallback.READ) // 8 + 1) / size
    monkeypatch.setattr(fallback, "_least_seconds", least_seconds)
    engine = build_engine(folder, EngineOptions(dtype="float32", kv_cache_memory=1 << 20, device="cpu"))
    engine.close()
    assert len(turns) == 2
    assert engine.info.slower_path.cause.startswith(f"the torch backend serves, {told}")
