"""The driver process of a server: starts Ray and Serve, says that it is ready, waits, stops in order.

Run by `service.supervisor`, which has set the environment that Ray reads when it is imported.
"""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.exceptions import RayServeException

from model.errors import AttendError, CheckpointError, SettingError
from model.net.checkpoint import inspect
from service import routes
from service.deployment import build
from service.keys import load_keys
from service.settings import Settings

APP = "default"
SERVICERS = [
    "service.grpc_api.register.add_generation_service",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
]
OBJECT_STORE = 80 << 20
"""Bytes; nothing large passes through it."""
ROUTES_SECONDS = 30.0


async def main(settings: Settings, statistics: int) -> int:
    """Serve until SIGTERM or SIGINT; a second signal stops without draining. `statistics` is HAProxy's port for them.

    Returns the exit status.
    A coroutine because Serve, in its throughput-optimised mode, makes handles only inside a running event loop.
    """
    inspect(settings.folder)
    if settings.api_keys_file:
        load_keys(Path(settings.api_keys_file))
    say(f"Starting Ray for {settings.name} ...")
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE,
        logging_level=logging.ERROR,
        log_to_driver=settings.log_level == "debug",
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    stop = catch_signals()  # after ray.init, which installs handlers of its own
    try:
        await start(settings, statistics)
        say(await ready_line(settings))
        await stop.wait()
        say("Stopping: running streams may end ...")
        await drain(settings)
    finally:
        await stop_everything()
    return 0


async def start(settings: Settings, statistics: int) -> None:
    """Start the proxies and the application; returns when calls go to replicas that have loaded their weights."""
    say(f"Loading {settings.folder} ...")
    serve.start(
        http_options=HTTPOptions(host=settings.host, port=settings.port),
        grpc_options=gRPCOptions(port=settings.grpc_port, grpc_servicer_functions=SERVICERS),
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    if settings.device == "cuda" and ray.cluster_resources().get("GPU", 0) < 1:
        raise SettingError("device is cuda, but this machine has no GPU")  # Serve would wait for one for ever
    try:
        application = build(settings.model_dump())
        await asyncio.to_thread(serve.run, application, name=APP, route_prefix="/")
    except RuntimeError as error:
        raise CheckpointError(reason_of_failure()) from error
    if settings.proxy == "haproxy" and not await routes.lead_to(settings.replicas, APP, statistics, seconds=ROUTES_SECONDS):
        say("HAProxy does not know every replica yet: calls go round by Serve's own proxy, which is slower")


def reason_of_failure() -> str:
    """Our own sentence out of the traceback that Serve keeps of a replica's failure, or its last lines."""
    deployments = serve.status().applications[APP].deployments.values()
    lines = [line.strip() for each in deployments for line in each.message.splitlines() if line.strip()]
    ours = [line.split(": ", 1)[1] for line in lines if line.startswith("model.errors.") and ": " in line]
    return ours[-1] if ours else " ".join(lines[-3:])


async def ready_line(settings: Settings) -> str:
    """Where the server listens, what it serves, and how to try it."""
    facts = (await ask_replicas("describe", seconds=30.0))[0]
    host = "localhost" if settings.host in ("127.0.0.1", "0.0.0.0") else settings.host
    body = '{"prompt":"def fibonacci(n):","max_tokens":48,"stream":true}'
    return (
        f"Ready: http://{host}:{settings.port}  grpc {host}:{settings.grpc_port}  {settings.name} "
        f"({facts['family']}, {facts['parameters'] / 1e6:.1f}M parameters)  {facts['device']} {facts['dtype']} "
        f"{facts['backend']}  {facts['kv_tokens']} KV tokens\n"
        f"Try:   curl -N --json '{body}' http://{host}:{settings.port}/v1/completions"
    )


async def drain(settings: Settings) -> None:
    """Have every replica refuse new requests and end the running ones, while Serve still routes to it."""
    try:
        await ask_replicas("drain", settings.drain_seconds, seconds=settings.drain_seconds + 2)
    except (RayServeException, TimeoutError, ray.exceptions.RayError) as error:
        say(f"A replica did not drain: {type(error).__name__}")


async def ask_replicas(method: str, *arguments: object, seconds: float) -> list[Any]:
    """Call a method on every replica; what each returns."""
    results: list[Any] = await serve.get_app_handle(APP).broadcast(method, *arguments).results_async(timeout_s=seconds)
    return results


async def stop_everything() -> None:
    """First the application, so that Serve lets its calls end; then the proxies; then Ray."""
    await asyncio.to_thread(serve.delete, APP)
    await serve.shutdown_async()
    ray.shutdown()


def catch_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set; the second one exits at once, and the supervisor cleans up."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        loop.call_soon_threadsafe(stop.set)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return stop


def say(text: str) -> None:
    """A line for the person who started the server."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main(Settings.from_json(sys.argv[1]), int(sys.argv[2]))))
    except AttendError as error:
        say(f"attend: {error}")
        sys.exit(2)
