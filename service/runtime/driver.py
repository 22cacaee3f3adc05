"""The driver process of a server: starts Ray and Serve, says that it is ready, waits, stops in order.

A child of `supervisor.py`, which has set the environment that Ray reads when it is imported.
"""

import asyncio
import contextlib
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.exceptions import RayServeException

from attend.model.errors import AttendError, CheckpointError, EngineFailed, SettingError
from attend.model.net.families.table import config_of
from attend.service.access.keys import load_keys
from attend.service.grpc_api.limits import most_bytes
from attend.service.observe import cluster_state, edge
from attend.service.runtime import hub
from attend.service.runtime.deployment import application
from attend.service.runtime.files import hold
from attend.service.runtime.http_server import IDLE_SECONDS
from attend.service.runtime.lifecycle import (
    Stop,
    catch_signals,
    drain_until_told_again,
    drained_status,
    linger,
    ready_line,
    run_in_daemon_thread,
    run_until,
    stopping_line,
    tell_while_slow,
)
from attend.service.runtime.sizes import gpus_per_rank
from attend.service.runtime.terminal_lines import print_line, set_line_style
from attend.service.settings import Settings

APP = "default"
SERVICERS = [
    "attend.service.grpc_api.register.add_generation_service",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
]
OBJECT_STORE = 80 << 20
"""Bytes; nothing large passes through it."""
ROUTES_SECONDS = 30.0
DESCRIBE_SECONDS = 30.0
"""How long a replica that does not answer is asked again what it is."""
CONTROLLER_SECONDS = 0.05
AGAIN_SECONDS, CENSUS_SECONDS, WATCH_SECONDS = 0.5, 2.0, 3.0
"""WATCH_SECONDS: how often the cluster is looked at. A look takes 20 ms of CPU, most of it Ray's."""
MISSED_LOOKS = 3
"""In a row, at which HAProxy misses replicas, before it is said: for a second or two it does whenever they change."""


async def main(settings: Settings, statistics: int) -> int:
    """Serve until SIGTERM or SIGINT; a second signal ends running requests at once. `statistics` is HAProxy's port for them.

    Returns the exit status: 0, or 128 and the signal where it was told to stop before it was ready.
    A coroutine because Serve, in its throughput-optimised mode, makes handles only inside a running event loop.
    """
    set_line_style(settings.log_format)
    settings = hub.with_folder(settings, print_line)  # once, before replicas start, and in sight of the person who waits
    if settings.api_keys_file:
        load_keys(Path(settings.api_keys_file))
    context = config_of(settings.folder).max_positions
    context = min(context, settings.max_model_len or context)
    os.environ.setdefault("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", str(most_bytes(context)))  # for the processes that Ray starts
    print_line(f"Starting Ray for {settings.name} ...")
    without_helpers()
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE,
        logging_level=logging.ERROR,
        log_to_driver=settings.log_level == "debug",
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    stop = catch_signals()  # after ray.init, which installs handlers of its own
    hold(Path(ray._private.worker._global_node.get_session_dir_path()))  # Ray's sockets and logs
    started = ready = False
    try:
        check_room(settings, ray.cluster_resources())
        started = await run_until(stop, tell_while_slow(start(settings, statistics)))
        ready = started and await run_until(stop, say_ready(settings))
        if ready:
            await run_until(stop, tell_changes(statistics))
            await linger_with_replicas(settings, statistics, stop)
        stop.is_draining = ready
        if await may_serve(unknown=started):
            if count := await count_requests():  # else the supervisor's line says all
                print_line(stopping_line(count, settings.drain_seconds))
            await drain_until_told_again(stop, settings.drain_seconds, partial(drain, settings))
    finally:
        await stop_everything(serving=started)
    return drained_status(stop) if ready else 128 + stop.number


