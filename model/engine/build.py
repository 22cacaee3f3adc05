"""Builds an engine from a checkpoint folder: device, dtype, weights, backend, KV cache."""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from attend.model.backends.backend import Backend, Placement, name_of
from attend.model.backends.choice import choose_backend
from attend.model.backends.native import Native
from attend.model.backends.torch import Torch
from attend.model.config import ModelConfig
from attend.model.devices import DTYPES, choose_device, gpu_dtype, name_of_device
from attend.model.engine.cache import (
    SNAPSHOTS_PER_CONTEXT,
    check_free,
    free_device_memory,
    free_memory,
    keeps_prefixes,
    memory_left,
    release_memory,
    size_groups,
    tell_states,
    usual_contexts,
    usual_memory,
    with_states,
)
from attend.model.engine.config import EngineConfig
from attend.model.engine.engine import Engine, warm_up
from attend.model.engine.fallback import Fallback, slower_path
from attend.model.engine.fingerprint import fingerprint, processor, ropes, stamps, weights_digest
from attend.model.engine.loop import AsyncEngine
from attend.model.engine.offload.offloader import open_offload
from attend.model.engine.options import EngineOptions
from attend.model.engine.ranks import Leader, ShardRunner, check_shared
from attend.model.engine.request import EngineInfo
from attend.model.engine.runner import ModelRunner
from attend.model.engine.scheduler import Scheduler
from attend.model.engine.startup import check_batch_invariance
from attend.model.errors import CheckpointError, SettingError
from attend.model.explain.explainer import Explainer
from attend.model.net.checkpoint import load_decoder, makes_text, read_config
from attend.model.net.kv_cache import KVCache
from attend.model.net.packed_linears import multiplies_bfloat16
from attend.model.net.quantised import names_of_kinds
from attend.model.net.transformer import Decoder
from attend.model.parallel.group import ProcessGroup
from attend.model.parallel.shards import config_of, load_shard

log = logging.getLogger("attend.engine")
SWITCH_SECONDS = 0.0005
"""How long another thread may keep the interpreter from the step thread; Python's own 5 ms are more than a step."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What computes: of one process, or of one of the ranks that share a model."""

    runner: ModelRunner
    net: Decoder
    """Its share of the weights as they were read from the files; `runner` has the converted form that computes."""
    model: ModelConfig
    config: EngineConfig
    backend: str
    dtype: torch.dtype
    weights: str
    """How weights are kept in memory: a dtype, "int8" or "int4"."""
    setup: str
    """What outputs depend on beside the checkpoint: backend, dtypes, processor and versions, for the fingerprint."""
    fallback: Fallback


def build_engine(
    folder: Path,
    options: EngineOptions,
    report: Callable[[int, int], None] = lambda num_bytes, total: None,
    group: ProcessGroup | None = None,
) -> AsyncEngine:
    """Load a checkpoint and build an engine for it, not yet started. Raises CheckpointError or SettingError.

    `report` is called with the bytes of weights read so far, and with all of them. With `group` this process is rank 0 of
    those that share the model; each of the others calls `build_runner`, and then `follow`.
    """
    before = stamps(folder)
    built = build_runner(folder, options, report, group)
    config, model, cache = built.config, built.model, built.runner.cache
    digest = weights_digest(folder)
    if stamps(folder) != before:
        raise CheckpointError(f"{folder} was changed while it was loaded: start again")
    info = EngineInfo(
        family=model.family,
        device=built.runner.device,
        dtype=name_of(built.dtype),
        weights=built.weights,
        backend=built.backend,
        num_parameters=built.net.num_parameters,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        max_model_len=config.max_model_len,
        max_batch_requests=config.max_batch_requests,
        max_queued_requests=options.max_queued_requests,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        cache_bytes=cache.nbytes * (1 if group is None else group.ranks),
        bos_token_id=model.bos_token_id,
        eos_token_ids=model.eos_token_ids,
        weights_digest=digest,
        fingerprint=fingerprint(folder, built.setup, digest),
        makes_text=makes_text(folder),
        slower_path=built.fallback.path(),
        device_name=name_of_device(built.runner.device),
    )
    if info.slower_path is not None:
        log.warning("%s", info.slower_path.cause)
    scheduler, ahead = Scheduler(config, time.monotonic), built.runner.device == "cuda"
    kv_cache_bytes = partial(cache.resident_bytes, 1 if group is None else group.ranks)
    if isinstance(built.runner, ShardRunner):
        leader = Leader(built.runner, time.monotonic)
        engine = Engine(scheduler, leader, time.monotonic, async_scheduling=ahead, idle=leader.idle)
        return _with_thread(engine, info, options, built, kv_cache_bytes, ready=leader.hurry)
    offload = open_offload(options, cache, scheduler, info.fingerprint)
    engine = Engine(scheduler, built.runner, time.monotonic, async_scheduling=ahead, offload=offload)
    return _with_thread(engine, info, options, built, kv_cache_bytes, explainer=Explainer(built.net))


