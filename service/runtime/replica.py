"""One replica: engine, service, metrics, HTTP application and gRPC methods.

Its process runs one event loop, which talks, and one step thread, which computes. Ray Serve runs it (`deployment.py`), or one
process alone does (`single.py`).
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from threading import Timer
from typing import Any

from starlette.types import ASGIApp

from attend.model.engine.build import build_engine
from attend.model.engine.loop import AsyncEngine
from attend.model.errors import EngineFailed
from attend.model.generation_config import read_defaults
from attend.model.parallel.group import ProcessGroup
from attend.model.pooling import chosen_rules, read_rules
from attend.model.scoring import score_rules
from attend.model.text.tokenizer import Tokenizer
from attend.service.access.hosts import allowed_names
from attend.service.access.keys import KeyRing
from attend.service.batch.runner import Runner
from attend.service.batch.service import BatchService
from attend.service.chat.forms import form_of
from attend.service.contract.shapes import build_all
from attend.service.generation.adapters import AdapterRegistry
from attend.service.generation.explain import ExplainService
from attend.service.generation.generation import GenerationService
from attend.service.generation.unread_bodies import CALL_BYTES, MAX_BYTES, UnreadBodies
from attend.service.grpc_api.servicer import GrpcMethods
from attend.service.http_api.app import build_app
from attend.service.http_api.batches import routes_of
from attend.service.http_api.route_deps import RouteDeps
from attend.service.http_api.routes import STALE_SECONDS
from attend.service.observe import logs, tracing
from attend.service.observe.capacity import Load
from attend.service.observe.metrics import Metrics
from attend.service.runtime import hub
from attend.service.runtime.checkpoint import of_model, read_template
from attend.service.runtime.sizes import callers_of, engine_options, most_calls
from attend.service.settings import Settings

SHAPES_SECONDS = 0.5
"""When the shapes of requests are built that nobody has asked for yet: half a second's work, out of the way of a start."""
SWITCH_SECONDS = 0.001
"""How long a thread that computes in Python may keep the interpreter from one that waits for it, as the event loop and the step
thread do: each time they wait, they wait so long for each such thread. Python's default is 5 ms."""


