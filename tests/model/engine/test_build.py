"""From a folder to an engine: what is chosen, how large it is, when its fingerprint changes, and what it says."""

import asyncio
import mmap
import shutil
import threading
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import attend.model.engine.build
import attend.model.net.transformer
from attend.model.backends.backend import Placement
from attend.model.backends.choice import choose_backend
from attend.model.backends.native import Native
from attend.model.backends.reference import Reference
from attend.model.backends.torch import Torch
from attend.model.backends.triton import Triton
from attend.model.engine.build import (
    build_engine,
    choose_dtype,
    size_engine,
)
from attend.model.engine.fingerprint import PART, fingerprint, processor
from attend.model.engine.options import EngineOptions
from attend.model.engine.ranks import check_shared
from attend.model.engine.request import FinishReason
from attend.model.errors import CheckpointError, EngineFailed, SettingError
from attend.model.net.checkpoint import load_decoder, save
from attend.model.net.formats.codes import INT8
from attend.model.net.linear import Linear
from attend.model.net.native.library import load_library as load_native
from attend.model.net.packed_linears import PackedLinear, pack_linears
from tests.model.checkpoints import POSITIONS, VOCAB, edit_config, their_model, tiny_config, tiny_decoder, write_checkpoint
from tests.model.engine.machines import ask, told

CONFIG = tiny_config()
BLOCK = CONFIG.kv_bytes_per_token(4) * 16
"""Bytes of one block of 16 tokens in float32."""
OPTIONS = EngineOptions(device="cpu", dtype="float32", block_size=16, num_threads=1, kv_cache_memory=65 * BLOCK)

NATIVE = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
needs_units = pytest.mark.skipif(not NATIVE, reason="this CPU has no units for bfloat16, so nothing is packed")


def sized(memory_blocks: int, **options):
    return size_engine(CONFIG, torch.float32, "cpu", replace(OPTIONS, kv_cache_memory=memory_blocks * BLOCK, **options))


async def read(engine, request):
    async with aclosing(engine.generate([request])) as stream:
        return told([output async for batch in stream for output in batch])


def generate(engine, request):
    engine.start()
    try:
        return asyncio.run(read(engine, request))
    finally:
        engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("multiplied", "natively", "device", "dtype"),
    [
        (True, False, "cpu", torch.bfloat16),
        (False, True, "cpu", torch.bfloat16),
        (False, False, "cpu", torch.float32),
        (False, False, "cuda", torch.bfloat16),
    ],
)
def test_auto_is_bfloat16_where_it_is_fast(monkeypatch, multiplied, natively, device, dtype):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: multiplied)
    assert dtype == choose_dtype("auto", device, natively=natively)


@pytest.mark.parametrize(
    ("variant", "changes", "block_size", "natively"),
    [
        ("avx2", {}, 32, True),
        ("portable", {}, 32, False),
        ("", {}, 32, False),
        ("avx2", {}, 16, False),
        ("avx2", {"head_size": 1024}, 32, False),
    ],
)
def test_the_native_decoder_serves_what_it_computes_with_the_vectors_of_a_cpu(
    monkeypatch, variant, changes, block_size, natively
):
    monkeypatch.setattr("attend.model.backends.native.variant", lambda: variant)
    config = tiny_config(**changes)
    assert Native.serves(config, "cpu", block_size) is natively
    assert not Native.serves(config, "cuda", block_size)


def no_such_operator():
    raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_is_mkldnn_bf16_supported'")


