"""The server of several models: `attend serve --models FILE`. It ends with its processes, and they with it."""

import asyncio
import itertools
import logging
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attend.model.errors import CheckpointError, SettingError
from attend.service.access.hosts import allowed_names
from attend.service.access.keys import KeyRing
from attend.service.errors import ModelUnavailable
from attend.service.observe import edge, logs
from attend.service.observe.cached_page import CachedPage
from attend.service.runtime.files import hold, socket_folder
from attend.service.runtime.lifecycle import (
    Stop,
    catch_signals,
    check_certificate,
    drain_until_told_again,
    drained_status,
    linger,
    listening_line,
    run_until,
    stopping_line,
    tell_while_slow,
)
from attend.service.runtime.models.admission import SERVER, Admission
from attend.service.runtime.models.app import build_models_app, models_page
from attend.service.runtime.models.entries import Plan, ServedModel, in_words, read_plan
from attend.service.runtime.models.grpc import models_grpc_server
from attend.service.runtime.models.pool import Pool
from attend.service.runtime.models.process import ModelProcess
from attend.service.runtime.single import WATCH_SECONDS, claim_port, connections_allowed
from attend.service.runtime.sizes import callers_of
from attend.service.runtime.terminal_lines import print_line
from attend.service.runtime.tls import Certificate
from attend.service.settings import Settings

log = logging.getLogger("attend.models")

MAX_PATH = 90
"""Bytes of the folder's path, before those of a number and a socket."""
MAX_CALLS = 4096
"""Calls of the server at a time, over each transport. The processes bound those of their models far below."""


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status, as `--single` does. Raises SettingError or CheckpointError."""
    if settings.batch_folder:
        raise SettingError("batch_folder is for a server of one model: leave it out with models")
    check_certificate(settings)
    plan = read_plan(settings)
    from attend.service.runtime.http_server import Loop

    logs.configure(settings.log_level, settings.log_format, settings.log_file)
    keys = KeyRing(settings.api_keys_file) if settings.api_keys_file else None
    with claim_port(settings) as http, folder_of_sockets() as folder, asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main(settings, plan, keys, http, folder))


@contextmanager
def folder_of_sockets() -> Iterator[Path]:
    """A folder for this user alone, which is gone afterwards. Raises SettingError where none can be made."""
    try:
        made = tempfile.TemporaryDirectory(prefix="attend-models-")
    except OSError as error:
        raise SettingError(f"no folder can be made for sockets: {error.strerror}; set TMPDIR to another folder") from error
    with made as folder:
        hold(Path(folder))
        yield socket_folder(Path(folder), MAX_PATH)


async def main(settings: Settings, plan: Plan, keys: KeyRing | None, http: socket.socket, folder: Path) -> int:
    """Load the pinned models, serve, drain. A second signal ends the process at once, and calls with their reason."""
    stop, numbers = catch_signals(), itertools.count()

    async def start(model: ServedModel) -> ModelProcess:
        return await ModelProcess.start(model, folder / str(next(numbers)))

    pool = Pool(plan, start)
    admission = Admission(keys, callers_of(settings), pool, settings.request_timeout_seconds)
    try:
        if pinned := [served.name for served in plan.models.values() if served.entry.pin]:
            print_line(f"Loading {', '.join(pinned)} ...")
        if not await run_until(stop, tell_while_slow(pool.load_pinned())):
            return 128 + stop.number
        await serve_models(settings, admission, http, stop)
        return drained_status(stop)
    except ModelUnavailable as error:
        reasons = (f"the model {slot.name!r} cannot be loaded: {slot.reason}" for slot in pool.slots.values() if slot.reason)
        raise CheckpointError(next(reasons, str(error))) from error
    finally:
        await pool.close(0.0)
        logs.close()


async def serve_models(settings: Settings, admission: Admission, http: socket.socket, stop: Stop) -> None:
    """Answer calls until `stop`, then let the running ones end."""
    from attend.service.runtime.http_server import http_server, listening

    pool = admission.pool
    certificate = Certificate(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    tls = (None, None) if certificate is None else (certificate.context, certificate.credentials)

    async def whole_page() -> str:
        own = {} if certificate is None else edge.certificate(SERVER, certificate.expiry, certificate.is_ok)
        return await models_page(admission.registry, pool) + edge.to_exposition(own)

    hosts = allowed_names(settings.allowed_hosts, settings.host, has_api_keys=admission.keys is not None)
    page = CachedPage(whole_page)
    app = build_models_app(settings, admission, page, version("attend-server"), hosts)
    over_http, over_grpc = (most // 2 for most in connections_allowed())  # each call has another one to its model's process
    server = http_server(app, MAX_CALLS, tls[0], cors_origins=settings.origins, most_connections=over_http)
    place = settings.host, settings.grpc_port, tls[1]
    limits: dict[str, Any] = {"most_calls": MAX_CALLS, "most_connections": over_grpc}
    rpc = models_grpc_server(admission, *place, **limits, linger_seconds=settings.linger_seconds)
    await rpc.start()
    http.listen(server.config.backlog)
    serving = asyncio.create_task(server.serve(listening(http)))
    names = ", ".join(served.name + (" (pinned)" if served.entry.pin else "") for served in pool.plan.models.values())
    print_line(listening_line(settings, f"models: {names}  memory for loaded models {in_words(pool.plan.budget)}"))
    await run_until(stop, _watch(pool, certificate))
    if settings.linger_seconds:
        admission.is_leaving = server.connections.are_leaving = True
        await linger(stop, settings.linger_seconds, _watch(pool, certificate))
        server.close_idle()
    print_line(stopping_line(sum(slot.calls for slot in pool.slots.values()), settings.drain_seconds))
    await drain_until_told_again(stop, settings.drain_seconds, pool.close)
    server.end()
    await asyncio.gather(serving, rpc.stop(1.0))


async def _watch(pool: Pool, certificate: Certificate | None) -> None:
    """Unload idle models, and take over new certificates."""
    while True:
        await pool.look()
        if certificate is not None:
            await asyncio.to_thread(certificate.renew)
        await asyncio.sleep(WATCH_SECONDS)
