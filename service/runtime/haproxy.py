"""The program that Ray starts as HAProxy: writes our configuration, and becomes HAProxy.

Ray writes a file and starts "haproxy -db -f FILE ..." at each change of the replicas. It names the process by its id, so this
program becomes HAProxy (`exec`). It runs from a copy beside `edge.json` (`edge.py::write_edge`), and imports nothing of ours.
"""

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TEMPLATE = "haproxy.cfg.j2"
RELOADED = "reload.map"
"""A map of HAProxy's with `ok`: 1, or 0 from a failed reload until one succeeds."""
REPLICA = "SERVE_REPLICA"
"""How the names of Ray's servers begin that are replicas."""
SPARE_FILES, FILES_PER_CONNECTION = 512, 2.5
"""HAProxy does not start where it may not have so many files."""
GLOBAL = ("log ", "nbthread ", "tune.", "hard-stop-after ", "close-spread-time ", "server-state-")
DEFAULTS = (
    *("balance ", "load-server-state-", "option idle-close-on-response"),
    *("timeout client ", "timeout http-keep-alive ", "timeout queue ", "timeout server "),
)
BACKEND = ("timeout ", "option httpchk", "http-check ", "option tcp-check", "tcp-check ")
"""What is Ray's to say, or whoever set its variables: the beginnings of lines."""
OTHERS = (
    *("acl has_", "default-server ", "errorfile ", "http-request return ", "http-reuse ", "log global", "maxconn "),
    *("mode http", "option ", "retries ", "retry-on ", "server ", "stats ", "timeout "),
)
"""What the template says by itself."""
ALIVE, LEAVES = "73756363657373", "445241494E494E47"
"""`success` and `DRAINING`: a replica that shuts down says the second. It is alive, and its streams may end."""
WATCH_SECONDS = 1.0
DEAD_SECONDS = 0.5
"""Ray ends HAProxy by SIGKILL too, and its manager at once afterwards."""
CRASH_SECONDS = 60
"""The longest life of a HAProxy that stands in for a dead one. Ray starts the next one after a few seconds."""

Environment = Mapping[str, str]


class NotUnderstood(Exception):
    """Ray's configuration is not what is known of it. The sentence names the line."""


class ConfigurationRefused(Exception):
    """HAProxy does not take the configuration. The sentence is its own."""


def parse_ray_config(text: str) -> dict[str, Any]:
    """What Ray's configuration says, for the template: servers, addresses, health, routes, and what variables of Ray's set.

    Raises NotUnderstood.
    """
    sections = _sections(text)
    known = {(name, line.split()[1]) for name, lines in sections.items() for line in lines if line.startswith("server ")}
    found: dict[str, Any] = {
        "global": _kept_lines(sections.get("global", []), GLOBAL),
        "defaults": _kept_lines(sections.get("defaults", []), DEFAULTS),
        "socket": _words(sections, "global", "stats socket ")[2],
        "prometheus": _words(sections, "frontend prometheus", "bind ")[1],
        "stats": _words(sections, "listen stats", "bind ")[1],
    }
    for side in ("http", "grpc"):  # Ray has a side for gRPC where its options name services
        if lines := sections.get(f"frontend {side}_frontend"):
            own = [name for name in sections if name.startswith((f"backend {side}-", f"backend {side}_"))]
            backends = [_backend(name.removeprefix("backend "), sections[name], side, known) for name in own]
            bind = _words(sections, f"frontend {side}_frontend", "bind ")[1]
            found[side] = {"bind": bind, "rules": _rules(lines), "backends": backends} | _applications(lines)
    return found