def test_auto_is_float32_where_torch_comes_without_onednn(monkeypatch):
    """As on Apple's CPUs, where the operator that is asked does not exist."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", no_such_operator)
    assert torch.float32 == choose_dtype("auto", "cpu", natively=False)


def test_the_context_is_the_models_where_the_cache_holds_it():
    config = sized(65)
    assert (POSITIONS, 64, 16) == (config.max_model_len, config.num_blocks, config.block_size)


def test_a_small_cache_caps_the_context():
    config = sized(4)
    assert (48, 3) == (config.max_model_len, config.num_blocks)


def test_the_cache_takes_no_more_than_could_be_used():
    assert POSITIONS // 16 * 2 == sized(10**6, max_batch_requests=2).num_blocks
    assert -(-33 * 2 // 16) == sized(10**6, max_batch_requests=2, max_model_len=33).num_blocks


@pytest.mark.parametrize(("device", "batch"), [("cpu", (64, 1024)), ("cuda", (256, 8192))])
def test_a_step_is_as_large_as_is_usual_on_the_device_but_for_what_is_set(device, batch):
    plain = EngineOptions(kv_cache_memory=100 * BLOCK)
    for options, (requests, tokens) in [
        (plain, batch),
        (replace(plain, max_batch_requests=7), (7, batch[1])),
        (replace(plain, max_batch_tokens=9), (batch[0], 9)),
    ]:
        config = size_engine(CONFIG, torch.float32, device, options)
        assert (requests, tokens) == (config.max_batch_requests, config.max_batch_tokens)


def test_a_context_beyond_the_models_positions_is_refused_by_name():
    with pytest.raises(SettingError, match=f"^max_model_len is {POSITIONS + 1}, .* only {POSITIONS} positions"):
        sized(65, max_model_len=POSITIONS + 1)


def test_a_context_beyond_the_cache_is_refused_by_name():
    """What was asked for is never lowered in silence."""
    with pytest.raises(SettingError, match=r"^max_model_len is 49 tokens, but the KV cache holds 48: raise kv_cache_memory"):
        sized(4, max_model_len=49)
    assert 48 == sized(4, max_model_len=48).max_model_len


@pytest.mark.parametrize("memory", [1, BLOCK, 2 * BLOCK - 1])
def test_too_little_memory_for_a_cache_is_a_sentence(memory):
    with pytest.raises(SettingError, match=f"^kv_cache_memory is {memory} bytes, but two KV blocks .* {2 * BLOCK}: raise it$"):
        size_engine(CONFIG, torch.float32, "cpu", replace(OPTIONS, kv_cache_memory=memory))
    assert 1 == sized(2).num_blocks


def test_the_fingerprint_of_a_large_file_changes_with_each_byte_and_is_that_of_a_copy(tmp_path):
    path, copy = tmp_path / "a/model.safetensors", tmp_path / "b"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(PART + (5 << 20) + 77)
    found = {fingerprint(path.parent, "a")}
    places = [5000, (1 << 20) + 4096, PART - 1, PART, PART + (5 << 20) + 76]
    for start in places:
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"\1")
        found.add(fingerprint(path.parent, "a"))
    assert 1 + len(places) == len(found)
    shutil.copytree(path.parent, copy)
    assert fingerprint(copy, "a") in found


def test_the_fingerprint_changes_with_the_version(folder, monkeypatch):
    before = fingerprint(folder, "a")
    monkeypatch.setattr("attend.model.engine.fingerprint.version", lambda name: "0.0.0")
    assert before != fingerprint(folder, "a")


@pytest.mark.parametrize(
    ("kind", "contexts", "depends"),
    [
        ("llama-dynamic", (100, 200), True),
        ("phi3-long", (24, 120), True),
        ("llama", (24, 120), False),
        ("llama-yarn", (24, 120), False),
    ],
)
def test_the_fingerprint_changes_with_the_context_where_positions_do(tmp_path, kind, contexts, depends):
    """Keys of one rotary embedding are wrong for another."""
    folder = write_checkpoint(kind, tmp_path)
    options = [replace(OPTIONS, dtype="float32", max_model_len=most) for most in contexts]
    assert len({build_engine(folder, each).info.fingerprint for each in options}) == 1 + depends


def test_the_fingerprint_changes_with_the_config(tmp_path):
    """The same weights with another rotary base are another model."""
    write_checkpoint("llama", tmp_path)
    before = fingerprint(tmp_path, "a")
    edit_config(tmp_path, rms_norm_eps=1e-3)
    assert before != fingerprint(tmp_path, "a")


def test_triton_computes_on_a_gpu_and_is_refused_elsewhere(monkeypatch):
    pytest.importorskip("triton")
    on_gpu = choose_backend("auto", CONFIG, Placement(torch.bfloat16, "cuda", 32))
    assert "triton" == on_gpu.name
    with pytest.raises(SettingError, match="backend is triton, but it needs a CUDA device"):
        choose_backend("triton", CONFIG, Placement(torch.bfloat16, "cpu", 32))
    monkeypatch.setattr("attend.model.backends.triton.find_spec", lambda name: None)
    assert "torch" == choose_backend("auto", CONFIG, Placement(torch.bfloat16, "cuda", 32)).name
    with pytest.raises(SettingError, match="backend is triton, but triton is not installed"):
        choose_backend("triton", CONFIG, Placement(torch.bfloat16, "cuda", 32))


def test_the_fingerprint_changes_with_dtype_backend_and_threads(folder):
    """And the digest of the weights does not."""
    ways = [{}, {"dtype": "bfloat16"}, {"backend": "reference"}, {"num_threads": 3}]
    found = [build_engine(folder, replace(OPTIONS, **way)).info for way in ways]
    assert (len(ways), 1) == (len({each.fingerprint for each in found}), len({each.weights_digest for each in found}))
    assert found[0].fingerprint == build_engine(folder, OPTIONS).info.fingerprint


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "new.json"])
def test_a_folder_that_is_changed_while_it_is_loaded_is_not_served(name, tmp_path):
    """It would be known by the digest of weights that it does not have."""
    folder = write_checkpoint("llama", tmp_path)

    def change(read, total):
        (folder / "new").write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"{}")
        (folder / "new").rename(folder / name)

    with pytest.raises(CheckpointError, match="was changed while it was loaded"):
        build_engine(folder, OPTIONS, change)


def test_an_engine_of_drawn_weights_serves_without_the_files_and_is_known_by_its_fingerprint(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for form in ("none", "int8"):
        engine = build_engine(tmp_path, replace(OPTIONS, load_format="dummy", quantize=form))
        [tokens, reason] = generate(engine, ask("a", [1, 2, 3], 5))
        assert (5, FinishReason.LENGTH) == (len(tokens), reason)
    drawn = build_engine(folder, replace(OPTIONS, load_format="dummy")).info.fingerprint
    assert drawn != build_engine(folder, OPTIONS).info.fingerprint


@pytest.mark.parametrize(("name", "what"), [("native", "no compiler is here"), ("triton", "triton is not installed")])
def test_a_backend_that_is_not_there_is_refused_with_what_to_do(monkeypatch, name, what):
    monkeypatch.setattr("attend.model.backends.native.load_library", lambda: None)
    monkeypatch.setattr("attend.model.backends.native.absence", lambda: ("no_compiler", what))
    monkeypatch.setattr("attend.model.backends.triton.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=f"backend is {name}, but {what}"):
        choose_backend(name, CONFIG, Placement(torch.float32, "cpu", 16))


@pytest.mark.parametrize("changed", [{"load_format": "dummy"}, {"quantize": "int8"}, {"adapters": True}], ids=str)
def test_what_ranks_cannot_do_is_refused_by_its_name(changed):
    [name] = changed
    with pytest.raises(SettingError, match=f"tensor_parallel is 2, but {name} is set"):
        check_shared(CONFIG, replace(OPTIONS, **changed), 2)
    check_shared(CONFIG, replace(OPTIONS, **changed), 1)


def test_the_fingerprint_knows_the_gpu_and_its_cuda(folder, monkeypatch):
    found = set()
    for name, version in [("H100", "12.8"), ("H200", "12.8"), ("H200", "13.0")]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        monkeypatch.setattr(torch.version, "cuda", version)
        found.add(fingerprint(folder, processor("cuda")))
    assert 3 == len(found)


def test_the_fingerprint_knows_the_kind_of_cpu(folder, monkeypatch):
    before = build_engine(folder, OPTIONS).info.fingerprint
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert before != build_engine(folder, OPTIONS).info.fingerprint


def test_a_built_engine_says_what_it_is(folder):
    info = build_engine(folder, OPTIONS).info
    theirs = their_model(folder)
    assert ("llama", "cpu", "float32", "torch") == (info.family, info.device, info.dtype, info.backend)
    assert (VOCAB, POSITIONS, 64, 16, 64) == (
        info.vocab_size,
        info.max_model_len,
        info.max_batch_requests,
        info.block_size,
        info.num_blocks,
    )
    assert (1, (2,)) == (info.bos_token_id, info.eos_token_ids)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == info.num_parameters


@needs_units
def test_packing_replaces_every_linear_of_a_bfloat16_decoder_and_keeps_its_embedding():
    """Also the head that shares its weight with the embedding."""
    net = tiny_decoder(CONFIG).bfloat16()
    hidden, table = torch.randn(3, CONFIG.hidden_size).bfloat16(), net.embedding.tokens.weight.clone()
    with torch.inference_mode():
        before = net.logits(hidden)
        pack_linears(net)
        torch.testing.assert_close(before, net.logits(hidden), rtol=2e-2, atol=2e-2)
    assert {PackedLinear} == {type(module) for module in net.modules() if isinstance(module, nn.Linear)}
    assert isinstance(net.head, PackedLinear)
    assert torch.equal(table, net.embedding.tokens.weight)


def test_packing_leaves_a_cpu_without_bfloat16_units_alone(monkeypatch):
    """oneDNN refuses to lay bfloat16 out on a CPU with AVX2 alone; a plain Linear works there."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    net = tiny_decoder(CONFIG).bfloat16()
    pack_linears(net)
    assert type(net.head) is Linear


