"""Planned changes of a service under callers: each is a function that makes one and waits until it is over."""

import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml
from safetensors.torch import load_file, save_file

from attend.service.client.errors import CallFailed
from loadtest.server import Address
from tests.deploy.callers import client_grpc, plain_http
from tests.deploy.manifests import ROOT
from tests.deploy.ray_nodes import Cluster, cluster
from tests.service.server import wait_for

LONGEST = 120
"""Seconds that a replica which leaves gives its streams; in production 620."""
LOADING = 120
"""Seconds that a node which leaves gives the successors of its replicas, as in production."""
CHANGE_SECONDS = 300.0
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
        self.address = Address(f"http://127.0.0.1:{nodes.worker_http}", f"127.0.0.1:{nodes.worker_grpc}")

    def config(self) -> dict[str, Any]:
        """The file with its ports moved, with this service's arguments, and with times that a test can wait for."""
        config = yaml.safe_load((ROOT / "deploy/serve/attend.yaml").read_text())
        config["http_options"] |= {"host": "127.0.0.1", "port": self.nodes.http}
        config["grpc_options"]["port"] = self.nodes.grpc
        [application] = config["applications"]
        application["args"] |= {"request_timeout_seconds": LONGEST, "drain_seconds": LONGEST} | self.arguments
        application["runtime_env"] = self.runtime_env
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

    def settled(self) -> bool:
        """True if two replicas run, and no other is known."""
        running = self.nodes.application().get("status") == "RUNNING" and self.nodes.replicas() == 2
        return running and len(self.replica_ids()) == 2

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


@contextmanager
def service(folder: Path) -> Iterator[Service]:
    """One that serves."""
    with cluster(folder, LONGEST + 1 + LOADING) as nodes:
        one = Service(nodes)
        if not wait_for(one.deployed, CHANGE_SECONDS):
            one.deploy()  # says why
        one.wait("two replicas", lambda: one.settled() and one.answers())
        yield one


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
