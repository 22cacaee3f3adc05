"""The Ray Serve deployment, where everything is put together: engine, service, HTTP application, gRPC methods.

One replica is one process: its event loop talks, its step thread computes. `build` is what `serve run` and a
RayService import.
"""

import asyncio
import logging
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import ray
from ray import serve
from starlette.types import ASGIApp

from model.chat import ChatTemplate
from model.engine.build import EngineOptions, build_engine
from model.engine.loop import AsyncEngine
from model.errors import EngineFailed
from model.generation_config import read_defaults
from model.machine import usable_cores
from service import autoscaling, census, hub, loading, logs, scrape, tracing
from service.adapters import Shelf
from service.aside import MOST_LARGE
from service.capacity import Load
from service.checkpoint import read_tokenizer
from service.generation import GenerationService
from service.grpc_api.servicer import MAX_WATCHES, GrpcMethods
from service.http_api.app import build_app
from service.http_api.routes import STALE_SECONDS, Site
from service.keys import KeyRing
from service.metrics import Metrics
from service.settings import Settings, read_settings

SPARE_CALLS = 64
"""Calls beside those that are bounded here (health, metrics, refusals) that Serve lets into a replica. What comes on top waits
for one of them to end, and with it the probes."""
SWITCH_SECONDS = 0.001
"""How long a thread that computes in Python may keep the interpreter from one that waits for it, as the event loop and the step
thread do: each time they wait, they wait so long for each such thread. Python's default is 5 ms."""


@serve.deployment(name="Attend")
@serve.ingress()
class Attend(GrpcMethods):
    """One replica."""

    def __init__(self, settings_json: str) -> None:
        settings = Settings.from_json(settings_json)
        sys.setswitchinterval(SWITCH_SECONDS)
        logs.configure(settings.log_level, settings.log_format, settings.log_file)
        settings = hub.with_folder(settings, logging.getLogger("attend.hub").info)  # without a driver, as in a RayService
        self.settings = settings
        self.keys = KeyRing(settings.api_keys_file) if settings.api_keys_file else None  # first: a bad file is told at once
        replica = serve.get_replica_context().replica_id.unique_id
        census.sign_in(replica)
        with log_terminal(settings) as terminal, loading.shown(terminal, logging.getLogger("attend.engine").info) as report:
            self.engine = build_engine(settings.folder, engine_options(settings), report)
        self.shelf = open_shelf(settings, self.engine)
        tokenizer = read_tokenizer(settings.folder, self.engine.info.vocab_size)
        self.service = GenerationService(
            self.engine,
            tokenizer,
            model_name=settings.name,
            request_timeout=settings.request_timeout_seconds,
            deadline_default_ms=settings.deadline_default_ms,
            defaults=read_defaults(settings.folder, settings.generation_config),
            shelf=self.shelf,
        )
        self.tracer = open_tracer(settings)
        vllm = settings.metrics_compat == "vllm"
        self.metrics = Metrics(
            self.engine,
            settings.name,
            tracer=self.tracer,
            vllm_names=vllm,
            keys=self.keys,
            preparing=lambda: self.service.num_preparing,
        )
        self.engine.start()
        if self.shelf is not None:
            self.shelf.follow()
        self.replica = replica

    def __serve_build_asgi_app__(self) -> ASGIApp:
        template = ChatTemplate.load(self.settings.folder)
        page, loads = partial(scrape.over_replicas, self.scrape_local), partial(scrape.loads, self.load_local)
        facts = (version("attend"), page, self.is_draining, template, self.keys)
        return build_app(
            Site(self.service, self.metrics, *facts, loads=loads),
            expose_docs=self.settings.expose_docs,
            cors_origins=self.settings.origins,
        )

    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self.engine.draining

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if self.engine.overdue() > STALE_SECONDS:
            raise EngineFailed("the engine's step thread is dead or stuck")

    async def scrape_local(self) -> tuple[str, str]:
        """(replica, metrics page) of this replica alone; for `scrape.over_replicas`."""
        return serve.get_replica_context().replica_id.unique_id, await asyncio.to_thread(self.metrics.text)

    async def load_local(self) -> Load:
        """The load of this replica alone; for `scrape.loads`."""
        return Load(self.engine.info, self.engine.stats(), self.metrics.meter.pace())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's controller gives to `autoscaling.policy`; Serve calls it where it autoscales."""
        return autoscaling.read(self.engine.info, self.engine.stats())._asdict()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, let running ones end for so long, then end the rest with their reason."""
        await self.engine.drain(seconds)

    async def describe(self) -> dict[str, Any]:
        """What the start-up line tells."""
        info = self.service.engine.info
        return {
            "family": info.family,
            "parameters": info.num_parameters,
            "device": info.device,
            "dtype": info.dtype,
            "weights": info.weights,
            "backend": info.backend,
            "kv_tokens": info.num_blocks * info.block_size,
            "max_model_len": info.max_model_len,
        }

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
        if hasattr(self, "shelf") and self.shelf is not None:
            self.shelf.close()
        if hasattr(self, "tracer") and self.tracer is not None:
            self.tracer.close()
        if hasattr(self, "replica"):  # it had started
            census.sign_out(self.replica)
        logs.close()


def open_shelf(settings: Settings, engine: AsyncEngine) -> Shelf | None:
    """The adapters that callers can name; None where none are set. Raises SettingError or CheckpointError."""
    if engine.adapters is None:
        return None
    folder = Path(settings.adapters_folder).absolute() if settings.adapters_folder else None
    return Shelf(engine.adapters, settings.adapters, folder, most=settings.max_adapters, taken=settings.name)


def open_tracer(settings: Settings) -> tracing.Tracer | None:
    """The tracer of this replica; None where no collector is set."""
    if not settings.otel_endpoint:
        return None
    replica = serve.get_replica_context().replica_id.unique_id
    return tracing.open_tracer(settings.otel_endpoint, settings.name, version=version("attend"), replica=replica)


@contextmanager
def log_terminal(settings: Settings) -> Iterator[TextIO | None]:
    """Where log lines go, if that is a terminal and no other replica loads at the same time: two bars would mix."""
    with ExitStack() as stack:
        terminal = None
        with suppress(OSError):
            if settings.replicas == 1 and stat.S_ISCHR(os.stat(settings.log_file).st_mode):
                terminal = stack.enter_context(open(settings.log_file, "a", encoding="utf-8"))
        yield terminal


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
        block_size=settings.block_size,
        kv_cache_memory=settings.kv_cache_memory,
        kv_dtype=settings.kv_dtype,
        prefix_caching=settings.prefix_caching,
        draft_tokens=settings.draft_tokens,
        deterministic=settings.deterministic,
        num_threads=settings.num_threads or usable_cores(),
        adapters=bool(settings.adapter or settings.adapters_folder),
    )


def gpus_wanted(device: str, available: float) -> int:
    """GPUs that a replica asks for. With `cuda` it is one, there or not: a cluster's nodes may come after its application."""
    return 1 if device == "cuda" or (device == "auto" and available >= 1) else 0


