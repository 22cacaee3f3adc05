"""Why a slower backend serves than the fastest of this machine: for the log, /version and a metric."""

import time
from collections.abc import Callable

import torch

from attend.model.backends.backend import Backend, Placement
from attend.model.backends.choice import fastest
from attend.model.backends.native import Native
from attend.model.config import ModelConfig
from attend.model.engine.config import EngineConfig
from attend.model.engine.memory import step_of
from attend.model.engine.request import SlowerPath
from attend.model.engine.runner import ModelRunner
from attend.model.net.native.library import variant as native_variant
from attend.model.net.transformer import Decoder

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
    return SlowerPath(refusal.reason, f"the {backend.name} backend serves, {best.loss}: {refusal.why}")


def with_factor(path: SlowerPath, runner: ModelRunner, config: EngineConfig) -> SlowerPath:
    """The same, with how many times slower a token of one stream is, as measured here in some 50 ms: a step's time beside that
    of a read of the weights in bfloat16, which is what holds the native decoder back.
    """
    if not isinstance(runner.net, Decoder) or runner.device != "cpu":
        return path
    step, size = step_of(runner.net.config, config, [1], end=1), 2 * runner.net.num_parameters
    read = torch.ones(min(size, READ) // 8 + 1, dtype=torch.int64)
    seconds = _least_seconds(lambda: runner.submit(step).result())
    reading = _least_seconds(read.amax) * size / read.nbytes / ROOF
    if seconds < LEAST_FACTOR * reading:  # other processes had the cores meanwhile
        return path
    factor = f"about {seconds / reading:.0f} times {Native.loss} ({1e3 * seconds:.1f} ms for a token of one stream)"
    return path._replace(cause=path.cause.replace(Native.loss, factor, 1))


def _least_seconds(work: Callable[[], object]) -> float:
    """The shortest of several turns, in about ENOUGH_SECONDS. The first one sets up, and counts only where it is long."""
    found: list[float] = []
    while not found or (found[0] < 1 and sum(found[1:]) < ENOUGH_SECONDS):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)