def build_runner(
    folder: Path,
    options: EngineOptions,
    report: Callable[[int, int], None] = lambda num_bytes, total: None,
    group: ProcessGroup | None = None,
) -> ModelParts:
    """Load what this process computes, with a cache. Of ranks all must call it: they agree on the size of the cache."""
    model, device = read_config(folder), choose_device(options.device)
    ranks = 1 if group is None else group.ranks
    check_shared(model, options, ranks)
    config, began = model if group is None else config_of(model, ranks), time.perf_counter()
    backend, dtype, kv_dtype, fallback = choose_way(folder, config, options, device, ranks)
    net = read_net(folder, model, options, dtype, device, backend, report, group)
    weights = names_of_kinds(net) or name_of(dtype)
    memory = measured_memory(net, backend, options, kv_dtype, device, fallback, is_sharded=ranks > 1)
    context = agreed_sizes(config, kv_dtype, device, options, memory, group).max_model_len
    net.reach(context)
    form = backend.decoder(net, report)  # after which `net` stands for what serves
    # once more: matrices may have lain in a mapped file, whose pages count as free
    engine_config = agreed_sizes(config, kv_dtype, device, options, memory, group)
    engine_config = replace(engine_config, max_model_len=min(context, engine_config.max_model_len))
    if device == "cpu" and options.kv_cache_memory is not None:
        check_free(options.kv_cache_memory * ranks)
    tell_states(options, config, engine_config, device)
    counts = [size.num_blocks for size in engine_config.groups]
    cache = KVCache.allocate(config, counts, engine_config.block_size, kv_dtype, device)
    log.info("Loaded the weights in %.1f s; the KV cache has %.1f GB", time.perf_counter() - began, cache.nbytes / 1e9)
    if options.draft_tokens:
        backend.check_drafts(options, dtype)
    # the proof of the deterministic mode computes steps that are not recorded: so must those be that follow it
    record = None
    if not options.deterministic:
        recording = partial(backend.record, form, cache, engine_config, is_sharded=ranks > 1)
        record = partial(fallback.record_steps, recording, form, backend.attention, cache)
    draw = fallback.draw(backend, dtype, device)
    adapters = backend.adapters(form, folder, device, exact=options.deterministic) if options.adapters else None
    attention, logprobs = backend.attention, backend.logprobs()
    runner = backend.runner()(form, attention, cache, device, draw=draw, adapters=adapters, logprobs=logprobs, record=record)
    if group is not None:
        runner = ShardRunner(runner, group)
    if options.deterministic:
        use_threads(options)  # as many as will serve
        check_batch_invariance(runner, min(counts), engine_config.max_model_len)
    setup = f"{dtype} {weights} {kv_dtype} {processor(device)} {attention.name} {_threads(options)} {ranks} ranks"
    setup += f" {ropes(config, context)}"
    setup += "" if options.load_format == "auto" else f" {options.load_format}"
    if group is None and fallback.path() is not None:
        use_threads(options)
        fallback.measure(runner, engine_config)
    return ModelParts(runner, net, model, engine_config, attention.name, dtype, weights, setup, fallback)