@pytest.mark.parametrize(
    ("changes", "words"), [({"dtype": "bfloat16"}, "in bfloat16"), ({"kv_dtype": "int8"}, "with kv_dtype = int8")]
)
def test_guesses_are_refused_where_one_could_change_an_answer(folder, changes, words):
    with pytest.raises(SettingError, match=f"^draft_tokens is set, but .* of the torch backend {words}: it needs"):
        build_engine(folder, replace(OPTIONS, backend="torch", draft_tokens=4, **changes))


def test_an_engine_warms_up_on_its_step_thread_and_reports_nothing_of_it(folder):
    engine, threads, reports = build_engine(folder, OPTIONS), [], []
    submit = engine._engine.runner.submit
    engine._engine.runner.submit = lambda plan: threads.append(threading.current_thread()) or submit(plan)
    engine.on_step(reports.append)
    engine.start()
    assert [engine._thread] * 2 == threads
    assert [] == reports
    tokens, _ = asyncio.run(read(engine, ask("a", [5, 17, 3], 8)))
    assert len(tokens) == len(reports) > 0
    engine.close()


def test_a_model_that_cannot_run_never_starts(folder):
    engine = build_engine(folder, OPTIONS)
    engine._engine.runner.net.logits = lambda hidden: torch.full((len(hidden), VOCAB), torch.nan)
    with pytest.raises(EngineFailed, match=r"^the model's first step failed: the model's logits are not finite$"):
        engine.start()


