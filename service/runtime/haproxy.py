"""The program that Ray starts as HAProxy: inserts lines into the configuration that Ray has written, and becomes HAProxy.

Ray starts "haproxy -db -f FILE ..." at each change of the replicas, and names the process by its id: so this program becomes
HAProxy (`exec`). It runs from a copy (`supervisor.py::write_edge`), and imports nothing of ours.
"""

import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

PREFIX_RULES = "prefix.cfg.j2"
KNOWN = re.compile(
    r"(acl|balance|bind|close-spread-time|default-server|default_backend|errorfile|hard-stop-after|http-check|http-request"
    r"|http-reuse|load-server-state-from-file|log|maxconn|mode|nbthread|no|option|retries|retry-on|server|server-state-base"
    r"|server-state-file|log-format-sd|stats|tcp-check|timeout|tune\.[a-z0-9.-]+|use_backend) "
)
"""Beginnings of lines that Ray writes. With another one HAProxy is not started: nobody knows what it would do beside ours."""
SECTIONS = re.compile(
    "global|defaults|frontend (prometheus|http_frontend|grpc_frontend)|listen stats"
    "|backend (default_backend|default_grpc_backend|grpc_fallback_backend|(http|grpc)-.+)"
)
SERVER = re.compile(r"server (\S+) (\S+?)( proto h2)? check( observe layer4 error-limit \d+ on-error mark-down)?( backup)?")
OURS = re.compile("default-server |errorfile |maxconn |retries |retry-on |timeout connect ")
"""Lines of Ray's that give way to ours."""
HEALTHY, DRAINING = "73756363657373", "445241494E494E47"
"""`success` and `DRAINING`, as Ray's check expects a replica's answer. One that shuts down says the second."""
MAX_CONNECTIONS, SPARE_FILES, FILES_PER_CONNECTION = 8192, 512, 2.5
"""HAProxy does not start where it may not have so many files."""
LOST_MS = 3500
"""A connection to a replica ends when that machine has acknowledged nothing for so long. It is more than the three seconds for
which an event loop may be busy: a busy one takes no more bytes than its kernel can hold, which looks the same."""
LAST_CALL_MS = 300
"""Milliseconds for which a HAProxy that is replaced waits for a call on a gRPC connection that it has told to go away. A client
that had only just connected waits for ten seconds without this."""
NONE_UP = "no replica can take the request now"
DEFAULTS = """
    timeout connect 300ms
    timeout check 1500ms
    timeout http-request 10s
    # A call is tried once more, on another replica, where the first one took nothing or answered nothing.
    retry-on conn-failure empty-response
    retries 1
    # Two checks without an answer make a replica dead, 1 + 1.5 + 0.1 + 1.5 s after it froze: its calls and streams end then.
    default-server inter 1s fastinter 100ms downinter 500ms fall 2 rise 1 on-marked-down shutdown-sessions
    # A machine that is lost is noticed on idle connections too.
    option srvtcpka
    srvtcpka-idle 1s
    srvtcpka-intvl 1s
    # gRPC's port alone speaks HTTP/2: that has a hundred calls on a connection, and bodies are bounded by connections.
    option disable-h2-upgrade
    # A connection that has sent nothing is closed without a word: a browser that opened it ahead would take it for an answer.
    option http-ignore-probes
"""
RETRY = " hdr retry-after 1"
ERRORS = (
    (400, "the request ended early, or is not HTTP", "invalid_request_error", "invalid_request", "", 3),
    (408, "the request was sent too slowly", "invalid_request_error", "request_timeout", "", 4),
    (500, "internal error", "internal_error", "internal_error", "", 13),
    (502, "the replica ended before it answered", "unavailable_error", "unavailable", RETRY, 14),
    (503, NONE_UP, "unavailable_error", "unavailable", RETRY, 14),
    (504, "the replica did not answer in time", "timeout_error", "deadline_exceeded", " hdr x-should-retry false", 4),
)
"""HAProxy's own errors: status, message, type, code and more headers over HTTP, code of gRPC."""
HTTP_FRONTEND = """
    maxconn 6144
    http-request set-var(txn.attend_read) bool(true)
    # The replica learns the caller's address from us, as the last one of X-Forwarded-For.
    option forwardfor
    # A replica reads one plain id, and Serve makes one where there is none.
    acl attend_id req.fhdr(x-request-id) -m reg ^[A-Za-z0-9._:/+=@-]{1,128}$
    http-request del-header x-request-id unless attend_id { req.fhdr_cnt(x-request-id) eq 1 }
    http-request return %(version)s unless { req.ver 1.0 1.1 }
    # What CONNECT asks for has no path; what follows would be read as another request.
    http-request return %(target)s hdr connection close unless { path_beg / }
    # We are alive where we answer; whether a replica is alive is Serve's to judge.
    http-request return status 200 content-type text/plain string "ok\\n" if METH_GET { path /healthz /health }
    # Else a caller who sends the body in a packet of its own and then leaves is not noticed. A replica refuses one that is too
    # large before it is sent.
    http-request wait-for-body time 30s unless { req.hdr(content-length) -m int gt 1048576 }
    # What was refused before our rules, such as HTTP/2's first line, may be followed by more of its kind.
    http-after-response set-header connection close unless { var(txn.attend_read) -m found }
    # A replica says so with its readiness: from now on each answer is the last one of its connection.
    http-after-response set-var(proc.attend_leaving) bool(true) if { res.hdr(x-attend-leaving) -m found }
    http-after-response set-header connection close if { var(proc.attend_leaving) -m found }
    # To a caller it is one thing whether its replica died before or during the call.
    http-after-response set-status 503 if { status 502 }
"""
HTTP_BACKEND = """
    # What is made would be made twice, where a replica has died after it made it and before it answered.
    http-request disable-l7-retry if METH_POST { path_end /v1/files /v1/batches }
"""
GRPC_FRONTEND = f"""
    maxconn 1920
    timeout client-fin {LAST_CALL_MS}ms
    # As over HTTP, but in one line: of several lines gRPC gives a server the last one.
    acl attend_forwarded req.fhdr(x-forwarded-for) -m found
    http-request set-header x-forwarded-for %[req.fhdr(x-forwarded-for)],%[src] if attend_forwarded
    http-request set-header x-forwarded-for %[src] unless attend_forwarded
    # An error has the status 200 of HTTP, and many clients take no other content-type for one of gRPC.
    acl attend_status res.hdr(grpc-status) -m found
    http-after-response set-status 200 if attend_status
    http-after-response set-header content-type application/grpc if attend_status
"""