def replicas_wanted(settings: Settings) -> dict[str, Any]:
    """Serve's options for the number of replicas: it is fixed, or Serve's autoscaler has bounds for it."""
    if settings.max_replicas is None:
        return {"num_replicas": settings.replicas}
    return {"autoscaling_config": autoscaling.config(settings.replicas, settings.max_replicas)}


def most_calls(settings: Settings) -> int:
    """Calls that Serve lets into a replica: those in the engine, those being prepared for it, long texts, watches, others."""
    return 2 * (settings.max_batch_requests + settings.max_queued_requests) + MOST_LARGE + MAX_WATCHES + SPARE_CALLS


def build(args: dict[str, Any]) -> serve.Application:
    """The application. `args` are settings by name; what they leave out comes from ATTEND_*."""
    settings = read_settings(args)
    tracing.check(settings.otel_endpoint)
    gpus = gpus_wanted(settings.device, ray.cluster_resources().get("GPU", 0))
    deployment = Attend.options(  # type: ignore[attr-defined]  # the decorator has made it a Deployment
        **replicas_wanted(settings),
        max_ongoing_requests=most_calls(settings),
        ray_actor_options={"num_gpus": gpus, "num_cpus": 1},
        graceful_shutdown_timeout_s=settings.drain_seconds + 1,
        graceful_shutdown_wait_loop_s=0.2,
        # Three checks in a row without an answer make a replica dead, 1 + 3 * 2 s after it froze at the latest. One whose event
        # loop stands still for less than six seconds is not replaced. Callers need not wait: HAProxy notices sooner.
        health_check_period_s=1,
        health_check_timeout_s=2,
        max_constructor_retry_count=1,  # a checkpoint that cannot be read once cannot be read twice
    )
    return deployment.bind(settings.to_json())
