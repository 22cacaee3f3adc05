"""What follows from the settings: engine options, the limit of calls, who calls, and what a replica asks of Ray."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from attend.model.engine.options import EngineOptions
from attend.model.errors import SettingError
from attend.model.machine import usable_cores
from attend.service.access.caller import Callers, networks
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


def callers_of(settings: Settings) -> Callers:
    """What finds who calls. Says where a setting of tenants does nothing."""
    if settings.trusted_proxies and settings.api_keys_file:
        logging.getLogger("attend.tenants").warning("trusted_proxies name no tenants: callers are told apart by their API keys")
    trusted = () if settings.api_keys_file else networks(settings.trusted_proxies)
    return Callers(trusted, settings.tenant_header, behind_edge=not (settings.single or settings.models))


def gpus_per_rank(settings: Settings, available: float) -> int:
    """GPUs that each rank of a replica asks for, where the node with most of them has so many. With `cuda` it is one, there or
    not: a cluster's nodes may come after its application. SettingError where `auto` could mean either.
    """
    if settings.device == "auto" and 0 < available < settings.tensor_parallel:
        ranks = f"tensor_parallel is {settings.tensor_parallel}"
        raise SettingError(f"{ranks}, but a node has {available:g} GPUs: set device to cuda for nodes with more, or to cpu")
    return 1 if settings.device == "cuda" or (settings.device == "auto" and available > 0) else 0


def largest_gpu_count(nodes: Iterable[Mapping[str, Any]]) -> float:
    """GPUs of the node that has most of them, as `ray.nodes` tells of nodes."""
    return max((node["Resources"].get("GPU", 0.0) for node in nodes if node["Alive"]), default=0.0)


def placement_options(settings: Settings, gpus: int) -> dict[str, Any]:
    """Serve's options for where a replica runs. Several ranks are a placement group on one node, the replica in its first
    bundle, so that Ray, its autoscaler too, starts all of them or none.
    """
    actor = {"ray_actor_options": {"num_gpus": gpus, "num_cpus": 1}}
    if settings.tensor_parallel == 1:
        return actor
    bundle = {"CPU": 1.0, "GPU": float(gpus)} if gpus else {"CPU": 1.0}
    return actor | {
        "placement_group_bundles": [bundle] * settings.tensor_parallel,
        "placement_group_strategy": "STRICT_PACK",
    }
