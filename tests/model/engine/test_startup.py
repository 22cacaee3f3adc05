"""The start-up law: what computes as torch does is kept; a planted bug, and what cannot run, is replaced, refused, and told.

No GPU ran: the native decoder is tried for itself, Triton's kernels in the interpreter (`startup_laws.py` beside their laws),
recorded steps and the errors of a GPU with stand-ins.
"""

import logging
import re

import pytest
import torch

from attend.model.backends.native import Native
from attend.model.backends.torch import Torch
from attend.model.backends.triton import Triton
from attend.model.config import DEFAULT_MODEL
from attend.model.engine import build, fallback, startup
from attend.model.engine.build import build_engine
from attend.model.engine.cuda_recorder import CudaRecorder
from attend.model.engine.fallback import Fallback, kept_kind
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.options import EngineOptions
from attend.model.engine.piecewise_graphs import PiecewiseGraphs
from attend.model.engine.runner import device_errors
from attend.model.engine.startup import (
    NARROW,
    VOCAB,
    WINDOW,
    check_decoder,
    check_draws,
    check_recorded,
    differs,
    look,
    reduce_config,
)
from attend.model.errors import EngineFailed, OutOfMemory
from attend.model.net.checkpoint import read_config
from attend.model.net.formats.codes import INT4, INT8, IQ4_NL, MXFP4
from attend.model.net.native.decoder import NativeDecoder
from attend.model.net.native.library import variant
from attend.model.net.paged_attention import KVCache, TorchBackend
from attend.model.sampling import sample
from tests.model.checkpoints import KINDS, tiny_config, tiny_decoder, write_checkpoint
from tests.model.net.formats.test_fp8 import BLOCKS, fp8
from tests.model.net.formats.test_packed import LAYOUTS
from tests.model.net.formats.writing import pack_folder, plain_folder

needs_native = pytest.mark.skipif(variant() in ("", "portable"), reason="no fast native decoder is built here")
OPTIONS = EngineOptions(device="cpu", kv_cache_memory=1 << 22)


class OutOfResources(Exception):
    """As Triton's, which needs no Triton here."""

    __module__ = "triton.runtime.errors"


class PTXASError(Exception):
    """The same."""

    __module__ = "triton.runtime.errors"


def raising(error):
    def call(*given, **named):
        raise error

    return call


def native_findings(config, held=torch.bfloat16, kind=None):
    return check_decoder(Native(config), torch.bfloat16, held, "cpu", 32, kind)


@pytest.fixture
def wrong_native(monkeypatch):
    """A native library whose answers differ: each hidden state is a little of the one before."""
    right = NativeDecoder.__call__

    def wrong(self, tokens_T, positions_T, attention):
        hidden_TE = right(self, tokens_T, positions_T, attention)
        return hidden_TE + 0.15 * hidden_TE.roll(1, 0)

    monkeypatch.setattr(NativeDecoder, "__call__", wrong)


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint("llama", tmp_path / "tiny")


# What is right is kept


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_the_native_decoder_is_torchs_for_each_family(kind, tmp_path):
    config = read_config(write_checkpoint(kind, tmp_path / "tiny"))
    if config.latent is None:
        assert all(finding.ok for finding in native_findings(config)), native_findings(config)


@needs_native
@pytest.mark.parametrize("kind", [INT8, INT4, IQ4_NL, MXFP4], ids=lambda kind: kind.name)
@pytest.mark.parametrize("held", [torch.bfloat16, torch.int8])
def test_so_it_is_with_quantised_weights_and_keys(kind, held):
    findings = native_findings(read_config(DEFAULT_MODEL), held, kind)
    assert all(finding.ok for finding in findings), findings
    assert findings[0].part == f"decoder with {kind.name} weights"


@needs_native
def test_the_law_of_the_shipped_model_takes_a_moment():
    config = read_config(DEFAULT_MODEL)
    assert min(sum(finding.seconds for finding in native_findings(config)) for _ in range(5)) < 0.3


def test_a_small_model_has_a_layer_of_each_kind():
    full, windowed = {"window_layers": (0, 1, 3, 4)}, {"sliding_window": 4096, "num_layers": 6}
    config = tiny_config(**full, **windowed, hidden_size=4096, mlp_size=14336, vocab_size=128256)
    small = reduce_config(config, narrow=True)
    assert (small.num_layers, small.window_layers, small.sliding_window) == (2, (0,), WINDOW)
    assert (small.hidden_size, small.mlp_size, small.vocab_size) == (NARROW, NARROW, VOCAB)
    on_gpu = reduce_config(config, narrow=False)
    assert (on_gpu.hidden_size, on_gpu.mlp_size, on_gpu.sliding_window) == (4096, 14336, 4096)