def _sections(text: str) -> dict[str, list[str]]:
    """The lines of each section by its head, such as `backend http-default`, without comments."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        words = line.strip()
        if line[:1].isalpha():
            lines = found[words] = []
        elif words and not words.startswith("#"):
            lines.append(words)
    return found


def _kept_lines(lines: list[str], beginnings: tuple[str, ...]) -> list[str]:
    kept = [line for line in lines if line.startswith(beginnings)]
    for line in lines:
        if line not in kept and not line.startswith(OTHERS):
            raise NotUnderstood(f"Ray's configuration of HAProxy has a line that is not understood: {line[:200]}")
    return kept


def _words(sections: Mapping[str, list[str]], section: str, beginning: str) -> list[str]:
    """The words of a section's one line that begins so."""
    for line in sections.get(section, ()):
        if line.startswith(beginning):
            return line.split()
    raise NotUnderstood(f"Ray's configuration of HAProxy has no line {beginning!r} in its section {section!r}")


def _rules(lines: list[str]) -> list[str]:
    """Of a frontend: Ray's health, its routes, and its metrics where they are on."""
    return [line for line in lines if not line.startswith(("bind ", "mode ", "log global"))]


def _applications(lines: list[str]) -> dict[str, list[str]]:
    """Of a frontend, how a call names its application: by the beginning of its path, or by the metadata `application`. Shorter
    ones come first. Neither is there where one application takes every call.
    """
    words = [line.split() for line in lines if line.startswith("acl is_")]
    prefixes = [word[-1].rstrip("/") for word in words if "path_beg" in word and word[-1] != "/"]
    names = [word[-1] for word in words if "req.hdr(application)" in word]
    return {"prefixes": sorted(prefixes, key=len), "names": sorted(names)}


def _backend(name: str, lines: list[str], side: str, known: set[tuple[str, str]]) -> dict[str, Any]:
    """A replica is alive while its gRPC side answers, also while it leaves, when its HTTP side takes no connection any more: so
    HTTP follows gRPC. Serve's own proxy (`backup`) would hold calls while no replica runs: it gets none.
    """
    servers = []
    for words in (line.split() for line in lines if line.startswith("server ") and not line.endswith(" backup")):
        twin = f"grpc-{name.removeprefix('http-')}"
        follows = f"{twin}/{words[1]}" if side == "http" and (f"backend {twin}", words[1]) in known else ""
        variable = "".join(sign if sign.isalnum() else "_" for sign in words[1])
        servers.append({"name": words[1], "address": words[2], "follows": follows, "variable": variable})
    checks = [
        line.replace(f"expect binary {ALIVE}", f"expect rbinary ({ALIVE}|{LEAVES})") for line in _kept_lines(lines, BACKEND)
    ]
    return {"name": name, "lines": checks, "servers": servers, "grpc": side == "grpc"}