def choose_way(
    folder: Path, config: ModelConfig, options: EngineOptions, device: str, ranks: int
) -> tuple[Backend, torch.dtype, torch.dtype, Fallback]:
    """What computes a model, in which dtype, and that of the KV cache: torch where the kernels of the fastest backend differ
    from it on this device, or fail. `config`: what this rank has of the model.
    """
    is_sharded, fallback = ranks > 1, Fallback(options, device, ranks)
    natively = not is_sharded and options.backend in ("auto", Native.name) and Native.serves(config, device, options.block_size)
    dtype = choose_dtype(options.dtype, device, natively=natively, family=config.family)
    at = Placement(dtype, device, options.block_size, is_sharded)
    backend = choose_backend(options.backend, config, at)
    if options.backend == "auto":
        fallback.note(slower_path(backend, config, at))
    kv_dtype = backend.kv_dtype(options.kv_dtype, dtype, device)
    if fallback.keeps(backend, folder, dtype, kv_dtype):
        return backend, dtype, kv_dtype, fallback
    dtype, backend = choose_dtype(options.dtype, device, natively=False, family=config.family), Torch(config)
    return backend, dtype, backend.kv_dtype(options.kv_dtype, dtype, device), fallback


def read_net(
    folder: Path,
    config: ModelConfig,
    options: EngineOptions,
    dtype: torch.dtype,
    device: str,
    backend: Backend,
    report: Callable[[int, int], None],
    group: ProcessGroup | None,
) -> Decoder:
    """The decoder of a folder, or this rank's part of it, once all ranks have theirs."""
    if group is not None:
        net = load_shard(folder, config, dtype, group, report)
        group.connect()
        return net
    kept = backend.load_options() | {"quantize": backend.quantized_kind(options.quantize, device)}
    return load_decoder(folder, dtype, device, 0, **kept, dummy=options.load_format == "dummy", report=report)


def agreed_sizes(
    config: ModelConfig,
    kv_dtype: torch.dtype,
    device: str,
    options: EngineOptions,
    memory: int | None,
    group: ProcessGroup | None,
) -> EngineConfig:
    """`size_engine`, with the memory of the rank that has least. On a CPU the ranks share that of the machine."""
    if group is not None:
        if memory is None:
            memory = options.kv_cache_memory or free_memory() // group.ranks
        memory = group.least(memory)
    return size_engine(config, kv_dtype, device, options, memory)


def _with_thread(
    engine: Engine,
    info: EngineInfo,
    options: EngineOptions,
    built: ModelParts,
    kv_cache_bytes: Callable[[], int],
    explainer: Explainer | None = None,
    ready: Callable[[], None] = lambda: None,
) -> AsyncEngine:
    """The engine with its step thread, which prepares itself first, and calls `ready` then."""

    def prepare() -> EngineInfo:
        sys.setswitchinterval(SWITCH_SECONDS)
        use_threads(options)
        built.runner.prepare()
        slower = built.fallback.path()
        if slower is not None and slower != info.slower_path:
            log.warning("%s", slower.cause)
        warm_up(engine)  # libraries keep handles and memory for each thread
        ready()
        return replace(info, recorded_sizes=built.runner.recorded_sizes, slower_path=slower)

    return AsyncEngine(
        engine,
        info,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        prepare=prepare,
        adapters=built.runner.adapters,
        explainer=explainer,
        progress=built.runner.progress,
        kv_cache_bytes=kv_cache_bytes,
    )


def use_threads(options: EngineOptions) -> None:
    """Set how many threads the work of the calling thread has."""
    if options.num_threads:
        torch.set_num_threads(options.num_threads)


