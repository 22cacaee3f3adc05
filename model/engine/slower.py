"""Why another backend serves than the fastest of this machine: told in the log, in /version and as a metric."""

import time
from collections.abc import Callable

import torch

from attend.model.config import ModelConfig
from attend.model.devices import BFLOAT16, capability, shown
from attend.model.engine.choice import ABSENT, COMPUTED, OTHER_NEEDS, computes_parts, kind_of
from attend.model.engine.config import EngineConfig
from attend.model.engine.memory import step_of
from attend.model.engine.request import SlowerPath
from attend.model.engine.runner import ModelRunner
from attend.model.net.features import features
from attend.model.net.native import decoder as native
from attend.model.net.native.build import absence
from attend.model.net.native.library import variant as native_variant
from attend.model.net.transformer import Decoder

LOSS = {"native": "slower than the native decoder", "triton": "slower than Triton's kernels"}
ROOF = 0.75
"""The share of the speed at which weights are read that the native decoder reaches with one stream: model/README.md."""
READ = 32 << 20
"""Bytes that are read to measure that speed; of a small model no more than its weights, which stay near the cores."""
ENOUGH_SECONDS = 0.02
LEAST_FACTOR = 1.5


def slower_path(
    name: str, config: ModelConfig, dtype: torch.dtype, device: str, block_size: int, *, shared: bool
) -> SlowerPath | None:
    """What keeps the fastest backend of this machine from serving where `auto` has chosen `name`; None where it serves.

    It is Triton on a GPU, and on a CPU the native decoder, unless that has nothing better than portable vectors here.
    """
    best = "triton" if device == "cuda" else "native"
    if name.partition("-")[0] == best or (best == "native" and native_variant() == "portable"):
        return None
    reason, why = _absence(best) or _refusal(best, config, dtype, block_size, shared=shared)
    return SlowerPath(reason, f"the {name} backend serves, {LOSS[best]}: {why}")


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
    factor = f"about {seconds / reading:.0f} times {LOSS['native']} ({1e3 * seconds:.1f} ms for a token of one stream)"
    return path._replace(cause=path.cause.replace(LOSS["native"], factor, 1))


def _least_seconds(work: Callable[[], object]) -> float:
    """The shortest of several turns, in about ENOUGH_SECONDS. The first one sets up, and counts only where it is long."""
    found: list[float] = []
    while not found or (found[0] < 1 and sum(found[1:]) < ENOUGH_SECONDS):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def _absence(best: str) -> tuple[str, str] | None:
    if kind_of(best) is not None:
        return None
    return absence() if best == "native" else ("not_built", ABSENT[best])


def _refusal(best: str, config: ModelConfig, dtype: torch.dtype, block_size: int, *, shared: bool) -> tuple[str, str]:
    """The first reason that `supports` of the backend has; the dtype last: where none is set it follows from the others."""
    if shared and not computes_parts(best, config):
        return "tensor_parallel", "it does not support tensor parallelism for this model"
    if lacking := sorted(features(config) - COMPUTED[best]):
        return "model", f"it does not support {', '.join(lacking)}"
    if best == "triton" and (found := capability()) < BFLOAT16:
        return "capability", f"this GPU has compute capability {shown(found)}, and it needs {shown(BFLOAT16)}"
    layers, most = [layer for layer in config.layers if layer.recurrence is None], _most_group(best)
    if (group := max(layer.num_heads // layer.num_kv_heads for layer in layers)) > most:
        return "heads", f"the model has {group} query heads per KV head, and it takes at most {most}"
    if (size := max(layer.head_size for layer in layers)) > native.MAX_HEAD:
        return "heads", f"the model's head size is {size}, and it takes at most {native.MAX_HEAD}"
    if best == "native" and block_size % native.BLOCK:
        return "block_size", f"block_size is {block_size}, and it takes multiples of {native.BLOCK}"
    if best == "native" and dtype != torch.bfloat16:
        return "dtype", f"dtype is {str(dtype).removeprefix('torch.')}, and it computes in bfloat16"
    return "model", OTHER_NEEDS


def _most_group(best: str) -> int:
    if best == "native":
        return native.MAX_GROUP
    from attend.model.net.triton.backend import MAX_GROUP

    return MAX_GROUP
