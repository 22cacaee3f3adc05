"""Engine options and the call limit of a replica, from the settings."""

from attend.model.engine.options import EngineOptions
from attend.model.machine import usable_cores
from attend.service.generation.thread_pools import MOST_LARGE
from attend.service.grpc_api.limits import MAX_WATCHES
from attend.service.settings import Settings

SPARE_CALLS = 64
"""Calls beside those that are bounded here (health, metrics, refusals) that a replica takes. What comes on top waits for one of
them to end, or is refused, and with it the probes."""


def engine_options(settings: Settings) -> EngineOptions:
    """The engine's part of the settings."""
    return EngineOptions(
        device=settings.device,
        dtype=settings.dtype,
        backend=settings.backend,
        quantize=settings.quantize,
        max_model_len=settings.max_model_len,
        max_batch_requests=settings.max_batch_requests,
        max_batch_tokens=settings.max_batch_tokens,
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=settings.max_queued_tokens,
        block_size=settings.block_size,
        kv_cache_memory=settings.kv_cache_memory,
        kv_dtype=settings.kv_dtype,
        prefix_caching=settings.prefix_caching,
        kv_idle_seconds=settings.kv_idle_seconds,
        state_cache_share=settings.state_cache_share,
        kv_disk_folder=settings.kv_disk_folder,
        kv_disk_bytes=settings.kv_disk_bytes,
        draft_tokens=settings.draft_tokens,
        deterministic=settings.deterministic,
        kernel_check=settings.kernel_check,
        num_threads=settings.num_threads or max(1, usable_cores() // settings.tensor_parallel),
        adapters=bool(settings.adapter or settings.adapters_folder),
    )


def most_calls(settings: Settings, device: str) -> int:
    """Calls that a replica on `cpu` or `cuda` takes at once: those in the engine, those being prepared for it, long texts,
    watches, others.
    """
    running = engine_options(settings).batch(device).requests
    return 2 * (running + settings.max_queued_requests) + MOST_LARGE + MAX_WATCHES + SPARE_CALLS