@pytest.mark.parametrize(
    ("asked", "served"),
    [({"max_model_len": 48}, 48), ({"kv_cache_memory": 5 * BLOCK}, 64)],
    ids=["asked for", "what the cache holds"],
)
def test_tables_of_positions_are_as_long_as_the_context_that_is_served(tmp_path, monkeypatch, asked, served):
    """A model that knows a million positions serves a short context without a gigabyte of angles, at any moment."""
    folder, made, make = write_checkpoint("llama", tmp_path), [], attend.model.net.transformer.rotary_table
    whole = load_decoder(folder, torch.float32, "cpu")
    edit_config(folder, max_position_embeddings=1_000_000)
    monkeypatch.setattr(
        attend.model.net.transformer, "rotary_table", lambda rope, length: made.append(length) or make(rope, length)
    )
    engine = build_engine(folder, replace(OPTIONS, **asked))
    net = engine._engine.runner.net
    ((cos, sin),) = net.rope_tables
    assert served == engine.info.max_model_len == max(made) == len(cos) == len(sin)
    assert torch.equal(cos, whole.rope_tables[0][0][:served])


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_large_cache_takes_memory_as_it_is_used(tmp_path, backend):
    """At the start it is an address range: of 2 GiB not a tenth is there, also after a first request."""
    if backend == "native" and load_native() is None:
        pytest.skip("the native decoder is not built")
    save(tiny_decoder(tiny_config(head_size=32, max_positions=1 << 18)), tmp_path, torch.bfloat16)
    options = replace(OPTIONS, dtype="bfloat16", backend=backend, block_size=32, kv_cache_memory=2 << 30)
    before = resident()
    engine = build_engine(tmp_path, options)
    assert engine.info.cache_bytes == engine._engine.runner.cache.nbytes > 1 << 30
    assert resident() - before < 200 << 20
    generate(engine, ask("a", [1, 2, 3], max_tokens=8))
    assert resident() - before < 200 << 20


