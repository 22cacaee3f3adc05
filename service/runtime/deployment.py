"""The Ray Serve deployment of a replica. `build` is what `serve run` and a RayService import."""

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from starlette.types import ASGIApp

from attend.model.errors import SettingError
from attend.service.access.hosts import ANY
from attend.service.observe import autoscaling, cluster_state, scrape, tracing
from attend.service.observe.cached_page import CachedPage
from attend.service.observe.capacity import Load
from attend.service.runtime import hub
from attend.service.runtime.lifecycle import refuse_tls
from attend.service.runtime.sizes import gpus_per_rank, largest_gpu_count, most_calls, placement_options
from attend.service.settings import Settings, read_settings, unknown_variables

if TYPE_CHECKING:
    from attend.service.runtime.replica import Replica

log = logging.getLogger("attend.settings")


@serve.deployment(name="Attend")
@serve.ingress()
class Attend:
    """A replica that Ray Serve runs, and what it tells the others. Its other methods are those of `replica`.

    The process that deploys it imports this file, and with it neither torch nor what serves.
    """

    replica: "Replica"

    def __init__(self, settings_json: str) -> None:
        from ray.serve._private.constants import DEFAULT_GRPC_SERVER_OPTIONS

        from attend.service.grpc_api.register import behind_serve
        from attend.service.runtime import ranks
        from attend.service.runtime.http_protocol import read_for_ray
        from attend.service.runtime.replica import Replica

        name = serve.get_replica_context().replica_id.unique_id
        cluster_state.sign_in(name)
        self.name = name
        self.replica = Replica(Settings.from_json(settings_json), name, ranks.start_ranks)
        behind_serve(self.replica)
        read_for_ray()
        # Ray has one limit for what a server takes and for what it sends. What a call may ask for bounds its answer.
        sent = "grpc.max_send_message_length"
        DEFAULT_GRPC_SERVER_OPTIONS[:] = [*(each for each in DEFAULT_GRPC_SERVER_OPTIONS if each[0] != sent), (sent, -1)]

    def __getattr__(self, name: str) -> Any:
        """Health, drain, description, and the methods of gRPC."""
        if name == "replica":  # it could not be put together
            raise AttributeError(name)
        return getattr(self.replica, name)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        page, loads = (
            CachedPage(partial(scrape.over_replicas, self.scrape_local)),
            CachedPage(partial(scrape.loads, self.load_local)),
        )
        return self.replica.application(page, loads, behind_serve=True)

    async def scrape_local(self) -> tuple[str, str]:
        """(replica, metrics page) of this replica alone; for `scrape.over_replicas`."""
        return self.name, await asyncio.to_thread(self.replica.metrics.text)

    async def load_local(self) -> Load:
        """The load of this replica alone; for `scrape.loads`."""
        return self.replica.metrics.load()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's controller gives to `autoscaling.policy`; Serve calls it where it autoscales."""
        return autoscaling.reported_load(self.replica.engine.info, self.replica.engine.stats())._asdict()

    def __del__(self) -> None:
        if hasattr(self, "replica"):
            self.replica.close()
            cluster_state.sign_out(self.name)


def replicas_wanted(settings: Settings) -> dict[str, Any]:
    """Serve's options for the number of replicas: it is fixed, or Serve's autoscaler has bounds for it."""
    if settings.max_replicas is None:
        return {"num_replicas": settings.replicas}
    return {"autoscaling_config": autoscaling.config(settings.replicas, settings.max_replicas)}


def build(args: dict[str, Any]) -> serve.Application:
    """The application. `args` are settings by name; what they leave out comes from ATTEND_*.

    Raises SettingError. Once for all replicas variables are told here that nobody reads, and a branch of the hub is looked up.
    """
    settings = read_settings(args)
    for name in unknown_variables():
        log.warning("%s is not a setting, and is ignored", name)
    if settings.single:
        raise SettingError("single is for `attend serve`: Ray Serve runs this application")
    if settings.models:
        raise SettingError(
            "models is for `attend serve` on one machine: under Ray Serve each model is an application of its own"
        )
    if settings.linger_seconds:
        raise SettingError("linger_seconds is for `attend serve`: Ray Serve moves callers away by itself")
    refuse_tls(settings)
    if not settings.allowed_hosts:  # what is listened on, Serve's own options say, and not `host`
        settings = settings.model_copy(update={"allowed_hosts": ANY})
    return application(hub.pin_revision(settings, log.warning))


def application(settings: Settings) -> serve.Application:
    """The application of these settings. Raises SettingError."""
    tracing.check_endpoint(settings.otel_endpoint)
    nodes = ray.nodes()
    gpus = gpus_per_rank(settings, largest_gpu_count(nodes))
    if settings.batch_folder and len(nodes) > 1 and (settings.max_replicas or settings.replicas) > 1:
        log.warning("batch_folder: replicas on different nodes keep different files, and a caller reaches one or the other")
    deployment = Attend.options(  # type: ignore[attr-defined]  # the decorator has made it a Deployment
        **replicas_wanted(settings),
        max_ongoing_requests=most_calls(settings, "cuda" if gpus else "cpu"),
        **placement_options(settings, gpus),
        graceful_shutdown_timeout_s=settings.shutdown_seconds + 1,
        graceful_shutdown_wait_loop_s=0.2,
        # Three checks in a row without an answer make a replica dead, 1 + 3 * 2 s after it froze at the latest. One whose event
        # loop stands still for less than six seconds is not replaced. Callers need not wait: HAProxy notices sooner.
        health_check_period_s=1,
        health_check_timeout_s=2,
        max_constructor_retry_count=1,  # a checkpoint that cannot be read once cannot be read twice
    )
    return deployment.bind(settings.to_json())
