"""Resources that a replica asks of Ray: CPUs, GPUs, placement groups."""

from collections.abc import Iterable, Mapping
from typing import Any

from attend.model.errors import SettingError
from attend.service.settings import Settings


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
