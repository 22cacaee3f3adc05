"""What a user applies of deploy/, and what it renders to: kustomizations by kubectl, the chart by helm."""

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
KUSTOMIZED = ["base/rayservice", "base/standalone", "overlays/kind-cpu"]
GPU = "gpu.yaml"
CHARTED = {
    "chart gpu": (GPU,),
    "chart gpu-ha": (GPU, "gpu-ha.yaml"),
    "chart gpu-tp": (GPU, "gpu-tp.yaml"),
    "chart gpu-in-place": (GPU, "gpu-in-place.yaml"),
    "chart gpu-hub": (GPU, "gpu-hub.yaml"),
    "chart standalone-cpu": ("standalone-cpu.yaml",),
    "chart standalone-load": ("standalone-cpu.yaml", "standalone-load.yaml"),
    "chart standalone-gpu": ("standalone-gpu.yaml",),
    "chart standalone-tp": ("standalone-tp.yaml",),
}
"""The files below deploy/chart/values of each; kind.yaml is compared with overlays/kind-cpu."""
RENDERED = [*KUSTOMIZED, *CHARTED]
"""What a user applies. Everything else is a part of one of these."""
MISSING = "NOT RENDERED: kubectl or helm is not installed (make setup brings both)"


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice; PyYAML's own keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.constructor.ConstructorError(None, None, f"a key stands twice in {keys}", node.start_mark)
        return super().construct_mapping(node, deep)


def program(name: str) -> str | None:
    """Where kubectl or helm is: in this environment, or on PATH; or None."""
    return shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))


def can_render() -> bool:
    """True if both programs are here."""
    return bool(program("kubectl") and program("helm"))


def helm(*words: str, chart: Path = DEPLOY / "chart") -> subprocess.CompletedProcess[str]:
    """`helm template` of the chart, as it is installed in the namespace `attend`; what it says is in `stderr`."""
    command = [program("helm") or "helm", "template", "attend", str(chart), "--namespace", "attend", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def kustomize(folder: Path) -> str:
    """What a folder renders to. Raises CalledProcessError with kustomize's words in `stderr`."""
    command = [program("kubectl") or "kubectl", "kustomize", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@functools.cache
def text(name: str) -> str:
    """What one of RENDERED renders to. Raises CalledProcessError with the program's words in `stderr`."""
    if name not in CHARTED:
        return kustomize(DEPLOY / name)
    done = helm(*(word for file in CHARTED[name] for word in ("--values", str(DEPLOY / "chart/values" / file))))
    done.check_returncode()
    return done.stdout


@functools.cache
def _parsed(name: str) -> list[dict[str, Any]]:
    return objects_of(text(name))


def objects_of(rendering: str) -> list[dict[str, Any]]:
    """The objects of a rendering; helm leaves empty documents where a template gives nothing."""
    return [item for item in yaml.load_all(rendering, Loader=StrictLoader) if item]


def render(name: str) -> list[dict[str, Any]]:
    """The objects of one of RENDERED, fresh at each call."""
    return copy.deepcopy(_parsed(name))


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


def jobs_of(objects: list[dict[str, Any]]) -> list[Pods]:
    """The pod templates of Jobs, which serve nothing."""
    return [Pods(f"Job {item['metadata']['name']}", item["spec"]["template"]) for item in of_kind(objects, "Job")]


def services_of(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every Service, and the one that KubeRay makes for a RayService, as it names it."""
    found = list(of_kind(objects, "Service"))
    for item in of_kind(objects, "RayService"):
        template = item["spec"]["serveService"]
        metadata = {**template.get("metadata", {}), "name": f"{item['metadata']['name']}-serve-svc"}
        found.append({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": template["spec"]})
    return found
