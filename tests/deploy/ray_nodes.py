"""Ray nodes as KubeRay starts them, `ray start --block`, but on one machine and on ports of their own."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attend.service.runtime.ports import claim
from attend.service.runtime.supervisor import write_edge
from tests.deploy.manifests import attend_env, ray_env
from tests.service.server import TAG, free_port, free_ports, processes_of, wait_for

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
START_SECONDS, STARTS = 240.0, 3
NODE_DRAIN = 30
"""Seconds; in production it is 930."""


class Cluster:
    """A head without CPUs, as in the RayService, and one worker with the CPUs of both of its workers."""

    def __init__(self, folder: Path, node_drain: int) -> None:
        self.folder, self.tag = folder, secrets.token_hex(8)
        self.http, self.grpc, self.worker_http, self.worker_grpc, self.dashboard, self.gcs, *self.metrics = free_ports(8)
        self.token = secrets.token_hex(32)
        (folder / "token").write_text(self.token)
        (folder / "token").chmod(0o600)
        inner, self.lock = claim(self.http, self.grpc)
        # The variables of the pods; then what one machine needs, and times that a test can wait for.
        self.environment = {
            **os.environ,
            **ray_env,
            **attend_env,
            **inner,
            TAG: self.tag,
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(write_edge(folder)),  # as the image does
            "ATTEND_LOG_FILE": str(folder / "replicas"),  # these nodes share the machine's first process
            "ATTEND_NUM_THREADS": "1",
            "ATTEND_KV_CACHE_MEMORY": str(64 << 20),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(node_drain),
        }
        # Ray's sockets lie in its temporary folder, and their paths must be short.
        self.session = Path("/tmp") / f"attend-ray-{self.tag[:6]}"
        self.head: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Both nodes; returns when the part of the head's dashboard that deploys answers."""
        head = [
            *("--head", "--num-cpus=0", f"--port={self.gcs}", f"--dashboard-port={self.dashboard}"),
            *("--dashboard-host=127.0.0.1", f"--ray-client-server-port={free_port()}", f"--temp-dir={self.session}"),
        ]
        self.head = self.ray_start("head", head, self.metrics[0], {})
        assert wait_for(lambda: bool(self.rest("/api/serve/applications/")) or self.head.poll() is not None, 90), self.log(
            "head"
        )
        assert self.head.poll() is None, self.log("head")
        self.start_worker("worker", self.worker_http, self.worker_grpc, self.metrics[1])

    @property
    def worker(self) -> subprocess.Popen[bytes]:
        """The first worker."""
        return self.workers[0]

    def start_worker(self, name: str, http: int, grpc: int, metrics: int | None = None) -> None:
        """A worker, on ports of its own; returns when Ray knows it. On a busy machine Ray may give up: then once more."""
        own = {"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(http), "RAY_SERVE_WORKER_PROXY_GRPC_PORT": str(grpc)}
        names = ("RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT")
        own |= dict(zip(names, map(str, free_ports(2)), strict=True))
        flags = [f"--address=127.0.0.1:{self.gcs}", "--num-cpus=4"]
        before = self.alive()
        for _ in range(STARTS):
            worker = self.ray_start(name, flags, metrics or free_port(), own)
            wait_for(lambda worker=worker: self.alive() > before or worker.poll() is not None, START_SECONDS)
            if worker.poll() is None:
                break
        assert worker.poll() is None, self.log(name)
        self.workers.append(worker)

    def ray_start(self, name: str, flags: list[str], metrics: int, extra: dict[str, str]) -> subprocess.Popen[bytes]:
        """`ray start`, with an agent's port of its own, and one for Ray's metrics."""
        common = ["--min-worker-port=0", "--max-worker-port=0", "--node-ip-address=127.0.0.1", "--disable-usage-stats"]
        common += ["--block", "--object-store-memory=80000000"]
        ports = [f"--dashboard-agent-listen-port={free_port()}", f"--metrics-export-port={metrics}"]
        command = [*RAY, "start", *ports, *flags, *common]
        with (self.folder / name).open("wb") as file:
            return subprocess.Popen(
                command, stdout=file, stderr=file, env=self.environment | extra, cwd="/tmp", start_new_session=True
            )

    def log(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")[-3000:]

    def rest(self, path: str) -> dict[str, Any]:
        """An answer of Ray's dashboard; empty while there is none."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.dashboard}{path}")
        request.add_header("Authorization", f"Bearer {self.token}")
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)
        return {}

    def deploy(self, file: Path) -> None:
        """`serve deploy`, which returns before the application runs."""
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", "-a", f"http://127.0.0.1:{self.dashboard}", str(file)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=90, cwd="/tmp")
        assert done.returncode == 0, done.stderr

    def application(self) -> dict[str, Any]:
        """What Serve says of the application; empty before there is one."""
        return self.rest("/api/serve/applications/").get("applications", {}).get("default", {})

    def replicas(self) -> int:
        """Replicas that run."""
        deployment = self.application().get("deployments", {}).get("Attend", {})
        return sum(each["state"] == "RUNNING" for each in deployment.get("replicas", []))

    def alive(self) -> int:
        """Nodes that Ray says are alive."""
        nodes = self.rest("/nodes?view=summary").get("data", {}).get("summary", [])
        return sum(each["raylet"].get("state") == "ALIVE" for each in nodes)

    def processes(self) -> list[int]:
        """Every living process of this cluster, whatever became of its parents."""
        return processes_of(self.tag)


@contextlib.contextmanager
def cluster(folder: Path, node_drain: int = NODE_DRAIN) -> Iterator[Cluster]:
    """A cluster that leaves no process behind. Never `ray stop`: it ends every Ray of the machine."""
    nodes = Cluster(folder, node_drain)
    try:
        nodes.start()
        yield nodes
    finally:
        for pid in nodes.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in filter(None, (nodes.head, *nodes.workers)):
            node.wait(10)
        wait_for(lambda: not nodes.processes(), 10)
        nodes.lock.close()
        shutil.rmtree(nodes.session, ignore_errors=True)