def resident() -> int:
    """Bytes of this process in memory (proc_pid_statm(5))."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_request_in_blocks_that_others_have_left_has_the_tokens_that_it_has_in_new_ones(tmp_path, backend):
    if backend == "native" and load_native() is None:
        pytest.skip("the native decoder is not built")
    save(tiny_decoder(tiny_config(head_size=32)), tmp_path, torch.bfloat16)
    answers = []
    for left in (None, torch.nan):
        options = replace(OPTIONS, dtype="bfloat16", backend=backend, block_size=32, kv_cache_memory=1 << 20)
        engine = build_engine(tmp_path, options)
        cache = engine._engine.runner.cache
        for part in (*cache.keys, *cache.values) if left is not None else ():
            part.fill_(left)
        answers.append(generate(engine, ask("a", list(range(40)), max_tokens=12)))
    assert answers[0] == answers[1]


def test_a_cache_for_which_there_is_no_memory_is_refused_by_name(folder, monkeypatch):
    monkeypatch.setattr("attend.model.engine.cache.available_memory", lambda: OPTIONS.kv_cache_memory - 1)
    with pytest.raises(SettingError, match=r"^kv_cache_memory is \d+ bytes, but only \d+ bytes are free"):
        build_engine(folder, OPTIONS)


def test_the_cache_is_sized_by_what_the_weights_leave(tmp_path, monkeypatch):
    """Matrices that still lie in a mapped file do not count as taken: they are copied before the cache is sized."""
    save(tiny_decoder(tiny_config(head_size=32)), tmp_path, torch.bfloat16)
    formed, free = [], 4 << 20
    make = Native.decoder
    monkeypatch.setattr(Native, "decoder", lambda *given: formed.append(make(*given)) or formed[-1])
    monkeypatch.setattr("attend.model.engine.cache.available_memory", lambda: free // 4 if formed else free)
    engine = build_engine(tmp_path, replace(OPTIONS, dtype="bfloat16", block_size=32, kv_cache_memory=None))
    assert engine.info.cache_bytes <= free // 16
    assert engine.info.max_model_len <= engine.info.num_blocks * 32


@pytest.mark.parametrize(("backend", "mapped"), [("torch", False), ("reference", False), ("native", True)])
def test_only_the_native_decoder_which_copies_them_gets_matrices_in_the_mapped_file(tmp_path, monkeypatch, backend, mapped):
    """What is served from must not change, or go, with the file."""
    if backend == "native" and load_native() is None:
        pytest.skip("the native decoder is not built")
    save(tiny_decoder(tiny_config(head_size=32)), tmp_path, torch.bfloat16)
    seen = []

    def watched(*words, **named):
        seen.append(load_decoder(*words, **named))
        return seen[-1]

    monkeypatch.setattr(attend.model.engine.build, "load_decoder", watched)
    build_engine(tmp_path, replace(OPTIONS, dtype="bfloat16", backend=backend, block_size=32, kv_cache_memory=1 << 20)).close()
    assert [net.mapped_files is not None for net in seen] == [mapped]


def test_a_cache_in_8_bits_holds_nearly_twice_the_tokens_of_bfloat16(tmp_path):
    """34 bytes in place of 64 for 32 numbers. It has a fingerprint of its own."""
    save(tiny_decoder(tiny_config(head_size=32, max_positions=1 << 16)), tmp_path, torch.bfloat16)
    infos = []
    for kv_dtype in ("auto", "int8"):
        options = replace(OPTIONS, dtype="bfloat16", backend="torch", kv_cache_memory=1 << 20, kv_dtype=kv_dtype)
        engine = build_engine(tmp_path, options)
        assert engine._engine.runner.cache.in_8_bits == (kv_dtype == "int8")
        infos.append(engine.info)
    plain, small = infos
    assert small.num_blocks + 1 == (plain.num_blocks + 1) * 64 // 34
    assert small.fingerprint != plain.fingerprint


def test_a_cache_in_8_bits_is_refused_where_nobody_computes_it():
    assert Reference(CONFIG).kv_dtype("int8", torch.float32, "cpu") == torch.int8
    for device, backend, who in (("cuda", Torch, "cuda"), ("cpu", Triton, "the triton backend")):
        with pytest.raises(SettingError, match=f"^kv_dtype is int8, but {who} has no int8 KV cache yet: it needs device = cpu"):
            backend(CONFIG).kv_dtype("int8", torch.float32, device)
        assert backend(CONFIG).kv_dtype("auto", torch.bfloat16, device) == torch.bfloat16


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_every_layer_of_a_step_is_a_sign_of_life(tmp_path, backend):
    """Counted in the memory that others look at while the step runs: a long one is not taken for one that stands still."""
    if backend == "native" and load_native() is None:
        pytest.skip("the native decoder is not built")
    save(tiny_decoder(tiny_config(num_layers=5, head_size=32)), tmp_path, torch.bfloat16)
    options = replace(OPTIONS, dtype="bfloat16", backend=backend, block_size=32, kv_cache_memory=1 << 20)
    engine = build_engine(tmp_path, options)
    inner, before = engine._engine, engine._progress.count
    inner.add(ask("a", [1, 2, 3], max_tokens=1))
    inner.step()
    beats = engine._progress.count - before
    threads = torch.get_num_threads() if backend == "native" else 1
    assert 5 <= beats <= 5 * threads


def test_an_engine_says_how_its_weights_are_kept_and_each_way_has_a_fingerprint(folder, caplog):
    engines = {wanted: build_engine(folder, replace(OPTIONS, quantize=wanted)) for wanted in ("none", "int8", "int4")}
    assert [engine.info.weights for engine in engines.values()] == [engines["none"].info.dtype, "int8", "int4"]
    assert len({engine.info.fingerprint for engine in engines.values()}) == 3
    assert len({engine.info.num_parameters for engine in engines.values()}) == 1
    with caplog.at_level("WARNING"):
        build_engine(folder, replace(OPTIONS, backend="torch", quantize="int4"))
    assert "quantize is int4 without the native backend" in caplog.text


def test_weights_in_whole_numbers_are_refused_where_nobody_multiplies_them():
    plain, experts = tiny_config(), tiny_config(num_experts=4, experts_per_token=2)
    with pytest.raises(SettingError, match=r"^quantize is int8, but the torch backend does not multiply quantised weights"):
        Torch(plain).quantized_kind("int8", "cuda")
    with pytest.raises(SettingError, match=r"^quantize is int4, but cuda does not multiply quantised experts"):
        Triton(experts).quantized_kind("int4", "cuda")
    assert Triton(plain).quantized_kind("int8", "cuda") == INT8
    assert Triton(experts).quantized_kind("none", "cuda") is None


def test_a_backend_is_refused_for_the_ranks_of_a_model_only_where_it_computes_none_of_their_parts():
    at = Placement(torch.bfloat16, "cpu", 32, is_sharded=True)
    with pytest.raises(SettingError, match=r"^backend is native, but it does not support this model with tensor_parallel$"):
        choose_backend("native", CONFIG, at)
    with pytest.raises(SettingError, match=r"^backend is triton, but (triton is not installed|it needs a CUDA device)"):
        choose_backend("triton", CONFIG, at)
    assert choose_backend("torch", CONFIG, at).name == "torch"
