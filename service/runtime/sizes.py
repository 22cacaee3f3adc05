"""Engine options and the call limit of a replica, from the settings."""

from attend.model.engine.options import EngineOptions
from attend.model.machine import usable_cores
from attend.service.generation.thread_pools import MAX_LARGE
from attend.service.grpc_api.limits import MAX_WATCHES
from attend.service.settings import Settings

SPARE_CALLS = 64
"""Calls beside those that are bounded here (health, metrics, refusals) that a replica takes. What comes on top waits for one of
them to end, or is refused, and with it the probes."""


def engine_options(settings: Settings) -> EngineOptions:
    """The engine's part of the settings: those of the same name, and what follows from the others."""
    same = EngineOptions.__dataclass_fields__.keys() & Settings.model_fields.keys()
    values = {name: getattr(settings, name) for name in same}
    values["num_threads"] = settings.num_threads or max(1, usable_cores() // settings.tensor_parallel)
    values["adapters"] = bool(settings.adapter or settings.adapters_folder)
    return EngineOptions(**values)


def most_calls(settings: Settings, device: str) -> int:
    """Calls that a replica on `cpu` or `cuda` takes at once: those in the engine, those being prepared for it, long texts,
    watches, others.
    """
    running = engine_options(settings).batch(device).requests
    return 2 * (running + settings.max_queued_requests) + MAX_LARGE + MAX_WATCHES + SPARE_CALLS
