"""From a checkpoint folder to a running engine: device, dtype, weights, backend, cache."""

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from model.config import EngineConfig, ModelConfig
from model.engine.adapters import Adapters
from model.engine.cache import free_device_memory, free_memory, give_back, most_requests, size_groups
from model.engine.choice import choose_backend, choose_draw, open_adapters, record_steps, serving_form
from model.engine.engine import Engine
from model.engine.exact import check_exact
from model.engine.loop import AsyncEngine
from model.engine.memory import memory_left
from model.engine.request import EngineInfo, Request, StepReport
from model.engine.runner import ModelRunner
from model.engine.scheduler import Scheduler
from model.errors import EngineFailed, SettingError
from model.explain.explainer import Explainer
from model.gguf.places import is_gguf, parts
from model.net.backends import AttentionBackend
from model.net.checkpoint import load, read_config
from model.net.formats.codes import KINDS, Kind
from model.net.kv_cache import KVCache
from model.net.native import decoder as native
from model.net.native.library import variant as native_variant
from model.net.packed import multiplies_bfloat16
from model.net.quantised import names_of_kinds
from model.net.transformer import Decoder
from model.params import SamplingParams

log = logging.getLogger("attend.engine")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAMPLED = 1 << 20
SWITCH_SECONDS = 0.0005
"""How long another thread may keep the interpreter from the step thread; Python's own 5 ms are more than a step."""


class Batch(NamedTuple):
    """The most that a step computes."""

    requests: int
    tokens: int


BATCHES = {"cpu": Batch(64, 1024), "cuda": Batch(256, 8192)}
"""Where nothing is set, by device. A GPU reads its weights for few tokens in the time that it needs to multiply hundreds."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may set; None and "auto" are chosen for the checkpoint and the machine."""

    device: str = "auto"
    dtype: str = "auto"
    backend: str = "auto"
    quantize: str = "none"
    """Keep the matrices in whole numbers: int8 or int4."""
    max_model_len: int | None = None
    max_batch_requests: int | None = None
    max_batch_tokens: int | None = None
    max_queued_requests: int = 256
    max_queued_tokens: int = 1 << 19
    block_size: int = 32
    kv_cache_memory: int | None = None
    """Bytes."""
    kv_dtype: str = "auto"
    """`auto` is the dtype of the weights; int8 takes about half of the memory of bfloat16, see `KVCache`."""
    prefix_caching: bool = True
    draft_tokens: int = 0
    """Guessed tokens of a step, see `lookup.py`; refused where a token's scores depend on the other rows of a step."""
    adapters: bool = False
    """Compute requests that have LoRA adapters."""
    deterministic: bool = False
    """Refuse to start where a request's tokens would depend on the other requests of a step."""
    num_threads: int = 0
    """CPU threads of the step thread; 0 leaves torch's own choice."""

    def batch(self, device: str) -> Batch:
        """What is set, else what is usual on the device, `cpu` or `cuda`."""
        usual = BATCHES[device]
        return Batch(
            usual.requests if self.max_batch_requests is None else self.max_batch_requests,
            usual.tokens if self.max_batch_tokens is None else self.max_batch_tokens,
        )


def build_engine(
    folder: Path, options: EngineOptions, report: Callable[[int, int], None] = lambda done, total: None
) -> AsyncEngine:
    """Load a checkpoint and build an engine for it, not yet started. Raises CheckpointError or SettingError.

    `report` is called with the bytes of weights read so far, and with all of them.
    """
    config = read_config(folder)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device, natively=decodes_natively(config, options, device))
    backend = choose_backend(options.backend, config, dtype, device, options.block_size)
    natively = isinstance(backend, native.NativeBackend)  # which multiplies codes: others would make each product's plain
    kind = quantised_kind(options.quantize, config, device, backend.name)
    held = choose_kv_dtype(options, dtype, device, backend.name)
    floats = backend.name == "triton" and not config.num_experts  # Triton multiplies all codes but those of experts
    keep = natively or floats
    net = load(folder, dtype, device, 0, quantize=kind, keep_codes=keep, keep_floats=floats, mapped=natively, report=report)
    weights = names_of_kinds(net) or name_of(dtype)
    engine_config = size_engine(config, held, device, options, measured_memory(net, backend, options, held, device))
    net.reach(engine_config.max_model_len)
    tell_states(options, engine_config, device)
    counts = [group.num_blocks for group in engine_config.groups]
    cache = KVCache.allocate(config, counts, engine_config.block_size, held, device)
    form, explainer = serving_form(net, backend), Explainer(net)  # after which `net` stands for what serves
    if options.draft_tokens and not isinstance(form, native.NativeDecoder):
        check_guesses(options, dtype, backend.name)
    graphs = record_steps(form, backend, cache, engine_config)
    draw = choose_draw(form, dtype, device, exact=options.deterministic)
    adapters = open_adapters(form, folder, device, exact=options.deterministic) if options.adapters else None
    runner = ModelRunner(form, backend, cache, device, graphs, draw, adapters)
    if options.deterministic:
        _use_threads(options)  # as many as will serve
        check_exact(runner, min(counts), engine_config.max_model_len)
    info = EngineInfo(
        family=config.family,
        device=device,
        dtype=name_of(dtype),
        weights=weights,
        backend=backend.name,
        num_parameters=net.num_parameters,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_model_len=engine_config.max_model_len,
        max_batch_requests=engine_config.max_batch_requests,
        max_queued_requests=options.max_queued_requests,
        block_size=engine_config.block_size,
        num_blocks=engine_config.num_blocks,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        fingerprint=fingerprint(folder, f"{dtype} {weights} {held} {_setup(options, device, backend)}"),
    )
    engine = Engine(Scheduler(engine_config, time.monotonic), runner, time.monotonic, async_scheduling=device == "cuda")

    return _with_thread(engine, info, options, adapters, explainer)