def test_a_small_model_has_few_experts_in_the_models_groups():
    config = tiny_config(num_experts=256, experts_per_token=8, expert_groups=8, groups_per_token=4, group_top=2)
    small = reduce_config(config, narrow=False)
    assert (small.num_experts, small.experts_per_token, small.expert_groups) == (16, 8, 8)


@needs_native
@pytest.mark.parametrize(("kind", "kept"), [("fp8", None), ("int4", "int4")])
def test_the_kind_of_codes_is_the_one_that_the_backend_keeps(tmp_path, kind, kept):
    """No CPU multiplies floats of 8 bits: they are dequantised, and the law is that of plain weights."""
    pack, settings = {"fp8": (fp8("blocks"), BLOCKS), "int4": LAYOUTS["awq under its old names"]}[kind]
    folder = pack_folder(plain_folder(tmp_path / "plain"), pack, settings)
    backend, floats = Native(read_config(folder)), Triton(read_config(folder))
    assert (found := kept_kind(backend, folder)) is None or found.name == kept
    assert kept_kind(floats, folder).name.startswith(kind[:3])
    engine = build_engine(folder, OPTIONS)
    engine.close()
    assert engine.info.backend.startswith("native") and engine.info.slower_path is None


# What differs is seen


@needs_native
def test_a_native_library_whose_answers_differ_is_seen(wrong_native):
    finding = native_findings(read_config(DEFAULT_MODEL))[0]
    assert finding.reason == "kernel_differs"
    assert finding.cause.startswith("hidden states differ: the median token differs from float32 by 1")


@needs_native
@pytest.mark.parametrize("row", range(4))
def test_one_token_that_differs_is_seen(monkeypatch, row):
    right = NativeDecoder.__call__

    def wrong(self, tokens_T, positions_T, attention):
        hidden_TE = right(self, tokens_T, positions_T, attention)
        if len(hidden_TE) == 6:
            hidden_TE[row] *= 1.2
        return hidden_TE

    monkeypatch.setattr(NativeDecoder, "__call__", wrong)
    cause = native_findings(read_config(DEFAULT_MODEL))[0].cause
    percent = re.search(r"the farthest token differs from float32 by ([\d.]+)%", cause)
    assert percent is not None and float(percent[1]) == pytest.approx(20, abs=1), cause


@needs_native
def test_scores_and_draws_that_differ_are_seen(monkeypatch):
    config, right = read_config(DEFAULT_MODEL), NativeDecoder.logits
    monkeypatch.setattr(NativeDecoder, "logits", lambda self, hidden_TE: right(self, hidden_TE) * 1.1)
    assert native_findings(config)[0].cause.startswith("scores differ")
    monkeypatch.setattr(startup, "draw_tokens", lambda scores_RV, draws: sample(scores_RV, draws).roll(1))
    assert native_findings(config)[1].cause.startswith("with temperature 0 it draws token")


def test_numbers_that_are_none_differ():
    exact = torch.ones(4, 8)
    broken = exact.clone()
    broken[2, 3] = torch.nan
    assert differs(exact, exact, exact, 0.01, 0.0) == ""
    assert "differs from float32 by inf%" in differs(broken, exact, exact, 0.01, 0.0)


def test_a_router_may_choose_another_expert_for_a_few_tokens():
    exact = torch.eye(20)
    ours = exact.clone()
    ours[3] = exact[4]
    assert differs(ours, exact, exact, 0.01, 0.0)
    assert differs(ours, exact, exact, 0.01, 0.2) == ""


# What becomes of it


@needs_native
def test_torch_serves_in_the_place_of_a_native_library_whose_answers_differ(wrong_native, folder, caplog):
    with caplog.at_level(logging.WARNING):
        engine = build_engine(folder, OPTIONS)
    engine.close()
    path = engine.info.slower_path
    assert engine.info.backend == "torch"
    assert path.reason == "kernel_differs"
    assert path.cause.startswith("the torch backend serves, ")
    assert (
        f"the decoder of the native-{variant()} backend differs from torch on this device: hidden states differ" in path.cause
    )
    assert [record.getMessage() for record in caplog.records] == [path.cause]