class NotUnderstood(Exception):
    """Ray's configuration is not what is known of it. The sentence names the line."""


def error_answer(status: int, message: str, kind: str, code: str, more: str = "") -> str:
    """An answer of HAProxy's own, as the SDKs read it."""
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    return f"status {status} content-type application/json string '{body}'{more}"


def with_our_lines(text: str, *, by_prefix: bool, connections: int = MAX_CONNECTIONS) -> str:
    """Ray's configuration with our lines. Raises NotUnderstood."""
    sections = dict(_sections(text))
    checked = {(head, words[1]) for head, lines in sections.items() for words in map(str.split, lines) if words[0] == "server"}
    lines = []
    for head, known in sections.items():
        lines += [head, *_our_lines(head, sections, connections)]
        lines += [ours for line in known for ours in _with_changes(head, line, checked)]
        servers = [words[1] for words in map(str.split, lines[lines.index(head) :]) if words[0] == "server"]
        if by_prefix and len(servers) > 1:
            lines += prefix_rules(servers, grpc=head.startswith("backend grpc"))
    return "\n".join(lines) + "\n"


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """The lines of each section, without comments, by its head, such as `backend http-default`."""
    head, lines = "", list[str]()
    for line in text.splitlines():
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        if head and line[0].isspace():
            if not KNOWN.match(f"{words} "):
                raise NotUnderstood(f"Ray's configuration of HAProxy has a line that is not understood: {words[:200]}")
            lines.append(words)
            continue
        if not SECTIONS.fullmatch(words):
            raise NotUnderstood(f"Ray's configuration of HAProxy has a section that is not understood: {words[:200]}")
        if head:
            yield head, lines
        head, lines = words, []
    yield head, lines


