"""Falls back to torch where kernels differ from it, or fail, on this device. Why another backend serves than the fastest of
this machine is told as `slower_path`: in the log, by /version and by a metric.

A decoder's kernels are not exchanged one by one: torch computes the whole model then. Recorded steps, and draws, are.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from attend.model.backends.backend import Backend, Form, Placement
from attend.model.backends.choice import fastest
from attend.model.backends.native import Native
from attend.model.config import ModelConfig
from attend.model.devices import unused_gpu
from attend.model.engine.cache import release_memory, step_of
from attend.model.engine.config import EngineConfig
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.options import EngineOptions
from attend.model.engine.piecewise_graphs import PiecewiseGraphs
from attend.model.engine.request import SlowerPath
from attend.model.engine.runner import DrawTokens, ModelRunner, device_errors
from attend.model.engine.startup import Finding, check_decoder, check_draws, check_recorded, look
from attend.model.errors import EngineFailed
from attend.model.net.checkpoint import kinds_of
from attend.model.net.formats.codes import FP8, Kind
from attend.model.net.kv_cache import KVCache
from attend.model.net.native.library import variant as native_variant
from attend.model.net.paged_attention import AttentionBackend
from attend.model.net.transformer import Decoder
from attend.model.sampling import sample, sample_by_row

ROOF = 0.75
"""Share of the memory bandwidth that the native decoder reaches with one stream: loadtest/results/engine.md."""
READ = 32 << 20
"""Bytes that are read to measure that speed; of a small model no more than its weights, which stay near the cores."""
ENOUGH_SECONDS = 0.02
LEAST_FACTOR = 1.5


def slower_path(backend: Backend, config: ModelConfig, at: Placement) -> SlowerPath | None:
    """What keeps the fastest backend of this machine from serving where `auto` has chosen `backend`; None where it serves.

    It is Triton on a GPU, and on a CPU the native decoder, unless that has nothing better than portable vectors here.
    """
    best = fastest(at.device)
    if isinstance(backend, best) or (best is Native and native_variant() == "portable"):
        return None
    refusal = best.absence() or best.refusal(config, at)
    assert refusal is not None, "auto takes the fastest that fits"
    return SlowerPath(refusal.reason, f"the {backend.name} backend serves, {best.slowness}: {refusal.why}")


def with_factor(path: SlowerPath, runner: ModelRunner, config: EngineConfig) -> SlowerPath:
    """The same, with how many times slower a token of one stream is, as measured here in some 50 ms: a step's time beside that
    of a read of the weights in bfloat16, which is what holds the native decoder back.
    """
    if not isinstance(runner.net, Decoder) or runner.device != "cpu" or Native.slowness not in path.cause:
        return path
    step, size = step_of(runner.net.config, config, [1], end=1), 2 * runner.net.num_parameters
    read = torch.ones(min(size, READ) // 8 + 1, dtype=torch.int64)
    seconds = _least_seconds(lambda: runner.submit(step).result())
    reading = _least_seconds(read.amax) * size / read.nbytes / ROOF
    if seconds < LEAST_FACTOR * reading:  # other processes had the cores meanwhile
        return path
    factor = f"about {seconds / reading:.0f} times {Native.slowness} ({1e3 * seconds:.1f} ms for a token of one stream)"
    return path._replace(cause=path.cause.replace(Native.slowness, factor, 1))


def _least_seconds(work: Callable[[], object]) -> float:
    """The shortest of several turns, in about ENOUGH_SECONDS. The first one sets up, and counts only where it is long."""
    found: list[float] = []
    while not found or (found[0] < 1 and sum(found[1:]) < ENOUGH_SECONDS):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


Recorded = tuple[DecodeGraphs | None, PiecewiseGraphs | None]
NOT_RECORDED: Recorded = (None, None)


class Fallback:
    """Carries out `kernel_check`, and keeps what makes an engine slower than this machine could be."""

    def __init__(self, options: EngineOptions, device: str, ranks: int) -> None:
        self._options, self._device, self._ranks = options, device, ranks
        self._paths: list[SlowerPath] = []
        self.findings: list[Finding] = []
        """Result of each check of a kernel against torch."""
        self._records = True
        if options.device == "auto" and (why := unused_gpu()):
            self._paths.append(SlowerPath("gpu", f"the CPU serves: {why}; device = cpu silences this"))

    def note(self, path: SlowerPath | None) -> None:
        """Add a reason why the engine is slower than it could be, if there is one."""
        self._paths += () if path is None else (path,)

    def measure(self, runner: ModelRunner, config: EngineConfig) -> None:
        """Add to each reason how many times slower the engine is for it."""
        self._paths = [with_factor(path, runner, config) for path in self._paths]

    def path(self) -> SlowerPath | None:
        """All reasons in one: the word of the first, and the sentences of all."""
        return SlowerPath(self._paths[0].reason, "; ".join(path.cause for path in self._paths)) if self._paths else None

    def keeps(self, backend: Backend, folder: Path, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
        """True if a backend agrees with torch; else torch is to compute the model in `folder`.

        Raises EngineFailed where torch may not: another backend was asked for by its name, or several ranks share the model.
        """
        options = self._options
        if options.kernel_check == "off" or not backend.is_checked:
            return True
        kind = backend.quantized_kind(options.quantize, self._device)
        if kind is None and options.load_format == "auto":
            kind = kept_kind(backend, folder)
        findings = check_decoder(backend, dtype, kv_dtype, self._device, options.block_size, kind)
        if self._device == "cuda":
            release_memory()  # what is free is for the model
        self.findings += findings
        bad = next((finding for finding in findings if not finding.ok), None)
        if bad is None:
            return True
        what = fault_of(backend.attention.name, bad)
        asked = f"backend is {options.backend}" if options.backend != "auto" else ""
        asked = f"tensor_parallel is {self._ranks}" if self._ranks > 1 else asked
        if asked:
            raise EngineFailed(f"{asked}, and {what}; use backend = torch, or kernel_check = off to skip the check")
        self._replace_with_torch(bad, f"the torch backend serves, {backend.slowness}: {what}", what)
        return False

    def draw(self, backend: Backend, dtype: torch.dtype, device: str) -> DrawTokens:
        """What draws tokens; torch, where the backend's way differs or fails."""
        exact = self._options.deterministic
        with device_errors():
            if self._options.kernel_check == "off" or device == "cpu":
                return backend.draw(dtype, device, exact=exact)
        kept: list[DrawTokens] = []

        def make_sampler() -> DrawTokens:
            kept.append(backend.draw(dtype, device, exact=exact))
            return kept[0]

        finding = check_draws(make_sampler, dtype, backend.config.vocab_size, device)
        self.findings.append(finding)
        if finding.ok:
            return kept[0]
        what = fault_of(backend.name, finding)
        self._replace_with_torch(finding, f"torch draws tokens, {backend.slowness}: {what}", what)
        return sample_by_row if exact else sample

    def record_steps(self, record: Callable[[], Recorded], form: Form, backend: AttentionBackend, cache: KVCache) -> Recorded:
        """The steps that `record` has recorded; none where that fails, or where they differ. Raises EngineFailed."""
        if not self._records:
            return NOT_RECORDED
        if self._options.kernel_check == "off" or self._ranks > 1:  # ranks of which one does not record wait for each other
            with device_errors():
                return record()
        made: list[Recorded] = []
        finding = look("recorded steps", lambda: made.append(record()) or "", self._device)  # type: ignore[func-returns-value]
        if finding.ok and made[0] != NOT_RECORDED:
            finding = check_recorded(form, backend, cache, *made[0])
        if made != [NOT_RECORDED]:
            self.findings.append(finding)
        if finding.ok:
            return made[0]
        self._records, what = False, fault_of(backend.name, finding)
        self._replace_with_torch(finding, f"steps are not recorded, and each launches all its kernels: {what}", what)
        return NOT_RECORDED

    def _replace_with_torch(self, finding: Finding, cause: str, what: str) -> None:
        if self._options.kernel_check == "fail":
            raise EngineFailed(f"kernel_check is fail, and {what}; kernel_check = replace lets torch compute instead")
        self._paths.append(SlowerPath(finding.reason, cause))


def kept_kind(backend: Backend, folder: Path) -> Kind | None:
    """The kind of codes, of the fewest bits, in which a backend keeps matrices of a folder; None: it keeps none in codes."""
    kept = backend.load_options()
    kinds = [kind for kind in kinds_of(folder) if kept["keep_codes"] and (kept["keep_floats"] or kind != FP8)]
    return next(iter(kinds), None)


def fault_of(name: str, finding: Finding) -> str:
    """A finding about a backend that is not ok, in words."""
    does = "differs from torch on this device" if finding.reason == "kernel_differs" else "fails on this device"
    return f"the {finding.part} of the {name} backend {does}: {finding.cause}"