def render_config(text: str, limits: Mapping[str, Any], state: Path, environment: Environment) -> str:
    """Our configuration, from Ray's. Raises NotUnderstood, or ValueError for a variable that is no number."""
    from jinja2 import Environment as Templates
    from jinja2 import FileSystemLoader, StrictUndefined

    templates = Templates(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.policies["json.dumps_kwargs"] = {}  # in the order that replicas write errors in
    templates.filters["quoted"] = _quote
    most, shares = connection_limits(limits)
    proxies = environment.get("ATTEND_TRUSTED_PROXIES", "").split(",")
    trusted = [str(ip_network(proxy.strip())) for proxy in proxies if proxy.strip()]
    keys = bool(environment.get("ATTEND_API_KEYS_FILE"))
    errors = int(environment.get("ATTEND_MAX_ERRORS_PER_SECOND") or limits["errors"]) if keys else 0
    tls = f"ssl crt {state / 'tls.pem'} ssl-min-ver TLSv1.2" if environment.get("ATTEND_TLS_CERT") else ""
    origins = [origin.strip() for origin in environment.get("ATTEND_CORS_ORIGINS", "").split(",") if origin.strip()]
    return templates.get_template(TEMPLATE).render(
        ray={"grpc": None} | parse_ray_config(text),
        limits=limits,
        connections=most,
        http_connections=shares["http"],
        grpc_connections=shares["grpc"],
        trusted=trusted,
        per_source=int(environment.get("ATTEND_MAX_CONNECTIONS_PER_SOURCE") or 0),
        keys=keys,
        errors=errors,
        by_prefix=environment.get("ATTEND_PREFIX_ROUTING") != "0",
        origins=["*"] if "*" in origins else origins,
        tls=tls,
        state=state,
    )


def _quote(text: str) -> str:
    """A word of HAProxy's configuration. Raises ValueError for what no word can hold."""
    if not text.isprintable():
        raise ValueError(f"cors_origins: {text!r} is no origin")
    return '"' + "".join("\\" + sign if sign in '\\"$' else sign for sign in text) + '"'


def connection_limits(limits: Mapping[str, Any]) -> tuple[int, dict[str, int]]:
    """Connections at the same time, and of them those of each transport: fewer where the number of open files is limited."""
    most: int = limits["connections"]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY:
        most = max(8, min(most, int((files - SPARE_FILES) / FILES_PER_CONNECTION)))
    return most, {side: most * limits[f"{side}_connections"] // limits["connections"] for side in ("http", "grpc")}


def main(words: list[str], environment: Environment) -> None:
    """Become HAProxy with these arguments, which are Ray's. With others, as -c, its file is written alone."""
    limits = json.loads((FOLDER / "edge.json").read_text(encoding="utf-8"))
    file, binary, serves = Path(words[words.index("-f") + 1]), limits["binary"], words[0] == "-db"
    us, manager = os.getpid(), os.getppid()
    if serves and os.fork() == 0:  # before anything large is imported
        try:
            Watch(us, manager, file.parent, binary, environment).run()
        finally:
            os._exit(0)
    text = file.read_text(encoding="utf-8")
    try:
        helper = _certificate(file.parent, environment)
        replace_file(file.with_name(RELOADED), "ok 1\n")
        replace_file(file, render_config(text, limits, file.parent, environment))
        if serves:
            _check(binary, file)
    except Exception as error:
        if serves:
            _tell_failure(file, text, str(error), environment)
        raise
    if serves:
        if "-sf" not in words:  # a new manager of Ray's
            words += [word for pid in _left(file.parent) for word in ("-sf", pid)]
        _take_over(file, us, named=f"server {REPLICA}" in text)
        if helper:
            log = environment.get("ATTEND_LOG_FILE", ""), environment.get("ATTEND_LOG_FORMAT", "")
            helper += [parse_ray_config(text)["socket"], str(us), *log]
            subprocess.Popen(helper, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    os.execv(binary, [binary, *words])


def _check(binary: str, file: Path) -> None:
    """Raise Refused where HAProxy does not take the configuration."""
    done = subprocess.run([binary, "-c", "-f", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.partition(" : ")[2] for line in done.stderr.splitlines() if line.startswith("[ALERT]")]
        raise ConfigurationRefused((lines or [done.stderr.strip()])[0][:500])


def _tell_failure(file: Path, text: str, reason: str, environment: Environment) -> None:
    """Say in the log of the server why HAProxy is not started. One that runs says from now on that it is outdated."""
    from certificate_renewal import publish, say  # type: ignore[import-not-found]  # the copy beside this one

    log = environment.get("ATTEND_LOG_FILE", ""), environment.get("ATTEND_LOG_FORMAT", "")
    say("error", f"HAProxy is not started with its next configuration: {reason}", *log, "attend.edge")
    with contextlib.suppress(OSError, NotUnderstood):
        publish(_words(_sections(text), "global", "stats socket ")[2], file.with_name(RELOADED), {"ok": "0"})


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _certificate(state: Path, environment: Environment) -> list[str]:
    """Write the certificate and its key for HAProxy; returns the command that follows them, empty without TLS.

    A pair that became bad leaves the last good one in use. Without one HAProxy does not start: it would speak without TLS.
    """
    if not environment.get("ATTEND_TLS_CERT"):
        return []
    pem = state / "tls.pem"
    pair = environment["ATTEND_TLS_CERT"], environment["ATTEND_TLS_KEY"]
    command = [sys.executable, "-I", str(FOLDER / "certificate_renewal.py"), *pair, str(pem)]
    if subprocess.run(command, check=False).returncode and not pem.exists():
        sys.exit(1)
    return command


def _left(state: Path) -> Iterator[str]:
    """HAProxies of a manager that died, or that stand in: they give up the ports and end with their streams."""
    for name in ("current", "stand-in"):
        with contextlib.suppress(OSError):
            pid = (state / name).read_text(encoding="ascii").strip()
            if f"{state}/".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():  # the id may be another process's by now
                yield pid


def _take_over(file: Path, pid: int, *, named: bool) -> None:
    """Ray names no replica while a new manager starts, and while it builds the application's next configuration (Ray 2.60).
    Meanwhile calls go where they went before. A replica that is gone fails its checks.
    """
    last = file.with_name("last.cfg")
    if named:
        shutil.copyfile(file, last)
    elif last.exists():
        shutil.copyfile(last, file)
    file.with_name("stand-in").unlink(missing_ok=True)
    replace_file(file.with_name("current"), f"{pid}\n")


class Watch:
    """Beside a HAProxy, in a session of its own since Ray ends all of a manager's group with it: stands in for a HAProxy that
    died without an end by its manager, and writes the edge's files anew where somebody has removed them.
    """

    def __init__(self, haproxy: int, manager: int, state: Path, binary: str, environment: Environment) -> None:
        self.haproxy, self.manager, self.state, self.binary = haproxy, manager, state, binary
        self.log = environment.get("ATTEND_LOG_FILE", ""), environment.get("ATTEND_LOG_FORMAT", "")
        self.serves = False
        """True if HAProxy has been started."""
        self.kept: dict[Path, tuple[int, bytes]] = {}
        """The files by path: mode and content."""
        self.keep(*FOLDER.iterdir())

    def run(self) -> None:
        """Until HAProxy ends, or another one has taken its place."""
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        ended = select.poll()
        with contextlib.suppress(ProcessLookupError):
            ended.register(os.pidfd_open(self.haproxy), select.POLLIN)
            while not ended.poll(WATCH_SECONDS * 1000):
                self.mend()
                if not self.serves and self.is_current():
                    self.serves = True
                    self.keep(*(self.state / name for name in ("current", "last.cfg", RELOADED, "tls.pem", "tls.map")))
                if self.serves and not self.is_current():
                    return
        time.sleep(DEAD_SECONDS)
        if self.is_current() and Path(f"/proc/{self.manager}").exists():
            self.stand_in()

    def is_current(self) -> bool:
        """True if it is the HAProxy that was started last."""
        with contextlib.suppress(OSError):
            return (self.state / "current").read_text(encoding="ascii").strip() == str(self.haproxy)
        return False

    def keep(self, *files: Path) -> None:
        """Remember these files, where they are files."""
        self.kept |= {path: (path.stat().st_mode & 0o777, path.read_bytes()) for path in files if path.is_file()}

    def mend(self) -> None:
        """Write each file anew that is gone, with a line in the log."""
        written = []
        for path, (mode, content) in self.kept.items():
            with contextlib.suppress(OSError):  # a disk may be full; another try follows
                if not path.exists():
                    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    fresh = path.with_name(f"{path.name}.new")
                    fresh.unlink(missing_ok=True)
                    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                        file.write(content)
                    fresh.replace(path)
                    written.append(path.name)
        if written:
            from certificate_renewal import say

            names = ", ".join(sorted(written))
            say("error", f"files of HAProxy were removed from {FOLDER} and are rewritten: {names}", *self.log, "attend.edge")

    def stand_in(self) -> None:
        """Serve with the same configuration until Ray has started its next HAProxy. With the socket Ray would think it had."""
        file = self.state / "stand-in.cfg"
        lines = (self.state / "last.cfg").read_text(encoding="utf-8").splitlines()
        replace_file(file, "\n".join(line for line in lines if not line.lstrip().startswith("stats socket ")) + "\n")
        process = subprocess.Popen([self.binary, "-db", "-dR", "-f", str(file)])
        replace_file(self.state / "stand-in", f"{process.pid}\n")
        try:
            process.wait(CRASH_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER))
    try:
        main(sys.argv[1:], os.environ)
    except (NotUnderstood, ConfigurationRefused, ValueError) as error:
        sys.exit(f"attend: {error}")
