"""How large the KV cache is: as many blocks as the memory given to it holds, and no more than could be used. It is given in
bytes (`kv_cache_memory`), where vLLM has a share, gpu_memory_utilization."""

import gc
import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from attend.model.config import MemoryGroup, ModelConfig
from attend.model.engine.config import EngineConfig, GroupSize
from attend.model.engine.options import EngineOptions
from attend.model.engine.plan import StepInput
from attend.model.engine.runner import ModelRunner
from attend.model.errors import SettingError
from attend.model.machine import available_memory
from attend.model.net.kv_cache import KVCache
from attend.model.params import SamplingParams
from attend.model.sampling_plan import Draw, SamplingPlan

log = logging.getLogger("attend.engine")
CPU_SHARE = 0.25
"""Default share of the available memory for the cache: other replicas and processes use memory too."""
REQUESTS_PER_CONTEXT = 4
"""By default, so many requests of a batch share the room of one full context in a CPU's cache."""
USUAL_CONTEXTS = 16
"""Whole contexts that a CPU's cache holds at least."""
SNAPSHOTS_PER_CONTEXT = 4
"""Snapshots of recurrent states for each context of `max_model_len` tokens."""


def free_memory() -> int:
    """Bytes that the KV cache may take by default on a CPU. On a GPU they are measured: `memory_left`."""
    return int(available_memory() * CPU_SHARE)


def check_free(memory: int) -> None:
    """Refuse a cache larger than what is free: its pages are taken as they are used, so it would fail late. SettingError."""
    if memory > (free := available_memory()):
        raise SettingError(
            f"kv_cache_memory is {memory} bytes, but only {free} bytes are free after loading the weights: lower it"
        )


def free_device_memory() -> int:
    """Free bytes of the GPU. What torch's allocator keeps for later is not free."""
    return int(torch.cuda.mem_get_info()[0])


def release_memory() -> None:
    """Give the GPU's memory that nobody holds any more back to it."""
    gc.collect()
    torch.cuda.empty_cache()