def _threads(options: EngineOptions) -> str:
    """The number of CPU threads, for the fingerprint: with another one, sums may be added in another order."""
    return "deterministic" if options.deterministic else str(options.num_threads or torch.get_num_threads())


def choose_dtype(dtype: str, device: str, *, natively: bool, family: str = "") -> torch.dtype:
    """`auto` on a CPU is bfloat16 where the native decoder serves, or the CPU multiplies it; else float32. See `gpu_dtype`."""
    if device == "cuda":
        return gpu_dtype(dtype, family)
    if dtype != "auto":
        return DTYPES[dtype]
    return torch.bfloat16 if natively or multiplies_bfloat16() else torch.float32


def wanted_engine(config: ModelConfig, options: EngineOptions, device: str) -> EngineConfig:
    """The sizes that are asked for, whatever the memory. Raises SettingError."""
    asked = options.max_model_len
    if asked is not None and asked > config.max_positions:
        raise SettingError(f"max_model_len is {asked}, but this model has only {config.max_positions} positions")
    context, batch = asked or config.default_context, options.batch(device)
    return EngineConfig(
        max_model_len=context,
        num_blocks=-(-context // options.block_size),
        block_size=options.block_size,
        max_batch_requests=batch.requests,
        max_batch_tokens=batch.tokens,
        prefix_caching=keeps_prefixes(config, options),
        stream_turns=device == "cpu",
        draft_tokens=options.draft_tokens,
    )


def measured_memory(
    net: Decoder,
    backend: Backend,
    options: EngineOptions,
    kv_dtype: torch.dtype,
    device: str,
    fallback: Fallback,
    *,
    is_sharded: bool,
) -> int | None:
    """Bytes of the GPU for the cache, beside what steps take; None on a CPU, or where it is set. The engine's own cache is
    not there yet.
    """
    if device != "cuda" or options.kv_cache_memory is not None:
        return None
    config = wanted_engine(net.config, options, device)
    net.reach(config.max_model_len)
    form = backend.decoder(net)

    def runner(cache: KVCache) -> ModelRunner:
        record = partial(backend.record, form, cache, config, is_sharded=is_sharded)
        graphs, pieces = fallback.record_steps(record, form, backend.attention, cache)
        return ModelRunner(form, backend.attention, cache, "cuda", graphs, pieces=pieces)

    memory = memory_left(net.config, config, kv_dtype, "cuda", runner, free_device_memory)
    release_memory()
    return memory


def size_engine(
    config: ModelConfig, kv_dtype: torch.dtype, device: str, options: EngineOptions, memory: int | None = None
) -> EngineConfig:
    """The cache takes the memory it is given, with keys and values in `kv_dtype`; the context is as long as it can hold.

    On a CPU it takes no more than `usual_memory` of it where nobody has set how much.
    """
    wanted, asked = wanted_engine(config, options, device), options.max_model_len
    context = wanted.max_model_len
    if memory is None:
        memory = free_memory() if options.kv_cache_memory is None else options.kv_cache_memory
    wanted = with_states(config, wanted, memory, options.state_cache_share)
    if device == "cpu" and options.kv_cache_memory is None:
        wanted = replace(wanted, num_snapshots=min(wanted.num_snapshots, SNAPSHOTS_PER_CONTEXT * usual_contexts(wanted)))
        memory = min(memory, usual_memory(config, wanted, kv_dtype))
    groups = size_groups(config, wanted, kv_dtype, memory, asked or 1)
    if not asked:
        room = (group.num_blocks * options.block_size for group in groups if group.window is None and not group.has_state)
        context = min([context, *room])
    kept = groups[-1].num_blocks - wanted.max_batch_requests if groups[-1].has_state else 0
    return replace(wanted, max_model_len=context, num_blocks=groups[0].num_blocks, num_snapshots=kept, groups=groups)