def _with_thread(
    engine: Engine, info: EngineInfo, options: EngineOptions, adapters: Adapters | None, explainer: Explainer
) -> AsyncEngine:
    """The engine with its step thread, which prepares itself first."""

    def prepare() -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        _use_threads(options)
        warm_up(engine)  # libraries keep handles and memory for each thread

    return AsyncEngine(
        engine,
        info,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        prepare=prepare,
        adapters=adapters,
        explainer=explainer,
    )


def _use_threads(options: EngineOptions) -> None:
    """Set how many threads the work of the calling thread has."""
    if options.num_threads:
        torch.set_num_threads(options.num_threads)


def _setup(options: EngineOptions, device: str, backend: AttentionBackend) -> str:
    """What answers depend on beside the weights: with another number of threads sums may run in another order."""
    threads = "deterministic" if options.deterministic else str(options.num_threads or torch.get_num_threads())
    return f"{processor(device)} {backend.name} {threads}"


def warm_up(engine: Engine) -> None:
    """Two steps of a short request: lazy set-up is done before the first caller, and a model that cannot run never serves.

    The engine learns how long a token may take: in steps of few tokens each takes longest. Its observer is not called.
    Raises EngineFailed.
    """
    reports: list[StepReport] = []
    observer, engine.observer = engine.observer, reports.append
    length = min(8, engine.scheduler.config.max_model_len - 2)
    engine.add(Request("warm-up", [0] * max(1, length), 2, SamplingParams()))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise EngineFailed(f"the model cannot run a first step: {output.error}")
    engine.observer = observer
    engine.seconds_a_token = min(report.seconds / report.num_tokens for report in reports)


