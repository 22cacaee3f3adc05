"""Changes of a service under callers, and losses of its parts: each is a function that makes one and waits until it is over.

Its docstring is its line in the table.
"""

import os
import shutil
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from safetensors.torch import load_file, save_file

from attend.service.client.errors import CallFailed
from loadtest.faults.target import CONTROLLER, HAPROXY, REPLICA
from loadtest.server import Address
from tests.deploy.callers import client_grpc, plain_http
from tests.deploy.manifests import ROOT
from tests.deploy.ray_nodes import Cluster, cluster
from tests.service.server import free_ports, wait_for

LONGEST = 120
"""Seconds that a replica which leaves gives its streams; in production 620."""
LOADING = 120
"""Seconds that a node which leaves gives the successors of its replicas, as in production."""
CHANGE_SECONDS, BUSY_SECONDS = 300.0, 0.5
QUICK = {"look_back_period_s": 2, "metrics_interval_s": 1, "upscale_delay_s": 1, "downscale_delay_s": 3}
"""Seconds of the autoscaler; in production 600 until a replica goes."""
Change = Callable[["Service"], None]
CHANGES: dict[str, Change] = {}


def change(one: Change) -> Change:
    """Put a function into CHANGES under its name."""
    CHANGES[one.__name__] = one
    return one


class Service:
    """Two replicas of deploy/serve/attend.yaml, on nodes of Ray of our own."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes, self.number = nodes, 0
        self.arguments: dict[str, Any] = {"dtype": "float32"}  # every replica gives the same bits
        self.runtime_env: dict[str, Any] = {}
        self.scaling: dict[str, int] = {}
        """Serve's bounds for the number of replicas, in place of two."""
        self.address = Address(f"http://127.0.0.1:{nodes.worker_http}", f"127.0.0.1:{nodes.worker_grpc}")

    def config(self) -> dict[str, Any]:
        """The file with its ports moved, with this service's arguments, and with times that a test can wait for."""
        name = "autoscaling" if self.scaling else "attend"
        config = yaml.safe_load((ROOT / f"deploy/serve/{name}.yaml").read_text())
        config["http_options"] |= {"host": "127.0.0.1", "port": self.nodes.http}
        config["grpc_options"]["port"] = self.nodes.grpc
        [application] = config["applications"]
        application["args"] |= {"request_timeout_seconds": LONGEST, "drain_seconds": LONGEST} | self.arguments
        application["runtime_env"] = self.runtime_env
        if self.scaling:
            application["deployments"][0]["autoscaling_config"] |= QUICK | self.scaling
        return config

    def deploy(self) -> None:
        """Hand the file to Serve."""
        file = self.nodes.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(self.config()))
        self.nodes.deploy(file)

    def deployed(self) -> bool:
        """True if Serve took the file. On a busy machine its own parts may come up too late for it at first."""
        with suppress(AssertionError):
            self.deploy()
            return True
        return False

    def replica_ids(self) -> set[str]:
        """All replicas that Serve still knows, those that start or leave too."""
        deployment = self.nodes.application().get("deployments", {}).get("Attend", {})
        return {each["replica_id"] for each in deployment.get("replicas", [])}

    def settled(self, number: int = 2) -> bool:
        """True if so many replicas run, and no other is known."""
        running = self.nodes.application().get("status") == "RUNNING" and self.nodes.replicas() == number
        return running and len(self.replica_ids()) == number

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Until a condition is true. Raises RuntimeError."""
        if not wait_for(condition, CHANGE_SECONDS):
            raise RuntimeError(f"{what} did not come in {CHANGE_SECONDS:g} s: {self.nodes.application()}")

    def update(self) -> None:
        """Deploy, and wait until other replicas serve and the old ones are gone."""
        before = self.replica_ids()
        self.deploy()
        self.wait("new replicas", lambda: not self.replica_ids() & before and self.settled())

    def uncut(self) -> set[tuple[str, tuple[int, ...]]]:
        """What our client's answer must be."""
        answer = client_grpc(self.address)
        return {(answer.text, answer.token_ids)}

    def answers(self) -> bool:
        """True if both transports answer."""
        with suppress(CallFailed, httpx.HTTPError):
            return bool(self.uncut()) and plain_http(self.address) == "ok"
        return False

    def pids(self, what: str) -> list[int]:
        """The processes whose command line holds `what`, the youngest last."""
        found = []
        for pid in self.nodes.processes():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if what in " ".join(process.cmdline()):
                    found.append((process.create_time(), pid))
        return [pid for _, pid in sorted(found)]

    def busiest(self) -> int:
        """The process of the replica that computes most at present: it has streams."""
        replicas = [psutil.Process(pid) for pid in self.pids(REPLICA)]
        before = {each: sum(each.cpu_times()[:2]) for each in replicas}
        time.sleep(BUSY_SECONDS)
        return max(replicas, key=lambda each: sum(each.cpu_times()[:2]) - before[each]).pid

    def lose_a_replica(self, number: signal.Signals) -> None:
        """Send a signal to the busiest replica, and wait for its successor."""
        before = self.replica_ids()
        os.kill(self.busiest(), number)
        self.wait("another replica", lambda: len(self.replica_ids() & before) == 1 and self.settled())


