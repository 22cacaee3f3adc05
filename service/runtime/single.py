"""One replica in one process, without Ray: `attend serve --single`.

It serves the same routes, gRPC methods, metrics and drain. What only Ray Serve and HAProxy give: service/OPERATION.md.
"""

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from attend.model.errors import EngineFailed, SettingError
from attend.service.runtime.files import allocator, raise_limit
from attend.service.runtime.lifecycle import (
    Stop,
    catch_signals,
    check_certificate,
    drain_until_told_again,
    drained_status,
    linger,
    ready_line,
    run_in_daemon_thread,
    run_until,
    stopping_line,
    tell_while_slow,
    wait_for,
)
from attend.service.runtime.ports import check_ports
from attend.service.runtime.terminal_lines import print_line
from attend.service.settings import Settings

if TYPE_CHECKING:
    from attend.service.runtime.replica import Replica
    from attend.service.runtime.tls import Certificate

REPLICA = "single"
"""The replica's label on the metrics page, and its node's."""
WATCH_SECONDS = 1.0
RESERVE = 256
"""Open files beside connections: the model's, logs, pipes to processes that try grammars, connections about to be closed."""
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE", "GRPC_VERBOSITY": "ERROR"}
"""Set before torch and grpc are imported: a tokenizer works on the thread that calls it, threads that wait do not spin, and a
caller whose handshake fails writes no line."""

Report = Callable[[dict[str, Any]], None]

log = logging.getLogger("attend.single")


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status: 0, or 130 and 143 where it was told before it served.

    Raises SettingError or CheckpointError.
    """
    check_certificate(settings)
    prepare()
    from attend.service.runtime.http_server import Loop

    with claim_port(settings) as http, asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main(settings, http))


def prepare() -> None:
    """What a process that serves does before it imports anything large."""
    raise_limit()
    for name, value in (ENVIRONMENT | allocator()).items():
        os.environ.setdefault(name, value)


def claim_port(settings: Settings) -> socket.socket:
    """The socket of HTTP, bound before the model is loaded. Raises SettingError naming a port that it cannot have."""
    from attend.service.runtime.http_server import bind_socket

    check_ports(settings.port, settings.grpc_port)
    try:
        return bind_socket(settings.host, settings.port)
    except OSError as error:
        raise SettingError(f"port {settings.port} on {settings.host}: {error.strerror}") from error


def connections_allowed() -> tuple[int, int]:
    """How many connections HTTP and gRPC may take, with RESERVE files left for others. Says where that is fewer than usual."""
    from attend.service.grpc_api.server import MAX_CONNECTIONS as MAX_GRPC
    from attend.service.runtime.http_server import MAX_CONNECTIONS as MAX_HTTP

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_HTTP + MAX_GRPC
    if files == resource.RLIM_INFINITY or files >= most + RESERVE:
        return MAX_HTTP, MAX_GRPC
    share = max(2, files - RESERVE)
    http = max(1, share * MAX_HTTP // most)
    log.warning(
        "at most %d files may be open (ulimit -n): at most %d connections over HTTP and %d over gRPC, in place of %d and %d",
        files,
        http,
        share - http,
        MAX_HTTP,
        MAX_GRPC,
    )
    return http, share - http


async def main(settings: Settings, http: socket.socket, report: Report | None = None) -> int:
    """Load, serve, drain. A second signal ends the process at once, and calls that are drained with their reason.

    `report` gets what the process serves once it does, in place of the person who typed the command; the metrics page is then
    that of the replica alone.
    """
    from attend.service.runtime.replica import Replica

    stop = catch_signals()
    if report is None:
        print_line(f"Loading {settings.name} ...")
    loading = run_in_daemon_thread(Replica, settings, REPLICA)
    if not await run_until(stop, tell_while_slow(loading) if report is None else wait_for(loading)):
        os._exit(128 + stop.number)  # the thread that loads cannot be ended
    replica: Replica = loading.result()
    try:
        return await serve_until(replica, settings, http, stop, report)
    finally:
        replica.close()


async def serve_until(
    replica: "Replica", settings: Settings, http: socket.socket, stop: Stop, report: Report | None = None
) -> int:
    """Answer calls until `stop`, and while it lingers; then let the running ones end."""
    from attend.service.grpc_api.server import grpc_server
    from attend.service.observe.cached_page import CachedPage
    from attend.service.runtime.http_server import http_server, listening
    from attend.service.runtime.sizes import most_calls
    from attend.service.runtime.tls import Certificate

    most = most_calls(settings, replica.engine.info.device)
    certificate = Certificate(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    tls = (None, None) if certificate is None else (certificate.context, certificate.credentials)
    over_http, over_grpc = connections_allowed()
    length = replica.engine.info.max_model_len
    write = partial(metrics_page, replica, certificate) if report is None else replica.metrics.text
    app = replica.application(CachedPage(lambda: asyncio.to_thread(write)), behind_serve=False)
    origins = settings.origins
    server = http_server(app, most, tls[0], cors_origins=origins, most_connections=over_http)
    place = settings.host, settings.grpc_port
    limits: dict[str, Any] = {"max_model_len": length, "most_connections": over_grpc}
    rpc = grpc_server(replica, *place, most, tls[1], **limits, linger_seconds=settings.linger_seconds)
    await rpc.start()
    http.listen(server.config.backlog)  # the task may not come to it before the line below is read
    serving = asyncio.create_task(server.serve(listening(http)))
    facts = await replica.describe()
    if report is None:
        print_line(ready_line(settings, facts))
    else:
        report(facts)
    try:
        await run_until(stop, watch(replica, certificate))
        if settings.linger_seconds:
            replica.is_leaving = server.connections.are_leaving = True
            await linger(stop, settings.linger_seconds, watch(replica, certificate))
            server.close_idle()
    except EngineFailed as error:
        log.critical("%s: the process ends", error)
        os._exit(1)  # its thread may never end
    if report is None:
        print_line(stopping_line(await replica.count_requests(), settings.drain_seconds))
    await drain_until_told_again(stop, settings.drain_seconds, replica.drain)
    server.end()
    await asyncio.gather(serving, rpc.stop(1.0))
    return drained_status(stop)


async def watch(replica: "Replica", certificate: "Certificate | None" = None) -> None:
    """Take over new certificates. Raise EngineFailed when the replica cannot serve any more."""
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        replica.check_health()
        if certificate is not None:
            await asyncio.to_thread(certificate.renew)


def metrics_page(replica: "Replica", certificate: "Certificate | None" = None) -> str:
    """The metrics page of the one replica."""
    from attend.service.observe import edge
    from attend.service.observe.exposition import merge, replica_counts, serving_metrics

    own = {} if certificate is None else edge.certificate(REPLICA, certificate.expiry, certificate.is_ok)
    return (
        merge([(REPLICA, replica.metrics.text())])
        + replica_counts(1, 1)
        + serving_metrics(["running"], 0)
        + edge.to_exposition(own)
    )