class Replica(GrpcMethods):
    """One replica. `name` tells it from others; where its settings name a model of the hub, it downloads that.

    `ranks` starts the other processes that share the model, where settings ask for some.

    Raises SettingError or CheckpointError.
    """

    def __init__(self, settings: Settings, name: str, ranks: Callable[[Settings], ProcessGroup] | None = None) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        logs.configure(settings.log_level, settings.log_format, settings.log_file)
        settings = hub.with_folder(settings, logging.getLogger("attend.hub").info)
        self.settings = settings
        self.keys = KeyRing(settings.api_keys_file) if settings.api_keys_file else None  # first: a bad file is told at once
        self.callers = callers_of(settings)
        group = ranks(settings) if ranks is not None and settings.tensor_parallel > 1 else None
        with ThreadPoolExecutor(1, "tokenizer") as aside:  # weights are unpacked meanwhile, without Python
            reading = aside.submit(Tokenizer.load, settings.folder)
            self.engine = build_engine(settings.folder, engine_options(settings), group=group)
        self.adapter_registry = open_shelf(settings, self.engine)
        tokenizer = of_model(reading.result(), settings.folder, self.engine.info.vocab_size)
        warn = logging.getLogger("attend.service").warning
        embedding = chosen_rules(read_rules(settings.folder), settings.pooling, warn)
        self.service = GenerationService(
            self.engine,
            tokenizer,
            model_name=settings.name,
            request_timeout=settings.request_timeout_seconds,
            deadline_default_ms=settings.deadline_default_ms,
            defaults=read_defaults(settings.folder, settings.generation_config),
            embedding=embedding,
            scoring=score_rules(settings.folder, settings.name, settings.score, embedding, tokenizer),
            adapter_registry=self.adapter_registry,
            json_whitespace=settings.json_whitespace,
        )
        callers_control = settings.special_tokens_in_content
        file = Path(settings.chat_template) if settings.chat_template else None
        self.unread_bodies = UnreadBodies(MAX_BYTES, MAX_BYTES // CALL_BYTES if settings.single else self._most_unread())
        self.template = read_template(settings.folder, tokenizer, file, special_tokens_in_content=callers_control)
        sources = "" if self.template is None else self.template.sources
        self.beyond_context = settings.max_tokens_beyond_context
        self.form = form_of(sources, settings.tool_parser, settings.reasoning_parser)
        self.explaining = None if self.engine.explainer is None else ExplainService(self.service, self.engine.explainer)
        self.tracer = open_tracer(settings, name)
        vllm = settings.metrics_compat == "vllm"
        self.metrics = Metrics(
            self.engine,
            settings.name,
            tracer=self.tracer,
            vllm_names=vllm,
            keys=self.keys,
            preparing=lambda: self.service.num_preparing,
        )
        self.batch_service = (
            BatchService(settings, max(1, self.engine.info.max_batch_requests // 4)) if settings.batch_folder else None
        )
        self.runner: Runner | None = None
        if self.batch_service is not None:
            numbers = self.batch_service.numbers
            self.metrics.has_batches(lambda: numbers)
        self.engine.start()
        later = Timer(SHAPES_SECONDS, build_all)
        later.daemon = True
        later.start()
        if self.adapter_registry is not None:
            self.adapter_registry.follow()

    def application(
        self,
        page: Callable[[], Awaitable[str]],
        loads: Callable[[], Awaitable[tuple[int, list[Load]]]] | None = None,
        *,
        behind_serve: bool,
    ) -> ASGIApp:
        """The HTTP application. `page` gives the metrics, `loads` the loads, of all replicas; see `build_app`."""
        deps = RouteDeps(
            service=self.service,
            metrics=self.metrics,
            version=version("attend-server"),
            scrape=page,
            is_draining=self.is_draining,
            is_leaving=lambda: self.is_leaving,
            template=self.template,
            form=self.form,
            keys=self.keys,
            callers=self.callers,
            loads=loads,
            explaining=self.explaining,
            strict_fields=self.settings.strict_fields,
            beyond_context=self.beyond_context,
            unread_bodies=self.unread_bodies,
            grpc_port=self.settings.grpc_port,
            batch_service=self.batch_service,
        )
        app = build_app(
            deps,
            expose_docs=self.settings.expose_docs,
            cors_origins=self.settings.origins,
            hosts=allowed_names(self.settings.allowed_hosts, self.settings.host, has_api_keys=self.keys is not None),
            behind_serve=behind_serve,
        )
        if self.batch_service is not None:
            self.runner = Runner(self.batch_service, routes_of(deps, app), self.keys, lambda: self.service.num_attended)
            self.runner.start()
        return app

    def _most_unread(self) -> int:
        """Calls whose bodies may wait behind Ray Serve, where each takes a place of the replica's before its body has come."""
        return most_calls(self.settings, self.engine.info.device) // 2

    def is_draining(self) -> bool:
        """True if new requests are refused."""
        return self.engine.draining

    def check_health(self) -> None:
        """Raises EngineFailed where the process must be replaced. Serve calls it by this name, and does so."""
        if self.engine.heartbeat_age() >= STALE_SECONDS:
            raise EngineFailed("the engine's step thread is dead or stuck")

    async def leave(self) -> None:
        """Be ready no more, so that callers go elsewhere. Their calls are still answered."""
        self.is_leaving = True

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, let running ones end for so long, then end the rest with their reason."""
        draining = asyncio.ensure_future(self.engine.drain(seconds))
        await asyncio.sleep(0)  # from now on new calls are refused
        if self.runner is not None:
            await self.runner.close()
        await draining

    async def count_requests(self) -> int:
        """How many requests run or wait."""
        stats = self.engine.stats()
        return stats.num_running + stats.num_waiting

    async def describe(self) -> dict[str, Any]:
        """What the start-up line tells."""
        info = self.service.engine.info
        return {
            "family": info.family,
            "parameters": info.num_parameters,
            "device": info.device,
            "device_name": info.device_name,
            "dtype": info.dtype,
            "weights": info.weights,
            "backend": info.backend,
            "kv_tokens": info.num_blocks * info.block_size,
            "kv_bytes": info.cache_bytes,
            "max_model_len": info.max_model_len,
        }

    def close(self) -> None:
        """End its threads. Also of a replica that could not be put together."""
        for name in ("engine", "adapter_registry", "tracer", "batch_service"):
            if (part := getattr(self, name, None)) is not None:
                part.close()
        logs.close()


def open_shelf(settings: Settings, engine: AsyncEngine) -> AdapterRegistry | None:
    """The adapters that callers can name; None where none are set. Raises SettingError or CheckpointError."""
    if engine.adapters is None:
        return None
    folder = Path(settings.adapters_folder).absolute() if settings.adapters_folder else None
    return AdapterRegistry(engine.adapters, settings.adapters, folder, most=settings.max_adapters, reserved_name=settings.name)


def open_tracer(settings: Settings, replica: str) -> tracing.Tracer | None:
    """The tracer of a replica; None where no collector is set."""
    if not settings.otel_endpoint:
        return None
    return tracing.open_tracer(settings.otel_endpoint, settings.name, version=version("attend-server"), replica=replica)