def without_helpers() -> None:
    """Have Ray start no process that does nothing for a server on one machine.

    They are the autoscaler of clusters, what copies workers' output to the driver, and the dashboard's server without a page:
    two seconds of a core, and 250 MB. Where another Ray has other names for what starts them, they start.
    """
    for name in ("start_monitor", "start_log_monitor", "start_api_server"):
        if hasattr(ray._private.node.Node, name):
            setattr(ray._private.node.Node, name, lambda *_, **__: None)


def check_room(settings: Settings, resources: dict[str, float]) -> None:
    """Raise SettingError where the replicas can never run together on this machine: Serve would wait without a word."""
    ranks, gpus = settings.tensor_parallel, resources.get("GPU", 0)
    if settings.device == "cuda" and gpus < 1:
        raise SettingError("device is cuda, but this machine has no GPU")
    wanted = {"CPU": ranks, "GPU": ranks} if gpus_per_rank(settings, gpus) else {"CPU": ranks}
    for name, most in (("replicas", settings.replicas), ("max_replicas", settings.max_replicas or settings.replicas)):
        fit = min(int(resources.get(kind, 0) / each) for kind, each in wanted.items())
        if most > fit:
            needs = " and ".join(f"{each} {kind}" for kind, each in wanted.items())
            has = " and ".join(f"{resources.get(kind, 0):g}" for kind in wanted)
            raise SettingError(f"{name} is {most}, but {fit} fit: each needs {needs}, and this machine has {has}")


async def start(settings: Settings, statistics: int) -> None:
    """Start the proxies and the application; returns when calls go to replicas that have loaded their weights."""
    print_line(f"Loading {settings.folder} ...")
    served = application(settings)
    proxies = run_in_daemon_thread(
        serve.start,
        http_options=HTTPOptions(host=settings.host, port=settings.port, keep_alive_timeout_s=IDLE_SECONDS),
        grpc_options=gRPCOptions(port=settings.grpc_port, grpc_servicer_functions=SERVICERS),
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    try:
        while not (has_controller() or proxies.done()):  # noqa: ASYNC110 - Ray tells nobody
            await asyncio.sleep(CONTROLLER_SECONDS)
        # the replica loads while the proxies start
        await asyncio.gather(proxies, deploy(served))
    finally:
        proxies.cancel()  # where the start was ended before they were asked for: their failure is no news then
    deadline = asyncio.get_running_loop().time() + ROUTES_SECONDS
    while not await leads_to(settings.replicas, statistics):  # Serve starts it with them a moment after it says that they run
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.05)


async def leads_to(replicas: int, statistics: int) -> bool:
    """True if HAProxy routes to so many replicas."""
    try:
        rows = await asyncio.to_thread(edge.statistics, "127.0.0.1", statistics, 2.0)
    except OSError:  # between two of its processes
        return False
    return edge.reachable_replicas(rows) >= replicas


async def deploy(application: serve.Application) -> None:
    """Returns when replicas have loaded their weights. Raises CheckpointError where one cannot."""
    try:
        await run_in_daemon_thread(serve.run, application, name=APP, route_prefix="/")
    except RuntimeError as error:
        raise CheckpointError(reason_of_failure()) from error


def has_controller() -> bool:
    """True if Serve's controller is there, which takes applications: `serve.start` returns only when the proxies are."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE) is not None
    return False


async def tell_changes(statistics: int) -> None:
    """Write a line for each replica and each proxy that changes its state, begins or dies, and where HAProxy misses some."""
    last: cluster_state.ClusterState | None = None
    looks_missed = 0
    while True:
        with contextlib.suppress(RayServeException, ray.exceptions.RayError):  # the controller may be the one that died
            now = await run_in_daemon_thread(cluster_state.take, APP)
            for line in cluster_state.news(last, now) if last else ():
                print_line(line)
            last = now
            is_whole = await leads_to(list(now.replicas.values()).count("running"), statistics)
            looks_missed = 0 if is_whole else looks_missed + 1
            if looks_missed == MISSED_LOOKS:
                print_line("HAProxy does not route to every replica: calls that it cannot route get 503")
        await asyncio.sleep(WATCH_SECONDS)


def reason_of_failure() -> str:
    """Our own sentence out of the traceback that Serve keeps of a replica's failure, or its last lines."""
    deployments = serve.status().applications[APP].deployments.values()
    lines = [line.strip() for each in deployments for line in each.message.splitlines() if line.strip()]
    ours = [line.split(": ", 1)[1] for line in lines if line.startswith("attend.model.errors.") and ": " in line]
    return ours[-1] if ours else " ".join(lines[-3:])