def most_requests(model: ModelConfig, memory: int, max_requests: int) -> int:
    """How many of `max_requests` run at a time: where layers keep states, these take half of the memory at most."""
    each = model.state_bytes
    return min(max_requests, max(1, memory // 2 // each - 1)) if each else max_requests  # and one lies in the reserved place


def with_states(model: ModelConfig, config: EngineConfig, memory: int, share: float) -> EngineConfig:
    """With as many requests at a time as `most_requests` lets run, and the snapshots of their states that a share of the memory
    holds.
    """
    kept = int(share * memory) // model.state_bytes if model.state_bytes and config.prefix_caching else 0
    return replace(config, max_batch_requests=most_requests(model, memory, config.max_batch_requests), num_snapshots=kept)


def keeps_prefixes(model: ModelConfig, options: EngineOptions) -> bool:
    """True if prefix caching is on. Where layers keep states, it needs snapshots, and full attention to tell texts apart."""
    full = any(group.window is None and not group.has_state for group in model.memory_groups)
    return options.prefix_caching and (not model.state_bytes or (options.state_cache_share > 0 and full))


def usual_contexts(config: EngineConfig) -> int:
    """Requests of the longest kind that a CPU's cache has room for, where nothing is set."""
    return max(USUAL_CONTEXTS, config.max_batch_requests // REQUESTS_PER_CONTEXT)


def usual_memory(model: ModelConfig, config: EngineConfig, kv_dtype: torch.dtype) -> int:
    """Bytes of as many blocks as `usual_contexts` of the longest requests fill, in each group what requests can use of them."""
    level = -(-usual_contexts(config) * config.max_model_len // config.block_size)
    return sum(
        (min(_most(group, config), max(_least(group, config, 1), level)) + 1)
        * model.block_bytes(group, config.block_size, kv_dtype.itemsize)
        for group in model.memory_groups
    )


def size_groups(
    model: ModelConfig, config: EngineConfig, kv_dtype: torch.dtype, memory: int, least_tokens: int = 1
) -> tuple[GroupSize, ...]:
    """The blocks of each group of layers that `memory` bytes hold: as many for each group, up to what requests can use of it.

    Keys and values have the dtype `kv_dtype`. So a short request has as much room under a window as under full attention, and
    memory that windows do not need is for long requests. One request of `least_tokens` fits, if the memory suffices. `config`
    has the longest request and how many run. A window as long as a request, or with too few blocks to give any back, keeps
    all tokens, as full attention does.
    """
    groups, size = model.memory_groups, config.block_size
    each = [model.block_bytes(group, size, kv_dtype.itemsize) for group in groups]
    most = [_most(group, config) for group in groups]
    wanted = [_least(group, config, least_tokens) for group in groups]
    possible = [_least(group, config, 1) for group in groups]
    counts = _fill_memory(wanted, most, each, memory) or _fill_memory(possible, most, each, memory)
    if counts is None:
        needed = sum((count + 1) * block for count, block in zip(possible, each, strict=True))
        raise SettingError(f"kv_cache_memory is {memory} bytes, but two KV blocks of {size} tokens need {needed}: raise it")
    return tuple(_group_size(group, count, config) for group, count in zip(groups, counts, strict=True))


def _most(group: MemoryGroup, config: EngineConfig) -> int:
    """Blocks that all requests at once can use, with snapshots of states."""
    if group.has_state:
        return config.max_batch_requests + config.num_snapshots
    most = -(-config.max_model_len * config.max_batch_requests // config.block_size)
    if group.window is None or group.window >= config.max_model_len:
        return most
    return min(most, config.max_batch_requests * config.window_blocks(group.window) + config.step_blocks)


def _least(group: MemoryGroup, config: EngineConfig, num_tokens: int) -> int:
    """Blocks without which no request of so many tokens can run."""
    if group.has_state:
        return config.max_batch_requests
    least = -(-num_tokens // config.block_size)
    return least if group.window is None else min(least, config.window_blocks(group.window) + config.step_blocks)


def _fill_memory(least: Sequence[int], most: Sequence[int], each: Sequence[int], memory: int) -> list[int] | None:
    """Blocks of each group: the largest number, cut to the group's bounds, that fits beside the reserved blocks; None: none."""

    def at(level: int) -> list[int]:
        return [min(high, max(low, level)) for low, high in zip(least, most, strict=True)]

    def fits(level: int) -> bool:
        return sum((count + 1) * block for count, block in zip(at(level), each, strict=True)) <= memory

    if not fits(1):
        return None
    low, high = 1, max(most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return at(low)


def _group_size(group: MemoryGroup, count: int, config: EngineConfig) -> GroupSize:
    window = group.window
    if window is not None:
        gives_back = window < config.max_model_len and count >= config.window_blocks(window) + config.step_blocks
        window = window if gives_back else None
    return GroupSize(count, window, group.has_state)


def tell_states(options: EngineOptions, model: ModelConfig, config: EngineConfig, device: str) -> None:
    """Log what follows for a model with a recurrent state."""
    if not model.state_bytes:
        return
    if options.prefix_caching and not config.prefix_caching:
        cause = "state_cache_share is 0" if options.state_cache_share == 0 else "no layer has full attention"
        log.warning("prefix caching is off: this model has layers with a recurrent state, and %s", cause)
    elif config.prefix_caching:
        bytes_kept = config.num_snapshots * model.state_bytes
        text = "prefix caching keeps %d snapshots of the recurrent states, %.1f MiB of the KV cache's memory"
        log.info(text, config.num_snapshots, bytes_kept / (1 << 20))
    fewer = (config.max_batch_requests, options.batch(device).requests)
    if fewer[0] < fewer[1]:
        log.warning(
            "max_batch_requests is %d in place of %d: more recurrent states would take over half of kv_cache_memory", *fewer
        )


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
