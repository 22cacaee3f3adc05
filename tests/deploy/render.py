"""The kustomizations under deploy/, and what they render to."""

import copy
import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.manifests import ROOT

DEPLOY = ROOT / "deploy"
RENDERED = [
    *("base/rayservice", "base/standalone"),
    *(f"overlays/{name}" for name in ("kind-cpu", "prod-gpu", "prod-gpu-ha", "prod-gpu-tp", "example", "standalone-gpu")),
]
"""What a user applies. Everything else is a part of one of these."""


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice; PyYAML's own keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.constructor.ConstructorError(None, None, f"a key stands twice in {keys}", node.start_mark)
        return super().construct_mapping(node, deep)


def renderer() -> list[str] | None:
    """The command that renders a folder, without the folder: this environment's kubectl, or one of PATH's; or None."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    if kubectl := shutil.which("kubectl", path=path):
        return [kubectl, "kustomize"]
    return ["kustomize", "build"] if shutil.which("kustomize") else None


@functools.cache
def text(folder: str) -> str:
    """What a folder below deploy/ renders to. Raises CalledProcessError with kustomize's words in `stderr`."""
    command = renderer()
    assert command, "neither kustomize nor kubectl is installed"
    return subprocess.run([*command, str(DEPLOY / folder)], check=True, capture_output=True, text=True, timeout=60).stdout


@functools.cache
def _parsed(folder: str) -> list[dict[str, Any]]:
    return list(yaml.load_all(text(folder), Loader=StrictLoader))


def render(folder: str) -> list[dict[str, Any]]:
    """The objects of a folder below deploy/, fresh at each call."""
    return copy.deepcopy(_parsed(folder))


@dataclass(frozen=True)
class Pods:
    """A pod template, and what makes pods of it."""

    owner: str
    template: dict[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        return self.template["spec"]

    @property
    def labels(self) -> dict[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for each in self.containers for port in each.get("ports", [])}


def of_kind(objects: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    """The objects of these kinds."""
    return [item for item in objects if item["kind"] in kinds]


def pods_of(objects: list[dict[str, Any]]) -> list[Pods]:
    """Every pod template. Ray's carry the label that KubeRay adds, as the policies select by it."""
    found = [
        Pods(f"Deployment {item['metadata']['name']}", item["spec"]["template"]) for item in of_kind(objects, "Deployment")
    ]
    for item in of_kind(objects, "RayService"):
        cluster = item["spec"]["rayClusterConfig"]
        groups = [("head", cluster["headGroupSpec"]), *(("worker", group) for group in cluster["workerGroupSpecs"])]
        for node, group in groups:
            template = group["template"]
            labels = {**template["metadata"]["labels"], "ray.io/node-type": node}
            found.append(Pods(f"RayService {node}", {**template, "metadata": {**template["metadata"], "labels": labels}}))
    return found


def services_of(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every Service, and the one that KubeRay makes for a RayService, as it names it."""
    found = list(of_kind(objects, "Service"))
    for item in of_kind(objects, "RayService"):
        template = item["spec"]["serveService"]
        metadata = {**template.get("metadata", {}), "name": f"{item['metadata']['name']}-serve-svc"}
        found.append({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": template["spec"]})
    return found