@needs_native
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernel_check": "fail"}, "^kernel_check is fail, and the decoder of the native-.* differs from torch"),
        ({"backend": "native"}, "^backend is native, and the decoder of the native-.* differs .*; use backend = torch"),
    ],
)
def test_torch_does_not_serve_where_that_was_refused(wrong_native, folder, changes, words):
    with pytest.raises(EngineFailed, match=words):
        build_engine(folder, build.replace(OPTIONS, **changes))


@needs_native
def test_without_the_check_nothing_is_compared(wrong_native, folder, caplog):
    engine = build_engine(folder, build.replace(OPTIONS, kernel_check="off"))
    engine.close()
    assert engine.info.backend.startswith("native") and engine.info.slower_path is None


@needs_native
def test_a_decoder_that_cannot_be_made_is_replaced_with_the_reason(folder, monkeypatch):
    monkeypatch.setattr(Native, "decoder", raising(PTXASError("ptxas fatal: Unsupported .target\nand more")))
    engine = build_engine(folder, OPTIONS)
    engine.close()
    assert engine.info.slower_path.reason == "kernel_fails"
    assert engine.info.slower_path.cause.endswith("fails on this device: PTXASError: ptxas fatal: Unsupported .target")


def test_an_unused_gpu_is_the_first_reason(folder, monkeypatch, caplog):
    monkeypatch.setattr(fallback, "unused_gpu", lambda: "an NVIDIA GPU is here (/dev/nvidia0), and torch cannot use it: why")
    with caplog.at_level(logging.WARNING):
        engine = build_engine(folder, build.replace(OPTIONS, device="auto"))
    engine.close()
    assert engine.info.slower_path.reason == "gpu"
    assert len([record for record in caplog.records if "/dev/nvidia0" in record.getMessage()]) == 1
    engine = build_engine(folder, OPTIONS)
    engine.close()
    assert engine.info.slower_path is None or engine.info.slower_path.reason != "gpu"


# The errors of a GPU


def test_what_triton_raises_is_a_sentence():
    words = "out of resource: shared memory, Required: 106496, Hardware limit: 101376"
    told = f"^a kernel cannot run on this device: OutOfResources: {words}; use backend = torch"
    with pytest.raises(EngineFailed, match=told), device_errors():
        raise OutOfResources(f"{words}\nReducing block sizes may help")
    with pytest.raises(KeyError), device_errors():
        raise KeyError("of our own")


def test_a_law_that_cannot_run_fails_with_its_first_line():
    finding = look("decoder", raising(OutOfResources("shared memory\nmore")))
    assert finding[:3] == ("decoder", "kernel_fails", "OutOfResources: shared memory")