def _our_lines(head: str, sections: Mapping[str, list[str]], connections: int) -> list[str]:
    """Our lines at the beginning of a section."""
    grpc_errors = [
        f"http-error status {status} hdr grpc-status {code} hdr grpc-message '{message}'" + RETRY * (code == 14)
        for status, message, _, _, _, code in ERRORS
    ]
    text, lines = "", list[str]()
    if head == "global":  # beyond maxhdr there is no request yet that could be refused in our shape
        lines = [f"maxconn {connections}", "tune.http.maxhdr 4096"]
    elif head == "defaults":
        text, lines = DEFAULTS, [f"http-error {error_answer(*error[:5])}" for error in ERRORS]
    elif head == "frontend http_frontend":
        bad = "invalid_request_error"
        text = HTTP_FRONTEND % {
            "version": error_answer(505, "the request must be HTTP/1.0 or HTTP/1.1", bad, "invalid_request"),
            "target": error_answer(404, "the target of a request must be a path", bad, "not_found"),
        }
    elif head == "frontend grpc_frontend":
        text, lines = GRPC_FRONTEND, grpc_errors
    elif head == "backend default_backend":  # before the model has loaded there is no application, which to Ray is a wrong path
        words = [line.split() for line in sections.get("frontend http_frontend", ()) if line.startswith("acl is_")]
        prefixes = sorted(each[-1] for each in words if each[2] == "path")
        message = f"no application is at this path: there are {', '.join(prefixes)}"
        wrong = error_answer(404, message, "invalid_request_error", "not_found")
        lines = [f"http-request return {wrong if prefixes else error_answer(*ERRORS[4][:5])}"]
    elif head == "backend default_grpc_backend" and not any(name.startswith("backend grpc-") for name in sections):
        lines = [f"http-request return status 200 hdr grpc-status 14 hdr grpc-message '{NONE_UP}'"]
    elif head.startswith("backend http-"):
        text = HTTP_BACKEND
    elif head.startswith("backend grpc-"):
        lines = grpc_errors
    return [line for line in map(str.strip, text.splitlines()) if line] + lines


def _with_changes(head: str, line: str, checked: set[tuple[str, str]]) -> Iterator[str]:
    """What becomes of a line of Ray's. Raises NotUnderstood.

    A replica is alive while its gRPC side answers, also while it leaves, when its HTTP side takes no connection any more: so
    HTTP follows gRPC. Serve's own proxy (`backup`) would hold calls while no replica runs: it gets none.
    """
    if OURS.match(line) or head == "backend default_backend":
        return
    if line.startswith("server "):
        if (match := SERVER.fullmatch(line)) is None:
            raise NotUnderstood(f"Ray's configuration of HAProxy has a server that is not understood: {line[:200]}")
        name, address, h2, _, backup = match.groups("")
        twin = head.removeprefix("backend ").replace("http-", "grpc-", 1)
        follows = head.startswith("backend http-") and (f"backend {twin}", name) in checked
        if not backup:  # a default-server ignores tcp-ut
            yield f"server {name} {address}{h2} {f'track {twin}/{name}' if follows else 'check'} tcp-ut {LOST_MS}"
    elif line.startswith("stats socket "):
        if " mode 666 " not in line:
            raise NotUnderstood(f"Ray's configuration of HAProxy has a socket that is not understood: {line[:200]}")
        yield line.replace(" mode 666 ", " mode 600 ")
    elif line == "http-reuse always" and head.startswith("backend http-"):
        # Where a replica dies during a call on a connection that was used before, HAProxy would close the caller's unanswered.
        yield "http-reuse never"
    else:
        yield line.replace(f"expect binary {HEALTHY}", f"expect rbinary ({HEALTHY}|{DRAINING})")


