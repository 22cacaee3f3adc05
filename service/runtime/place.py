"""What a replica asks of Ray's nodes."""

from typing import Any

from service.settings import Settings


def gpus_wanted(settings: Settings, available: float) -> int:
    """GPUs that each rank of a replica asks for. With `cuda` it is one, there or not: a cluster's nodes may come after its
    application.
    """
    enough = settings.device == "auto" and available >= settings.tensor_parallel
    return 1 if settings.device == "cuda" or enough else 0


def place_wanted(settings: Settings, gpus: int) -> dict[str, Any]:
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
