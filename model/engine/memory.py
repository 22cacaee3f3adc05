"""Memory profiling: how much memory steps take on a device beside weights and cache, measured on a cache of one block: the
rest is for keys and values. Kernels, libraries, recorded steps and the allocator take what no formula says.

Not yet run on a GPU: on the CPU it is tested with a device that counts.
"""

from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch

from attend.model.config import ModelConfig
from attend.model.engine.config import EngineConfig
from attend.model.engine.plan import StepInput
from attend.model.engine.runner import ModelRunner
from attend.model.net.kv_cache import KVCache
from attend.model.params import SamplingParams
from attend.model.sampling_plan import Draw, SamplingPlan

SHARE = 0.97
"""Share of the memory that the largest steps left: other steps may fragment the allocator's memory more."""
LIMITED = SamplingParams(temperature=1.0, top_p=0.5)
"""What takes most memory to draw: it sorts all scores."""


def memory_left(
    model: ModelConfig,
    config: EngineConfig,
    kv_dtype: torch.dtype,
    device: str,
    runner_of: Callable[[KVCache], ModelRunner],
    free: Callable[[], int],
) -> int:
    """Bytes for the cache, once the largest steps of `config` have run.

    `runner_of` makes a runner round a cache, and records its steps; `free` tells the free bytes of the device. What the
    allocator holds counts as taken, and a later runner takes it again. Raises OutOfMemory if there is no room for the steps.
    """
    runner = runner_of(KVCache.allocate(model, 1, config.block_size, kv_dtype, device))
    for step in largest_steps(model, config):
        runner.submit(step).result()
    return int(free() * SHARE)


def largest_steps(model: ModelConfig, config: EngineConfig) -> Iterator[StepInput]:
    """Prompts that fill a step, at the ends of the longest requests; and as many streams as run, drawn from sorted scores.

    All tokens lie in block 1, and all states in slot 1: nobody looks at what is computed.
    """
    counts: list[int] = []
    left = config.max_batch_tokens
    while left and len(counts) < config.max_batch_requests:
        counts.append(min(left, config.max_model_len))
        left -= counts[-1]
    yield step_of(model, config, sorted(counts))  # rows of one token come first
    yield step_of(model, config, [1] * min(config.max_batch_requests, config.max_batch_tokens))


def step_of(model: ModelConfig, config: EngineConfig, counts: list[int], end: int | None = None) -> StepInput:
    """Rows of so many tokens, each of which draws, at the ends of requests of `end` tokens, or of the longest ones."""
    num_rows, names, end = len(counts), [f"largest {row}" for row in range(len(counts))], end or config.max_model_len
    blocks = array("q", [1]) * -(-end // config.block_size)
    tables = [[array("q", [1]) if group.has_state else blocks] * num_rows for group in model.memory_groups]
    return StepInput(
        request_ids=names,
        tables=tables,
        starts=[end - count for count in counts],
        counts=counts,
        tokens=array("q", [0]) * sum(counts),
        draws=[Draw(SamplingPlan(LIMITED, seed=0), end)] * num_rows,
        draw_rows=[end - 1 for end in accumulate(counts)],
        draw_ids=names,
    )