def prefix_rules(servers: list[str], *, grpc: bool) -> list[str]:
    """The lines that send calls which begin alike to one of these servers."""
    from jinja2 import Environment

    templates = Environment(trim_blocks=True, lstrip_blocks=True)
    text = templates.from_string(Path(__file__).with_name(PREFIX_RULES).read_text(encoding="utf-8"))
    return [line for line in text.render(servers=servers, grpc=grpc).splitlines() if line.strip()]


def connection_limit() -> int:
    """Connections at the same time: fewer where the number of open files is limited."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(8, min(MAX_CONNECTIONS, int((files - SPARE_FILES) / FILES_PER_CONNECTION)))


def main(binary: str, words: list[str], environment: Mapping[str, str]) -> None:
    """Become HAProxy with these arguments, which are Ray's. With others, as -c, its file is written alone.

    Ray names no replica while a new manager starts, and while it builds the application's next configuration (Ray 2.60).
    Meanwhile calls go where they went before. A replica that is gone fails its checks.
    """
    file = Path(words[words.index("-f") + 1])
    by_prefix = environment.get("ATTEND_PREFIX_ROUTING") not in ("0", "false")
    text = file.read_text(encoding="utf-8")
    last, current = file.with_name("last.cfg"), file.with_name("current")
    if "server SERVE_REPLICA" not in text and last.exists():
        text = last.read_text(encoding="utf-8")
    else:
        text = with_our_lines(text, by_prefix=by_prefix, connections=connection_limit())
        replace_file(last, text)
    replace_file(file, text)
    if words[0] == "-db":
        if "-sf" not in words and (pid := running(current)):  # of a manager of Ray's that died, or of `replace_dead`
            words += ["-sf", str(pid)]
        replace_file(current, f"{os.getpid()}\n")
        us, manager = os.getpid(), os.getppid()
        if os.fork() == 0:
            replace_dead(us, manager, current, binary)
            os._exit(0)
    os.execv(binary, [binary, *words])


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def running(current: Path) -> int:
    """The HAProxy that was started last, while it runs; else 0. Its id may be another process's by now."""
    with suppress(OSError):
        pid = int(current.read_text(encoding="ascii"))
        if f"{current.parent}/".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return 0


def replace_dead(haproxy: int, manager: int, current: Path, binary: str) -> None:
    """Start another HAProxy where this one dies and its manager, which ends with it at a stop, lives: Ray takes several seconds
    for it. Without the socket, by which Ray would take it for its own. In a session of its own: Ray ends all of a group.
    """
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    with suppress(ProcessLookupError):
        ended = select.poll()
        ended.register(os.pidfd_open(haproxy), select.POLLIN)
        while not ended.poll(1000):
            if running(current) not in (0, haproxy):
                return
    time.sleep(0.5)
    if current.read_text(encoding="ascii").strip() != str(haproxy) or not Path(f"/proc/{manager}").exists():
        return
    file = current.with_name("stand-in.cfg")
    lines = current.with_name("last.cfg").read_text(encoding="utf-8").splitlines(keepends=True)
    replace_file(file, "".join(line for line in lines if not line.startswith("stats socket ")))
    process = subprocess.Popen([binary, "-db", "-dR", "-f", str(file)])
    replace_file(current, f"{process.pid}\n")
    while process.poll() is None and Path(f"/proc/{manager}").exists():
        time.sleep(1)
    try:
        process.wait(60)  # Ray ends its manager, and starts another, whose HAProxy ends this one
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)


def say(sentence: str, environment: Mapping[str, str]) -> None:
    """An error in the log of the server."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
    line = f"{stamp} ERROR attend.edge: {sentence}"
    if environment.get("ATTEND_LOG_FORMAT") == "json":
        line = json.dumps({"time": stamp, "level": "error", "logger": "attend.edge", "message": sentence})
    with suppress(OSError), open(environment["ATTEND_LOG_FILE"], "a", encoding="utf-8") as log:
        log.write(line + "\n")


if __name__ == "__main__":
    try:
        main(os.environ["HAPROXY_BINARY"], sys.argv[1:], os.environ)
    except NotUnderstood as error:
        if os.environ.get("ATTEND_LOG_FILE"):
            say(f"HAProxy is not started with its next configuration: {error}", os.environ)
        sys.exit(f"attend: {error}")