def test_a_lack_of_memory_is_no_fault_of_a_kernel():
    with pytest.raises(OutOfMemory):
        look("decoder", raising(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")))


def test_a_device_that_computes_no_more_ends_the_start_in_a_sentence(monkeypatch):
    illegal = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")
    assert look("decoder", raising(illegal)).reason == "kernel_fails", "the device still computes"
    monkeypatch.setattr(torch, "ones", raising(illegal))
    with pytest.raises(
        EngineFailed, match=r"^the device failed in the start-up check of the decoder: RuntimeError: CUDA error"
    ):
        look("decoder", raising(illegal))


def test_a_sampler_that_differs_is_replaced_by_torchs(monkeypatch, folder):
    options, triton = EngineOptions(), Triton(tiny_config())

    def drawn(kept, make):
        monkeypatch.setattr(Triton, "draw", lambda self, dtype, device, *, exact: make())
        return kept.draw(triton, torch.float32, "cuda")

    kept = Fallback(options, "cpu", 1)
    monkeypatch.setattr(startup, "_is_alive", lambda device: True)
    monkeypatch.setattr(fallback, "check_draws", lambda made, dtype, size, device: check_draws(made, dtype, size, "cpu"))
    assert drawn(kept, lambda: sample) is sample and kept.path() is None
    assert drawn(kept, lambda: lambda scores_RV, draws: sample(scores_RV, draws) + 1) is sample
    assert kept.path().cause.startswith(
        "torch draws tokens, slower than Triton's kernels: the sampler of the triton backend differs"
    )
    failing = Fallback(options, "cpu", 1)
    assert drawn(failing, raising(OutOfResources("shared memory"))) is sample
    assert failing.path().reason == "kernel_fails"


class Machine:
    """A tiny decoder whose steps are recorded by what is given."""

    def __init__(self, record):
        self.config = tiny_config()
        self.net, self.backend = tiny_decoder(self.config), TorchBackend()
        self.cache = KVCache.allocate(self.config, 4, 32, torch.float32, "cpu")
        self.record = record

    def recorded(self):
        graphs = DecodeGraphs(self.net, self.backend, self.cache, 64, 2, self.record)
        return graphs, None


def test_recorded_steps_that_are_the_same_are_kept():
    machine, kept = Machine(lambda step: step), Fallback(EngineOptions(), "cpu", 1)
    graphs, pieces = kept.record_steps(machine.recorded, machine.net, machine.backend, machine.cache)
    assert len(graphs) == 2 and pieces is None and kept.path() is None


@pytest.mark.parametrize(
    ("record", "reason", "words"),
    [
        (
            raising(RuntimeError("CUDA error: operation not permitted when stream is capturing")),
            "kernel_fails",
            "RuntimeError: CUDA",
        ),
        (raising(OutOfResources("shared memory")), "kernel_fails", "OutOfResources: shared memory"),
        (lambda step: lambda: None, "kernel_differs", "a recorded step: the median token differs"),
    ],
)
def test_a_recorder_that_fails_or_lies_leaves_steps_as_they_are(record, reason, words):
    machine, kept = Machine(record), Fallback(EngineOptions(), "cpu", 1)
    for _ in range(2):
        assert kept.record_steps(machine.recorded, machine.net, machine.backend, machine.cache) == (None, None)
    assert kept.path().reason == reason
    assert kept.path().cause.startswith(
        "steps are not recorded, and each launches all its kernels: the recorded steps of the torch"
    )
    assert words in kept.path().cause and kept.path().cause.count("not recorded") == 1
    failing = Fallback(EngineOptions(kernel_check="fail"), "cpu", 1)
    with pytest.raises(EngineFailed, match=r"^kernel_check is fail, and the recorded steps"):
        failing.record_steps(machine.recorded, machine.net, machine.backend, machine.cache)


def test_a_recording_that_fails_on_the_step_thread_is_told_once_it_has_started(folder, monkeypatch, caplog):
    monkeypatch.setattr(Torch, "record", raising(OutOfResources("shared memory")))
    with caplog.at_level(logging.WARNING):
        engine = build_engine(folder, build.replace(OPTIONS, backend="torch"))
        assert engine.info.slower_path is None
        engine.start()
    engine.close()
    assert engine.info.slower_path.reason == "kernel_fails" and engine.info.recorded_sizes == (0, 0)
    assert [record.getMessage() for record in caplog.records] == [engine.info.slower_path.cause]
    failing = build_engine(folder, build.replace(OPTIONS, backend="torch", kernel_check="fail"))
    with pytest.raises(EngineFailed, match=r"^kernel_check is fail, and the recorded steps of the torch backend fails"):
        failing.start()


def test_ranks_record_or_end_in_a_sentence():
    """Where one had recorded and another had not, they would wait for each other."""
    machine = Machine(raising(OutOfResources("shared memory")))
    with pytest.raises(EngineFailed, match="OutOfResources: shared memory"):
        Fallback(EngineOptions(), "cpu", 2).record_steps(machine.recorded, machine.net, machine.backend, machine.cache)


def test_pieces_are_compared_too():
    machine = Machine(None)
    for broken in (False, True):
        pieces = PiecewiseGraphs(machine.net, machine.backend, machine.cache, 32, lambda step: step)
        if broken:
            pieces.run = lambda *given, run=pieces.run: run(*given) * 1.2
        finding = check_recorded(machine.net, machine.backend, machine.cache, None, pieces)
        assert finding.ok != broken
        said = "pieces of a recorded step: the median token differs from the same without recording by 20.0%"
        assert finding.cause.startswith(said) == broken


def test_what_breaks_a_recording_is_told_and_not_what_ends_it(monkeypatch):
    class Graph:
        def capture_begin(self, **named):
            pass

        def capture_end(self):
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    recorder = CudaRecorder.__new__(CudaRecorder)
    recorder._pool, recorder._stream = None, type("Stream", (), {"wait_stream": lambda self, other: None})()
    calls = []

    def step(cut):
        calls.append(cut)
        if len(calls) == 3:
            raise OutOfResources("shared memory")

    for name in ("CUDAGraph", "current_stream", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, Graph if name == "CUDAGraph" else lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    with pytest.raises(OutOfResources):
        recorder.in_pieces(step)