@contextmanager
def service(folder: Path, *, through_head: bool = False) -> Iterator[Service]:
    """One that serves. Its callers go through the node of the replicas, or through the head."""
    with cluster(folder, LONGEST + 1 + LOADING) as nodes:
        one = Service(nodes)
        if through_head:
            one.address = Address(f"http://127.0.0.1:{nodes.http}", f"127.0.0.1:{nodes.grpc}")
        if not wait_for(one.deployed, CHANGE_SECONDS):
            one.deploy()  # says why
        one.wait("two replicas", lambda: one.settled() and one.answers())
        yield one


@change
def kill(one: Service) -> None:
    """SIGKILL of one of two replicas"""
    one.lose_a_replica(signal.SIGKILL)


@change
def term(one: Service) -> None:
    """SIGTERM of the process of one of two replicas"""
    one.lose_a_replica(signal.SIGTERM)


@change
def freeze(one: Service) -> None:
    """SIGSTOP of one of two replicas"""
    one.lose_a_replica(signal.SIGSTOP)


@change
def haproxy(one: Service) -> None:
    """SIGKILL of the HAProxy that all callers go through"""
    port = int(one.address.http.rpartition(":")[2])

    def listening() -> list[int]:
        found = []
        for pid in one.pids(HAPROXY):
            with suppress(psutil.Error):  # one that has ended since
                connections = psutil.Process(pid).net_connections()
                if any(each.laddr.port == port and each.status == "LISTEN" for each in connections):
                    found.append(pid)
        return found

    for pid in (before := listening()):
        os.kill(pid, signal.SIGKILL)
    one.wait("another HAProxy", lambda: bool(set(listening()) - set(before)) and one.answers() and one.settled())


@change
def controller(one: Service) -> None:
    """SIGKILL of Serve's controller"""
    before, replicas = one.pids(CONTROLLER), one.replica_ids()
    os.kill(before[-1], signal.SIGKILL)
    one.wait("another controller", lambda: bool(set(one.pids(CONTROLLER)) - set(before)) and one.settled())
    if one.replica_ids() != replicas:
        raise RuntimeError("the new controller has replaced the replicas")


@change
def settings(one: Service) -> None:
    """a changed setting, deployed in place"""
    one.number += 1
    one.arguments["served_model_name"] = f"model-{one.number}"
    one.update()


@change
def model(one: Service) -> None:
    """another checkpoint, deployed in place"""
    one.number += 1
    folder = one.nodes.folder / f"checkpoint-{one.number}"
    shutil.copytree(ROOT / "model/default", folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("norm.weight"))
    weights[name] *= 1 + one.number / 64
    save_file(weights, folder / "model.safetensors")
    before = one.uncut()
    one.arguments["model"] = str(folder)
    one.update()
    if before & one.uncut():
        raise RuntimeError("the other checkpoint gives the same answer")


def packed(folder: Path, version: str) -> Path:
    """A zip of the source, as `version` of Attend."""
    path = folder / f"attend-{version}.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for package in (ROOT / "attend", *(link for link in (ROOT / "attend").iterdir() if link.is_dir())):
            for file in package.rglob("*"):
                if file.is_file() and "__pycache__" not in file.parts:
                    archive.write(file, file.relative_to(ROOT))
        about = f"Metadata-Version: 2.1\nName: attend-server\nVersion: {version}\n"
        archive.writestr(f"attend_server-{version}.dist-info/METADATA", about)
    return path


@change
def code(one: Service) -> None:
    """another version of the code by `runtime_env`, deployed in place"""
    one.number += 1
    version = f"99.{one.number}"
    one.runtime_env = {"working_dir": f"file://{packed(one.nodes.folder, version)}"}
    one.update()
    found = httpx.get(f"{one.address.http}/version", timeout=10).json()
    if version not in found.values():
        raise RuntimeError(f"the new code is version {version}, but {found} answers")


@change
def autoscale(one: Service) -> None:
    """the autoscaler takes one of two replicas away, and gives it back"""
    one.scaling = {"min_replicas": 1, "max_replicas": 2}
    one.deploy()
    one.wait("one replica", lambda: one.settled(1))
    one.scaling = {"min_replicas": 2, "max_replicas": 2}
    one.deploy()
    one.wait("two replicas", one.settled)


def another_node(one: Service) -> None:
    """A further node: on a machine of its own it would come up however busy this one is."""
    one.nodes.start_worker(f"worker-{len(one.nodes.workers)}", *free_ports(2))


BEFORE: dict[str, Change] = {"node": another_node}
"""What is done before callers begin, by kind."""


@change
def node(one: Service) -> None:
    """SIGTERM of the node that holds the replicas, as when it is drained, while another node can take them"""
    nodes = one.nodes
    holding = {parent.pid for pid in one.pids(REPLICA) for parent in psutil.Process(pid).parents()}
    [leaving] = [worker for worker in nodes.workers if worker.pid in holding]
    before = one.replica_ids()
    leaving.send_signal(signal.SIGTERM)
    one.wait("replicas elsewhere", lambda: not one.replica_ids() & before and one.settled() and leaving.poll() is not None)