async def say_ready(settings: Settings) -> None:
    """Say where the server listens and what it serves. While no replica answers, ask again."""
    deadline = asyncio.get_running_loop().time() + DESCRIBE_SECONDS
    while asyncio.get_running_loop().time() < deadline:
        with contextlib.suppress(RayServeException, TimeoutError, ray.exceptions.RayError):
            if facts := await ask_replicas("describe", seconds=5.0):
                return print_line(ready_line(settings, facts[0]))
        await asyncio.sleep(AGAIN_SECONDS)
    raise EngineFailed(f"no replica has reported its model within {DESCRIBE_SECONDS:g} s")


async def may_serve(unknown: bool) -> bool:
    """True if a replica runs that may have calls; `unknown` where Serve's controller does not say."""
    with contextlib.suppress(RayServeException, ray.exceptions.RayError, TimeoutError):
        cluster = await asyncio.wait_for(run_in_daemon_thread(cluster_state.take, APP), CENSUS_SECONDS)
        return "running" in cluster.replicas.values()
    return unknown


async def count_requests() -> int:
    """How many requests run or wait on all replicas that say so."""
    with contextlib.suppress(RayServeException, ray.exceptions.RayError, TimeoutError):
        return sum(await ask_replicas("count_requests", seconds=CENSUS_SECONDS))
    return 0


async def linger_with_replicas(settings: Settings, statistics: int, stop: Stop) -> None:
    """Have every replica be ready no more, and HAProxy say so; answer new calls for as long as the settings say."""
    if settings.linger_seconds:
        stop.is_lingering = True
        with contextlib.suppress(RayServeException, ray.exceptions.RayError, OSError):
            await ask_replicas("leave", seconds=CENSUS_SECONDS)
            await asyncio.to_thread(edge.ask_readiness, settings.host, settings.port, CENSUS_SECONDS)
        await linger(stop, settings.linger_seconds, tell_changes(statistics))


async def drain(settings: Settings, seconds: float) -> None:
    """Have every replica refuse new requests, and end the running ones within so long, while Serve still routes to it."""
    within = seconds + settings.shutdown_seconds - settings.drain_seconds + 2
    try:
        await asyncio.shield(ask_replicas("drain", seconds, seconds=within))  # Serve says a traceback where it is cancelled
    except (RayServeException, TimeoutError, ray.exceptions.RayError) as error:
        print_line(f"A replica did not drain: {type(error).__name__}")


async def ask_replicas(method: str, *arguments: object, seconds: float) -> list[Any]:
    """Call a method on every replica; what each returns."""
    results: list[Any] = await serve.get_app_handle(APP).broadcast(method, *arguments).results_async(timeout_s=seconds)
    return results


async def stop_everything(serving: bool) -> None:
    """First the application, so that Serve lets its calls end; then the proxies; then Ray. One that never served has no calls:
    Serve would wait until it has loaded.
    """
    if serving:
        await asyncio.to_thread(serve.delete, APP)
        await serve.shutdown_async()
    ray.shutdown()


if __name__ == "__main__":  # its words: settings as JSON, and HAProxy's port for its statistics
    try:
        sys.exit(asyncio.run(main(Settings.from_json(sys.argv[1]), int(sys.argv[2]))))
    except AttendError as error:
        print_line(f"attend: {error}", logging.ERROR)
        sys.exit(2)