def choose_device(wanted: str) -> str:
    """`auto` is CUDA where there is one; `cuda` never falls back to the CPU."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SettingError("device is cuda, but this process sees no CUDA device")
    return "cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu"


def choose_dtype(wanted: str, device: str, *, natively: bool) -> torch.dtype:
    """`auto` is bfloat16 on CUDA, where the native decoder serves, and on CPUs that multiply it natively; else float32."""
    if wanted != "auto":
        return DTYPES[wanted]
    return torch.bfloat16 if device == "cuda" or natively or multiplies_bfloat16() else torch.float32


def quantised_kind(wanted: str, config: ModelConfig, device: str, backend: str) -> Kind | None:
    """The kind of codes in matrices that are kept in whole numbers; None for plain ones. Raises SettingError."""
    if wanted == "none":
        return None
    if config.num_experts and (device != "cpu" or backend == "triton"):
        who = f"{device} does not multiply experts in whole numbers"
        raise SettingError(f"quantize is {wanted}, but {who}: it needs device = cpu and another backend than triton")
    if device != "cpu" and backend != "triton":
        raise SettingError(f"quantize is {wanted}, but the {backend} backend does not multiply whole numbers on {device}")
    if backend not in ("native", "triton"):
        log.warning(
            "quantize is %s without the native backend: each product first makes its matrix plain, which is slow", wanted
        )
    return KINDS[wanted]


def choose_kv_dtype(options: EngineOptions, dtype: torch.dtype, device: str, backend: str) -> torch.dtype:
    """The dtype of the KV cache; int8 is refused where no backend computes with it."""
    if options.kv_dtype == "auto":
        return dtype
    if device != "cpu" or backend == "triton":
        who = "the triton backend" if device == "cpu" else device
        raise SettingError(f"kv_dtype is {options.kv_dtype}, but it is not computed on {who} yet: it needs device = cpu")
    return torch.int8


def check_guesses(options: EngineOptions, dtype: torch.dtype, backend: str) -> None:
    """Refuse guesses where sums that depend on the number of rows are rounded more coarsely than to float32: SettingError."""
    how = f"in {name_of(dtype)}" if options.kv_dtype == "auto" else f"with kv_dtype = {options.kv_dtype}"
    if (dtype, options.kv_dtype) != (torch.float32, "auto"):
        why = f"a guess could change an answer of the {backend} backend {how}"
        raise SettingError(f"draft_tokens is set, but {why}: it needs float32, or the native backend")


def name_of(dtype: torch.dtype) -> str:
    """As callers read it."""
    return str(dtype).removeprefix("torch.")


def decodes_natively(config: ModelConfig, options: EngineOptions, device: str) -> bool:
    """Whether the native decoder would serve this model in bfloat16, with better than portable vectors."""
    asked = options.backend in ("auto", "native") and native_variant() not in ("", "portable")
    return asked and native.NativeBackend.supports(config, torch.bfloat16, device, options.block_size)


def wanted_engine(config: ModelConfig, options: EngineOptions, device: str) -> EngineConfig:
    """The sizes that are asked for, whatever the memory. Raises SettingError."""
    asked = options.max_model_len
    if asked is not None and asked > config.max_positions:
        raise SettingError(f"max_model_len is {asked}, but this model knows only {config.max_positions} positions")
    context, batch = asked or config.default_context, options.batch(device)
    return EngineConfig(
        max_model_len=context,
        num_blocks=-(-context // options.block_size),
        block_size=options.block_size,
        max_batch_requests=batch.requests,
        max_batch_tokens=batch.tokens,
        prefix_caching=options.prefix_caching and not any(group.has_state for group in config.memory_groups),
        draft_tokens=options.draft_tokens,
    )


def measured_memory(
    net: Decoder, backend: AttentionBackend, options: EngineOptions, held: torch.dtype, device: str
) -> int | None:
    """Bytes of the GPU for the cache, beside what steps take; None on a CPU, or where it is set. The engine's own cache is
    not there yet.
    """
    if device != "cuda" or options.kv_cache_memory is not None:
        return None
    config = wanted_engine(net.config, options, device)
    net.reach(config.max_model_len)
    form = serving_form(net, backend)

    def runner(cache: KVCache) -> ModelRunner:
        return ModelRunner(form, backend, cache, "cuda", record_steps(form, backend, cache, config))

    memory = memory_left(net.config, config, held, "cuda", runner, free_device_memory)
    give_back()
    return memory


def size_engine(
    config: ModelConfig, held: torch.dtype, device: str, options: EngineOptions, memory: int | None = None
) -> EngineConfig:
    """The cache takes the memory it is given, with keys and values in dtype `held`; the context is as long as it can hold."""
    wanted, asked = wanted_engine(config, options, device), options.max_model_len
    context = wanted.max_model_len
    if memory is None:
        memory = free_memory() if options.kv_cache_memory is None else options.kv_cache_memory
    wanted = replace(wanted, max_batch_requests=most_requests(config, memory, wanted.max_batch_requests))
    groups = size_groups(config, wanted, held, memory, asked or 1)
    if not asked:
        room = (group.num_blocks * options.block_size for group in groups if group.window is None and not group.has_state)
        context = min([context, *room])
    return replace(wanted, max_model_len=context, num_blocks=groups[0].num_blocks, groups=groups)


def tell_states(options: EngineOptions, config: EngineConfig, device: str) -> None:
    """Log the settings that do not hold, since layers keep a state for each sequence."""
    if options.prefix_caching and not config.prefix_caching:
        log.warning("prefix caching is off: layers of this model keep a state for each sequence, which no other can begin from")
    fewer = (config.max_batch_requests, options.batch(device).requests)
    if fewer[0] < fewer[1]:
        log.warning("max_batch_requests is %d in place of %d: the states of so many take half of kv_cache_memory", *fewer)


def processor(device: str) -> str:
    """The GPU and the versions of CUDA and Triton, or the CPU's vector instructions: others may sum in another order."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()} CUDA {torch.version.cuda} Triton {_triton()}"
    return f"{device} {torch.backends.cpu.get_cpu_capability()}"


def _triton() -> str:
    """Its version; it comes with the wheels of torch for CUDA."""
    return version("triton") if find_spec("triton") is not None else "none"


def fingerprint(folder: Path, setup: str) -> str:
    """Changes whenever answers might: weights and JSON (size, head, middle and tail of each), set-up and version."""
    digest = hashlib.sha256(f"{setup} {torch.__version__}".encode())
    for path in parts(folder) if is_gguf(folder) else sorted((*folder.glob("*.safetensors"), *folder.glob("*.json"))):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - _SAMPLED)):
                file.seek(start, os.SEEK_SET)
                digest.update(file.read(_SAMPLED))
    return "fp_" + digest.hexdigest()[:16]
